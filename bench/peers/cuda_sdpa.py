"""Times PyTorch's attention on a CUDA device: scaled_dot_product_attention, backend by backend, and
FlexAttention, compiled.

One causal sequence of bf16, random inputs of order 1; the median of several runs after a warm-up. The
figures stand beside those of cuda_bench in docs/performance.md.
"""

import argparse
import json
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
BACKENDS = [*SDPA, "flex"]


def causal(batch, head, query, key):
    return query >= key


def flex(tokens):
    """FlexAttention with a causal block mask, as a function of q, k and v."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = torch.compile(create_block_mask)(causal, None, None, tokens, tokens, device="cuda")
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def attention(backend, tokens):
    if backend == "flex":
        return flex(tokens)

    def sdpa(q, k, v):
        with sdpa_kernel(SDPA[backend]):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )

    return sdpa


def measure(backend, tokens, heads, kv_heads, head_dim, repetitions):
    shape = lambda n: (1, n, tokens, head_dim)
    q = torch.randn(shape(heads), device="cuda", dtype=torch.bfloat16)
    k = torch.randn(shape(kv_heads), device="cuda", dtype=torch.bfloat16)
    v = torch.randn(shape(kv_heads), device="cuda", dtype=torch.bfloat16)
    times = []
    attend = attention(backend, tokens)
    with torch.no_grad():
        for i in range(repetitions + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            attend(q, k, v)
            end.record()
            end.synchronize()
            if i > 0:
                times.append(begin.elapsed_time(end))
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-p", "--tokens", type=lambda s: [int(t) for t in s.split(",")],
                        default=[8192, 32768, 131072], help="prompt lengths, separated by commas")
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    rows = []
    for tokens in args.tokens:
        for backend in args.backend:
            times = measure(backend, tokens, args.heads, args.kv_heads, args.head_dim,
                            args.repetitions)
            median = statistics.median(times)
            flops = 2.0 * args.heads * args.head_dim * tokens * (tokens + 1)
            rows.append({"backend": backend, "tokens": tokens, "total_ms": median,
                         "total_min_ms": min(times), "total_max_ms": max(times),
                         "total_tflops": flops / median * 1e-9})
            print(f"{backend:8s} {tokens:9d} {median:10.3f} ms ({min(times):.3f} .. {max(times):.3f})"
                  f" {rows[-1]['total_tflops']:6.0f} TFLOP/s", flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                       "results": rows}, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
