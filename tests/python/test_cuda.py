"""attention() over torch and CuPy tensors on a CUDA device, against fp64 over the explicit mask."""

import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import minference  # noqa: E402
import oracle  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 2e-2, F16: 3e-3, F32: 2e-5}


def random(*shape, dtype=BF16, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to("cuda", dtype)


def problem(batch=2, q_tokens=200, kv_tokens=333, q_heads=6, kv_heads=2, dim=64, v_dim=None, dtype=BF16):
    return (
        random(batch, q_tokens, q_heads, dim, dtype=dtype, seed=1),
        random(batch, kv_tokens, kv_heads, dim, dtype=dtype, seed=2),
        random(batch, kv_tokens, kv_heads, v_dim or dim, dtype=dtype, seed=3),
    )


def host(tensor):
    return tensor.detach().double().cpu().numpy()


def check(got, want, dtype=BF16):
    np.testing.assert_allclose(host(got), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def reference(q, k, v, seen, **score):
    """(out, lse) of one sequence."""
    return oracle.attend(host(q), host(k), host(v), seen, **score)


def check_batch(got, q, k, v, seen, dtype=BF16, lse=None, **score):
    for b in range(q.shape[0]):
        out, logs = reference(q[b], k[b], v[b], seen, **score)
        check(got[b], out, dtype)
        if lse is not None:
            np.testing.assert_allclose(host(lse[b]), logs, rtol=1e-3, atol=TOLERANCE[dtype])


def on_device(method):
    """Whether a method has CUDA kernels; without, the sentence must say which do."""
    q, k, v = problem(batch=1, q_tokens=70, kv_tokens=70)
    try:
        minference.attention(q, k, v, method)
    except NotImplementedError as error:
        assert f"method {method} has no CUDA kernels; those that do: " in str(error)
        return False
    return True


# --- dense


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize(
    "shape",
    [
        dict(),
        dict(batch=1, q_tokens=1, kv_tokens=257, q_heads=8, kv_heads=1, dim=128),
        dict(q_tokens=333, dim=96),
        dict(q_tokens=129, kv_tokens=129, dim=256),
        dict(q_heads=4, kv_heads=4, dim=128, v_dim=64),
        dict(q_tokens=65, dim=24, v_dim=40),
        dict(q_tokens=65, dim=33, v_dim=7),
    ],
)
def test_dense_equals_fp64(dtype, shape):
    q, k, v = problem(**shape, dtype=dtype)
    out, lse = minference.attention(q, k, v, "dense", return_lse=True)
    assert out.dtype == dtype and out.device == q.device and lse.dtype == F32
    check_batch(out, q, k, v, oracle.visible(q.shape[1], k.shape[1]), dtype, lse)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_dense_equals_torch(dtype):
    q, k, v = problem(batch=1, q_tokens=4096, kv_tokens=4096, q_heads=8, kv_heads=2, dim=128, dtype=dtype)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(t.float().transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    got = minference.attention(q, k, v, "dense")
    torch.testing.assert_close(got.float(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    "arguments",
    [
        dict(scale=0.3),
        dict(causal=False),
        dict(sliding_window=50),
        dict(soft_cap=2.0),
        dict(sinks=[0.5, -1.0, 2.0, 0.0, 3.0, -4.0]),
        dict(sliding_window=70, soft_cap=5.0, sinks=[1.0] * 6),
    ],
)
def test_score_modifiers(arguments, dtype):
    q, k, v = problem(dtype=dtype)
    out, lse = minference.attention(q, k, v, "dense", return_lse=True, **arguments)
    masking = {name: arguments[name] for name in ("causal", "sliding_window") if name in arguments}
    score = {name: value for name, value in arguments.items() if name not in masking}
    check_batch(out, q, k, v, oracle.visible(200, 333, **masking), dtype, lse, **score)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_ragged(dtype):
    q, k, v = problem(batch=3, dtype=dtype)
    q_lens, kv_lens = [200, 7, 0], [333, 100, 20]
    out, lse = minference.attention(q, k, v, "dense", q_lens=q_lens, kv_lens=kv_lens, return_lse=True)
    for b, (rows, keys) in enumerate(zip(q_lens, kv_lens)):
        want, logs = reference(q[b, :rows], k[b, :keys], v[b, :keys], oracle.visible(rows, keys))
        check(out[b, :rows], want, dtype)
        assert not out[b, rows:].any() and torch.isneginf(lse[b, rows:]).all()
    tensors = dict(q_lens=torch.tensor(q_lens), kv_lens=torch.tensor(kv_lens))
    assert torch.equal(minference.attention(q, k, v, "dense", **tensors), out)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("page_size", [16, 100])
def test_paged(dtype, page_size):
    q, k, v = problem(dtype=dtype)
    pages = -(-333 // page_size)
    table = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(5)).reshape(2, pages)
    paged = []
    for tensor in (k, v):
        padded = torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, pages * page_size - 333))
        pool = torch.empty(2 * pages, page_size, *tensor.shape[2:], dtype=dtype, device="cuda")
        pool[table.flatten().cuda()] = padded.reshape(2 * pages, page_size, *tensor.shape[2:])
        paged.append(pool)
    kv_lens = [333, 250]
    out = minference.attention(q, *paged, "dense", block_table=table, kv_lens=kv_lens)
    for b, keys in enumerate(kv_lens):
        want, _ = reference(q[b], k[b, :keys], v[b, :keys], oracle.visible(200, keys))
        check(out[b], want, dtype)


def test_strided_views_and_out():
    q, k, v = problem(dim=128)
    want = minference.attention(q, k, v, "dense")
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(minference.attention(*heads_first, "dense"), want)
    fused = torch.cat([k, v], -1)
    assert torch.equal(minference.attention(q, fused[..., :128], fused[..., 128:], "dense"), want)
    odd = torch.zeros(2, 200, 6, 131, dtype=BF16, device="cuda")[..., 1:129]  # no 16-byte address
    odd.copy_(q)
    torch.testing.assert_close(minference.attention(odd, k, v, "dense"), want, rtol=2e-2, atol=2e-2)
    out = torch.zeros(2, 200, 6, 256, device="cuda")[..., :128]
    assert minference.attention(q, k, v, "dense", out=out) is out
    torch.testing.assert_close(out.to(BF16), want, rtol=2e-2, atol=2e-2)


# --- masks


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("keys", [333, 320, 5])
@pytest.mark.parametrize("shared", [False, True])
def test_mask(shared, keys, dtype):
    q, k, v = problem(kv_tokens=keys, dtype=dtype)
    mask = random(1 if shared else 2, 200, keys, seed=9, dtype=F32) > 0.5
    mask[:, 5] = False
    method = "vertical_slash" if dtype == BF16 else "dense"  # exact under a mask
    strided = mask.expand(2, 200, keys) if shared else mask.transpose(1, 2).contiguous().transpose(1, 2)
    for given in (mask, strided):
        out, lse = minference.attention(q, k, v, method, mask=given, return_lse=True)
        for b in range(2):
            want, logs = reference(q[b], k[b], v[b], mask[b % len(mask)].cpu().numpy())
            check(out[b], want, dtype)
        assert not out[:, 5].any() and torch.isneginf(lse[:, 5]).all()
    windowed = minference.attention(q, k, v, "dense", mask=mask, sliding_window=40)
    near = oracle.visible(200, keys, causal=False, sliding_window=40)
    for b in range(2):
        check(windowed[b], reference(q[b], k[b], v[b], mask[b % len(mask)].cpu().numpy() & near)[0], dtype)


def test_packed_mask():
    q, k, v = problem()
    mask = random(2, 200, 333, seed=9, dtype=F32) > 0.5
    bits = np.packbits(mask.cpu().numpy(), axis=-1, bitorder="little")
    bits = np.pad(bits, ((0, 0), (0, 0), (0, -bits.shape[-1] % 8))).view(np.int64)
    words = torch.from_numpy(bits)
    want = minference.attention(q, k, v, "dense", mask=mask)
    assert torch.equal(minference.attention(q, k, v, "dense", mask=words.cuda()), want)
    on_cpu = minference.attention(q.float().cpu(), k.float().cpu(), v.float().cpu(), "dense", mask=words)
    torch.testing.assert_close(on_cpu, want.float().cpu(), rtol=2e-2, atol=2e-2)


# --- methods


def planted(tokens, dtype, heads=8, kv_heads=2, dim=64, weight=9.0):
    """A prompt whose rows attend to a few columns and their own neighbourhood only."""
    q, k, v = problem(1, tokens, tokens, heads, kv_heads, dim, dtype=dtype)
    q, k = q * 0.5, k * 0.5
    q[..., 0] = dim**0.5
    k[..., 0] = 0.0
    k[:, [0, 3, 500, 901, 1300], :, 0] = weight
    return q, k, v


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("method", ["vertical_slash", "auto", "static"])
def test_sparse_methods_find_what_matters(method, dim, dtype):
    if not on_device(method):
        pytest.skip(f"{method} has no CUDA kernels")
    # auto is exact where prompts are short.
    q, k, v = planted(20480, dtype, dim=dim, weight=12.0) if method == "auto" else planted(4096, dtype, dim=dim)
    options = {"vertical_size": 100, "slash_size": 400} if method in ("vertical_slash", "static") else {}
    out = minference.attention(q, k, v, method, measure=True, **options)
    stats = minference.last_stats()
    assert 0 < stats.kept_fraction < 0.9 and not stats.fallbacks, stats
    exact = minference.attention(q, k, v, "dense")
    assert (out.float() - exact.float()).norm() < 0.02 * exact.float().norm()


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("method", ["block_sparse", "flexprefill", "xattention"])
def test_block_methods_choose_as_on_the_cpu(method, dtype):
    q, k, v = planted(4096, dtype)
    options = {"top_k": 16} if method == "block_sparse" else {}
    out = minference.attention(q, k, v, method, measure=True, **options)
    kept = minference.last_stats().kept_fraction
    want = minference.attention(q.cpu(), k.cpu(), v.cpu(), method, **options)
    assert abs(kept - minference.last_stats().kept_fraction) < 0.01 and kept < 1
    assert (out.cpu().float() - want.float()).norm() < 0.02 * want.float().norm()


@pytest.mark.parametrize("method", [m.name for m in minference.methods()])
def test_every_method_keeps_all_of_a_short_prompt_or_is_refused(method):
    if not on_device(method):
        return
    q, k, v = problem(batch=1, q_tokens=100, kv_tokens=100)
    out = minference.attention(q, k, v, method)
    check_batch(out, q, k, v, oracle.visible(100, 100))


RULES = {  # of positions alone: the same keys as on the CPU
    "a_shape": {"n_init": 32, "n_local": 200},
    "tri_shape": {"n_init": 32, "n_local": 200, "n_last": 50},
    "dilated1": {},
    "dilated2": {},
}


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("method", RULES)
def test_rules_of_positions_equal_the_cpu(method, dtype):
    q, k, v = problem(2, 700, 1500, dtype=dtype)
    lengths = dict(q_lens=[700, 300], kv_lens=[1500, 1111])
    out = minference.attention(q, k, v, method, measure=True, **lengths, **RULES[method])
    kept = minference.last_stats().kept_fraction
    want = minference.attention(q.cpu(), k.cpu(), v.cpu(), method, **lengths, **RULES[method])
    assert kept == pytest.approx(minference.last_stats().kept_fraction, abs=0.05)
    torch.testing.assert_close(out.cpu(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("kind", range(5))
def test_segments_choose_as_on_the_cpu(kind):
    q, k, v = planted(4096, BF16)
    options = dict(kind=kind, vertical_size=100, slash_size=100, n_local=200, min_stride=20)
    options["segments"] = [[minference.Segment(200, 3000, "visual"), minference.Segment(3100, 4000, "visual", stride=50)]]
    out = minference.attention(q, k, v, "mminference", measure=True, **options)
    kept = minference.last_stats().kept_fraction
    assert minference.last_stats().isa in ("sm_90a", "sm_80")
    want = minference.attention(q.cpu(), k.cpu(), v.cpu(), "mminference", **options)
    assert abs(kept - minference.last_stats().kept_fraction) < 0.05 and kept < 1
    assert (out.cpu().float() - want.float()).norm() < 0.02 * want.float().norm()
    with pytest.raises(ValueError, match="segment 0 is"):
        minference.attention(q, k, v, "mminference", segments=[[minference.Segment(200, 5000, "visual")]])


def test_block_sparse_equals_the_cpu():
    q, k, v = problem(1, 2048, 2048, dim=128)
    out = minference.attention(q, k, v, "block_sparse", top_k=6)
    want = minference.attention(q.cpu(), k.cpu(), v.cpu(), "block_sparse", top_k=6)
    different = ((out.cpu() - want).abs() > 3e-2).any(-1).float().mean()  # ties of rounded means
    assert different < 0.02


def test_pattern_file():
    patterns = minference.PatternFile(1)
    for head in range(8):
        patterns.set(0, head, *(("stream_llm", 64, 512) if head % 2 else ("vertical_and_slash", 100, 400)))
    q, k, v = planted(4096, BF16)
    out = minference.attention(q, k, v, "minference", patterns=patterns)
    exact = minference.attention(q, k, v, "dense")
    streaming = minference.attention(q, k, v, "a_shape", n_init=64, n_local=512)
    assert torch.equal(out[:, :, 1::2], streaming[:, :, 1::2])
    assert (out - exact)[:, :, ::2].float().norm() < 0.02 * exact.float().norm()


def test_the_references_kernels():
    q, k, v = (t.transpose(1, 2) for t in planted(2048, BF16))
    exact = minference.attention(*(t.transpose(1, 2) for t in (q, k, v)), "dense").transpose(1, 2)
    columns = torch.arange(2048, device="cuda").expand(1, 8, -1)
    out = minference.vertical_slash_sparse_attention(q, k, v, columns[..., :1500], columns[..., :700])
    assert (out.float() - exact.float()).norm() < 0.02 * exact.float().norm()
    assert minference.block_sparse_attention(q, k, v, 32).shape == q.shape
    assert minference.streaming_forward(q, k, v, 64, 2048).shape == q.shape


# --- streams, graphs, compilers


METHODS = {
    "dense": {},
    "vertical_slash": {"vertical_size": 100, "slash_size": 400},
    "a_shape": {"n_init": 64, "n_local": 256},
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_current_stream(method, given):
    q, k, v = planted(4096, BF16)
    want = minference.attention(q, k, v, method, **METHODS[method])
    late = [torch.zeros_like(t) for t in (q, k, v)]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # about 50 ms: work in any other stream would read the zeros
        for tensor, value in zip(late, (q, k, v)):
            tensor.copy_(value)
        if not given:
            out = minference.attention(*late, method, **METHODS[method])
    if given:
        out = minference.attention(*late, method, stream=stream.cuda_stream, **METHODS[method])
    assert not stream.query(), "the call waited for its stream"
    stream.synchronize()
    assert torch.equal(out, want)


@pytest.mark.parametrize("kind", [*METHODS, "mask", "lengths", "paged"])
def test_cuda_graph(kind):
    q, k, v = planted(2048, BF16)
    arguments = METHODS.get(kind, {})
    if kind == "mask":
        arguments = {"mask": torch.ones(1, 2048, 2048, dtype=torch.bool, device="cuda").tril()}
    elif kind == "lengths":
        arguments = {"q_lens": [2000], "kv_lens": [2000], "sinks": [0.5] * 8}
    elif kind == "paged":
        k, v = (t.reshape(128, 16, *t.shape[2:]) for t in (k, v))
        arguments = {"kv_lens": [2000], "block_table": torch.randperm(128)[None]}

    def call():
        return minference.attention(q, k, v, kind if kind in METHODS else "dense", **arguments)

    want = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    source = q.clone()
    for factor in (1.0, 0.5, 1.0):
        q.copy_(source * factor)
        out.zero_()
        scribble = [np.full(2048, 7, np.int64) for _ in range(64)]  # on freed host memory
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, call()), factor
        del scribble
    assert torch.equal(out, want)


def test_compile():
    q, k, v = planted(2048, BF16)
    mask = torch.ones(1, 2048, 2048, dtype=torch.bool, device="cuda").tril()
    attend = minference.attention
    for call in (
        lambda q, k, v: attend(q * 2, k, v, "vertical_slash", vertical_size=100) + 1,
        lambda q, k, v: attend(q * 2, k, v, "dense", mask=mask, sinks=q[0, 0, :, 1]) + 1,
    ):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q, k, v), call(q, k, v))


def test_threads_and_streams():
    problems = {
        (method, tokens): planted(tokens, BF16) for method in METHODS for tokens in (1500, 2048, 3000)
    }
    wanted = {key: minference.attention(*q_k_v, key[0], **METHODS[key[0]]) for key, q_k_v in problems.items()}
    torch.cuda.synchronize()
    wrong = []

    def work(number):
        keys = list(problems)
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(20):
                key = keys[(number + i) % len(keys)]
                out = minference.attention(*problems[key], key[0], measure=i % 5 == 0, **METHODS[key[0]])
                torch.cuda.current_stream().synchronize()
                if not torch.equal(out, wanted[key]):
                    wrong.append(key)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- what is refused


def test_mixed_devices():
    q, k, v = problem()
    on_cpu = k.cpu()
    mask = torch.ones(1, 200, 333, dtype=torch.bool)
    for arguments, text in [
        ((q, on_cpu, v), "k is on device cpu; legal: that of q, cuda:0"),
        ((q.cpu(), k, v), "k is on device cuda:0; legal: that of q, cpu"),
    ]:
        with pytest.raises(ValueError, match=text):
            minference.attention(*arguments, "dense")
    with pytest.raises(ValueError, match="out is on device cpu; legal: that of q, cuda:0"):
        minference.attention(q, k, v, "dense", out=torch.empty(2, 200, 6, 64))
    with pytest.raises(ValueError, match="mask is on device cpu; legal: that of q, cuda:0"):
        minference.attention(q, k, v, "dense", mask=mask)
    with pytest.raises(ValueError, match="mask has dtype float32 on cuda:0; legal: int64 or uint64"):
        minference.attention(q, k, v, "dense", mask=mask.float().cuda())
    with pytest.raises(ValueError, match=r"mask has shape \[1, 200, 320\]; legal: .* 333\]"):
        minference.attention(q, k, v, "dense", mask=mask[..., :320].cuda())


@pytest.mark.parametrize("method,options", [("a_shape", {"n_init": 1, "n_local": 64}), ("block_sparse", {"top_k": 4})])
def test_guard(method, options):
    q, k, v = problem(q_tokens=600, kv_tokens=900)
    report = minference.Guard("report", rows=4)
    minference.attention(q, k, v, method, **options, guard=report, measure=True)
    stats = minference.last_stats()
    assert stats.recall_count == 12 and 0 < stats.mass_recall < 1 and not stats.fallbacks
    if method == "a_shape":  # the same keys on both
        minference.attention(q.cpu(), k.cpu(), v.cpu(), method, **options, guard=report)
        assert abs(minference.last_stats().mass_recall - stats.mass_recall) < 5e-3
    enforce = minference.Guard("enforce", rows=4, min_recall=1)
    got = minference.attention(q, k, v, method, **options, guard=enforce)
    check(got, host(minference.attention(q, k, v, "dense")))
    minference.attention(q, k, v, method, **options, guard=enforce, measure=True)
    assert sum(minference.last_stats().fallbacks.values()) == 12
    minference.attention(q, k, v, method, **options, guard="report")
    assert minference.last_stats().recall_count == 0


def test_out_of_memory():
    # The index of one head alone takes more memory than any device has; the tensors hardly any.
    tokens, batch = 1 << 21, 64
    q = k = torch.zeros(1, 1, 1, 8, dtype=BF16, device="cuda").expand(batch, tokens, 1, 8)
    short = problem()
    want = minference.attention(*short, "dense")
    with pytest.raises(RuntimeError, match="allocating [0-9]+ bytes of workspace failed: out of memory"):
        minference.attention(q, k, k, "block_sparse", top_k=tokens // 64)
    assert torch.equal(minference.attention(*short, "dense"), want)
    torch.testing.assert_close(minference.attention(*short, "vertical_slash"), want, rtol=2e-2, atol=2e-2)


# --- other libraries


def test_cupy():
    cupy = pytest.importorskip("cupy")
    q, k, v = problem(dtype=F16)
    want, logs = minference.attention(q, k, v, "dense", return_lse=True)
    arrays = [cupy.from_dlpack(t) for t in (q, k, v)]
    torch.cuda.synchronize()
    with cupy.cuda.Stream() as stream:
        out, lse = minference.attention(*arrays, "dense", return_lse=True)
        stream.synchronize()
    assert isinstance(out, cupy.ndarray) and isinstance(lse, cupy.ndarray)
    assert torch.equal(torch.from_dlpack(out), want) and torch.equal(torch.from_dlpack(lse), logs)
    minference.attention(*arrays, "a_shape", n_init=64, n_local=2048, out=out)
    torch.testing.assert_close(torch.from_dlpack(out), want)
