#!/usr/bin/env python3
"""Time to first token beside other engines: `minference bench`, peers, a table, JSON and a plot.

Examples:
  bench/ttft.py -m models/smollm2-135m-instruct-q4_1.gguf --tokens 4k,8000
  bench/ttft.py -m models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --tokens 16k,32000 \\
      --attn stock,dense,vertical_slash:vertical_size=800:slash_size=1000 \\
      --json ttft.json --plot ttft.png
  bench/ttft.py -m model.gguf --tokens 8k \\
      --peers vllm_cpu,openvino_genai:dense,openvino_genai:xattention \\
      --peer-python vllm_cpu=venvs/vllm/bin/python3 \\
      --peer-python openvino_genai=venvs/ov/bin/python3

The methods of one length follow each other, then its peers, so that all meet the same machine. A
peer NAME[:MODE] is bench/peers/NAME.py, a process of its own that prints one JSON object; one that
is not installed is left out with its own words. Exit codes: 0 done, 1 a cell or a peer failed (its
row says why), 2 bad input, 130 interrupted.
"""

import argparse
import json
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_INSTALLED = 3  # a peer's exit code
COLUMNS = [  # title, key, factor, digits
    ("TTFT s", "ttft_seconds", 1, 2),
    ("tokens/s", "prefill_tokens_per_second", 1, 1),
    ("attention s", "attention_seconds", 1, 2),
    ("index s", "index_seconds", 1, 2),
    ("kept %", "kept_fraction", 100, 1),
    ("peak MiB", "peak_mib", 1, 0),
    ("speed-up", "speedup_over_stock", 1, 2),
]


class BenchError(Exception):
    """Ends the bench with one line and exit code 2."""


class ChildFailed(Exception):
    """`minference bench` ended without figures, and has said why."""

    def __init__(self, exit_code):
        super().__init__()
        self.exit_code = exit_code


def last_line(text, fallback):
    lines = text.strip().splitlines()
    return lines[-1] if lines else fallback


def parse_length(text):
    """4k -> 4096; what is legal `minference bench` knows."""
    factor = 1024 if text[-1:] in ("k", "K") else 1
    digits = text[:-1] if factor > 1 else text
    if not (digits.isascii() and digits.isdigit()):
        raise argparse.ArgumentTypeError(f"'{text}' is not a length, for example 8k or 32000")
    return int(digits) * factor


def parse_lengths(text):
    return [parse_length(item) for item in text.split(",")]


def parse_peers(text):
    """NAME[:MODE],... -> [(name, mode)]; each must have its script."""
    peers = []
    for item in text.split(","):
        name, _, mode = item.partition(":")
        if not name.isidentifier() or not peer_script(name).is_file():
            known = ", ".join(sorted(path.stem for path in peer_script("x").parent.glob("*.py")))
            raise argparse.ArgumentTypeError(
                f"unknown peer '{item}', expected one of: {known or 'none'}")
        peers.append((name, mode))
    return peers


def parse_interpreter(text):
    name, separator, path = text.partition("=")
    if not separator or not name or not path:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=PATH")
    return name, path


def peer_script(name):
    return ROOT / "bench" / "peers" / f"{name}.py"


def peer_label(name, mode):
    return f"{name}:{mode}" if mode else name


def run_minference(arguments, tokens):
    """The report of `minference bench` for one length."""
    binary = arguments.bin_dir / "minference"
    if not binary.is_file():
        raise BenchError(f"{binary} is missing: run `make build`")
    command = [str(binary), "bench", "-m", str(arguments.model), "-p", str(tokens), "--json",
               "--attn", arguments.attn, "--prompt-file", str(arguments.text),
               "-r", str(arguments.repetitions), "-n", str(arguments.answer)]
    if arguments.threads:
        command += ["-t", str(arguments.threads)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    try:
        return json.loads(result.stdout)
    except json.JSONDecodeError:
        raise ChildFailed(result.returncode) from None


def run_peer(arguments, name, mode, tokens, threads):
    """The row of one peer, or None where it is not installed."""
    python = dict(arguments.peer_python).get(name, sys.executable)
    label = peer_label(name, mode)
    row = {"tokens": tokens, "attention": label}
    command = [python, str(peer_script(name)), "--model", str(arguments.model), "--prompt-file",
               str(arguments.text), "--tokens", str(tokens), "--threads", str(threads)]
    if mode:
        command += ["--mode", mode]
    runs = []
    for _ in range(arguments.repetitions):
        try:
            result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                    text=True, check=False)
        except OSError as error:
            raise BenchError(f"--peer-python {name}={python}: {error.strerror}") from error
        if result.returncode == NOT_INSTALLED:
            print(f"{label}: left out: {last_line(result.stderr, 'not installed')}",
                  file=sys.stderr)
            return None
        try:
            if result.returncode != 0:
                raise ValueError(last_line(result.stderr, f"exit code {result.returncode}"))
            run = json.loads(result.stdout)
            runs.append({
                key: run[key]
                for key in ("version", "tokens", "ttft_seconds", "answer_tokens", "peak_mib")
            })
        except (ValueError, KeyError, TypeError) as error:
            words = f"no figures: {error}" if isinstance(error, KeyError) else str(error)
            return {**row, "error": words}
    best = min(runs, key=lambda run: run["ttft_seconds"])
    return {**row,
            "prompt_tokens": best["tokens"],
            "ttft_seconds": best["ttft_seconds"],
            "all_ttft_seconds": [run["ttft_seconds"] for run in runs],
            "prefill_tokens_per_second": best["tokens"] / best["ttft_seconds"],
            "peak_mib": max(run["peak_mib"] for run in runs),
            "answer_tokens": best["answer_tokens"],
            "version": best["version"],
            "peer": True}


def print_header(width):
    titles = "".join(f" {title:>11}" for title, *_ in COLUMNS)
    print(f"{'tokens':>8}  {'attention':<{width}}{titles}")


def print_row(row, width):
    line = f"{row.get('prompt_tokens', row['tokens']):>8}  {row['attention']:<{width}}"
    if "error" in row:
        print(f"{line}  failed: {row['error']}", flush=True)
        return
    for _, key, factor, digits in COLUMNS:
        value = row.get(key)
        line += f" {'-' if value is None else f'{factor * value:.{digits}f}':>11}"
    print(line, flush=True)


def measure(arguments):
    labels = arguments.attn.split(",") + [peer_label(*peer) for peer in arguments.peers]
    width = max(len(label) for label in labels)
    report = None
    missing = set()
    for tokens in arguments.tokens:
        part = run_minference(arguments, tokens)
        if report is None:
            report = {**part, "command": shlex.join(sys.argv), "rows": []}
            print_header(width)
        rows = part["rows"]
        for row in rows:
            print_row(row, width)
        stock = next((row["ttft_seconds"] for row in rows
                      if row["attention"] == "stock" and "error" not in row), None)
        for name, mode in arguments.peers:
            if (name, mode) in missing:
                continue
            row = run_peer(arguments, name, mode, tokens, part["machine"]["threads"])
            if row is None:
                missing.add((name, mode))
                continue
            if stock and "error" not in row:
                row["speedup_over_stock"] = stock / row["ttft_seconds"]
            rows.append(row)
            print_row(row, width)
        report["rows"] += rows
        # After every length, so that an interruption does not lose hours.
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def load_pyplot():
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise BenchError("--plot needs matplotlib: pip install matplotlib") from error
    return pyplot


def plot(pyplot, report, path):
    """Lines over lengths, both axes logarithmic; bars where there is one length."""
    rows = [row for row in report["rows"] if "error" not in row]
    if not rows:
        raise BenchError("nothing to plot: every cell failed")
    lengths = sorted({row["tokens"] for row in rows})
    labels = list(dict.fromkeys(row["attention"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(8, 5))
    if len(lengths) > 1:
        for label in labels:
            points = sorted((row["prompt_tokens"], row["ttft_seconds"]) for row in rows
                            if row["attention"] == label)
            axes.plot(*zip(*points), marker="o", label=label)
        axes.set(xscale="log", yscale="log", xlabel="prompt tokens")
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.tick_params(axis="x", which="minor", length=0, labelbottom=False)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="y", which="minor", labelsize=6)
        axes.legend(fontsize=8)
    else:
        seconds = [next(row["ttft_seconds"] for row in rows if row["attention"] == label)
                   for label in labels]
        axes.bar_label(axes.bar(labels, seconds), fmt="%.2f")
        axes.tick_params(axis="x", labelrotation=20, labelsize=8)
        axes.set(xlabel=f"{lengths[0]} tokens")
    axes.set(ylabel="time to first token, s")
    axes.grid(alpha=0.3)
    machine = report["machine"]
    about = (f"{report['model']}: {machine['processor']}, {machine['threads']} threads, "
             f"{machine['isa']}, ggml {machine['ggml']}, {machine['date']}")
    axes.set_title(about + "\n" + textwrap.fill(report["command"], 120), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--tokens", type=parse_lengths, default=[4096, 8000],
                        help="prompt lengths, for example 4k,8000")
    parser.add_argument("--attn", default="stock,dense,vertical_slash",
                        help="methods, each name[:key=value ...], separated by commas")
    parser.add_argument("-t", "--threads", type=int, default=0,
                        help="threads (default: one per core)")
    parser.add_argument("-n", "--answer", type=int, default=8, help="tokens of the answer")
    parser.add_argument("-r", "--repetitions", type=int, default=1,
                        help="runs of each cell; the fastest counts")
    parser.add_argument("--text", type=Path, default=ROOT / "models/text/all.txt",
                        help="text that prompts are cut from")
    parser.add_argument("--bin-dir", type=Path, default=ROOT / "build/release/bin")
    parser.add_argument("--peers", type=parse_peers, default=[],
                        help="other engines, NAME[:MODE] separated by commas")
    parser.add_argument("--peer-python", type=parse_interpreter, action="append", default=[],
                        metavar="NAME=PATH", help="Python interpreter of a peer; may be repeated")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, help="also draw them to this image file")
    arguments = parser.parse_args()
    try:
        # Before hours of measuring.
        pyplot = load_pyplot() if arguments.plot else None
        report = measure(arguments)
        if pyplot:
            plot(pyplot, report, arguments.plot)
    except ChildFailed as error:
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except (BenchError, OSError) as error:
        print(f"ttft.py: error: {error}", file=sys.stderr)
        return 2
    return 1 if any("error" in row for row in report["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
