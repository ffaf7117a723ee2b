"""Time to first token of a transformers model: its own attention beside minference's methods.

Examples:
  python -m minference.bench -m models/smollm2-135m-instruct-q4_1.gguf --lengths 4k,8k --text book.txt
  python -m minference.bench -m Qwen/Qwen2.5-Coder-0.5B-Instruct --device cuda --lengths 32k,128k --text book.txt \\
      --attn sdpa,dense,minference --patterns qwen2.5-coder-0.5b-instruct --json ttft.json --plot ttft.png
  python -m minference.bench -m folder/with/config --random-weights --lengths 8k \\
      --attn sdpa,vertical_slash:vertical_size=800:slash_size=1000 --chunk 2048

Every repetition runs all methods of a length one after the other, so that all meet the same machine. A
time is one prefill with an empty cache and the last token's logits, the device synchronised before and
after. Exit codes: 0 done, 1 a cell failed (its row says why), 2 bad input, 130 interrupted.
"""

import argparse
import platform
import statistics
import sys
import time

from . import _cli

_COLUMNS = [  # title, key, factor, digits
    ("TTFT s", "p50", 1, 3),
    ("p10", "p10", 1, 3),
    ("p90", "p90", 1, 3),
    ("tokens/s", "tokens_per_second", 1, 1),
    ("attention s", "attention_seconds", 1, 3),
    ("index s", "index_seconds", 1, 3),
    ("kept %", "kept_fraction", 100, 1),
    ("decode ms", "decode_ms", 1, 2),
    ("peak MiB", "peak_mib", 1, 0),
    ("speed-up", "speedup", 1, 2),
]


def attention_spec(text):
    """method[:option=value...] -> (label, method, options)."""
    name, *rest = text.split(":")
    options = {}
    for item in rest:
        key, separator, value = item.partition("=")
        try:
            options[key] = float(value)
        except ValueError:
            separator = ""
        if not separator or not key:
            raise argparse.ArgumentTypeError(f"'{item}' in '{text}' is no option=value with a number")
    return text, name, options


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m minference.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _cli.add_model_arguments(parser)
    parser.add_argument(
        "--lengths",
        default="4k,8k",
        type=lambda text: [_cli.length(item) for item in text.split(",")],
        help="prompt lengths in tokens (default: 4k,8k)",
    )
    parser.add_argument(
        "--attn",
        default="sdpa,dense,auto",
        type=lambda text: [attention_spec(item) for item in text.split(",")],
        help="methods, and attention implementations of transformers (default: sdpa,dense,auto); the first "
        "is what speed-ups refer to",
    )
    parser.add_argument("--text", help="text of the prompts; without it random tokens")
    parser.add_argument("--patterns", help="pattern file for the methods that take one: path or model name")
    parser.add_argument(
        "--random-weights", action="store_true", help="read the config alone, draw the weights"
    )
    parser.add_argument(
        "--chunk", type=_cli.length, help="tokens of a prefill step (default: the whole prompt)"
    )
    parser.add_argument(
        "-n",
        "--new-tokens",
        type=_cli.number_between(int, 0, 10000),
        default=0,
        help="tokens to decode after each prefill, timed apart (default: 0)",
    )
    parser.add_argument("-r", "--repetitions", type=_cli.number_between(int, 1, 1000), default=5)
    parser.add_argument("--warmup", type=_cli.number_between(int, 0, 1000), default=1)
    parser.add_argument(
        "--slice-tokens", type=_cli.number_between(int, 0, 1 << 24), default=0, help="see hf.patch(); 0: off"
    )
    parser.add_argument(
        "--profile",
        type=_cli.number_between(int, 1, 1000),
        metavar="N",
        help="on a CUDA device: also profile one more prefill of each cell, and print its N longest operations",
    )
    parser.add_argument("--json", help="also write everything that was measured to this file")
    parser.add_argument("--plot", help="also draw the medians by length to this file (PNG, SVG, PDF)")
    return parser.parse_args(arguments)


class Subject:
    """A loaded model that runs prompts with one attention after another."""

    def __init__(self, options):
        import torch

        from .hf import loading

        if options.threads:
            torch.set_num_threads(options.threads)
        self.options = options
        self.torch = torch
        self.model = loading.load_model(
            options.model, options.dtype, options.device, options.random_weights
        )
        self._given = self.model.config._attn_implementation
        longest = max(options.lengths)
        limit = loading.context_of(self.model.config)
        if limit is not None and longest + options.new_tokens > limit:
            print(
                f"minference.bench: {longest} tokens and {options.new_tokens} new ones exceed the {limit} "
                "that the model was trained for: the times hold, its text does not",
                file=sys.stderr,
            )
        if options.text:
            self.tokens = loading.read_tokens(options.model, options.text)
        else:
            self.tokens = loading.random_tokens(self.model.config, longest)
        if self.tokens.shape[1] < longest:
            raise ValueError(
                f"{options.text} has {self.tokens.shape[1]} tokens; --lengths asks for {longest}"
            )
        self.tokens = self.tokens[:, :longest].to(options.device)
        self.cuda = self.tokens.is_cuda
        if options.profile and not self.cuda:
            raise ValueError(f"--profile works on a CUDA device; --device is {options.device}")

    def use(self, name, method_options, measure=False):
        """Makes the model compute attention by a method or by an implementation of transformers.

        measure: on a CUDA device, wait for each layer's attention to time it.
        """
        from transformers import AttentionInterface

        from . import find_method, hf

        hf.unpatch(self.model)
        if name in ("eager", *AttentionInterface().keys()) and name != hf.NAME:
            if method_options:
                raise ValueError(f"'{name}' takes no options")
            self.model.set_attn_implementation(name)
            return
        takes = find_method(name).takes_patterns
        hf.patch(
            self.model,
            name,
            options=method_options,
            patterns=self.options.patterns if takes else None,
            threads=self.options.threads,
            slice_tokens=self.options.slice_tokens,
            measure=measure,
        )

    def reset(self):
        from . import hf

        hf.unpatch(self.model)
        self.model.set_attn_implementation(self._given)

    def measure(self, length):
        """Figures of one prefill, and of the decoding after it."""
        from . import hf

        torch, options = self.torch, self.options
        if hf.is_patched(self.model):
            hf.reset_stats(self.model)
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.tokens.device)
        with torch.inference_mode():
            begin = self._now()
            token, cache = self._prefill(length)
            cell = {"seconds": self._now() - begin}
            if options.new_tokens:
                begin = self._now()
                for _ in range(options.new_tokens):
                    out = self.model(token, past_key_values=cache, logits_to_keep=1)
                    token = out.logits[:, -1:].argmax(-1)
                cell["decode_ms"] = (self._now() - begin) / options.new_tokens * 1e3
        if hf.is_patched(self.model):
            stats = hf.stats(self.model)
            cell["stats"] = stats
            if stats["kept_fraction"] is not None:
                cell["attention_seconds"] = stats["kernel_seconds"] + stats["index_seconds"]
                cell["index_seconds"] = stats["index_seconds"]
                cell["kept_fraction"] = stats["kept_fraction"]
        if self.cuda:
            cell["peak_mib"] = torch.cuda.max_memory_allocated(self.tokens.device) / 2**20
        return cell

    def profile(self, length):
        """The operations of one prefill, the longest first."""
        from . import _profile

        with self.torch.inference_mode():
            return _profile.operation_times(lambda: self._prefill(length), self.options.device)

    def _prefill(self, length):
        """The first token after a prompt and the prompt's cache."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        chunk = self.options.chunk or length
        for first in range(0, length, chunk):
            part = self.tokens[:, first : min(first + chunk, length)]
            out = self.model(part, past_key_values=cache, logits_to_keep=1)
        return out.logits[:, -1:].argmax(-1), cache

    def _now(self):
        if self.cuda:
            self.torch.cuda.synchronize(self.tokens.device)
        return time.perf_counter()


def percentile(values, share):
    """By linear interpolation between the closest ranks."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def summary(length, label, cells, measured=None):
    """One row of the table from the repetitions of a cell, and from one apart that measured its layers."""
    times = [cell["seconds"] for cell in cells]
    row = {"tokens": length, "attention": label, "seconds": times}
    for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9)):
        row[name] = percentile(times, share)
    row["tokens_per_second"] = length / row["p50"]
    for key in ("attention_seconds", "index_seconds", "kept_fraction", "decode_ms", "peak_mib"):
        values = [cell[key] for cell in cells if key in cell]
        if not values and measured is not None and key in measured:
            values = [measured[key]]
        if values:
            row[key] = max(values) if key == "peak_mib" else statistics.median(values)
    if "stats" in cells[-1]:
        row["fallbacks"] = cells[-1]["stats"]["fallbacks"]
    return row


def bench(subject, length):
    """The rows of one length. A method that fails has a row with its error."""
    options = subject.options
    cells = {label: [] for label, _, _ in options.attn}
    measured = {}  # on a CUDA device: the last warm-up, which waits for each layer's attention
    errors = {}
    for repetition in range(-options.warmup, options.repetitions):
        for label, name, method_options in options.attn:
            if label in errors:
                continue
            which = "warm-up" if repetition < 0 else f"{repetition + 1} of {options.repetitions}"
            _cli.progress(f"{length} tokens, {label}: {which}")
            try:
                subject.use(name, method_options, measure=subject.cuda and repetition < 0)
                cell = subject.measure(length)
            except (RuntimeError, NotImplementedError) as error:  # out of memory, not on this device
                errors[label] = str(error).splitlines()[0]
                continue
            if repetition >= 0:
                cells[label].append(cell)
            elif subject.cuda:
                measured[label] = cell
    rows = []
    for label, name, method_options in options.attn:
        if label in errors:
            rows.append({"tokens": length, "attention": label, "error": errors[label]})
            continue
        row = summary(length, label, cells[label], measured.get(label))
        if options.profile:
            _cli.progress(f"{length} tokens, {label}: profile")
            try:
                subject.use(name, method_options)
                row["operations"] = subject.profile(length)
            except RuntimeError as error:  # out of memory: the times above stand
                _cli.progress(f"{length} tokens, {label}: no profile: {str(error).splitlines()[0]}")
        if rows and "p50" in rows[0]:
            row["speedup"] = rows[0]["p50"] / row["p50"]
        rows.append(row)
    _cli.end_progress()
    return rows


def table(rows):
    columns = [c for c in _COLUMNS if any(c[1] in row for row in rows)]
    width = max(len("attention"), *(len(row["attention"]) for row in rows))
    lines = [f"{'tokens':>8}  {'attention':<{width}}" + "".join(f"  {c[0]:>11}" for c in columns)]
    for row in rows:
        line = f"{row['tokens']:>8}  {row['attention']:<{width}}"
        if "error" in row:
            lines.append(f"{line}  failed: {row['error']}")
            continue
        for _, key, factor, digits in columns:
            line += f"  {row[key] * factor:>11.{digits}f}" if key in row else f"  {'':>11}"
        lines.append(line)
    return "\n".join(lines)


def plot(path, rows, title):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for label in dict.fromkeys(row["attention"] for row in rows):
        good = [row for row in rows if row["attention"] == label and "p50" in row]
        axes.plot([r["tokens"] for r in good], [r["p50"] for r in good], marker="o", label=label)
    axes.set(xlabel="prompt tokens", ylabel="time to first token (s)", title=title)
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=150)


def device_name(device):
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def main(options):
    for path in (options.json, options.plot):
        if path:
            _cli.check_writable(path)
    if options.plot:
        import matplotlib  # noqa: F401  (missing: said before the work, not after)
    _cli.progress(f"loading {options.model}")
    subject = Subject(options)
    for _, name, method_options in options.attn:  # bad names are refused before anything is measured
        subject.use(name, method_options)
    rows = []
    for length in options.lengths:
        rows += bench(subject, length)
    subject.reset()

    import torch
    import transformers

    from . import __version__, isa_levels

    print(table(rows))
    if options.profile:
        from . import _profile

        for row in rows:
            if "operations" in row:
                print(f"\n{row['tokens']} tokens, {row['attention']}")
                print(_profile.table(row["operations"], options.profile))
    if options.json:
        report = {
            "model": options.model,
            "random_weights": options.random_weights,
            "dtype": options.dtype,
            "device": device_name(options.device),
            "isa_levels": isa_levels(),
            "threads": torch.get_num_threads(),
            "chunk": options.chunk,
            "warmup": options.warmup,
            "repetitions": options.repetitions,
            "versions": {
                "minference": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "rows": rows,
        }
        _cli.write_json(options.json, report)
    if options.plot:
        plot(options.plot, rows, f"{options.model.rpartition('/')[2]}, {options.dtype}")
    return _cli.FAILED if any("error" in row for row in rows) else _cli.OK


if __name__ == "__main__":
    sys.exit(_cli.run("minference.bench", main, parse(None)))
