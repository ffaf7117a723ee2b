#!/usr/bin/env python3
"""What a call from Python costs beyond the kernel, and what importing the package costs.

  build/python/venv/bin/python bench/python_overhead.py
  build/python/venv/bin/python bench/python_overhead.py --calls 20000 --json overhead.json

The overhead of a call is its time on the clock less the time that the library reports for index and
kernel, so that it includes checks, DLPack, the result's memory and the library's own dispatch.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

TOKENS = 16


def overhead(call, last_stats, calls):
    """Microseconds of each call beyond index and kernel."""
    times = []
    for i in range(calls + calls // 10):
        begin = time.perf_counter()
        call()
        elapsed = time.perf_counter() - begin
        stats = last_stats()
        if i >= calls // 10:  # the first ones warm up
            times.append(1e6 * (elapsed - stats.index_seconds - stats.kernel_seconds))
    return times


def import_seconds(repeats=9):
    """Seconds of `import minference` in fresh interpreters, their own start left out."""
    program = "import time; t = time.perf_counter(); import minference; print(time.perf_counter() - t)"
    run = [sys.executable, "-c", program]
    return [float(subprocess.run(run, check=True, capture_output=True).stdout) for _ in range(repeats)]


def percentiles(values):
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return {"median": statistics.median(values), "p5": cuts[0], "p95": cuts[-1]}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=5000, help="calls measured of each kind (default: 5000)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    arguments = parser.parse_args()
    if arguments.calls < 100:
        parser.error(f"--calls is {arguments.calls}; legal: 100 or more")

    import minference
    import torch

    q = torch.randn(1, TOKENS, 4, 64)
    k = torch.randn(1, TOKENS, 2, 64)
    out = torch.empty_like(q)
    nq, nk = q.numpy(), k.numpy()
    bq, bk = q.bfloat16(), k.bfloat16()
    transposed = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k)]
    attend = minference.attention
    kinds = {
        "torch float32": lambda: attend(q, k, k, "dense", threads=1),
        "torch bfloat16": lambda: attend(bq, bk, bk, "dense", threads=1),
        "torch, strided": lambda: attend(transposed[0], transposed[1], transposed[1], "dense", threads=1),
        "torch, out=": lambda: attend(q, k, k, "dense", threads=1, out=out),
        "torch, auto": lambda: attend(q, k, k, threads=1),
        "torch, with options": lambda: attend(q, k, k, "a_shape", n_init=4, n_local=64, threads=1),
        "NumPy float32": lambda: attend(nq, nk, nk, "dense", threads=1),
        "NumPy, return_lse": lambda: attend(nq, nk, nk, "dense", threads=1, return_lse=True),
    }
    figures = {"calls": arguments.calls, "overhead_us": {}}
    print(f"{'overhead of a call':<24}{'median':>10}{'p5':>10}{'p95':>10}  us")
    for name, call in kinds.items():
        row = percentiles(overhead(call, minference.last_stats, arguments.calls))
        figures["overhead_us"][name] = row
        print(f"{name:<24}{row['median']:>10.1f}{row['p5']:>10.1f}{row['p95']:>10.1f}")
    figures["import_seconds"] = percentiles(import_seconds())
    row = figures["import_seconds"]
    print(
        f"{'import minference':<24}{1e3 * row['median']:>10.1f}{1e3 * row['p5']:>10.1f}{1e3 * row['p95']:>10.1f}  ms"
    )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
