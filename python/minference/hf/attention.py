"""The attention implementation "minference" of transformers: one function for every model.

A prefill goes to the method that the model's settings name, one sequence of a padded batch after the
other, without its padding. Decoding, a few rows at a time (assisted decoding), sliding windows and masks
that are not causal are computed exactly.
"""

from __future__ import annotations

import threading
import weakref

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

import minference

from minference._torch import packed_mask

from . import masks
from .settings import EXACT_ROWS, Layer, warn_once
from .spans import spans_of

_current = threading.local()  # .cache: weak reference to the cache that this thread's module was given


def set_current_cache(cache) -> None:
    """Says which cache the next attention call of this thread belongs to; None when it is not known."""
    _current.cache = None if cache is None else weakref.ref(cache)


def _take_current_cache():
    reference = getattr(_current, "cache", None)
    _current.cache = None
    return None if reference is None else reference()


def minference_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    is_causal=None,
    position_bias=None,
    cache=None,
    **kwargs,
):
    """query [batch, heads, q_tokens, head_dim], key and value [batch, kv_heads, kv_tokens, ...].

    Returns ([batch, q_tokens, heads, v_head_dim], None). Raises NotImplementedError for what no exact
    computation exists of here either: dropout, a bias of positions, paged caches, returned weights.
    """
    _refuse(dropout, position_bias, cache, kwargs.get("output_attentions", False))
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    layer = getattr(module, "minference_layer", None)
    handle = layer.handle if layer is not None else -1 - (getattr(module, "layer_idx", None) or 0)
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    soft_cap = float(softcap or 0.0)
    window = int(sliding_window or 0)
    if window == 0 and attention_mask is not None and attention_mask.dim() == 3:
        window = int(module.config.sliding_window)

    plain = soft_cap == 0.0 and s_aux is None
    compiling = torch.compiler.is_compiling()
    cache_of_call = None if compiling else _take_current_cache()
    if not is_causal and plain:
        return _explicit_sdpa(query, key, value, attention_mask, scale), None
    if query.shape[2] == 1 and plain and is_causal:
        if not compiling:
            Layer.of_handle(handle).totals.add_decode()
        return _decode(query, key, value, attention_mask, scale, window), None
    arguments = (query, key, value, attention_mask, s_aux, scale, soft_cap, window, is_causal, handle)
    if compiling:
        return torch.ops.minference.hf_attention(*arguments), None
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        return _ForwardOnly.apply(*arguments, cache_of_call), None
    return _attend(*arguments, cache_of_call), None


def _refuse(dropout, position_bias, cache, output_attentions):
    if dropout:
        raise NotImplementedError(
            f"attention dropout is {dropout}; minference computes inference only, legal: 0 (call "
            "model.eval())"
        )
    if position_bias is not None:
        raise NotImplementedError("this model adds a bias of positions to its scores; minference has none")
    if cache is not None:
        raise NotImplementedError(
            "continuous batching (a paged cache) does not run on minference; use generate(), or "
            "attn_implementation='sdpa'"
        )
    if output_attentions:
        raise NotImplementedError(
            "output_attentions=True: minference never forms the attention weights; use "
            "attn_implementation='eager'"
        )


class _ForwardOnly(torch.autograd.Function):
    """Attention inside a graph that autograd records: the result is right, a gradient is refused."""

    @staticmethod
    def forward(ctx, *arguments):
        return _attend(*arguments)

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(
            "minference has no backward pass; train with attn_implementation='sdpa' or "
            "minference.hf.unpatch(model)"
        )


def _attend(query, key, value, mask, sinks, scale, soft_cap, window, causal, handle, cache=None):
    """Everything that is not a plain decode step."""
    layer = Layer.of_handle(handle)
    query, key, value = query.detach(), key.detach(), value.detach()
    q_length = query.shape[2]
    if not causal:
        mask = _bidirectional(mask, query, key)
    elif mask is not None and mask.dim() == 4:
        mask = _codes_of(mask)
    settings = layer.settings
    call = dict(
        scale=scale,
        soft_cap=soft_cap,
        threads=settings.threads,
        layer=layer.index,
        measure=settings.measure,
    )
    if sinks is not None:
        call["sinks"] = _host_sinks(sinks)
    # [batch, tokens, heads, head_dim], views
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    if mask is not None and mask.dim() == 4:
        return _explicit(layer, q, k, v, mask, call, "mask that is not causal with padding")
    if mask is None:
        return _prefill(layer, q, k, v, slice(0, q.shape[0]), window, cache, call)
    codes = _host_codes(mask)
    spans = spans_of(codes, q_length)
    if window > 0 and not all(span.contiguous for span in spans):
        visible = masks.visible_mask(mask, q_length, window)
        return _explicit(layer, q, k, v, visible, call, "padding between tokens under a sliding window")
    out = q.new_zeros(q.shape[0], q_length, q.shape[2], v.shape[3])
    for span in spans:
        one = span.sequences
        rows, keys = _index(span.rows, q.device), _index(span.keys, q.device)
        out[one, rows] = _prefill(layer, q[one, rows], k[one, keys], v[one, keys], one, window, cache, call)
    return out


def _index(part, device):
    return part if isinstance(part, slice) else torch.as_tensor(part, device=device)


def _prefill(layer, q, k, v, sequences, window, cache, call):
    """Causal attention of sequences without padding, by the layer's method."""
    settings = layer.settings
    out = q.new_empty(*q.shape[:3], v.shape[3])
    cut = 0 < window < k.shape[1]
    exact = q.shape[1] <= EXACT_ROWS or cut
    call = dict(call, sliding_window=window if cut else 0)
    if settings.on_prefill is not None:
        for one in range(q.shape[0]):
            settings.on_prefill(layer.index, q[one : one + 1], k[one : one + 1], v[one : one + 1], call)
    if exact:
        call["method"] = "dense"
    else:
        call.update(
            method=settings.method,
            options=settings.options,
            patterns=settings.patterns,
            guard=settings.guard,
            state=layer.state(cache, sequences),
        )
    minference.attention(q, k, v, out=out, explanation=settings.explanation, **call)
    layer.totals.add_prefill(minference.last_stats())
    if cut and q.shape[1] > EXACT_ROWS and settings.method != "dense":
        layer.totals.add_fallback("sliding window, computed exactly")
    return out


def _explicit(layer, q, k, v, mask, call, reason):
    """Exact attention under an explicit mask, counted under the reason for it."""
    if q.shape[1] > 1:
        layer.totals.add_fallback(f"{reason}, computed exactly")
        warn_once(f"minference: {reason}, computed exactly; minference.hf.stats() counts the layers")
    out = q.new_empty(*q.shape[:3], v.shape[3])
    words = _mask_words(mask, k)
    if words is None:
        if call["soft_cap"] or "sinks" in call:
            raise NotImplementedError(
                "a mask that adds to the scores, or differs between heads, together with a soft cap or "
                "sinks; legal: a bool mask [batch, 1, q_tokens, kv_tokens]"
            )
        query, key, value = (t.transpose(1, 2) for t in (q, k, v))
        return _explicit_sdpa(query, key, value, mask, call["scale"])
    minference.attention(q, k, v, out=out, method="dense", mask=words, **call)
    layer.totals.add_prefill(minference.last_stats())
    return out


def _explicit_sdpa(query, key, value, mask, scale):
    """torch's attention under an explicit mask, or none: every row sees every key."""
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2).contiguous()


def _bidirectional(mask, query, key):
    if mask is not None:
        return mask
    return torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)


def _decode(query, key, value, mask, scale, window):
    """One row a sequence, by torch: the heads that share keys become the rows of one product.

    Several times faster than torch's own grouped-query attention, which copies the keys for each head.
    """
    batch, heads, _, dim = query.shape
    if mask is None:
        if window > 0:
            key, value = key[:, :, -window:], value[:, :, -window:]
    elif mask.dim() != 4:
        mask = _row_mask(mask, window)
    if mask is not None and mask.shape[1] != 1:
        return _explicit_sdpa(query, key, value, mask, scale)
    rows = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    return out.reshape(batch, 1, heads, value.shape[3])


# A mask is the same tensor in all layers of a forward: what it says is found out once.
_known_codes = WeakTensorKeyDictionary()
_known_host_codes = WeakTensorKeyDictionary()
_known_row_masks = WeakTensorKeyDictionary()
_known_words = WeakTensorKeyDictionary()
_known_sinks = WeakTensorKeyDictionary()  # to (version of the tensor, its values on the host)


def _row_mask(codes, window):
    """The explicit mask of one row a sequence."""
    if torch.compiler.is_compiling():
        return masks.visible_mask(codes, 1, window)
    by_window = _known_row_masks.setdefault(codes, {})
    if window not in by_window:
        by_window[window] = masks.visible_mask(codes, 1, window)
    return by_window[window]


def _codes_of(mask):
    """Key codes of an explicit mask that is causal with padding, or the mask itself."""
    if mask not in _known_codes:
        _known_codes[mask] = masks.recognise(mask)
    codes = _known_codes[mask]
    return mask if codes is None else codes


def _mask_words(mask, k):
    """An explicit mask [batch, 1, q_tokens, kv_tokens] as attention() takes it, packed where that is done on
    the device; None when it weighs keys, or differs between heads."""
    words = _known_words.get(mask)
    if words is None:
        visible = masks.as_bool(mask)
        if visible is None or visible.shape[1] != 1:
            return None
        words = packed_mask(visible[:, 0], k)
        if words.is_cuda:  # a view of the mask would keep it alive here
            _known_words[mask] = words
    return words


def _host_sinks(sinks):
    """The values of sinks, which are parameters: read from the device once, not in every call."""
    if sinks.is_inference():  # nobody would tell that it has changed
        return sinks.float().cpu()
    version, values = _known_sinks.get(sinks, (None, None))
    if version != sinks._version:
        values = sinks.detach().float().cpu()
        _known_sinks[sinks] = (sinks._version, values)
    return values


def _host_codes(codes):
    if codes not in _known_host_codes:
        _known_host_codes[codes] = codes.reshape(codes.shape[0], codes.shape[-1]).cpu().numpy()
    return _known_host_codes[codes]


# For torch.compile and torch.export: the same call as one opaque operation.
@torch.library.custom_op("minference::hf_attention", mutates_args=())
def _hf_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float,
    window: int,
    causal: bool,
    handle: int,
) -> torch.Tensor:
    return _attend(query, key, value, mask, sinks, scale, soft_cap, window, causal, handle)


@_hf_attention.register_fake
def _hf_attention_fake(query, key, value, mask, sinks, scale, soft_cap, window, causal, handle):
    batch, heads, q_length, _ = query.shape
    return query.new_empty(batch, q_length, heads, value.shape[3])
