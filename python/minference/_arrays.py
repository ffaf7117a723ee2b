"""Results of attention() for NumPy arrays and for tensors of any other library that speaks DLPack."""

import contextlib
import sys

from . import _core

_LIKE_NUMPY = ("numpy", "cupy")  # libraries with NumPy's functions, whose arrays can be written to


def is_traced(q):
    return False


def threads(asked):
    return asked or 0


def on_stream(q, number):
    """The context in which a cudaStream_t is the current one; CuPy alone has a current stream to set."""
    if _library(q) != "cupy" or not number:
        return contextlib.nullcontext()
    return sys.modules["cupy"].cuda.ExternalStream(number, q.device.id)


def current_stream(q):
    return sys.modules["cupy"].cuda.get_current_stream(q.device.id).ptr if _library(q) == "cupy" else 0


def packed_mask(mask, k, block_table):
    return mask


def begin(q, k, v, sinks, out, q_lens, return_lse):
    """q, k, v, out and lse as the library takes them, sinks, and the tensors to write to: out, and lse or
    None."""
    name = _library(q)
    if name in _LIKE_NUMPY:
        library, shape = sys.modules[name], q.shape[:3]
        if out is None:
            out = library.zeros(shape + v.shape[-1:], q.dtype)
        lse = library.full((*shape, 1), -float("inf"), "f4") if return_lse else None
    else:
        if out is None:
            out = _core.new_output(q, v)
        lse = _core.new_lse(q) if return_lse else None
    return (q, k, v, out, lse), sinks, out, lse


def end(q, out, lse, is_new):
    """What attention() returns: out, which begin() made or the caller gave, and lse, of q's library."""
    if is_new:
        out = _as_kind_of(q, out)
    if lse is None:
        return out
    lse = _as_kind_of(q, lse)
    return out, lse[..., 0] if hasattr(lse, "__getitem__") else lse


def heads_first_output(query, value):
    """A new array [batch, heads, tokens, v_head_dim]; of NumPy and CuPy alone, others have no common axes."""
    name = _library(query)
    if name not in _LIKE_NUMPY:
        raise ValueError(
            f"query is a {type(query).__name__}; legal: a torch tensor, or an array of NumPy or CuPy"
        )
    return sys.modules[name].empty(query.shape[:3] + value.shape[-1:], query.dtype)


def _library(tensor):
    return type(tensor).__module__.partition(".")[0]


def _as_kind_of(q, tensor):
    """The tensor as q's library has it; as it is, DLPack and nothing else, when q's has no way in."""
    name = _library(q)
    if name in _LIKE_NUMPY:
        return tensor
    library = q.__array_namespace__() if hasattr(q, "__array_namespace__") else sys.modules.get(name)
    take = getattr(library, "from_dlpack", None)
    return tensor if take is None else take(tensor)
