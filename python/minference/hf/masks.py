"""Masks: what transformers says about visibility, in a form that is small and tells padding from time.

transformers asks the mask function of an attention implementation once a forward, and hands its answer
to every layer. Ours answers

* None: causal, no padding, and the keys end with the query rows;
* key codes, uint8 [batch, kv_tokens], of causal attention with padding or with a static cache: what each
  key is (PADDING, TOKEN or BEYOND). [batch, 1, kv_tokens] when the layer's sliding window cuts as well;
* bool [batch, 1, q_tokens, kv_tokens] for everything else (packed sequences, images, encoders).
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from transformers import masking_utils

# generate() gives a static cache's codes to the model as its attention mask, which comes here once more: as
# a padding mask, where 0 is padding.
PADDING = 0
TOKEN = 1
BEYOND = 2  # a place of a static cache behind the last query row


@functools.cache
def _codes_of_masks():
    """The compiled bodies of transformers' mask functions: what tells them apart."""
    return (
        masking_utils.and_masks(masking_utils.causal_mask_function).__code__,
        masking_utils.sliding_window_overlay(1).__code__,
    )


def causal_window(mask_function, local_size, config=None, plain=False) -> int | None:
    """The window of a causal mask function, 0 for none; None when it is anything else."""
    if mask_function is masking_utils.causal_mask_function:
        return 0
    if local_size is None:
        return None
    if torch.compiler.is_compiling():  # which cannot look into functions; plain: no other rule was joined
        is_window = plain and local_size == getattr(config, "sliding_window", None)
        return local_size if is_window and getattr(config, "attention_chunk_size", None) is None else None
    both, window = _codes_of_masks()
    if getattr(mask_function, "__code__", None) is not both:
        return None
    parts = mask_function.__closure__[0].cell_contents
    if len(parts) != 2 or parts[1] is not masking_utils.causal_mask_function:
        return None
    if getattr(parts[0], "__code__", None) is not window:
        return None
    return int(parts[0].__closure__[0].cell_contents)


def minference_mask(
    batch_size,
    q_length=None,
    kv_length=0,
    q_offset=0,
    kv_offset=0,
    mask_function=masking_utils.causal_mask_function,
    attention_mask=None,
    local_size=None,
    device=None,
    cache_position=None,
    **kwargs,
):
    """The mask function of the attention implementation "minference" (see this file's head)."""
    if cache_position is not None:  # transformers 4: the queries' positions, not a number and an offset
        queries = {"cache_position": cache_position}
        q_length, q_offset = cache_position.shape[0], cache_position[0]
        device = cache_position.device
    else:
        queries = {"q_length": q_length, "q_offset": q_offset}
    plain = kwargs.get("allow_is_causal_skip", False) and not kwargs.get("use_vmap", False)
    window = causal_window(mask_function, local_size, kwargs.get("config"), plain)
    if window is None:
        return masking_utils.sdpa_mask(
            batch_size=batch_size,
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            device=device,
            **queries,
            **kwargs,
        )

    if attention_mask is not None:
        is_token = attention_mask.reshape(attention_mask.shape[0], -1) != 0
        is_token = F.pad(is_token, (0, max(kv_offset + kv_length - is_token.shape[1], 0)))
        is_token = is_token[:, kv_offset : kv_offset + kv_length]
    else:
        is_token = None
    end = q_offset + q_length - kv_offset
    cuts = 0 < window < kv_length
    if not torch.compiler.is_compiling():
        end = int(end)
        if end == kv_length and not cuts and (is_token is None or bool(is_token.all())):
            return None
    if device is None:
        device = "cpu" if is_token is None else is_token.device
    codes = key_codes(batch_size, kv_length, end, is_token, device)
    return codes[:, None] if cuts else codes


def key_codes(batch_size, kv_length, end, is_token, device):
    """uint8 [batch_size, kv_length]: keys from `end` on are BEYOND, others TOKEN, or PADDING where `is_token`
    is false."""
    written = torch.arange(kv_length, device=device) < end
    if is_token is None:
        is_token = written.expand(batch_size, kv_length)
    return torch.where(written, is_token.to(device=device, dtype=torch.uint8), BEYOND)


def recognise(mask: torch.Tensor) -> torch.Tensor | None:
    """The key codes that say the same as `mask`, bool or additive [batch, 1, q_tokens, kv_tokens].

    None when there are none, that is when the mask is not causal attention with padding. What it says of
    query rows that are padding themselves does not matter: nobody reads them.
    """
    if mask.dim() != 4 or mask.shape[1] != 1:
        return None
    q_length, kv_length = mask.shape[2:]
    if q_length > kv_length:
        return None
    visible = as_bool(mask[:, 0])
    if visible is None:
        return None
    keys = torch.arange(kv_length, device=mask.device)
    rows = torch.arange(q_length, device=mask.device)
    # Position of row 0: the last key that some row sees, seen from that row.
    last = torch.where(visible.any(-1), kv_length - 1 - visible.flip(-1).int().argmax(-1), -1)
    offset = int((last - rows).max())
    if not 0 <= offset <= kv_length - q_length:
        return None
    is_token = visible.any(1)
    for begin in range(0, q_length, 1024):
        block = rows[begin : begin + 1024]
        expected = is_token[:, None, :] & (keys <= (block + offset)[:, None])
        wrong = (visible[:, begin : begin + 1024] != expected).any(-1)
        if bool((wrong & is_token[:, block + offset]).any()):
            return None
    return key_codes(mask.shape[0], kv_length, offset + q_length, is_token, mask.device)


def as_bool(mask):
    """`mask` as bool, or None when it weighs keys instead of hiding them."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    visible = mask == 0
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return visible if bool((visible | hidden).all()) else None


def visible_mask(codes, q_length, window):
    """bool [batch, 1, q_length, kv_tokens] of key codes, for functions that take explicit masks."""
    codes = codes.reshape(codes.shape[0], codes.shape[-1])
    end = (codes != BEYOND).sum(-1)
    keys = torch.arange(codes.shape[-1], device=codes.device)
    rows = torch.arange(q_length, device=codes.device) - q_length + end[:, None]
    mask = (codes == TOKEN)[:, None, :] & (keys <= rows[..., None])
    if window > 0:
        mask &= keys > rows[..., None] - window
    return mask[:, None]
