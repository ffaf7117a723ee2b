"""Hugging Face models on a CUDA device: prefill by minference's kernels, decoding, padding, odd masks."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import minference  # noqa: E402
import minference.hf as hf  # noqa: E402
from hf_models import exact_implementation, tiny_model, tokens  # noqa: E402
from transformers import DynamicCache  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
LENGTH = 700
VERTICAL_SLASH = dict(method="vertical_slash", options={"vertical_size": 64, "slash_size": 8})


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def cuda_model(family="llama", dtype=torch.bfloat16, attention="sdpa", **overrides):
    overrides = {"head_dim": 64, "hidden_size": 256, "initializer_range": 0.1, **overrides}
    return tiny_model(family, attention, **overrides).to("cuda", dtype)


def ids(batch=1, length=LENGTH, seed=1):
    return tokens(batch, length, seed).cuda()


def error(got, want):
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def without_kernels():
    names = []
    token = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16, device="cuda")
    for method in minference.methods():
        try:
            minference.attention(token, token, token, method.name)
        except NotImplementedError:
            names.append(method.name)
    return names


def test_methods_without_kernels_leave_the_model_unpatched():
    model = cuda_model()
    for name in without_kernels():
        with pytest.raises(NotImplementedError, match=f"{name} has no CUDA kernels; those that do: .*dense"):
            hf.patch(model, name)
        assert not hf.is_patched(model) and model.config._attn_implementation == "sdpa"


def test_estimates_take_float32():
    model = cuda_model(dtype=torch.float32)
    want = model(ids()).logits
    hf.patch(model, **VERTICAL_SLASH, measure=True)
    got = model(ids()).logits
    assert 0 < hf.stats(model)["kept_fraction"] < 1
    assert torch.isfinite(got).all() and error(got, want) < 1


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dense_is_as_exact_as_transformers(family, dtype):
    exact = cuda_model(family, torch.float32, exact_implementation(family))
    model = cuda_model(family, dtype, exact_implementation(family))
    want, own = exact(ids()).logits, model(ids()).logits
    hf.patch(model, "dense")
    assert error(model(ids()).logits, want) < 2 * error(own, want) + 1e-3


def test_sparse_prefill_and_statistics():
    model, prompt = cuda_model(), ids(2, 4000)
    exact = model(prompt).logits
    hf.patch(model, "vertical_slash", options={"vertical_size": 4000, "slash_size": 4000})
    assert error(model(prompt).logits, exact) < 0.02
    hf.patch(model, **VERTICAL_SLASH)
    sparse = model(prompt).logits
    figures = hf.stats(model)
    assert figures["prefill_calls"] == 2 and figures["method"] == "vertical_slash"
    assert figures["kept_fraction"] is None and figures["kernel_seconds"] is None
    hf.patch(model, **VERTICAL_SLASH, measure=True)
    assert torch.equal(model(prompt).logits, sparse)
    figures = hf.stats(model)
    assert 0.1 < figures["kept_fraction"] < 0.95 and figures["kernel_seconds"] > 0
    hf.unpatch(model)
    assert torch.equal(model(prompt).logits, exact)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_sequence(side):
    model = cuda_model()
    hf.patch(model, **VERTICAL_SLASH)
    mask = torch.ones(3, LENGTH, dtype=torch.long, device="cuda")
    for sequence in (1, 2):
        pads = slice(0, 101 * sequence) if side == "left" else slice(LENGTH - 101 * sequence, LENGTH)
        mask[sequence, pads] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    together = model(ids(3), attention_mask=mask, position_ids=positions).logits
    for sequence in range(3):
        seen = mask[sequence].bool()
        alone = model(ids(3)[sequence : sequence + 1, seen]).logits
        assert error(together[sequence, seen], alone[0]) < 0.02


def test_odd_masks_are_exact():
    model = cuda_model()
    generator = torch.Generator("cuda").manual_seed(3)
    documents = (torch.arange(LENGTH, device="cuda") // 150)[None]
    mask = documents[:, :, None] == documents[:, None, :]
    mask = mask & torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cuda").tril()
    mask |= (torch.rand(1, LENGTH, LENGTH, generator=generator, device="cuda") > 0.9) & mask.any(1, True)
    want = model(ids(), attention_mask=mask[:, None]).logits
    hf.patch(model, "vertical_slash")
    assert error(model(ids(), attention_mask=mask[:, None]).logits, want) < 0.02
    assert hf.stats(model)["fallbacks"]["mask that is not causal with padding, computed exactly"] == 2
    hf.patch(model, "dense")
    additive = torch.zeros_like(mask, dtype=torch.bfloat16).masked_fill(~mask, torch.finfo(torch.bfloat16).min)
    assert error(model(ids(), attention_mask=additive[:, None]).logits, want) < 0.02


@pytest.mark.parametrize("chunk", [None, 128])
def test_generate(chunk):
    model = cuda_model(dtype=torch.float32, initializer_range=0.3)
    mask = torch.ones(2, LENGTH, dtype=torch.long, device="cuda")
    mask[1, :57] = 0
    arguments = dict(attention_mask=mask, max_new_tokens=12, do_sample=False)
    if chunk:
        arguments["prefill_chunk_size"] = chunk
    want = model.generate(ids(2), **arguments)
    hf.patch(model, "dense")
    assert torch.equal(model.generate(ids(2), **arguments), want)
    assert hf.stats(model)["decode_calls"] >= 2 * 11


def test_generate_in_bfloat16_with_a_sparse_method():
    model = cuda_model()
    hf.patch(model, **VERTICAL_SLASH)
    out = model.generate(ids(2), max_new_tokens=5, do_sample=False)
    assert out.shape == (2, LENGTH + 5)


def test_chunked_prefill_with_a_cache():
    model = cuda_model()
    exact = model(ids()).logits
    hf.patch(model, "vertical_slash", options={"vertical_size": LENGTH, "slash_size": LENGTH})
    cache = DynamicCache(config=model.config)
    parts = [model(part, past_key_values=cache).logits for part in ids().split(256, 1)]
    assert error(torch.cat(parts, 1), exact) < 0.02


def test_a_forward_does_not_wait_for_the_device():
    for family in ("llama", "gpt_oss"):
        model = cuda_model(family, attention=exact_implementation(family))
        hf.patch(model, "dense" if family == "gpt_oss" else "vertical_slash")
        numbers = ids()
        model.model(numbers)  # the first call reads sinks
        torch.cuda.set_sync_debug_mode("error")
        try:
            if family == "llama":
                model.model(numbers)
            else:  # its experts wait
                layer = model.model.layers[0].self_attn
                query = torch.zeros(1, 4, LENGTH, 64, dtype=torch.bfloat16, device="cuda")
                hf.attention.minference_attention(
                    layer, query, query[:, :2], query[:, :2], None, scaling=0.1, s_aux=layer.sinks
                )
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_compile():
    model = cuda_model()
    hf.patch(model, **VERTICAL_SLASH)
    want = model(ids()).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert error(compiled(ids()).logits, want) < 0.01


def test_models_loaded_by_name():
    model = cuda_model(attention="minference")
    assert model(ids()).logits.isfinite().all()
    hf.patch(model, "dense")
    assert model(ids()).logits.isfinite().all()
