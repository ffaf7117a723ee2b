"""Results of attention() for torch tensors, and the operator torch.ops.minference.attention behind it
that torch.compile and torch.export can trace."""

import contextlib
from typing import List, Optional, Tuple

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from . import _core

_NO_GRADIENT = (
    "q, k, v or out requires a gradient, which minference does not compute; legal: a call under "
    "torch.no_grad() or torch.inference_mode(), or detached tensors"
)
_PLAIN = (Tensor, torch.nn.Parameter)


def is_traced(q):
    """Whether the call is recorded rather than computed, or the tensor has no memory of its own."""
    return torch.compiler.is_compiling() or type(q) not in _PLAIN


def threads(asked):
    return torch.get_num_threads() if asked is None else asked


def on_stream(q, number):
    """The context in which a cudaStream_t is the current one of q's device."""
    if not q.is_cuda:
        return contextlib.nullcontext()
    stream = torch.cuda.ExternalStream(number, q.device) if number else torch.cuda.default_stream(q.device)
    return torch.cuda.stream(stream)


def current_stream(q):
    # What torch.cuda.current_stream(q.device).cuda_stream is, without objects for stream and device.
    return torch._C._cuda_getCurrentRawStream(q.get_device()) if q.is_cuda else 0


def packed_mask(mask, k, block_table=None):
    """A mask of bool on a device as the words that the library reads there, int64 [..., (keys + 63) // 64]:
    key j is bit j % 64 of word j // 64. Masks on the CPU are packed by the library."""
    if not isinstance(mask, Tensor) or not mask.is_cuda or mask.dtype != torch.bool:
        return mask
    keys = k.shape[1] if block_table is None else k.shape[1] * block_table.shape[1]
    if mask.dim() != 3 or mask.shape[2] != keys:
        raise ValueError(f"mask has shape {list(mask.shape)}; legal: [batch or 1, q_tokens, {keys}]")
    rows = mask.flatten(0, 1) if mask.stride(0) != 0 else mask[0]
    words = torch.empty(rows.shape[0], -(-rows.shape[1] // 64), dtype=torch.int64, device=mask.device)
    step = max(1, _PACKED_AT_ONCE // max(rows.shape[1], 1))
    for begin in range(0, rows.shape[0], step):
        part = rows[begin : begin + step]
        padded = part.new_zeros(part.shape[0], 64 * words.shape[1])
        padded[:, : rows.shape[1]] = part
        # Eight bytes of 0 or 1 become the eight bits of the topmost byte.
        octets = padded.view(torch.int64).mul_(0x0102040810204080) >> 56
        words[begin : begin + step] = octets.to(torch.uint8).view(torch.int64)
    return words.view(mask.shape[0] if mask.stride(0) != 0 else 1, mask.shape[1], words.shape[1])


_PACKED_AT_ONCE = 1 << 26  # keys of a mask; two to three times as many bytes are needed meanwhile


def begin(q, k, v, sinks, out, q_lens, return_lse):
    """q, k, v, out and lse as the library takes them, sinks, and the tensors to write to: out, and lse or
    None."""
    for name, tensor in (("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {_kind(tensor)} and q a {_kind(q)}; legal: tensors of one library")
    if q.requires_grad or k.requires_grad or v.requires_grad or getattr(out, "requires_grad", False):
        if torch.is_grad_enabled():
            raise ValueError(_NO_GRADIENT)
        q, k, v = q.detach(), k.detach(), v.detach()
    if isinstance(sinks, Tensor):
        sinks = sinks.detach().cpu()
    if out is None:
        out = _new(q, v.shape[-1], q.dtype, q_lens, 0.0)
    lse = _new(q, 1, torch.float32, q_lens, -torch.inf) if return_lse else None
    return _exported(q, k, v, out, lse), sinks, out, lse


def _kind(tensor):
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


def _exported(q, k, v, out, lse):
    """The tensors as DLPack capsules. Tensor.__dlpack__() makes the same ones, but its checks in Python take
    several times as long: for the tensors of a call longer than all the rest of it."""
    try:
        capsules = to_dlpack(q), to_dlpack(k), to_dlpack(v), to_dlpack(out)
        return (*capsules, None if lse is None else to_dlpack(lse))
    except (TypeError, RuntimeError, BufferError):
        # One is no tensor of torch, or has no memory: the library takes it, or says what is wrong.
        return q, k, v, out, lse


def end(q, out, lse, is_new):
    """What attention() returns."""
    return out if lse is None else (out, lse[..., 0])


def heads_first_output(query, value):
    """A new tensor [batch, heads, tokens, v_head_dim]."""
    return query.new_empty((*query.shape[:3], value.shape[-1]))


def _new(q, width, dtype, q_lens, fill):
    """A tensor for results, [..., width]; filled where the call does not write every row."""
    shape = (*q.shape[:3], width)
    if q_lens is None:
        return q.new_empty(shape, dtype=dtype)
    return q.new_full(shape, fill, dtype=dtype)


def copy_to(out, results):
    """`results` of traced_attention() with the first of them in `out`."""
    if isinstance(results, tuple):
        return out.copy_(results[0]), results[1]
    return out.copy_(results)


def traced_attention(
    q, k, v, method, options, scale, causal, sliding_window, soft_cap, sinks, q_lens, kv_lens,
    block_table, mask, layer, patterns, guard, rows_after, precision, threads, return_lse,
):  # fmt: skip
    """attention() through the operator."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError(_NO_GRADIENT)
    if threads is not None and threads < 0:
        raise ValueError(f"threads is {threads}; legal: 0 to 4096")
    options = {name: value for name, value in options.items() if value is not None}
    if guard is None or isinstance(guard, str):
        guard_mode, guard_rows, min_recall = guard or "off", _DEFAULT_ROWS, _DEFAULT_RECALL
    else:
        guard_mode, guard_rows, min_recall = guard.mode, guard.rows, guard.min_recall
    out, lse = torch.ops.minference.attention(
        q, k, v, method, ",".join(options), [float(value) for value in options.values()],
        float(scale), causal, sliding_window, float(soft_cap), _tensor(sinks, torch.float32),
        _tensor(q_lens, torch.int64), _tensor(kv_lens, torch.int64), block_table, mask, layer,
        "" if patterns is None else _text(patterns), guard_mode, guard_rows, min_recall,
        _tensor(rows_after, torch.int64), precision, -1 if threads is None else threads, return_lse,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _text(patterns):
    return patterns.to_json()


# What torch.compiler.assume_constant_result() does, without its import of the compiler (0.8 s).
_text._dynamo_marked_constant = True


_DEFAULT_ROWS = _core.Guard().rows
_DEFAULT_RECALL = _core.Guard().min_recall


def _tensor(numbers, dtype):
    if numbers is None or isinstance(numbers, Tensor):
        return numbers
    return torch.tensor(numbers, dtype=dtype)


@torch.library.custom_op("minference::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    method: str,
    option_names: str,
    option_values: List[float],
    scale: float,
    causal: bool,
    sliding_window: int,
    soft_cap: float,
    sinks: Optional[Tensor],
    q_lens: Optional[Tensor],
    kv_lens: Optional[Tensor],
    block_table: Optional[Tensor],
    mask: Optional[Tensor],
    layer: int,
    patterns: str,
    guard_mode: str,
    guard_rows: int,
    min_recall: float,
    rows_after: Optional[Tensor],
    precision: str,
    thread_count: int,
    return_lse: bool,
) -> Tuple[Tensor, Tensor]:
    """minference.attention() as an operator: (out, lse); lse is empty unless asked for.

    option_names: separated by commas, one a value. patterns: JSON text, or "". thread_count: -1 for
    torch.get_num_threads().
    """
    options = dict(zip(option_names.split(","), option_values)) if option_values else {}
    with torch.no_grad():
        given, sinks, out, lse = begin(q, k, v, sinks, None, q_lens, return_lse)
    _core.attend_method(
        *given, method, options, q_lens, kv_lens, block_table, sinks,
        packed_mask(mask, k, block_table), scale, causal, sliding_window, soft_cap, precision,
        threads(None if thread_count < 0 else thread_count), current_stream(q), False, layer,
        _parsed(patterns), None,
        _core.Guard(guard_mode, guard_rows, min_recall), rows_after, None, None,
    )  # fmt: skip
    return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse[..., 0].contiguous()


@_attention.register_fake
def _fake_attention(q, k, v, *arguments):
    return_lse = arguments[-1]
    shape = q.shape[:3]
    lse = q.new_empty(shape if return_lse else 0, dtype=torch.float32)
    return q.new_empty((*shape, v.shape[-1])), lse


def _refuse_gradient(context, *gradients):
    raise NotImplementedError(_NO_GRADIENT)


_attention.register_autograd(_refuse_gradient)

_parsed_patterns = {}  # JSON text -> PatternFile; programs have a few


def _parsed(text):
    if not text:
        return None
    if text not in _parsed_patterns:
        _parsed_patterns[text] = _core.PatternFile.parse(text, "patterns")
    return _parsed_patterns[text]
