"""Results of attention() for NumPy arrays and for tensors of any other library that speaks DLPack."""

import sys

from . import _core


def is_traced(q):
    return False


def threads(asked):
    return asked or 0


def stream(q):
    return 0


def begin(q, k, v, sinks, out, q_lens, return_lse):
    """(q, k, v), sinks, and the tensors to write to: out, and lse or None."""
    if type(q).__module__ == "numpy":
        zeros, full, shape = _numpy().zeros, _numpy().full, q.shape[:3]
        if out is None:
            out = zeros(shape + v.shape[-1:], q.dtype)
        return (q, k, v), sinks, out, full((*shape, 1), -float("inf"), "f4") if return_lse else None
    if out is None:
        out = _core.new_output(q, v)
    return (q, k, v), sinks, out, _core.new_lse(q) if return_lse else None


def end(q, out, lse, is_new):
    """What attention() returns: out, which begin() made or the caller gave, and lse, of q's library."""
    if is_new:
        out = _as_kind_of(q, out)
    if lse is None:
        return out
    lse = _as_kind_of(q, lse)
    return out, lse[..., 0] if hasattr(lse, "__getitem__") else lse


def heads_first_output(query, value):
    """A new array [batch, heads, tokens, v_head_dim]; of NumPy alone, others have no common axes."""
    if type(query).__module__ != "numpy":
        raise ValueError(f"query is a {type(query).__name__}; legal: a torch tensor or a NumPy array")
    return _numpy().empty(query.shape[:3] + value.shape[-1:], query.dtype)


def _numpy():
    return sys.modules["numpy"]


def _as_kind_of(q, tensor):
    """The tensor as q's library has it; as it is, DLPack and nothing else, when q's has no way in."""
    name = type(q).__module__.partition(".")[0]
    if name == "numpy":
        return tensor
    library = q.__array_namespace__() if hasattr(q, "__array_namespace__") else sys.modules.get(name)
    take = getattr(library, "from_dlpack", None)
    return tensor if take is None else take(tensor)
