#!/usr/bin/env python3
"""What a sparse method costs in quality, beside dense attention: a Markdown table, JSON and a plot.

Four figures for each method and context length:
  perplexity  of the last tokens of windows of a text; its change against dense over the same
              windows
  needles     share of numbers, hidden in the text at a grid of depths, that the greedy answer
              repeats
  agreement   greedy continuations of the text beside dense's: leading tokens that are equal, and
              continuations that are equal to the end
  recall      share of the softmax mass that the kept keys hold (the guard's report); and kept keys,
              time to first token

Examples:
  bench/fidelity.py -m models/smollm2-135m-instruct-q4_1.gguf --tokens 4k,8k \\
      --attn vertical_slash:vertical_size=500:slash_size=700,a_shape \\
      --json fidelity.json --plot fidelity.png
  bench/fidelity.py -m models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --tokens 32k \\
      --windows 2 --prompts 2 --attn minference,minference:pattern=searched.json \\
      --json fidelity.json --resume

Methods are name[:key=value...]; pattern=FILE gives a method its pattern file. dense is always
measured, first. --json is written after each cell, and --resume goes on with what it holds. Exit
codes: 0 done, 1 a cell failed (its row says why), 2 bad input, 130 interrupted.
"""

import argparse
import json
import math
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from ttft import BenchError, last_line, load_pyplot, parse_lengths

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("perplexity", "answers", "needles")
PLACES = ("Alexandria", "Bergamo", "Cordoba", "Damascus", "Edessa", "Ferrara", "Granada", "Hamadan")
NEEDLE = ("The secret number of {place} is {number}. "
          "Remember it: {number} is the secret number of {place}.")
# Small models can complete a sentence where they no longer follow an instruction.
NEEDLE_FORMS = {
    "completion": "{text}\nThe secret number of {place} is",
    "chat": "{text}\n\nWhat is the secret number of {place}? Answer with the number only."
}
NEEDLE_TOKENS = 24
COLUMNS = [  # title, key, factor, format
    ("kept %", "kept_fraction", 100, ".1f"),
    ("recall %", "mass_recall", 100, ".2f"),
    ("perplexity", "perplexity", 1, ".3f"),
    ("perplexity change %", "perplexity_change", 100, "+.2f"),
    ("needles %", "needle_score", 100, ".0f"),
    ("equal tokens %", "leading_share", 100, ".1f"),
    ("equal answers %", "exact_share", 100, ".0f"),
    ("TTFT s", "ttft_seconds", 1, ".2f"),
]


class CellFailed(Exception):
    """The command line ended without figures; its sentence and exit code."""

    def __init__(self, sentence, exit_code):
        super().__init__(sentence)
        self.exit_code = exit_code


def parse_depths(text):
    depths = []
    for item in text.split(","):
        if not (item.isascii() and item.isdigit() and int(item) <= 100):
            raise argparse.ArgumentTypeError(f"'{item}' is not a depth in % from 0 to 100")
        depths.append(int(item))
    return depths


def parse_parts(text):
    parts = text.split(",")
    for part in parts:
        if part not in PARTS:
            raise argparse.ArgumentTypeError(
                f"unknown part '{part}', expected one of {', '.join(PARTS)}")
    return parts


def positive(text):
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"'{text}' is not an integer from 1")
    return int(text)


def parse_methods(text):
    """The methods as given, without twins and with dense in front."""
    return list(dict.fromkeys(["dense", *text.split(",")]))


def method_arguments(label):
    """name[:key=value...] -> options of the command line, which judges them."""
    name, *settings = label.split(":")
    words = ["--attn", name]
    for setting in settings:
        key, _, value = setting.partition("=")
        words += ["--pattern", value] if key == "pattern" else ["--attn-opt", setting]
    return words


def cut_at_word(text, size):
    """The beginning, at most `size` characters, without a part of a word."""
    if size >= len(text) or text[size].isspace():
        return text[:size].rstrip()
    end = max(text.rfind(" ", 0, size), text.rfind("\n", 0, size))
    return text[:end if end > 0 else size].rstrip()


def hide(text, needle, depth):
    """Puts a line of its own into the text, `depth` % from the beginning."""
    at = len(text) * depth // 100
    end = text.find("\n", at)
    if depth == 100 or end < 0:
        return f"{text}\n{needle}"
    start = text.rfind("\n", 0, at) + 1
    at = start if at - start < end + 1 - at else end + 1
    return f"{text[:at]}{needle}\n{text[at:]}"


def leading_share(answer, reference):
    """How much of the reference the answer begins with; an empty one is equalled by itself."""
    equal = 0
    for left, right in zip(answer, reference):
        if left != right:
            break
        equal += 1
    longest = max(len(answer), len(reference))
    return equal / longest if longest else 1.0


def loss_change(windows, reference):
    """Relative change of the perplexity over the same windows, standard error (None for one)."""
    differences = [
        window["mean_loss"] - dense["mean_loss"] for window, dense in zip(windows, reference)
    ]
    ratio = math.exp(statistics.fmean(differences))
    error = None
    if len(differences) > 1:
        error = ratio * statistics.stdev(differences) / math.sqrt(len(differences))
    return ratio - 1, error


def summarize(tokens, label, cells, dense):
    """One row of the table from the cells of a method and dense's, both by part."""
    row = {"tokens": tokens, "attention": label}
    errors = [cell["error"] for cell in cells.values() if "error" in cell]
    if errors:
        row["error"] = errors[0]
    good = {part: cell for part, cell in cells.items() if "error" not in cell}
    sound = {part: cell for part, cell in dense.items() if "error" not in cell}
    if "perplexity" in good:
        cell = good["perplexity"]
        for key in ("perplexity", "standard_error", "kept_fraction", "mass_recall"):
            row[key] = cell[key]
        if "perplexity" in sound:
            row["perplexity_change"], row["perplexity_change_error"] = loss_change(
                cell["windows"], sound["perplexity"]["windows"])
    if "answers" in good and "answers" in sound:
        pairs = [(answer["answer_tokens"], reference["answer_tokens"]) for answer, reference
                 in zip(good["answers"]["prompts"], sound["answers"]["prompts"])]
        row["leading_share"] = statistics.fmean(leading_share(*pair) for pair in pairs)
        row["exact_share"] = statistics.fmean(left == right for left, right in pairs)
    if "needles" in good:
        row["needle_score"] = statistics.fmean(prompt["found"]
                                               for prompt in good["needles"]["prompts"])
    prompts = [
        prompt for part in ("answers", "needles")
        for prompt in good.get(part, {}).get("prompts", [])
    ]
    if prompts:
        row["ttft_seconds"] = statistics.median(prompt["ttft_seconds"] for prompt in prompts)
        if "perplexity" not in good and None not in (kept := [p["kept_fraction"] for p in prompts]):
            row["kept_fraction"] = statistics.fmean(kept)
    return row


def figure(row, key, factor, form):
    value = row.get(key)
    if value is None:
        return "-"
    error = row.get(f"{key}_error")
    return f"{factor * value:{form}}" + (f" ± {factor * error:.2f}" if error else "")


def markdown(rows):
    """The table as Markdown, columns aligned."""
    lines = [["tokens", "attention", *(title for title, *_ in COLUMNS)]]
    for row in rows:
        lines.append([str(row["tokens"]), f"`{row['attention']}`",
                      *(figure(row, *column) for _, *column in COLUMNS)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    table = [
        "| " + " | ".join(word.ljust(width) for word, width in zip(line, widths)) + " |"
        for line in lines
    ]
    table += [f"\n{row['tokens']} tokens, `{row['attention']}` failed: {row['error']}"
              for row in rows if "error" in row]
    return "\n".join(table)


class Progress:
    """Lines on stderr: what is measured, and how long it took."""

    def __init__(self, total):
        self.total = total
        self.done = 0

    def begin(self, tokens, label, part):
        self.done += 1
        self.title = f"[{self.done}/{self.total}] {tokens} tokens, {label}, {part}"
        self.start = time.monotonic()
        self.show("")

    def show(self, detail):
        if sys.stderr.isatty():
            print(f"\r\033[K{self.title} {detail}", end="", file=sys.stderr, flush=True)

    def end(self, words):
        clear = "\r\033[K" if sys.stderr.isatty() else ""
        print(f"{clear}{self.title}: {words} ({time.monotonic() - self.start:.0f} s)",
              file=sys.stderr, flush=True)


class CommandLine:
    """`minference` on one model."""

    def __init__(self, options):
        self.binary = options.bin_dir / "minference"
        if not self.binary.is_file():
            raise BenchError(f"{self.binary} is missing: run `make build`")
        # Each method gets its own by option; inherited ones would be the defaults of the others.
        self.environment = {name: value for name, value in os.environ.items()
                            if name not in ("MINFERENCE_ATTN_OPTS", "MINFERENCE_PATTERN")}
        self.shared = ["-m", str(options.model), "--ubatch", str(options.ubatch)]
        if options.threads:
            self.shared += ["-t", str(options.threads)]

    def call(self, command, words, text="", on_line=None):
        """The JSON objects that it prints, one a line. `on_line` hears how many so far."""
        results = []
        with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
            process = subprocess.Popen([str(self.binary), command, *self.shared, *words],
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                                       encoding="utf-8", env=self.environment)
            with process:
                try:
                    # All of it is read before the first answer; a refusal closes it.
                    process.stdin.write(text)
                    process.stdin.close()
                except BrokenPipeError:
                    pass
                for line in process.stdout:
                    results.append(json.loads(line))
                    if on_line:
                        on_line(len(results))
            if process.returncode != 0:
                if process.returncode == 130:
                    raise KeyboardInterrupt
                errors.seek(0)
                sentence = last_line(errors.read(), f"exit code {process.returncode}")
                raise CellFailed(sentence.removeprefix("minference: error: "), process.returncode)
        return results

    def run(self, words, prompts, on_line=None):
        text = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
        return self.call("run", ["--prompts", "-", "--temp", "0", *words], text, on_line)


class Prompts:
    """Prompts of wanted lengths, the same for every method."""

    def __init__(self, options, command_line):
        self.options = options
        self.command_line = command_line
        self.text = options.text.read_text(encoding="utf-8", errors="replace")

    def after_line(self, place):
        return self.text.find("\n", place) + 1

    def fit(self, room, starts, make):
        """make(i, excerpt) for each start, with excerpts as long as `room` tokens allow.

        They are 1 % or 16 tokens shorter at most.
        """
        slack = max(16, room // 100)
        sizes = [3 * room for _ in starts]  # characters, a first guess
        results = [None for _ in starts]
        for _ in range(12):
            asked = [i for i, result in enumerate(results) if result is None]
            if not asked:
                return results
            made = []
            for i in asked:
                if starts[i] + sizes[i] > len(self.text):
                    raise BenchError(
                        f"{self.options.text} is too short for prompts of {room} tokens")
                made.append(
                    make(i, cut_at_word(self.text[starts[i]:starts[i] + sizes[i]], sizes[i])))
            counts = self.command_line.run(["--attn", "stock", "--count-tokens"], made)
            for i, prompt, count in zip(asked, made, counts):
                if room - slack <= count["prompt_tokens"] <= room:
                    results[i] = prompt
                else:
                    sizes[i] = max(1, int(sizes[i] * (room - slack / 2) / count["prompt_tokens"]))
        raise BenchError(f"no prompts of {room} tokens were found in {self.options.text}")

    def answers(self, tokens):
        """Excerpts, spread evenly, to be continued."""
        count = self.options.prompts
        starts = [self.after_line(i * len(self.text) // (count + 1)) for i in range(count)]
        return self.fit(tokens - self.options.answer, starts, lambda i, excerpt: {
            "id": i, "prompt": excerpt, "chat": False, "tokens": self.options.answer})

    def needles(self, tokens):
        """One prompt for each depth and trial, and in its id what is hidden."""
        options = self.options
        draw = random.Random(f"{options.seed} {tokens}")
        grid = [(depth, trial) for depth in options.depths for trial in range(options.trials)]
        last_start = max(1, len(self.text) - 8 * tokens)
        starts = [self.after_line(draw.randrange(last_start)) for _ in grid]
        hidden = [(draw.choice(PLACES), draw.randrange(10000, 100000)) for _ in grid]

        def make(i, excerpt):
            place, number = hidden[i]
            text = hide(excerpt, NEEDLE.format(place=place, number=number), grid[i][0])
            return {"id": {"depth": grid[i][0], "number": number}, "tokens": NEEDLE_TOKENS,
                    "chat": options.needle_form == "chat",
                    "prompt": NEEDLE_FORMS[options.needle_form].format(text=text, place=place)}
        return self.fit(tokens - NEEDLE_TOKENS, starts, make)


class Bench:
    def __init__(self, options):
        self.options = options
        self.command_line = CommandLine(options)
        self.prompts = Prompts(options, self.command_line)
        self.cached_prompts = {}
        self.report = {"bench": "fidelity", "command": shlex.join(sys.argv), "machine": None,
                       "settings": self.settings(), "rows": [], "cells": []}
        if options.resume:
            self.resume()

    def settings(self):
        """What cells must have in common to stand in one table."""
        options = self.options
        return {
            "model": options.model.name,
            "text": options.text.name,
            "last": options.last,
            "windows": options.windows,
            "prompts": options.prompts,
            "answer": options.answer,
            "depths": options.depths,
            "trials": options.trials,
            "needle_form": options.needle_form,
            "seed": options.seed,
            "ubatch": options.ubatch
        }

    def resume(self):
        path = self.options.json
        if path is None:
            raise BenchError("--resume needs --json FILE")
        if not path.exists():
            return
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
            settings, cells, machine = earlier["settings"], earlier["cells"], earlier["machine"]
        except (ValueError, KeyError, TypeError):
            raise BenchError(f"{path}: not a report of this bench") from None
        for key, value in self.report["settings"].items():
            if settings.get(key) != value:
                raise BenchError(
                    f"{path} was measured with {key} {settings.get(key)}, not {value}: "
                    "name another --json file")
        self.report["cells"] = [cell for cell in cells if "error" not in cell]
        self.report["machine"] = machine

    def check(self):
        """Refuses what no cell could run with, before the first one."""
        question = [{"prompt": "x"}]
        for label in self.options.attn:
            [answer] = self.command_line.run([*method_arguments(label), "--count-tokens"], question)
        trained = answer["trained_context"]
        for tokens in self.options.tokens:
            # Room for something to hide a needle in.
            least = max(self.options.last, self.options.answer, 128) + 128
            if not least <= tokens <= trained:
                raise BenchError(f"--tokens {tokens}: legal with this model and these options: "
                                 f"{least} to {trained}")

    def cells(self, tokens, label):
        return {cell["part"]: cell for cell in self.report["cells"]
                if (cell["tokens"], cell["attention"]) == (tokens, label)}

    def measure_perplexity(self, tokens, label):
        options = self.options
        [result] = self.command_line.call("perplexity", [
            *method_arguments(label), "-f", str(options.text), "-c", str(tokens),
            "--last", str(options.last), "--windows", str(options.windows),
            "--guard", "off" if label == "stock" else "report", "--json"])
        self.report["machine"] = self.report["machine"] or result["machine"]
        keys = ("perplexity", "standard_error", "kept_fraction", "mass_recall", "windows")
        return {key: result[key] for key in keys}

    def measure_prompts(self, tokens, label, part, progress):
        if (part, tokens) not in self.cached_prompts:
            progress.show("cuts its prompts")
            self.cached_prompts[part, tokens] = getattr(self.prompts, part)(tokens)
        prompts = self.cached_prompts[part, tokens]
        answers = self.command_line.run([*method_arguments(label), "--guard", "off"], prompts,
                                        lambda done: progress.show(f"{done}/{len(prompts)}"))
        rows = []
        for answer in answers:
            row = {
                key: answer[key]
                for key in ("id", "prompt_tokens", "answer", "answer_tokens", "ttft_seconds",
                            "kept_fraction", "index_seconds", "attention_seconds")
            }
            if part == "needles":
                row["found"] = str(answer["id"]["number"]) in answer["answer"]
            rows.append(row)
        return {"prompts": rows}

    def measure(self):
        options = self.options
        missing = [(tokens, label, part) for tokens in options.tokens for label in options.attn
                   for part in options.parts if part not in self.cells(tokens, label)]
        progress = Progress(len(missing))
        self.save()  # a path that cannot be written fails now
        for tokens, label, part in missing:
            progress.begin(tokens, label, part)
            cell = {"tokens": tokens, "attention": label, "part": part}
            try:
                cell |= (self.measure_perplexity(tokens, label) if part == "perplexity"
                         else self.measure_prompts(tokens, label, part, progress))
            except CellFailed as error:
                cell["error"] = str(error)
            self.report["cells"].append(cell)
            progress.end(f"failed: {cell['error']}" if "error" in cell else "done")
            self.save()

    def summarize(self):
        self.report["rows"] = []
        for tokens in self.options.tokens:
            dense = self.cells(tokens, "dense")
            for label in self.options.attn:
                cells = self.cells(tokens, label)
                if cells:
                    self.report["rows"].append(summarize(tokens, label, cells, dense))

    def save(self):
        self.summarize()
        path = self.options.json
        if path is None:
            return
        unfinished = path.with_name(path.name + ".part")
        unfinished.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)


def plot(pyplot, report, path):
    """A panel of bars for each figure; methods downwards, a colour for each length."""
    rows = [row for row in report["rows"] if len(row) > 3]
    if not rows:
        raise BenchError("nothing to plot: every cell failed")
    lengths = sorted({row["tokens"] for row in rows})
    labels = list(dict.fromkeys(row["attention"] for row in rows))
    panels = [column for column in COLUMNS if column[1] not in ("perplexity", "exact_share")
              and any(row.get(column[1]) is not None for row in rows)]
    height = 0.8 / len(lengths)
    drawing, axes = pyplot.subplots(
        1, len(panels), sharey=True, squeeze=False,
        figsize=(2.6 * len(panels) + 2, 0.35 * len(labels) * max(1, len(lengths)) + 2))
    for axis, (title, key, factor, form) in zip(axes[0], panels):
        for i, tokens in enumerate(lengths):
            points = [(labels.index(row["attention"]), factor * row[key],
                       factor * (row.get(f"{key}_error") or 0)) for row in rows
                      if row["tokens"] == tokens and row.get(key) is not None]
            if not points:
                continue
            places, values, errors = zip(*points)
            bars = axis.barh([place + (i - (len(lengths) - 1) / 2) * height for place in places],
                             values, height, xerr=errors if any(errors) else None,
                             label=f"{tokens} tokens")
            axis.bar_label(bars, fmt=f"{{:{form}}}", fontsize=7, padding=2)
        axis.set_title(title, fontsize=9)
        if key == "perplexity_change":
            # One method that fails must not hide the others.
            axis.set_xscale("symlog", linthresh=10)
        axis.margins(x=0.25)
        axis.tick_params(labelsize=8)
        axis.grid(axis="x", alpha=0.3)
    axes[0][0].set_yticks(range(len(labels)), labels)
    axes[0][0].invert_yaxis()
    if len(lengths) > 1:
        axes[0][0].legend(fontsize=7)
    machine = report["machine"]
    about = report["settings"]["model"] + (
        f": {machine['processor']}, {machine['threads']} threads, "
        f"{machine['isa']}, {machine['date']}" if machine else "")
    drawing.suptitle(about + "\n" + textwrap.fill(report["command"], 150), fontsize=8)
    drawing.tight_layout()
    drawing.savefig(path, dpi=110)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--tokens", type=parse_lengths, default=[8192],
                        help="context lengths, answer included, for example 8k,32k (default: 8k)")
    parser.add_argument(
        "--attn", type=parse_methods, default="minference",
        help="methods, each name[:key=value...], separated by commas (default: minference)")
    parser.add_argument("--parts", type=parse_parts, default=list(PARTS),
                        help=f"some of {','.join(PARTS)}")
    parser.add_argument("--text", type=Path, default=ROOT / "models/text/all.txt",
                        help="long text, UTF-8")
    parser.add_argument("--windows", type=positive, default=4, help="windows of the perplexity (4)")
    parser.add_argument("--last", type=positive, default=1024,
                        help="tokens scored at the end of a window (1024)")
    parser.add_argument("--prompts", type=positive, default=4,
                        help="continued prompts of the agreement (4)")
    parser.add_argument("--answer", type=positive, default=64, help="tokens of a continuation (64)")
    parser.add_argument("--depths", type=parse_depths, default=[10, 30, 50, 70, 90],
                        help="where needles lie, in %% of the text (10,30,50,70,90)")
    parser.add_argument("--trials", type=positive, default=1,
                        help="needles per depth and length (1)")
    parser.add_argument("--needle-form", choices=sorted(NEEDLE_FORMS), default="completion",
                        help="how needles are asked for (completion)")
    parser.add_argument("--seed", type=int, default=0, help="of the needles (0)")
    parser.add_argument("--ubatch", type=positive, default=2048,
                        help="tokens of a prefill step (2048)")
    parser.add_argument("-t", "--threads", type=int, default=0,
                        help="threads (default: one per core)")
    parser.add_argument("--bin-dir", type=Path, default=ROOT / "build/release/bin")
    parser.add_argument("--json", type=Path,
                        help="also write all figures to this file, after each cell")
    parser.add_argument("--resume", action="store_true",
                        help="keep the cells that the file of --json holds")
    parser.add_argument("--plot", type=Path, help="also draw them to this image file")
    return parser.parse_args()


def main():
    options = parse_arguments()
    try:
        pyplot = load_pyplot() if options.plot else None
        bench = Bench(options)
        bench.check()
        bench.measure()
        print(markdown(bench.report["rows"]))
        if pyplot:
            plot(pyplot, bench.report, options.plot)
    except KeyboardInterrupt:
        return 130
    except (BenchError, CellFailed, OSError) as error:
        print(f"fidelity.py: error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, CellFailed) else 2
    return 1 if any("error" in row for row in bench.report["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
