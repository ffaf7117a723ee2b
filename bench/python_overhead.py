#!/usr/bin/env python3
"""What a call from Python costs beyond the kernel, and what importing the package costs.

  build/python/venv/bin/python bench/python_overhead.py
  build/python/venv/bin/python bench/python_overhead.py --calls 20000 --json overhead.json
  build/python/venv/bin/python bench/python_overhead.py --device cuda --driver-calls

The overhead of a call is its time on the clock less the time that the library reports for index and
kernel, so that it includes checks, DLPack, the result's memory and the library's own dispatch. On a CUDA
device it is the time until an asynchronous call returns; torch's SDPA stands beside it.
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


def launch_times(call, calls):
    """Microseconds until each asynchronous call returns; the device is idle before every tenth."""
    import torch

    times = []
    for i in range(calls + calls // 10):
        if i % 10 == 0:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if i >= calls // 10:
            times.append(1e6 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    return times


def driver_calls(call, calls=50):
    """[(name, times a call, microseconds each)] of the CUDA runtime's functions, as the profiler sees them."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    rows = [row for row in recorded.key_averages() if row.key.startswith("cu")]
    rows.sort(key=lambda row: -row.self_cpu_time_total)
    return [(row.key, row.count / calls, row.self_cpu_time_total / row.count) for row in rows]


def cuda_kinds():
    """Calls over tensors on the device, small enough that its work is shorter than the launch."""
    import minference
    import torch

    def tensors(tokens, heads, batch=1):
        return torch.randn(batch, tokens, heads, 128, device="cuda", dtype=torch.bfloat16)

    q, k = tensors(64, 8), tensors(64, 2)
    long_q, long_k = tensors(4096, 8), tensors(4096, 2)
    two_q, two_k = tensors(64, 8, 2), tensors(64, 2, 2)
    out = torch.empty_like(q)
    attend = minference.attention
    first = [t.transpose(1, 2) for t in (q, k)]
    patterns = minference.PatternFile(1)
    for head in range(8):
        patterns.set(0, head, "vertical_and_slash", 100, 400)
    return {
        "dense": lambda: attend(q, k, k, "dense"),
        "dense, out=": lambda: attend(q, k, k, "dense", out=out),
        "dense, ragged": lambda: attend(two_q, two_k, two_k, "dense", q_lens=[64, 9], kv_lens=[64, 40]),
        "a_shape": lambda: attend(q, k, k, "a_shape", n_init=4, n_local=16),
        "vertical_slash 4k": lambda: attend(long_q, long_k, long_k, "vertical_slash"),
        "minference 4k": lambda: attend(long_q, long_k, long_k, "minference", patterns=patterns),
        "block_sparse 4k": lambda: attend(long_q, long_k, long_k, "block_sparse"),
        "auto 4k": lambda: attend(long_q, long_k, long_k),
        "torch's SDPA": lambda: torch.nn.functional.scaled_dot_product_attention(
            first[0], first[1], first[1], is_causal=True, enable_gqa=True
        ),
    }


def cuda_main(arguments):
    figures = {"calls": arguments.calls, "launch_us": {}, "driver_calls": {}}
    print(f"{'until a call returns':<24}{'median':>10}{'p5':>10}{'p95':>10}  us")
    kinds = cuda_kinds()
    for name, call in kinds.items():
        row = percentiles(launch_times(call, arguments.calls))
        figures["launch_us"][name] = row
        print(f"{name:<24}{row['median']:>10.1f}{row['p5']:>10.1f}{row['p95']:>10.1f}", flush=True)
    if arguments.driver_calls:
        for name, call in kinds.items():
            figures["driver_calls"][name] = driver_calls(call)
            print(f"\n{name}: CUDA runtime calls, times a call, us each under the profiler")
            for function, times, each in figures["driver_calls"][name]:
                print(f"  {function:<48}{times:>6.1f}{each:>8.2f}")
    write(arguments.json, figures)


def write(path, figures):
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)


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
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu")
    parser.add_argument(
        "--driver-calls", action="store_true", help="cuda: also list the runtime's functions that a call uses"
    )
    arguments = parser.parse_args()
    if arguments.calls < 100:
        parser.error(f"--calls is {arguments.calls}; legal: 100 or more")

    if arguments.device == "cuda":
        return cuda_main(arguments)

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
    write(arguments.json, figures)


if __name__ == "__main__":
    main()
