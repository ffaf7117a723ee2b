#!/usr/bin/env python3
"""Causal scaled_dot_product_attention of PyTorch on the CPU: seconds, GFLOP/s of the causal half.

  python3 bench/peers/torch_sdpa.py --tokens 8192 --head-dim 64,128 --heads 8 --kv-heads 2 \\
      --threads 2

Install: pip install torch==2.13.0 (any torch 2.5 or later has the call used here).

GFLOP/s = 4 * head_dim * heads * tokens * (tokens + 1) / 2 / seconds: the two products of the scores
that a causal mask keeps, and nothing else, whatever the kernel computes beyond them.

Traps:
- K and V keep their own heads (enable_gqa=True), as in attention_bench; --expand-kv repeats them to
  --heads before the clock starts, for a torch whose grouped path falls back to the mathematical one
  (seen as a fraction of the speed, and as tokens^2 of memory).
- The bf16 kernel uses AMX or AVX512_BF16 through oneDNN where the processor has them; f32 never
  does.
- The first call of a shape builds its kernels: it is not timed.
Exit codes: 0 done, 3 PyTorch is not installed, 2 anything else, with one line on stderr.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time

PEER = "torch_sdpa"


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number")
    return number


def positives(text):
    return [positive(item) for item in text.split(",")]


def measure(arguments, tokens, head_dim):
    import torch
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[arguments.dtype]
    generator = torch.Generator().manual_seed(1)

    def values(heads):
        return torch.randn(1, heads, tokens, head_dim, generator=generator).to(dtype)

    q, k, v = values(arguments.heads), values(arguments.kv_heads), values(arguments.kv_heads)
    group = arguments.heads // arguments.kv_heads
    grouped = group > 1 and not arguments.expand_kv
    if group > 1 and not grouped:
        k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))

    def attend():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True,
                                                                enable_gqa=grouped)

    seconds = []
    with torch.inference_mode():
        attend()
        for _ in range(arguments.repetitions):
            start = time.perf_counter()
            attend()
            seconds.append(time.perf_counter() - start)
    work = 4 * head_dim * arguments.heads * tokens * (tokens + 1) / 2
    return {
        "tokens": tokens,
        "head_dim": head_dim,
        "kernel": f"torch sdpa {arguments.dtype}",
        "min_seconds": round(min(seconds), 6),
        "median_seconds": round(statistics.median(seconds), 6),
        "gflops": round(work / min(seconds) / 1e9, 1),
        "heads": arguments.heads,
        "kv_heads": arguments.kv_heads,
        "threads": arguments.threads,
        "kv": "grouped" if grouped else "expanded" if group > 1 else "own",
        "version": torch.__version__
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=positives, default=[8192],
                        help="lengths, for example 4096,8192")
    parser.add_argument("--head-dim", type=positives, default=[64, 128])
    parser.add_argument("--heads", type=positive, default=8)
    parser.add_argument("--kv-heads", type=positive, default=2)
    parser.add_argument("--threads", type=positive, default=os.cpu_count())
    parser.add_argument("--dtype", choices=["bf16", "f16", "f32"], default="bf16")
    parser.add_argument("-r", "--repetitions", type=positive, default=5)
    parser.add_argument("--expand-kv", action="store_true",
                        help="repeat K and V to --heads, untimed")
    parser.add_argument("--json", action="store_true", help="print JSON rows instead of the table")
    arguments = parser.parse_args()

    if importlib.util.find_spec("torch") is None:
        print(f"{PEER}.py: error: PyTorch is not installed; --help says how", file=sys.stderr)
        return 3
    try:
        if arguments.heads % arguments.kv_heads != 0:
            raise ValueError(
                f"{arguments.heads} heads are no multiple of {arguments.kv_heads} K/V heads")
        import torch
        torch.set_num_threads(arguments.threads)
        if not arguments.json:
            print(f"{'tokens':>7} {'head_dim':>8} {'kernel':<16} {'K/V':<8} {'min s':>9} "
                  f"{'median s':>9} {'GFLOP/s':>8}")
        rows = []
        for tokens in arguments.tokens:
            for head_dim in arguments.head_dim:
                row = measure(arguments, tokens, head_dim)
                rows.append(row)
                if not arguments.json:
                    print(f"{row['tokens']:>7} {row['head_dim']:>8} {row['kernel']:<16} "
                          f"{row['kv']:<8} {row['min_seconds']:>9.4f} "
                          f"{row['median_seconds']:>9.4f} {row['gflops']:>8.1f}", flush=True)
        if arguments.json:
            print(json.dumps(rows))
    except Exception as error:  # whatever the peer raises ends as one line
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"{PEER}.py: error: {reason[:300]}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
