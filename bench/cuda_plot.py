#!/usr/bin/env python3
"""Draws the time of one attention layer over the prompt's length, from figures of cuda_bench and
bench/peers/cuda_sdpa.py.

Examples:
  bench/cuda_plot.py ours.json cudnn.json -o cuda.png
  bench/cuda_plot.py ours.json -o cuda.png --add 'reference kernels:32768=76.1,131072=182'
"""

import argparse
import itertools
import json
import sys

# How the names of the two programs read in the picture, and their colours.
LABELS = {
    "dense": ("minference, dense", "tab:blue"),
    "head_mix": ("minference, mix of per-head budgets", "tab:red"),
    "cudnn": ("cuDNN through PyTorch, dense", "tab:gray"),
    "flash": ("FlashAttention 2 through PyTorch, dense", "tab:brown"),
}
OTHER_COLOURS = ["tab:green", "tab:purple", "tab:orange", "tab:olive", "tab:cyan", "tab:pink"]


def read_file(path):
    """The device and {name: {tokens: milliseconds}} of a file."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        series = {}
        for row in content["results"]:
            name = row["method"] if "method" in row else row["backend"]
            series.setdefault(name, {})[int(row["tokens"])] = float(row["total_ms"])
        return content["device"], series
    except OSError as error:
        raise SystemExit(f"cuda_plot.py: error: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise SystemExit(
            f"cuda_plot.py: error: {path} was not written by cuda_bench or cuda_sdpa.py ({error!r})"
        ) from error


def parse_series(text):
    """NAME:TOKENS=MS,... as (name, {tokens: milliseconds})."""
    try:
        name, points = text.rsplit(":", 1)
        pairs = [point.split("=") for point in points.split(",")]
        return name, {int(tokens): float(milliseconds) for tokens, milliseconds in pairs}
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"'{text}' is no series; expected NAME:TOKENS=MS,TOKENS=MS"
        ) from error


def tokens_text(tokens):
    if tokens % 2**20 == 0:
        return f"{tokens // 2**20}M"
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def draw(device, series, output):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    lengths = sorted({t for points in series.values() for t in points})
    others = itertools.cycle(OTHER_COLOURS)
    for name, points in series.items():
        label, colour = LABELS.get(name) or (name, next(others))
        tokens = sorted(points)
        times = [points[t] for t in tokens]
        # Peers dashed: dense attention of two programs may be one line.
        style = "--" if name in ("cudnn", "flash") else "-"
        axes.plot(tokens, times, style, marker="o", label=label, color=colour)
        if tokens[-1] == lengths[-1]:
            text = f"{times[-1]:,.0f} ms" if times[-1] >= 10 else f"{times[-1]:.1f} ms"
            axes.annotate(text, (tokens[-1], times[-1]), textcoords="offset points",
                          xytext=(7, -4), color=colour, fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda t, _: tokens_text(round(t))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda t, _: f"{t:,g}"))
    axes.set_xlim(lengths[0] / 1.2, lengths[-1] * 2)  # room for the last figures
    axes.set_xlabel("tokens")
    axes.set_ylabel("ms a layer, index included")
    axes.set_title(f"One causal layer on {device}")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(output, dpi=110)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSON of cuda_bench or cuda_sdpa.py")
    parser.add_argument("-o", "--output", required=True, help="picture to write (.png, .svg, .pdf)")
    parser.add_argument("--add", type=parse_series, action="append", default=[], metavar="SERIES",
                        help="figures from elsewhere: NAME:TOKENS=MS,TOKENS=MS; may be repeated")
    args = parser.parse_args()
    devices = []
    series = {}
    for path in args.files:
        device, found = read_file(path)
        devices.append(device)
        for name, points in found.items():
            series.setdefault(name, {}).update(points)
    if len(set(devices)) > 1:
        raise SystemExit(f"cuda_plot.py: error: files of different devices: {sorted(set(devices))}")
    for name, points in args.add:
        series.setdefault(name, {}).update(points)
    draw(devices[0], series, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
