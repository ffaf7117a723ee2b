"""torch: the operator under torch.compile and torch.export, and gradients, which there are none of."""

import minference
import numpy as np
import pytest
import torch


def problem(tokens=128):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(2, tokens, 4, 32, generator=generator),
        torch.randn(2, tokens, 2, 32, generator=generator),
        torch.randn(2, tokens, 2, 16, generator=generator),
    )


CALLS = {
    "method": lambda q, k, v: minference.attention(q, k, v, "a_shape", n_init=4, n_local=32),
    "lse": lambda q, k, v: minference.attention(q, k, v, "dense", return_lse=True),
    "score": lambda q, k, v: minference.attention(
        q, k, v, "dense", scale=0.3, soft_cap=2.0, sliding_window=9, sinks=q[0, 0, :, 0], precision="f32"
    ),
    "lengths": lambda q, k, v: minference.attention(q, k, v, "dense", q_lens=[128, 3], kv_lens=[128, 100]),
    "mask": lambda q, k, v: minference.attention(q, k, v, "dense", mask=torch.ones(1, 128, 128).bool()),
    "guard": lambda q, k, v: minference.attention(q, k, v, "tri_shape", guard="report", rows_after=[1, 1]),
    "out": lambda q, k, v: minference.attention(q, k, v, "dense", out=torch.empty(2, 128, 4, 16)),
}


@pytest.mark.parametrize("name", CALLS)
def test_compile(name):
    call, tensors = CALLS[name], problem()
    compiled = torch.compile(lambda *t: call(*t), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), call(*tensors))


def test_compile_with_any_length():
    compiled = torch.compile(CALLS["method"], fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (128, 200, 333):
        torch.testing.assert_close(compiled(*problem(tokens)), CALLS["method"](*problem(tokens)))


def test_compile_with_pattern_file():
    patterns = minference.PatternFile(1)
    for head in range(4):
        patterns.set(0, head, "stream_llm", 4, 32)
    compiled = torch.compile(
        lambda q, k, v: minference.attention(q, k, v, "minference", patterns=patterns), backend="aot_eager"
    )
    torch.testing.assert_close(compiled(*problem()), CALLS["method"](*problem()))


def test_compile_with_a_state_leaves_the_graph():
    state = minference.MethodState()
    options = {"vertical_size": 30, "slash_size": 100, "state": state}
    q, k, v = problem(2048)
    compiled = torch.compile(
        lambda q, k, v: minference.attention(q, k, v, "vertical_slash", **options) + 1, backend="aot_eager"
    )
    assert compiled(q, k, v).shape == (2, 2048, 4, 16)
    assert state.kv_lens == [2048, 2048]


def test_compile_to_machine_code():
    compiled = torch.compile(lambda q, k, v: CALLS["method"](q * 2, k, v) + 1, fullgraph=True)
    q, k, v = problem()
    torch.testing.assert_close(compiled(q, k, v), CALLS["method"](q * 2, k, v) + 1)


class Attention(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, q, k, v):
        return self.call(q, k, v)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["method", "lse", "score"])
def test_export(name, strict, tmp_path):
    tensors = problem()
    program = torch.export.export(Attention(CALLS[name]), tensors, strict=strict)
    assert "torch.ops.minference.attention" in program.graph_module.code
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    torch.testing.assert_close(loaded.module()(*tensors), CALLS[name](*tensors))


def test_the_operator_keeps_torchs_rules():
    q, k, v = problem()
    arguments = [q, k, v, "dense", "", [], 0.0, True, 0, 0.0, None, None, None, None, None, 0, "", "off", 16]
    for return_lse in (False, True):
        torch.library.opcheck(
            torch.ops.minference.attention.default, (*arguments, 0.9, None, "auto", -1, return_lse)
        )


def test_gradients_are_refused():
    q, k, v = problem()
    for call in (CALLS["method"], torch.compile(CALLS["method"], backend="aot_eager")):
        for tensor in (q, k, v):
            tensor.requires_grad_()
            with pytest.raises(ValueError, match="requires a gradient, .*; legal: .*no_grad"):
                call(q, k, v)
            with torch.no_grad():
                assert not call(q, k, v).requires_grad
            with torch.inference_mode():
                call(q, k, v)
            tensor.requires_grad_(False)
    out = CALLS["method"](q, k, v).requires_grad_()
    with pytest.raises(ValueError, match="out requires a gradient"):
        minference.attention(q, k, v, out=out)
    with torch.no_grad():
        minference.attention(q, k, v, out=out)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("out", lambda q: torch.empty_like(q, device="meta"), "out is a .*Tensor that does not give its memory"),
        ("out", lambda q: q.to_sparse(), "out is a .*Tensor that does not give its memory"),
        ("k", lambda q: q.numpy(), "k is a numpy.ndarray and q a .*Tensor; legal: tensors of one library"),
        ("v", lambda q: None, "v is a builtins.NoneType and q a .*Tensor; legal: tensors of one library"),
    ],
)
def test_tensors_that_have_no_memory_here(name, tensor, words):
    q, k, v = problem()
    arguments = {"q": q, "k": k, "v": v, name: tensor(q)}
    with pytest.raises(ValueError, match=words):
        minference.attention(**arguments, method="dense")


def test_an_output_of_another_library():
    q, k, v = problem()
    out = np.zeros((*q.shape[:3], v.shape[3]), np.float32)
    minference.attention(q, k, v, "dense", out=out)
    torch.testing.assert_close(torch.from_numpy(out), minference.attention(q, k, v, "dense"))


def test_threads_are_torchs(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: asked.append(1) or 1)
    minference.attention(*problem(), "dense")
    assert asked == [1]
    minference.attention(*problem(), "dense", threads=2)
    assert asked == [1]
