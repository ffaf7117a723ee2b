"""attention() against fp64: every argument of the contract, NumPy arrays, torch tensors, DLPack."""

import gc
import resource
import sys
import weakref

import minference
import numpy as np
import oracle
import pytest
import torch

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {F32: 2e-5, F16: 2e-2, BF16: 3e-2}


def random(*shape, dtype=F32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def problem(batch=2, q_tokens=70, kv_tokens=150, q_heads=6, kv_heads=2, dim=32, v_dim=None, dtype=F32):
    return (
        random(batch, q_tokens, q_heads, dim, dtype=dtype, seed=1),
        random(batch, kv_tokens, kv_heads, dim, dtype=dtype, seed=2),
        random(batch, kv_tokens, kv_heads, v_dim or dim, dtype=dtype, seed=3),
    )


def check(got, want, dtype=F32):
    got = got.double().numpy() if isinstance(got, torch.Tensor) else np.asarray(got, np.float64)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def reference(q, k, v, seen=None, **score):
    """fp64 of every sequence: (out, lse)."""
    if seen is None:
        seen = oracle.visible(q.shape[1], k.shape[1])
    q, k, v = (t.double().numpy() for t in (q, k, v))
    results = [oracle.attend(q[b], k[b], v[b], seen, **score) for b in range(len(q))]
    return tuple(np.stack(part) for part in zip(*results))


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("shape", [{}, {"q_tokens": 1}, {"kv_heads": 6}, {"v_dim": 48, "dim": 80}])
def test_dense_equals_fp64(dtype, shape):
    q, k, v = problem(dtype=dtype, **shape)
    out, lse = minference.attention(q, k, v, "dense", return_lse=True)
    want_out, want_lse = reference(q, k, v)
    assert (out.dtype, lse.dtype) == (dtype, F32)
    check(out, want_out, dtype)
    check(lse, want_lse, dtype)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_dense_equals_torch(dtype):
    q, k, v = problem(q_tokens=150, dtype=dtype)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
    )
    check(minference.attention(q, k, v, "dense"), want.transpose(1, 2).double().numpy(), dtype)


@pytest.mark.parametrize(
    "arguments",
    [
        {"scale": 0.3},
        {"soft_cap": 1.5},
        {"causal": False},
        {"sliding_window": 20},
        {"sinks": [0.5, -1.0, 2.0, 0.0, -np.inf, 1.0]},
    ],
    ids=lambda a: next(iter(a)),
)
def test_score_modifiers(arguments):
    q, k, v = problem()
    masking = {name: arguments[name] for name in ("causal", "sliding_window") if name in arguments}
    score = {name: value for name, value in arguments.items() if name not in masking}
    want, _ = reference(q, k, v, oracle.visible(70, 150, **masking), **score)
    check(minference.attention(q, k, v, "dense", **arguments), want)


@pytest.mark.parametrize("kind", [torch.tensor, lambda x: torch.tensor(x, dtype=BF16), np.array])
def test_sinks_of_any_kind(kind):
    q, k, v = problem()
    sinks = [0.5, -1.0, 2.0, 0.0, -4.0, 1.0]
    want, _ = reference(q, k, v, sinks=sinks)
    check(minference.attention(q, k, v, "dense", sinks=kind(sinks)), want)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda x: np.array(x, np.int32)])
def test_ragged(kind):
    q, k, v = problem()
    q_lens, kv_lens = [70, 33], [121, 50]
    out, lse = minference.attention(
        q, k, v, "dense", q_lens=kind(q_lens), kv_lens=kind(kv_lens), return_lse=True
    )
    for b, (rows, keys) in enumerate(zip(q_lens, kv_lens)):
        want, want_lse = oracle.attend(
            q[b, :rows].numpy(), k[b, :keys].numpy(), v[b, :keys].numpy(), oracle.visible(rows, keys)
        )
        check(out[b, :rows], want)
        check(lse[b, :rows], want_lse)
        assert (out[b, rows:] == 0).all() and (lse[b, rows:] == -torch.inf).all()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_paged(dtype):
    q, k, v = problem(kv_tokens=160)
    table = np.array([[7, 2, 9, 0, 5], [1, 8, 3, 6, 4]], dtype)
    pages = {"k": torch.empty(10, 32, 2, 32), "v": torch.empty(10, 32, 2, 32)}
    for name, tensor in (("k", k), ("v", v)):
        for b in range(2):
            for p in range(5):
                pages[name][table[b, p]] = tensor[b, 32 * p : 32 * (p + 1)]
    out = minference.attention(q, pages["k"], pages["v"], "dense", kv_lens=[160, 130], block_table=table)
    check(out[0], reference(q[:1], k[:1], v[:1])[0][0])
    check(out[1], reference(q[1:], k[1:, :130], v[1:, :130])[0][0])


@pytest.mark.parametrize("shared", [True, False])
def test_mask(shared):
    q, k, v = problem()
    mask = random(1 if shared else 2, 70, 150, seed=9) > 0.5
    mask[:, 5] = False
    out = minference.attention(q, k, v, "dense", mask=mask)
    for b in range(2):
        check(out[b], reference(q[b : b + 1], k[b : b + 1], v[b : b + 1], mask[b % len(mask)].numpy())[0][0])
    assert (out[:, 5] == 0).all()


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_packed_mask(dtype):
    q, k, v = problem()
    mask = random(2, 70, 150, seed=9) > 0.5
    bits = np.packbits(mask.numpy(), axis=-1, bitorder="little")  # 19 bytes a row
    words = np.pad(bits, ((0, 0), (0, 0), (0, 5))).view(dtype)
    want = minference.attention(q, k, v, "dense", mask=mask)
    assert torch.equal(minference.attention(q, k, v, "dense", mask=words), want)
    wide = np.zeros((2, 140, 4), dtype)[:, ::2, :3]  # rows of other words between
    wide[:] = words
    assert torch.equal(minference.attention(q, k, v, "dense", mask=wide), want)


def test_methods_agree_with_their_rule():
    q, k, v = problem(q_tokens=300, kv_tokens=300)
    offset = np.arange(300)[:, None] - np.arange(300)[None, :]
    first = np.broadcast_to(np.arange(300) < 5, (300, 300))
    causal = offset >= 0
    rules = {
        ("a_shape", (("n_init", 5), ("n_local", 40))): causal & (first | (offset < 40)),
        ("dilated1", (("n_init", 5), ("n_local", 100), ("stride", 3))): causal
        & (first | ((offset < 100) & (offset % 3 == 0))),
    }
    for (method, options), seen in rules.items():
        out = minference.attention(q, k, v, method, **dict(options))
        check(out, reference(q, k, v, seen)[0])
        assert minference.last_stats().method == method
        assert minference.last_stats().kept_pairs == seen.sum() * 12
    options = {"n_init": 5, "n_local": 40, "n_last": 7}
    seen = causal & (first | (offset < 40) | (np.arange(300)[:, None] >= 293))
    check(minference.attention(q, k, v, "tri_shape", options=options), reference(q, k, v, seen)[0])
    default = minference.attention(q, k, v, "tri_shape", options=options, n_last=None)  # 100
    assert not torch.equal(default, minference.attention(q, k, v, "tri_shape", options=options))
    # Rows that come later hold the last ones.
    seen = causal & (first | (offset < 40))
    out = minference.attention(q, k, v, "tri_shape", options=options, rows_after=[9, 9])
    check(out, reference(q, k, v, seen)[0])


@pytest.mark.parametrize("method", [m.name for m in minference.methods()])
def test_every_method_runs_and_keeps_all_of_a_short_prompt(method):
    q, k, v = problem(batch=1, q_tokens=60, kv_tokens=60)
    check(minference.attention(q, k, v, method, layer=1), reference(q, k, v)[0])


@pytest.mark.parametrize("method", [m.name for m in minference.methods()])
def test_every_method_keeps_part_of_a_long_prompt(method):
    q, k, v = problem(batch=1, q_tokens=2048, kv_tokens=2048, q_heads=2, kv_heads=1)
    small = {
        "vertical_slash": {"vertical_size": 30, "slash_size": 100},
        "static": {"vertical_size": 30, "slash_size": 100},
        "minference": {"minference_ratio": 0.01},
        "tri_mix_minference": {"minference_ratio": 0.01},
        "mminference": {"vertical_size": 30, "slash_size": 100},
        "a_shape": {"n_init": 4, "n_local": 256},
        "tri_shape": {"n_init": 4, "n_local": 256},
        "dilated1": {"n_local": 512, "n_init": 4},
        "dilated2": {"n_local": 128, "n_dilated": 512, "n_init": 4},
        "block_sparse": {"top_k": 4},
        "flexprefill": {"gamma": 0.3, "max_budget": 256},
        "xattention": {"threshold": 0.3},
        "inf_llm": {"n_init": 64, "n_local": 128, "topk": 2},
        "tri_mix": {"starting_layer": 0},
    }.get(method, {})
    out = minference.attention(q, k, v, method, **small, guard="report")
    stats = minference.last_stats()
    assert torch.isfinite(out).all()
    assert stats.kept_fraction == 1 if method in ("dense", "auto") else stats.kept_fraction < 0.9
    assert stats.recall_count == 2
    # The first row sees itself alone, whatever is kept.
    check(out[0, 0], v[0, 0].double().numpy().repeat(2, 0))


def test_guard_makes_heads_dense():
    q, k, v = problem(batch=1, q_tokens=2048, kv_tokens=2048, q_heads=2, kv_heads=1)
    guard = minference.Guard("enforce", rows=8, min_recall=0.99)
    out = minference.attention(q, k, v, "a_shape", n_init=1, n_local=64, guard=guard)
    assert sum(minference.last_stats().fallbacks.values()) == 2
    check(out, minference.attention(q, k, v, "dense").double().numpy())


def test_segments():
    q, k, v = problem(batch=1, q_tokens=512, kv_tokens=512)
    out = minference.attention(
        q, k, v, "mminference", segments=[[minference.Segment(100, 400, "visual", stride=100)]]
    )
    check(out, reference(q, k, v)[0])


def test_pattern_file():
    q, k, v = problem(batch=1, q_tokens=600, kv_tokens=600)
    patterns = minference.PatternFile(2)
    for head in range(6):
        patterns.set(1, head, "stream_llm", 4, 100)
    out = minference.attention(q, k, v, "minference", patterns=patterns, layer=1)
    assert torch.equal(out, minference.attention(q, k, v, "a_shape", n_init=4, n_local=100))


def test_chunks_with_a_state():
    q, k, v = problem(batch=1, q_tokens=4096, kv_tokens=4096, q_heads=2, kv_heads=1, dim=64)
    state = minference.MethodState()
    options = {"vertical_size": 30, "slash_size": 100}
    for end in (1024, 2048, 3072, 4096):
        out = minference.attention(
            q[:, end - 1024 : end], k[:, :end], v[:, :end], "vertical_slash", state=state, **options
        )
        assert torch.isfinite(out).all()
        assert state.kv_lens[0] > 0
    assert minference.last_stats().kept_fraction < 0.5
    state.reset()
    assert state.kv_lens == []


def test_strided_views_are_not_copied():
    base = random(2, 6, 150, 64)
    q = base.transpose(1, 2)[:, 80:, :, :32]
    k = base.transpose(1, 2)[:, :, ::3, 32:]
    assert not q.is_contiguous() and not k.is_contiguous()
    check(minference.attention(q, k, k, "dense"), reference(q, k, k)[0])
    flipped = base.numpy()[:, :, ::-1].transpose(0, 2, 1, 3)  # negative stride along tokens
    out = minference.attention(flipped, flipped, flipped, "dense")
    check(out, reference(*3 * [torch.tensor(flipped.copy())])[0])
    expanded = k[:1].expand(2, -1, -1, -1)  # stride 0 along batch
    check(minference.attention(q, expanded, expanded, "dense"), reference(q, expanded, expanded)[0])


def test_out():
    q, k, v = problem()
    buffer = torch.full((2, 70, 6, 100), 7.0, dtype=BF16)
    view = buffer[..., 10:42]
    assert minference.attention(q, k, v, "dense", out=view) is view
    check(view, reference(q, k, v)[0], BF16)
    assert (buffer[..., :10] == 7).all() and (buffer[..., 42:] == 7).all()
    array = np.empty((2, 70, 6, 32), np.float16)
    out, lse = minference.attention(q.numpy(), k.numpy(), v.numpy(), "dense", out=array, return_lse=True)
    assert out is array and lse.shape == (2, 70, 6)
    check(array, reference(q, k, v)[0], F16)


def test_numpy():
    q, k, v = problem()
    out, lse = minference.attention(q.numpy(), k.numpy(), v.numpy(), "dense", return_lse=True)
    assert type(out) is np.ndarray and out.dtype == np.float32 and out.flags.writeable
    want_out, want_lse = reference(q, k, v)
    check(out, want_out)
    check(lse, want_lse)
    for tensor in (q, k, v):
        tensor.numpy().flags.writeable = False
    check(minference.attention(q.numpy(), k.numpy(), v.numpy(), "dense"), want_out)


class Foreign:
    """A tensor of a library that we do not know: DLPack and nothing else."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **arguments):
        return self.tensor.__dlpack__()

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


class Namespaced(Foreign):
    """One whose library can take a tensor over."""

    def __array_namespace__(self):
        return torch


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_any_dlpack_tensor(dtype):
    q, k, v = problem(dtype=dtype)
    want_out, want_lse = reference(q, k, v)
    out, lse = minference.attention(*map(Foreign, (q, k, v)), "dense", return_lse=True)
    check(torch.from_dlpack(out), want_out, dtype)
    check(torch.from_dlpack(lse)[..., 0], want_lse, dtype)
    out, lse = minference.attention(*map(Namespaced, (q, k, v)), "dense", return_lse=True)
    assert isinstance(out, torch.Tensor) and out.dtype == dtype
    check(out, want_out, dtype)
    check(lse, want_lse, dtype)


def test_memory_is_given_back():
    q, k, v = problem()
    sources = [Foreign(t) for t in (q, k, v)]
    kept = [weakref.ref(source) for source in sources]
    out = minference.attention(*sources, "dense")
    del sources
    gc.collect()
    assert all(reference() is None for reference in kept)
    taken = torch.from_dlpack(out)
    del out
    gc.collect()
    check(taken, reference(q, k, v)[0])  # the result's memory lives as long as a view of it


def test_no_call_keeps_its_tensors():
    arrays = [tensor.numpy() for tensor in problem()]
    arrays.append(np.empty_like(arrays[0]))
    before = [sys.getrefcount(array) for array in arrays]
    for _ in range(3):
        minference.attention(*arrays[:3], "dense", out=arrays[3], return_lse=True)
        with pytest.raises(ValueError):
            minference.attention(*arrays[:3], "dense", out=arrays[3][:, :4])
    assert [sys.getrefcount(array) for array in arrays] == before


def test_results_that_nobody_takes_are_freed():
    q, k, v = map(Foreign, problem(q_tokens=1, dim=256, batch=1))
    rows = Foreign(q.tensor.expand(1, 4000, 6, 256))  # 24 MB of result

    def high_water_mark():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB

    minference.attention(rows, k, v, "dense", q_lens=[1])
    before = high_water_mark()
    for _ in range(20):
        minference.attention(rows, k, v, "dense", q_lens=[1])
    assert high_water_mark() - before < 200


def test_empty_tensors():
    q, k, v = problem()
    assert minference.attention(q[:, :0], k, v).shape == (2, 0, 6, 32)
    assert minference.attention(q[:0], k[:0], v[:0]).shape == (0, 70, 6, 32)
    assert (minference.attention(q, k[:, :0], v[:, :0]) == 0).all()


def test_stats():
    q, k, v = problem()
    minference.attention(q, k, v, "dense", precision="f32", threads=1)
    stats = minference.last_stats()
    assert stats.isa in minference.isa_levels() and "bf16" not in stats.isa
    assert stats.kept_pairs == stats.causal_pairs == oracle.visible(70, 150).sum() * 12
    assert stats.kernel_seconds > 0 and stats.fallbacks == {}
    total = minference.Stats()
    total.add(stats)
    total.add(stats)
    assert total.to_dict()["kept_pairs"] == 2 * stats.kept_pairs
    assert "'method': 'dense'" in repr(stats)
