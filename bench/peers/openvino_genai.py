#!/usr/bin/env python3
"""Time to first token of OpenVINO GenAI on the CPU, for a GGUF model and a text, as JSON.

  python3 bench/peers/openvino_genai.py --model MODEL.gguf --prompt-file models/text/all.txt \\
      --threads 2 --mode xattention

Install, in a virtual environment of its own: pip install openvino-genai==2026.4.1 numpy (openvino
and openvino-tokenizers of the same release come with it). llama-quantize comes from `make tools`.

Traps:
- Its GGUF reader refuses some tensor types (q5_0 among them), so the model is requantised once to
  Q8_0 under --cache: the values of the GGUF, rounded to 8 bits, at twice the size of a 4-bit file.
- Its tokenizer cuts a text off at 8,192 tokens without a word, so the text is encoded in pieces.
  Pieces end at single line breaks between visible characters, where no token of a byte-level BPE
  spans.
- Unless told otherwise (--property) the CPU plug-in computes in bf16 where the processor has it,
  quantises activations in groups of 32 and keeps K and V in 8 bits, so its dense is an
  approximation too. Closer:
  --property KV_CACHE_PRECISION=f16 --property DYNAMIC_QUANTIZATION_GROUP_SIZE=0
- SchedulerConfig reads a prompt in steps of 256 tokens. With more than one step 2026.4.1's
  xattention answers one prompt differently from run to run, mostly with nonsense; in a single step
  it repeats itself. So xattention takes the prompt in one step here, and --step-tokens changes that
  for all modes.
- Below about 2,100 tokens trishape (128 first, 1,920 nearest, 100 last rows) keeps everything.
- Prompts are given as token ids, without a BOS token.
Exit codes: 0 done, 3 OpenVINO GenAI is not installed, 2 anything else, with one line on stderr.
"""

import argparse
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

PEER = "openvino_genai"
ROOT = Path(__file__).resolve().parent.parent.parent
WARM_UP_TOKENS = 64
TOKENIZER_LIMIT = 8192
PIECE_CHARACTERS = 2000  # at most 8,000 bytes, so as many tokens


class PeerError(Exception):
    """Ends the run with one line and exit code 2."""


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number")
    return number


def key_value(text):
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"'{text}' is not KEY=VALUE")
    return key, value


def converted(model, cache, tool):
    """The Q8_0 twin of this GGUF, made if the cache lacks it."""
    status = model.stat()
    path = cache / PEER / f"{model.stem}-{status.st_size}-{status.st_mtime_ns}.gguf"
    if not path.is_file():
        if not tool.is_file():
            raise PeerError(f"{tool} is missing: run `make tools`, or name it with --quantize-tool")
        print(f"requantising {model} to {path}", file=sys.stderr)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        words = [str(tool), "--allow-requantize", str(model), str(unfinished), "q8_0"]
        result = subprocess.run(words, stdout=sys.stderr, check=False)
        if result.returncode != 0:
            unfinished.unlink(missing_ok=True)
            raise PeerError(f"{tool.name} cannot convert {model} (its reason is above)")
        unfinished.rename(path)
    return path


def encode(tokenizer, text, tokens):
    """The first `tokens` token ids of the text."""
    ids, start = [], 0
    ends = [match.end() for match in re.finditer(r"(?<=\S)\n(?=\S)", text)] + [len(text)]
    for end, following in zip(ends, ends[1:] + [None]):
        if following is not None and following - start <= PIECE_CHARACTERS:
            continue
        piece = tokenizer.encode(text[start:end], add_special_tokens=False).input_ids.data[0]
        if len(piece) >= TOKENIZER_LIMIT:
            raise PeerError("the text has a paragraph that OpenVINO's tokenizer would cut off")
        ids += piece.tolist()
        start = end
        if len(ids) >= tokens:
            return ids[:tokens]
    raise PeerError(f"the text has only {len(ids)} tokens, {tokens} were asked for")


def measure(arguments):
    if not arguments.model.is_file():
        raise PeerError(f"{arguments.model} is missing")
    text = arguments.prompt_file.read_text(encoding="utf-8")
    model = converted(arguments.model, arguments.cache, arguments.quantize_tool)

    import numpy
    import openvino
    import openvino_genai
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = 1
    scheduler.cache_size = 0  # grows as needed
    step_tokens = arguments.step_tokens
    if step_tokens is None and arguments.mode == "xattention":
        # Its answers are not repeatable in several steps.
        step_tokens = max(arguments.tokens, WARM_UP_TOKENS)
    if step_tokens is not None:
        scheduler.max_num_batched_tokens = step_tokens
    if arguments.mode != "dense":
        scheduler.use_sparse_attention = True
        scheduler.sparse_attention_config = openvino_genai.SparseAttentionConfig(
            mode=getattr(openvino_genai.SparseAttentionMode, arguments.mode.upper()))
    print(scheduler.to_string(), file=sys.stderr)
    pipeline = openvino_genai.LLMPipeline(str(model), "CPU", scheduler_config=scheduler,
                                          INFERENCE_NUM_THREADS=arguments.threads,
                                          **dict(arguments.property))
    ids = encode(pipeline.get_tokenizer(), text, max(arguments.tokens, WARM_UP_TOKENS))

    def generate(prompt, count):
        config = openvino_genai.GenerationConfig()
        config.do_sample = False
        config.max_new_tokens = count
        ids = openvino.Tensor(numpy.array([prompt], numpy.int64))
        return list(pipeline.generate(ids, config).tokens[0])

    generate(ids[:WARM_UP_TOKENS], 1)
    start = time.perf_counter()
    answer = generate(ids[:arguments.tokens], 1)
    seconds = time.perf_counter() - start
    if arguments.answer_tokens > 1:
        answer = generate(ids[:arguments.tokens], arguments.answer_tokens)
    return {"peer": PEER, "version": openvino_genai.__version__, "mode": arguments.mode,
            "tokens": arguments.tokens, "ttft_seconds": round(seconds, 4), "answer_tokens": answer,
            "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--prompt-file", type=Path, required=True,
                        help="text that the prompt is cut from")
    parser.add_argument("--tokens", type=positive, required=True, help="prompt length")
    parser.add_argument("--threads", type=positive, default=os.cpu_count())
    parser.add_argument("--mode", choices=["dense", "trishape", "xattention"], default="dense")
    parser.add_argument("--answer-tokens", type=positive, default=8,
                        help="length of the answer; above 1 it takes a second, untimed run")
    parser.add_argument(
        "--step-tokens", type=positive,
        help="tokens of a prefill step (default: all for xattention, else OpenVINO's 256)")
    parser.add_argument("--property", type=key_value, action="append", default=[],
                        metavar="KEY=VALUE",
                        help="property of OpenVINO's CPU plug-in; may be repeated")
    parser.add_argument("--quantize-tool", type=Path,
                        default=ROOT / "build/release/bin/llama-quantize")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/minference/peers",
                        help="where converted models are kept")
    arguments = parser.parse_args()

    # This file is called as the package is, and its folder is the first that Python searches.
    own = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != own]
    if importlib.util.find_spec("openvino_genai") is None:
        print(f"{PEER}.py: error: OpenVINO GenAI is not installed; --help says how",
              file=sys.stderr)
        return 3
    # OpenVINO logs to stdout from C++; stdout is for the one object.
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
