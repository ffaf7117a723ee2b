#!/usr/bin/env python3
"""One long prompt through stock llama.cpp, our dense and our sparse attention, as one table.

Needs what `make demo` prepares: the built programs, the small model and the text.
Exit codes: 0 done, 2 anything else, with one line on stderr.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MODEL = "smollm2-135m-instruct-q4_1.gguf"
PLAY = "macbeth_gut.txt"
# The beginning of the play: with everything around it about 7,600 tokens, so that the answer still
# fits the model's context of 8,192.
PLAY_BYTES = 24_500
# A fact that only this text holds, put between two speeches in the middle: whether a method still
# sees it can be read off its answer.
INTRODUCTION = "A special magic number is hidden within the following text. Make sure to memorize it."
FACT = "The special magic number for quiet-harbor is 7421853."
FACT_DEPTH = 0.5
QUESTION = "What is the special magic number for quiet-harbor mentioned in the text above?"
ANSWER_TOKENS = 32

# (name in the table, options of `minference run`). The budgets are small for this prompt; with
# smaller ones (500 and 700) this model, which has three KV heads, no longer finds the fact.
METHODS = [
    ("stock llama.cpp", ["--attn", "stock"]),
    ("dense, products stock", ["--attn", "dense", "--linear", "0"]),
    ("dense", ["--attn", "dense"]),
    ("vertical_slash", ["--attn", "vertical_slash", "--attn-opt", "vertical_size=800",
                        "--attn-opt", "slash_size=1000", "--guard", "report"]),
    ("auto (the default)", ["--attn", "auto", "--guard", "report"]),
]


class DemoError(Exception):
    """Ends the run with one line and exit code 2."""


def make_prompt(text_dir):
    play = (text_dir / PLAY).read_bytes()[:PLAY_BYTES].decode("utf-8", errors="ignore")
    play = play[:play.rindex("\n")]
    middle = play.index("\n\n", int(FACT_DEPTH * len(play)))
    return "\n\n".join([INTRODUCTION, play[:middle], FACT, play[middle:].lstrip("\n"), QUESTION])


def run_method(binary, model, prompt_file, options):
    command = [str(binary), "run", "-m", str(model), "-f", str(prompt_file),
               "-n", str(ANSWER_TOKENS), "--temp", "0", "--json", *options]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            check=False)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise DemoError(f"{' '.join(options)}: {lines[-1]}")
    try:
        return json.loads(result.stdout)
    except json.JSONDecodeError as error:
        raise DemoError(f"{' '.join(options)}: no JSON on stdout: {error}") from error


def common_prefix(a, b):
    count = 0
    for x, y in zip(a, b):
        if x != y:
            break
        count += 1
    return count


def percent(value):
    return "-" if value is None else f"{100 * value:.1f}"


def table_rows(results):
    stock, attention_only = results[0], results[1]
    # What stock llama.cpp needs beside attention, measured where attention's own time is known.
    other_seconds = attention_only["ttft_seconds"] - attention_only["attention_seconds"]
    rows = []
    for (name, _), result in zip(METHODS, results):
        ttft = result["ttft_seconds"]
        is_stock = result is stock
        attention = ttft - other_seconds if is_stock else result["attention_seconds"]
        same = common_prefix(result["answer_tokens"], stock["answer_tokens"])
        kept = 1.0 if is_stock else result["kept_fraction"]
        # Who computes everything keeps the whole mass; nothing has to be sampled for that.
        recall = 1.0 if kept == 1.0 else result["mass_recall"]
        rows.append([
            name,
            f"{ttft:.1f}",
            f"{result['prefill_tokens_per_second']:.0f}",
            f"{max(0.0, attention) / ttft:.0%}" + ("*" if is_stock else ""),
            percent(kept),
            percent(recall),
            f"{stock['ttft_seconds'] / ttft:.2f}x",
            f"{same} of {len(stock['answer_tokens'])}",
        ])
    return rows


def print_table(header, rows):
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    for line in [header, ["-" * width for width in widths], *rows]:
        first = line[0].ljust(widths[0])
        print("  ".join([first] + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin-dir", type=Path, default=ROOT / "build/release/bin")
    parser.add_argument("--models-dir", type=Path, default=ROOT / "models")
    arguments = parser.parse_args()
    model = arguments.models_dir / MODEL
    binary = arguments.bin_dir / "minference"

    results = []
    try:
        for path in (model, binary):
            if not path.is_file():
                raise DemoError(f"{path} is missing: run `make demo`")
        with tempfile.TemporaryDirectory() as directory:
            prompt_file = Path(directory) / "prompt.txt"
            prompt_file.write_text(make_prompt(arguments.models_dir / "text"), encoding="utf-8")
            for name, options in METHODS:
                print(f"running {name} ...", file=sys.stderr, flush=True)
                results.append(run_method(binary, model, prompt_file, options))
    except (DemoError, OSError) as error:
        print(f"demo.py: error: {error}", file=sys.stderr)
        return 2

    first = results[0]
    print(f"\n{MODEL}, {first['prompt_tokens']} prompt tokens, {first['threads']} threads, "
          f"kernels {results[1]['isa']}\n")
    print_table(
        ["attention", "TTFT s", "prefill tokens/s", "attention share", "kept %", "mass recall %",
         "speed-up", "same answer tokens"],
        table_rows(results))
    print("\nTTFT: time to first token. kept: share of the causal area that was computed. mass recall:"
          "\nsoftmax mass that it holds, on sampled rows. same answer tokens: greedy, before the first"
          "\ndifference to stock. * by difference with the second row, where only attention is ours.\n")
    for (name, _), result in zip(METHODS, results):
        print(f"{name}: {result['answer'].strip()}")
        for reason, count in result["fallbacks"].items():
            print(f"  fallback, {count} times: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
