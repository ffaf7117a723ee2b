"""Bad input: every refusal is a Python exception with the value and what is legal."""

import ctypes

import minference
import numpy as np
import pytest

Q = np.zeros((1, 8, 4, 16), np.float32)
KV = np.zeros((1, 8, 2, 16), np.float32)


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


class Nothing:
    """Says that it is a tensor, and fails."""

    def __dlpack__(self, **arguments):
        raise BufferError("no")

    def __dlpack_device__(self):
        return (1, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": Q[0]}, "q has 3 dimensions; legal: 4"),
        ({"q": Q.astype(np.float64)}, "q has dtype float64; legal: float32, float16, bfloat16"),
        ({"k": KV.astype(np.int32)}, "k has dtype int32; legal: float32"),
        ({"q": Q.astype(bool)}, "q has dtype bool; legal"),
        ({"q": 3}, "q is a int that does not give its memory; legal: a tensor"),
        ({"q": None}, "q is a NoneType that does not give its memory"),
        ({"k": Nothing()}, "k is a test_bad_input.Nothing that does not give its memory"),
        ({"q": Q[..., ::2]}, "q has stride 2 along dim; legal: 1"),
        ({"q": Q[:, :, :3]}, "q has 3 heads and k and v have 2; legal"),
        ({"v": KV[:, :4]}, "k has shape [1, 8, 2, 16] and v [1, 4, 2, 16]"),
        ({"k": KV[..., :8]}, "head_dim of k is 8; legal: that of q, 16"),
        ({"method": "foo"}, "unknown attention method 'foo'; valid methods: auto"),
        ({"method": "a_shape", "n_foo": 3}, "n_foo"),
        ({"method": "a_shape", "n_local": 0}, "option n_local of method a_shape is 0; legal: whole"),
        ({"method": "a_shape", "options": {"n_local": 2.5}}, "option n_local of method a_shape is 2.5"),
        ({"method": "a_shape", "n_local": "3"}, "option n_local is '3'; legal: a number"),
        ({"scale": 0}, "scale is 0; legal: any other"),
        ({"scale": float("nan")}, "scale is nan; legal: a finite number"),
        ({"soft_cap": -1.0}, "soft_cap is -1;"),
        ({"sliding_window": -1}, "sliding_window is -1; legal: 1 or more"),
        ({"precision": "f8"}, "precision is 'f8'; legal: auto, f32, bf16"),
        ({"guard": "on"}, "guard is 'on'; legal: off, report, enforce"),
        ({"guard": minference.Guard("report", rows=0)}, "rows"),
        ({"guard": minference.Guard("enforce", min_recall=2)}, "min_recall"),
        ({"threads": -1}, "threads is -1"),
        ({"sinks": [1.0]}, "sinks has 1 entries; legal: none or one per query head, 4"),
        ({"sinks": "abc"}, "sinks"),
        ({"sinks": ["a"]}, "sinks is ['a']; legal: a list of numbers"),
        ({"q_lens": [9]}, "q_lens[0] is 9; legal: 0 to 8"),
        ({"q_lens": [1, 2]}, "q_lens has 2 entries"),
        ({"kv_lens": [1.5]}, "kv_lens is [1.5]; legal: a list of whole numbers"),
        ({"kv_lens": np.array([8.0])}, "kv_lens has dtype float64; legal: int32, int64"),
        ({"kv_lens": np.array([[8]])}, "kv_lens has 2 dimensions; legal: 1"),
        ({"block_table": np.zeros((1, 1), np.int32)}, "kv_lens has 0 entries; with a block table"),
        ({"block_table": np.array([[4]]), "kv_lens": [8]}, "block_table entry 0 of sequence 0 is 4"),
        ({"block_table": np.array([[2**40]]), "kv_lens": [8]}, "block_table entry 0 of sequence 0 is -1"),
        ({"block_table": np.zeros(3, np.int32)}, "block_table has 1 dimensions"),
        ({"block_table": np.zeros((1, 1), np.float32)}, "block_table has dtype float32"),
        ({"mask": np.ones((1, 8, 7), bool)}, "mask has shape [1, 8, 7]; legal: [1 or 1, 8, 8]"),
        ({"mask": np.ones((1, 8, 2), np.int64)}, "mask has shape [1, 8, 2]; legal: [1 or 1, 8, 1]"),
        ({"mask": np.ones((1, 8, 8), np.float32)}, "mask has dtype float32 on cpu; legal: bool"),
        ({"rows_after": [-1], "method": "tri_shape"}, "rows_after of sequence 0 is -1"),
        ({"segments": [[minference.Segment(5, 3)]], "method": "mminference"}, "segment"),
        ({"segments": [[(0, 3)]], "method": "mminference"}, "segments[0][0] is (0, 3); legal: a minference.Segment"),
        ({"out": read_only(Q)}, "out is read-only; legal: a writable tensor"),
        ({"out": Q[:, :4].copy()}, "out has"),
        ({"out": np.broadcast_to(Q[:, :1], Q.shape)}, "out"),
        ({"out": [1]}, "out is a list that does not give its memory"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_value_error(changes, message):
    arguments = {"q": Q, "k": KV, "v": KV} | changes
    with pytest.raises(ValueError) as error:
        minference.attention(**arguments)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [{"layer": "x"}, {"patterns": "a path"}, {"state": 3}, {"segments": 3}, {"causal": "no"}],
    ids=lambda value: next(iter(value)),
)
def test_type_error(changes):
    with pytest.raises(TypeError):
        minference.attention(Q, KV, KV, "dense", **changes)


class OnAnotherDevice:
    """A DLPack tensor whose producer says that it lies elsewhere, on CUDA device 1; nothing may read it."""

    def __init__(self, device_type=2):
        self.device_type = device_type

    def __dlpack__(self, **arguments):
        return dlpack_of_device(self.device_type)

    def __dlpack_device__(self):
        return (self.device_type, 1)


def dlpack_of_device(device_type):
    """A capsule as a device's library makes it, without memory of ours behind it."""

    class Tensor(ctypes.Structure):
        _fields_ = [
            ("data", ctypes.c_void_p),
            ("device_type", ctypes.c_int32),
            ("device_id", ctypes.c_int32),
            ("ndim", ctypes.c_int32),
            ("code", ctypes.c_uint8),
            ("bits", ctypes.c_uint8),
            ("lanes", ctypes.c_uint16),
            ("shape", ctypes.POINTER(ctypes.c_int64)),
            ("strides", ctypes.POINTER(ctypes.c_int64)),
            ("byte_offset", ctypes.c_uint64),
            ("manager", ctypes.c_void_p),
            ("deleter", ctypes.c_void_p),
        ]

    shape = (ctypes.c_int64 * 4)(1, 8, 4, 16)
    tensor = Tensor(4096, device_type, 1, 4, 2, 16, 1, shape, None, 0, None, None)
    _kept.append((shape, tensor))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.addressof(tensor), b"dltensor", None)


_kept = []


def test_other_devices():
    out = Q.copy()
    with pytest.raises(ValueError, match="k is on device cpu; legal: that of q, cuda:1"):
        minference.attention(OnAnotherDevice(), KV, KV, out=out)
    with pytest.raises(ValueError, match="out is on device cuda:1; legal: that of q, cpu"):
        minference.attention(Q, KV, KV, out=OnAnotherDevice())
    # Whether the kernels are missing or only a device: one sentence says so.
    with pytest.raises(NotImplementedError, match="no CUDA"):
        minference.attention(*[OnAnotherDevice()] * 3, method="dense", out=OnAnotherDevice())
    with pytest.raises(NotImplementedError, match="v is on a device of DLPack's type 10; .* cpu and cuda"):
        minference.attention(Q, KV, OnAnotherDevice(device_type=10), out=out)
    with pytest.raises(ValueError, match="mask is on device cuda:1; legal: that of q, cpu"):
        minference.attention(Q, KV, KV, "dense", mask=OnAnotherDevice())


def test_a_failed_call_leaves_out_as_it_was():
    out = np.full_like(Q, 7)
    with pytest.raises(ValueError):
        minference.attention(Q, KV, KV, "a_shape", n_local=-1, out=out)
    assert (out == 7).all()


def test_a_state_serves_one_layer_and_batch():
    state = minference.MethodState()
    long = np.zeros((1, 2048, 4, 16), np.float32)
    minference.attention(long, long, long, "vertical_slash", vertical_size=30, slash_size=100, state=state)
    two = np.zeros((2, 4096, 4, 16), np.float32)
    with pytest.raises(ValueError):
        minference.attention(two[:, :64], two, two, "vertical_slash", vertical_size=30, state=state)


def test_pattern_files(tmp_path):
    with pytest.raises(OSError, match="missing.json"):
        minference.PatternFile.load(str(tmp_path / "missing.json"))
    with pytest.raises(OSError):
        minference.find_patterns(tmp_path / "missing.json")
    with pytest.raises(ValueError, match="text"):
        minference.PatternFile.parse("{}")
    patterns = minference.PatternFile(2)
    with pytest.raises(ValueError, match="legal: vertical_and_slash, stream_llm, block_sparse"):
        patterns.set(0, 0, "foo", 1, 1)
    with pytest.raises(ValueError):
        patterns.set(2, 0, "stream_llm", 1, 1)
    with pytest.raises(ValueError, match="3"):
        patterns.check_model(3, 4)
    with pytest.raises(OSError):
        patterns.save(str(tmp_path / "no" / "such" / "folder.json"))
