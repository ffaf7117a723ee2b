#!/usr/bin/env python3
"""Time to first token: model x prompt length x attention, through `minference run`, as a table and JSON.

Examples:
  bench/ttft.py -m models/smollm2-135m-instruct-q4_1.gguf --tokens 4k,8000
  bench/ttft.py -m models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --tokens 16k,32000 \\
      --attn stock,dense,vertical_slash:vertical_size=800:slash_size=1000 --json ttft.json --plot ttft.png

Prompts are the real text, cut to exactly the asked number of tokens. Each run is a process of its own;
methods of one length follow each other, so that they meet the same machine. Exit codes: 0 done, 2
anything else, with one line on stderr.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SLACK_TOKENS = 16  # the prompt may miss the asked length by this much


class BenchError(Exception):
    """Ends the run with one line and exit code 2."""


def parse_tokens(text):
    """4k -> 4096, 32000 -> 32000."""
    lengths = []
    for item in text.split(","):
        factor = 1024 if item[-1:] in "kK" else 1
        digits = item[:-1] if factor > 1 else item
        if not digits.isdigit() or not 64 <= int(digits) * factor <= 4 * 1024 * 1024:
            raise argparse.ArgumentTypeError(f"'{item}' is not a length from 64 to 4096k")
        lengths.append(int(digits) * factor)
    return lengths


def method_options(method):
    """name[:key=value ...] -> options of `minference run`."""
    name, *options = method.split(":")
    words = ["--attn", name]
    for option in options:
        words += ["--attn-opt", option]
    return words


def run(binary, arguments):
    result = subprocess.run([str(binary), "run", *arguments, "--json"], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise BenchError(lines[-1])
    return json.loads(result.stdout)


def cut_prompt(count_tokens, text, tokens):
    """The beginning of text that has `tokens` tokens, within SLACK_TOKENS below."""
    size = min(len(text), 3 * tokens)
    low, high = 0, None
    for _ in range(24):
        got = count_tokens(text[:size])
        if tokens - SLACK_TOKENS <= got <= tokens:
            return text[:size]
        if got < tokens:
            if size == len(text):
                raise BenchError(f"the text has only {got} tokens, {tokens} were asked for")
            low = size
        else:
            high = size
        guess = int(size * tokens / got)
        # Proportion first, bisection once it stops helping.
        if high is not None and not low < guess < high:
            guess = (low + high) // 2
        size = min(len(text), max(guess, low + 1))
    raise BenchError(f"no prompt of {tokens} tokens was found")


def plot(rows, path, title):
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise BenchError("--plot needs matplotlib: pip install matplotlib") from error
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for method in dict.fromkeys(row["attn"] for row in rows):
        points = [(row["prompt_tokens"], row["ttft_seconds"]) for row in rows if row["attn"] == method]
        axes.plot(*zip(*points), marker="o", label=method)
    axes.set(xlabel="prompt tokens", ylabel="time to first token, s", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def processor():
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="ignore").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown processor"


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--tokens", type=parse_tokens, default=[4096, 8000],
                        help="prompt lengths, for example 4k,8000")
    parser.add_argument("--attn", default="stock,dense,vertical_slash",
                        help="methods, each name[:key=value ...], separated by commas")
    parser.add_argument("-t", "--threads", type=int, default=0, help="threads, 0 = all")
    parser.add_argument("-r", "--repetitions", type=int, default=1,
                        help="runs of each cell; the fastest counts")
    parser.add_argument("--text", type=Path, default=ROOT / "models/text/all.txt")
    parser.add_argument("--bin-dir", type=Path, default=ROOT / "build/release/bin")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, help="also draw them to this PNG file")
    arguments = parser.parse_args()
    binary = arguments.bin_dir / "minference"
    common = ["-m", str(arguments.model), "--no-chat", "--temp", "0"]
    if arguments.threads > 0:
        common += ["-t", str(arguments.threads)]

    rows = []
    try:
        if not binary.is_file():
            raise BenchError(f"{binary} is missing: run `make build`")
        text = arguments.text.read_text(encoding="utf-8")
        print(f"{'tokens':>7} {'attention':<44} {'TTFT s':>8} {'tokens/s':>9} {'attention s':>12} "
              f"{'index s':>8} {'kept %':>7} {'speed-up':>9}")
        with tempfile.TemporaryDirectory() as directory:
            prompt_file = Path(directory) / "prompt.txt"

            def count_tokens(prompt):
                prompt_file.write_text(prompt, encoding="utf-8")
                return run(binary, [*common, "-f", str(prompt_file), "--count-tokens"])["prompt_tokens"]

            for tokens in arguments.tokens:
                prompt_file.write_text(cut_prompt(count_tokens, text, tokens), encoding="utf-8")
                baseline = None
                for method in arguments.attn.split(","):
                    results = [run(binary, [*common, "-f", str(prompt_file), "-n", "8",
                                            *method_options(method)])
                               for _ in range(max(1, arguments.repetitions))]
                    row = min(results, key=lambda result: result["ttft_seconds"])
                    row["attn"] = method
                    row["all_ttft_seconds"] = [result["ttft_seconds"] for result in results]
                    rows.append(row)
                    baseline = baseline or row["ttft_seconds"]
                    number = lambda key, digits: ("-" if row.get(key) is None
                                                  else f"{row[key]:.{digits}f}")
                    kept = row.get("kept_fraction")
                    print(f"{row['prompt_tokens']:>7} {method:<44} {row['ttft_seconds']:>8.2f} "
                          f"{row['prefill_tokens_per_second']:>9.1f} {number('attention_seconds', 2):>12} "
                          f"{number('index_seconds', 2):>8} "
                          f"{'-' if kept is None else f'{100 * kept:.1f}':>7} "
                          f"{baseline / row['ttft_seconds']:>8.2f}x", flush=True)
        if arguments.json:
            report = {"date": time.strftime("%Y-%m-%d"), "processor": processor(),
                      "command": " ".join(sys.argv), "rows": rows}
            arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        if arguments.plot:
            plot(rows, arguments.plot,
                 f"{arguments.model.stem}, {rows[0]['threads']} threads\n{processor()}")
    except (BenchError, OSError, json.JSONDecodeError) as error:
        print(f"ttft.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
