"""attention(): exact or sparse causal attention over NumPy arrays, torch tensors and anything else
that DLPack can export."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from . import _arrays, _core

_NO_OPTIONS = {}
_NO_CONTEXT = contextlib.nullcontext()


def attention(
    q: Any,
    k: Any,
    v: Any,
    method: str = "auto",
    *,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    q_lens: Any = None,
    kv_lens: Any = None,
    block_table: Any = None,
    mask: Any = None,
    layer: int = 0,
    patterns: _core.PatternFile | None = None,
    options: dict[str, float | None] | None = None,
    state: _core.MethodState | None = None,
    guard: _core.Guard | str | None = None,
    rows_after: Any = None,
    segments: Sequence[Sequence[_core.Segment]] | None = None,
    explanation: _core.Explanation | None = None,
    precision: str = "auto",
    threads: int | None = None,
    stream: int | None = None,
    measure: bool = False,
    return_lse: bool = False,
    out: Any = None,
    **method_options: float | None,
) -> Any:
    """Softmax attention of q over k and v, exactly or over the keys that a method chooses.

    The causal alignment is bottom-right: query row i of a sequence stands at position
    kv_len - q_len + i and sees the keys at positions <= its own. A first prefill, a later chunk, a
    turn after prefix reuse and a decode step are the same call. Nothing is copied: q, k and v may be
    strided views, as long as the elements of a head lie together. The GIL is released meanwhile.

    Args:
        q: [batch, q_tokens, q_heads, head_dim], float32, float16 or bfloat16.
        k: [batch, kv_tokens, kv_heads, head_dim]; q_heads must be a multiple of kv_heads (grouped
            queries: k and v are not expanded). With a block table [pages, page_size, kv_heads,
            head_dim].
        v: as k; its last extent may differ.
        method: a name that methods() lists, or an alias. "dense" is exact.
        scale: factor on the scores; None means 1 / sqrt(head_dim).
        causal: False: rows also see the keys after their own position.
        sliding_window: w: a row sees no key that lies w or more positions behind its own.
        soft_cap: c: scores become c * tanh(score / c).
        sinks: [q_heads] logits that take part in the softmax without a value.
        q_lens, kv_lens: [batch] lengths of ragged sequences, lists or int32/int64 arrays. Rows at and
            beyond a sequence's q_len are 0 in a new output, and not written in a given one.
        block_table: [batch, pages_per_sequence], int32 or int64, for paged k and v; needs kv_lens.
        mask: [batch or 1, q_tokens, kv_tokens], bool, true where the row sees the key. It replaces
            the causal rule. Or packed, int64 or uint64 [batch or 1, q_tokens, (kv_tokens + 63) // 64]:
            bit j % 64 of word j // 64 for key j.
        layer: layer number, for methods and pattern files with rules of a layer.
        patterns: PatternFile with the pattern of every head, for methods that take one.
        options: dict of the method's options; they may be given as keywords too (methods() shows
            names, defaults and ranges). None is the default.
        state: MethodState that was given with the earlier chunks of the same sequences and layer.
        guard: "off", "report", "enforce" or a Guard: measures what a sparse call keeps.
        rows_after: [batch] rows of the same prompt that later calls bring, where that is known.
        segments: a list of Segment for each sequence: the modalities of the prompt.
        explanation: Explanation that is shown what the call keeps, on the CPU; batch 1.
        precision: "auto" (bfloat16 products where a tensor has 16 bits), "f32" (CUDA: of float32 tensors
            only) or "bf16".
        threads: None: of torch tensors torch.get_num_threads(), otherwise OpenMP's default.
        stream: tensors on a CUDA device: the cudaStream_t to work in, as a number; None: the
            current stream of torch or CuPy, otherwise the device's default stream. The call returns
            at once.
        measure: tensors on a CUDA device: wait for the work, so that last_stats() has pairs and
            seconds.
        return_lse: also return the natural-log sum of exponentials, [batch, q_tokens, q_heads],
            float32.
        out: tensor [batch, q_tokens, q_heads, v_head_dim] to write to, of any dtype above.

    Returns:
        A tensor of q's kind and dtype (or out), [batch, q_tokens, q_heads, v_head_dim]; with
        return_lse a pair. Rows that see no key are 0. last_stats() tells what the call did.

    Raises:
        ValueError: an argument is illegal; the message names the value and the legal range.
        NotImplementedError: legal, but not on this device.

    Source: MInference (arXiv 2407.02490); docs/methods.md has the source of every method.
    """
    if method_options:
        options = {**options, **method_options} if options else method_options
    elif options is None:
        options = _NO_OPTIONS
    if scale is None:
        scale = 0.0
    elif scale == 0:
        raise ValueError("scale is 0; legal: any other finite number, None for 1 / sqrt(head_dim)")

    if segments is not None:
        for b, of_sequence in enumerate(segments):
            for i, segment in enumerate(of_sequence):
                if not isinstance(segment, _core.Segment):
                    raise ValueError(f"segments[{b}][{i}] is {segment!r}; legal: a minference.Segment")

    backend = backend_of(q)
    if segments is None and state is None and explanation is None and backend.is_traced(q):
        results = backend.traced_attention(
            q, k, v, method, options, scale, causal, sliding_window or 0, soft_cap or 0.0, sinks,
            q_lens, kv_lens, block_table, mask, layer, patterns, guard, rows_after, precision,
            threads, return_lse,
        )  # fmt: skip
        return results if out is None else backend.copy_to(out, results)

    if guard is not None and type(guard) is not _core.Guard:
        guard = _core.Guard(guard)
    with _NO_CONTEXT if stream is None else backend.on_stream(q, stream):
        given, sinks, target, lse = backend.begin(q, k, v, sinks, out, q_lens, return_lse)
        if mask is not None:
            mask = backend.packed_mask(mask, k, block_table)
        _core.attend_method(
            *given, method, options, q_lens, kv_lens, block_table, sinks, mask, scale,
            causal, sliding_window or 0, soft_cap or 0.0, precision, backend.threads(threads),
            backend.current_stream(q) if stream is None else stream, measure, layer,
            patterns, state, guard, rows_after, segments, explanation,
        )  # fmt: skip
    return backend.end(q, target, lse, out is None)


def backend_of(q):
    """The module that knows tensors of q's kind; torch is not imported for others."""
    kind = type(q)
    backend = _backends.get(kind)
    if backend is None:
        backend = _arrays
        if kind.__module__ != "numpy" and "torch" in sys.modules:
            from . import _torch

            if isinstance(q, _torch.Tensor):
                backend = _torch
        _backends[kind] = backend
    return backend


_backends = {}  # class of tensors -> module
