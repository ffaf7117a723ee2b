"""The reference system's three attention functions, by its names and with its layout [batch, heads,
tokens, head_dim]."""

from __future__ import annotations

from typing import Any

from . import _core
from ._attention import attention, backend_of

_BLOCK = 64


def vertical_slash_sparse_attention(
    query: Any,
    key: Any,
    value: Any,
    v_idx: Any,
    s_idx: Any,
    block_size_M: int = 64,
    block_size_N: int = 64,
) -> Any:
    """Causal attention over given columns and diagonals of every head.

    Args:
        query: [batch, heads, tokens, head_dim], float32, float16 or bfloat16.
        key, value: [batch, kv_heads, tokens, head_dim]; heads a multiple of kv_heads.
        v_idx: integers, [batch, heads, n] in any shape of as many elements: key positions that every row
            sees.
        s_idx: [batch, heads, m] likewise: distances of a key behind the query, 0 for the query's own.
            They are rounded up to whole tiles, as the reference system does.
        block_size_M, block_size_N: 64.

    Returns a tensor like query. Unlike the reference system any batch size and head_dim up to 256 is
    right, and float32 is computed as such. Raises ValueError for an index outside the prompt.
    Source: MInference (arXiv 2407.02490) §3.2.
    """
    _check_blocks(block_size_M, block_size_N)
    batch, heads = query.shape[:2]
    index = _core.SparseIndex.vertical_slash(
        batch, heads, _lists("v_idx", v_idx, batch, heads), _lists("s_idx", s_idx, batch, heads)
    )
    backend = backend_of(query)
    q, k, v = (tensor.swapaxes(1, 2) for tensor in (query, key, value))
    out = backend.heads_first_output(query, value)
    given, _, _, _ = backend.begin(q, k, v, None, out.swapaxes(1, 2), None, False)
    _core.attend_index(
        *given, index, None, None, None, None, None, 0.0, True, 0, 0.0, "auto",
        backend.threads(None), backend.current_stream(q), False,
    )  # fmt: skip
    return out


def block_sparse_attention(
    query: Any,
    key: Any,
    value: Any,
    top_k: int,
    block_size_M: int = 64,
    block_size_N: int = 64,
) -> Any:
    """Causal attention over the top_k blocks of 64 keys whose mean matches that of 64 rows best.

    query, key, value: as in vertical_slash_sparse_attention(). top_k: blocks kept per row block, 1 or
    more; unlike the reference system the diagonal block and the first are always among them. Returns a
    tensor like query. Raises ValueError for a top_k outside its range.
    Source: MInference (arXiv 2407.02490) §3.2.
    """
    _check_blocks(block_size_M, block_size_N)
    return _heads_first(query, key, value, "block_sparse", top_k=top_k)


def streaming_forward(q: Any, k: Any, v: Any, n_init: int, n_local: int) -> Any:
    """Causal attention over the first n_init keys and the nearest n_local ones, the row's own included.

    q, k, v: as in vertical_slash_sparse_attention(). Returns a tensor like q. Raises ValueError for a
    number outside its range. Source: StreamingLLM (arXiv 2309.17453).
    """
    return _heads_first(q, k, v, "a_shape", n_init=n_init, n_local=n_local)


def _heads_first(query, key, value, method, **options):
    out = backend_of(query).heads_first_output(query, value)
    q, k, v = (tensor.swapaxes(1, 2) for tensor in (query, key, value))
    attention(q, k, v, method, out=out.swapaxes(1, 2), **options)
    return out


def _check_blocks(block_size_m, block_size_n):
    for name, value in (("block_size_M", block_size_m), ("block_size_N", block_size_n)):
        if value != _BLOCK:
            raise ValueError(f"{name} is {value}; legal: {_BLOCK}")


def _lists(name, indices, batch, heads):
    """One list of indices a sequence and head, from an array or a tensor."""
    size = 1
    for extent in indices.shape:
        size *= extent
    if batch * heads == 0 or size % (batch * heads) != 0:
        raise ValueError(
            f"{name} has shape {tuple(indices.shape)}; legal: as many numbers for each of {batch} x {heads} "
            "(batch, head)"
        )
    return indices.reshape(batch * heads, -1).tolist()
