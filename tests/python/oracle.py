"""Attention in fp64 over an explicit mask: the judge of every test here."""

import numpy as np


def visible(q_tokens, kv_tokens, *, causal=True, sliding_window=None):
    """[q_tokens, kv_tokens] of bool: bottom-right aligned."""
    position = np.arange(q_tokens)[:, None] + kv_tokens - q_tokens
    key = np.arange(kv_tokens)[None, :]
    seen = key <= position if causal else np.ones((q_tokens, kv_tokens), bool)
    return seen & (position - key < sliding_window) if sliding_window else seen


def attend(q, k, v, seen, *, scale=None, soft_cap=None, sinks=None):
    """q [tokens, heads, dim], k and v [keys, kv_heads, ...] of one sequence; seen [tokens, keys] or
    [heads, tokens, keys]. Returns (out, lse)."""
    q, k, v = (np.asarray(t, np.float64) for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("thd,khd->htk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    scores = np.where(seen, scores, -np.inf)
    extra = np.full((q.shape[1], 1, 1), -np.inf) if sinks is None else np.asarray(sinks)[:, None, None]
    top = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), extra)
    top = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True) + np.exp(extra - top)
    with np.errstate(divide="ignore", invalid="ignore"):
        probabilities = np.where(total > 0, weights / total, 0.0)
        lse = (np.log(total) + top)[..., 0]
    return np.einsum("htk,khd->thd", probabilities, v), lse.T
