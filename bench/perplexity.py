#!/usr/bin/env python3
"""Perplexity per weight format: stock llama.cpp beside the plug-in.

Examples:
  bench/perplexity.py -m models/smollm2-135m-instruct-q4_1.gguf --formats own,Q4_K_M,Q8_0,BF16
  bench/perplexity.py -m model.gguf --formats own \\
      --attn dense,vertical_slash:vertical_size=800:slash_size=1000

Each format is made from the model by llama-quantize (--allow-requantize; `own` is the file as it
is) and kept in --work. Exit codes: 0 done, 1 a row differs from stock by more than --bound %, 2
anything else.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class BenchError(Exception):
    """Ends the bench with one line and exit code 2."""


def run(words, environment=None):
    result = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, check=False,
                            env={**os.environ, **(environment or {})})
    if result.returncode != 0:
        lines = (result.stderr + result.stdout).strip().splitlines()
        lines = lines or [f"exit code {result.returncode}"]
        raise BenchError(f"{Path(words[0]).name}: {lines[-1]}")
    return result.stdout + result.stderr


def quantized(options, name):
    if name == "own":
        return options.model
    path = options.work / f"{options.model.stem}-{name}.gguf"
    if not path.exists():
        unfinished = path.with_suffix(".part")
        run([options.bin_dir / "llama-quantize", "--allow-requantize",
             options.model, unfinished, name])
        unfinished.rename(path)
    return path


def plugin(options, attn):
    """name[:key=value ...] -> the plug-in's variables."""
    name, *settings = attn.split(":")
    return {
        "GGML_BACKEND_PATH": str(options.bin_dir / "libggml-minference.so"),
        "MINFERENCE_LOG": "0",
        "MINFERENCE_ATTN": name,
        "MINFERENCE_ATTN_OPTS": ",".join(settings)
    }


def perplexity(options, model, environment):
    output = run([
        options.bin_dir / "llama-perplexity", "-m", model, "-f", options.text,
        "-c", options.context, "-b", options.context, "-ub", options.context,
        "--chunks", options.chunks, "-fa", "on", "-t", options.threads], environment)
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", output)
    if not found:
        raise BenchError(f"llama-perplexity printed no estimate for {model.name}")
    return float(found.group(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--formats", default="own,Q4_1,Q4_K_M,Q8_0,BF16")
    parser.add_argument("--attn", default="dense")
    parser.add_argument("--text", type=Path, default=ROOT / "models/text/othello_gut.txt")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    parser.add_argument("--bin-dir", type=Path, default=ROOT / "build/release/bin")
    parser.add_argument("--work", type=Path, default=ROOT / "build/quantized",
                        help="folder of the made files")
    parser.add_argument("--bound", type=float, default=0.3,
                        help="largest difference of dense in %%")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    exceeded = 0
    rows = []
    try:
        for path in (options.model, options.text):
            if not path.is_file():
                raise BenchError(f"{path}: no such file")
        options.work.mkdir(parents=True, exist_ok=True)
        print(f"{'format':10} {'attention':40} {'perplexity':>10} {'difference':>11}", flush=True)
        for name in options.formats.split(","):
            model = quantized(options, name)
            stock = perplexity(options, model, None)
            print(f"{name:10} {'stock':40} {stock:10.4f}", flush=True)
            rows.append({"format": name, "attention": "stock", "perplexity": stock})
            for attn in options.attn.split(","):
                value = perplexity(options, model, plugin(options, attn))
                change = 100.0 * (value / stock - 1.0)
                exceeded += attn == "dense" and abs(change) > options.bound
                print(f"{name:10} {attn:40} {value:10.4f} {change:+10.3f} %", flush=True)
                rows.append({
                    "format": name,
                    "attention": attn,
                    "perplexity": value,
                    "difference_percent": change
                })
        if options.json:
            options.json.write_text(json.dumps(rows, indent=2) + "\n")
    except (BenchError, OSError) as error:
        print(f"perplexity.py: error: {error}", file=sys.stderr)
        return 2
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
