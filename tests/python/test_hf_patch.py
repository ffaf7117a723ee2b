"""Patching a Hugging Face model: what comes and goes, sparse prefill, and what is refused."""

import copy
import os
import pickle
import threading
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import minference  # noqa: E402
import minference.hf as hf  # noqa: E402
from hf_models import tiny_model, tokens  # noqa: E402
from transformers import DynamicCache  # noqa: E402

# A rule of positions alone, small enough that short prompts are sparse; the same for chunks and padding.
# Measured, because on a CUDA device statistics have counts only then.
A_SHAPE = dict(method="a_shape", options={"n_init": 32, "n_local": 64}, measure=True)
estimates = pytest.mark.skipif(
    "MINFERENCE_TEST_DEVICE" in os.environ,
    reason="on CUDA no method remembers earlier chunks, and a pattern's runs are of whole boxes",
)


@pytest.fixture
def model():
    return tiny_model("llama")


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def close(ours, own):
    torch.testing.assert_close(ours, own, rtol=2e-4, atol=2e-4)


def snapshot(model):
    """Everything that patching could leave behind."""
    modules = [(id(m), sorted(vars(m)), len(m._forward_pre_hooks)) for m in model.modules()]
    return modules, model.config._attn_implementation, model.config.to_dict()


# --- patch and unpatch


def test_unpatch_restores_everything(model):
    before, logits = snapshot(model), model(tokens(1, 200)).logits
    hf.patch(model, **A_SHAPE, slice_tokens=50)
    assert hf.is_patched(model) and model.config._attn_implementation == "minference"
    assert not torch.allclose(model(tokens(1, 200)).logits, logits)
    assert hf.unpatch(model) is model
    assert snapshot(model) == before and not hf.is_patched(model)
    assert torch.equal(model(tokens(1, 200)).logits, logits)
    hf.unpatch(model)  # nothing to do
    assert snapshot(model) == before


def test_patching_twice_keeps_the_first_state_and_the_last_settings(model):
    before = snapshot(model)
    hf.patch(model, "dense", slice_tokens=50)
    once = [len(m._forward_pre_hooks) for m in model.modules()]
    hf.patch(model, **A_SHAPE)
    assert [len(m._forward_pre_hooks) for m in model.modules()] == once
    model(tokens(1, 200))
    assert hf.stats(model)["method"] == "a_shape"
    hf.unpatch(model)
    assert snapshot(model) == before


def test_eager_comes_back_as_eager():
    model = tiny_model("gemma2", "eager")
    hf.unpatch(hf.patch(model))
    assert model.config._attn_implementation == "eager"


def test_loading_by_name_needs_no_patch(tmp_path, model):
    model.save_pretrained(tmp_path)
    hf.reset_stats()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="minference")
    ids = tokens(2, 150)
    close(loaded(ids).logits, model(ids).logits)
    assert hf.stats(loaded)["prefill_calls"] == 2 and hf.stats()["method"] == "auto"
    hf.patch(loaded, "dense")
    loaded(ids)
    assert hf.stats(loaded)["prefill_calls"] == 2 and hf.stats(loaded)["method"] == "dense"
    hf.unpatch(loaded)
    assert loaded.config._attn_implementation == "minference"


def test_copies_are_patched_models_of_their_own(model):
    hf.patch(model, **A_SHAPE, slice_tokens=50)
    ids = tokens(1, 200)
    expected = model(ids).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        hf.reset_stats(model)
        close(other(ids).logits, expected)
        assert hf.stats(other)["prefill_calls"] == 2 and hf.stats(model)["prefill_calls"] == 0
        for parameter in other.parameters():
            parameter.zero_()
        assert not other(ids).logits.any()
        hf.unpatch(other)
        assert other.config._attn_implementation == "sdpa" and hf.is_patched(model)


def test_the_three_lines_of_the_reference(model):
    assert minference.MInference("a_shape", attn_kwargs={"n_local": 64, "n_init": 32})(model) is model
    model(tokens(1, 200))
    stats = hf.stats(model)
    assert stats["method"] == "a_shape" and (stats["kept_fraction"] or 0) < 1  # None: not measured, CUDA
    minference.MInference("hf")(model)
    assert not hf.is_patched(model)


# --- sparse prefill


def test_sequences_of_a_padded_batch_are_as_if_alone(model):
    ids = tokens(2, 300)
    mask = torch.ones_like(ids)
    mask[1, :100] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    hf.patch(model, **A_SHAPE)
    together = model(ids, attention_mask=mask, position_ids=positions).logits
    figures = hf.stats(model)
    assert figures["kept_fraction"] < 0.8 and figures["fallbacks"] == {}
    close(together[0], model(ids[:1]).logits[0])
    close(together[1, 100:], model(ids[1:, 100:]).logits[0])


def test_chunks_and_later_turns_are_sparse(model):
    ids = tokens(1, 700)
    hf.patch(model, **A_SHAPE)
    whole = model(ids).logits
    cache = DynamicCache(config=model.config)
    for begin, end in [(0, 200), (200, 500), (500, 700)]:
        hf.reset_stats(model)
        close(model(ids[:, begin:end], past_key_values=cache).logits, whole[:, begin:end])
        assert hf.stats(model)["kept_fraction"] < 0.8


@estimates
def test_chunks_share_what_a_method_remembers(model):
    """`static` refuses a chunk whose prompt it has not seen from the beginning."""
    hf.patch(model, "static", options={"vertical_size": 30, "slash_size": 100})
    first = model.generate(tokens(1, 900), prefill_chunk_size=300, max_new_tokens=3, do_sample=False)
    again = model.generate(tokens(1, 900), prefill_chunk_size=300, max_new_tokens=3, do_sample=False)
    assert torch.equal(first, again)
    assert hf.stats(model)["kept_fraction"] < 0.9


@estimates
def test_two_conversations_at_once_do_not_mix(model):
    hf.patch(model, "static", options={"vertical_size": 30, "slash_size": 100})
    prompts = [tokens(1, 600, seed) for seed in (1, 2)]

    def run(order):
        caches, results = [DynamicCache(), DynamicCache()], {}
        for which, part in order:
            begin = 300 * part
            out = model(prompts[which][:, begin : begin + 300], past_key_values=caches[which])
            results[which, part] = out.logits
        return results

    mixed = run([(0, 0), (1, 0), (0, 1), (1, 1)])
    apart = run([(0, 0), (0, 1), (1, 0), (1, 1)])
    for key, logits in mixed.items():
        close(logits, apart[key])


@estimates
def test_pattern_file(model):
    patterns = minference.PatternFile(2)
    for layer in range(2):
        for head in range(4):
            patterns.set(layer, head, "stream_llm", 32, 64)
    hf.patch(model, "minference", patterns=patterns)
    ids = tokens(1, 300)
    logits = model(ids).logits
    hf.patch(model, **A_SHAPE)
    close(model(ids).logits, logits)


def test_assisted_decoding_verifies_exactly(model):
    ids = tokens(1, 40).repeat(1, 10)
    arguments = dict(max_new_tokens=20, do_sample=False, eos_token_id=2)
    hf.patch(model, **A_SHAPE)
    plain = model.generate(ids, **arguments)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=5, **arguments), plain)


def test_generate_asks_for_the_last_logits_only(model):
    hf.patch(model, "dense")
    shapes = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape[1]))
    model.generate(tokens(1, 200), max_new_tokens=2, do_sample=False)
    assert shapes == [1, 1]


def test_sliding_windows_are_exact_and_counted():
    model = tiny_model("mistral")
    ids = tokens(1, 200)
    expected = model(ids).logits
    hf.patch(model, **A_SHAPE)
    close(model(ids).logits, expected)
    assert hf.stats(model)["fallbacks"] == {"sliding window, computed exactly": 2}


def test_guard(model):
    hf.patch(model, **A_SHAPE, guard="report")
    model(tokens(1, 400))
    assert 0 < hf.stats(model)["mass_recall"] < 1


def test_threads_share_a_model(model):
    hf.patch(model, **A_SHAPE)
    prompts = [tokens(1, 200 + 10 * i, seed=i) for i in range(8)]
    expected = [model(ids).logits for ids in prompts]
    results = [None] * 8

    def run(i):
        with torch.no_grad():
            results[i] = model(prompts[i], past_key_values=DynamicCache()).logits

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, logits in zip(results, expected, strict=True):
        close(result, logits)


def test_compiled_whole(model):
    ids = tokens(1, 200)
    hf.patch(model, **A_SHAPE)
    expected = model(ids).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    close(compiled(ids, use_cache=False).logits, expected)


def test_exported(model):
    ids = tokens(1, 200)
    hf.patch(model, **A_SHAPE)
    exported = torch.export.export(model, (ids,), {"use_cache": False}, strict=False)
    close(exported.module()(ids, use_cache=False).logits, model(ids).logits)


# --- masks


def causal(batch, length):
    return torch.ones(batch, 1, length, length, dtype=torch.bool).tril()


def test_explicit_causal_masks_are_recognised(model):
    ids = tokens(2, 200)
    hf.patch(model, **A_SHAPE)
    mask = causal(2, 200)
    mask[1, :, :, :40] = False
    padding = mask[:, 0, -1].long()
    expected = model(ids, attention_mask=padding).logits
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    for explicit in (mask, additive):
        hf.reset_stats(model)
        logits = model(ids, attention_mask=explicit).logits
        close(logits[padding.bool()], expected[padding.bool()])
        assert hf.stats(model)["fallbacks"] == {} and hf.stats(model)["kept_fraction"] < 1


def test_other_masks_are_exact_with_one_warning(model):
    ids = tokens(1, 200)
    mask = causal(1, 200)
    mask[:, :, :50, :50] = True  # a prefix that sees itself
    weighted = torch.where(mask, torch.rand(mask.shape), torch.finfo(torch.float32).min)
    expected = [model(ids, attention_mask=m).logits for m in (mask, weighted)]
    hf.patch(model, **A_SHAPE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hf.settings._warned.clear()
        close(model(ids, attention_mask=mask).logits, expected[0])
        close(model(ids, attention_mask=weighted).logits, expected[1])
    assert [str(w.message) for w in caught].count(str(caught[0].message)) == 1
    assert "not causal" in str(caught[0].message)
    assert sum(hf.stats(model)["fallbacks"].values()) >= 4


def test_a_batch_of_nothing_but_padding(model):
    hf.patch(model, **A_SHAPE)
    ids, mask = tokens(2, 100), torch.ones(2, 100, dtype=torch.long)
    mask[1] = 0
    logits = model(ids, attention_mask=mask).logits
    assert logits.isfinite().all()
    close(logits[:1], model(ids[:1]).logits)


# --- refusals: the message names value and legal range, the model stays usable and unpatched


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(method="a_shap"), ValueError, "a_shape"),
        (dict(method="a_shape", options={"n_locl": 3}), ValueError, "n_local"),
        (dict(method="a_shape", options={"n_local": 0}), ValueError, "n_local"),
        (dict(method="a_shape", patterns=minference.PatternFile(2)), ValueError, "minference"),
        (dict(method="minference", patterns=minference.PatternFile(3)), ValueError, "3"),
        (dict(method="minference", patterns="no/such/file.json"), OSError, "no/such/file.json"),
        (dict(method="auto", guard="always"), ValueError, "enforce"),
        (dict(method="auto", slice_tokens=-1), ValueError, "slice_tokens is -1"),
        (dict(method="auto", threads=-1), ValueError, "threads"),
    ],
)
def test_bad_settings(model, arguments, error, words):
    before = snapshot(model)
    with pytest.raises(error, match=words):
        hf.patch(model, **arguments)
    assert snapshot(model) == before
    model(tokens(1, 80))


def test_bad_settings_keep_an_earlier_patch(model):
    hf.patch(model, **A_SHAPE)
    with pytest.raises(ValueError):
        hf.patch(model, "a_shap")
    model(tokens(1, 200))
    assert hf.stats(model)["method"] == "a_shape"


def test_a_dtype_that_the_library_has_not(model):
    model.double()
    with pytest.raises(ValueError, match="float"):
        hf.patch(model)
    assert not hf.is_patched(model)


def test_what_is_no_model():
    with pytest.raises(TypeError, match="Linear"):
        hf.patch(torch.nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("class_name", "sizes", "words"),
    [
        (
            "BertModel",
            dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32),
            "causal|AttentionInterface",
        ),
        ("MambaForCausalLM", dict(hidden_size=32, num_hidden_layers=1, vocab_size=50), "causal"),
        ("BloomForCausalLM", dict(hidden_size=32, n_layer=1, n_head=2, vocab_size=50), "AttentionInterface"),
    ],
)
def test_unsupported_architectures(class_name, sizes, words):
    model_class = getattr(transformers, class_name)
    model = model_class(model_class.config_class(**sizes))
    with pytest.raises(NotImplementedError, match=words):
        hf.patch(model)
    assert not hf.is_patched(model)


def test_gradients_are_refused(model):
    hf.patch(model, "dense")
    with torch.enable_grad():
        loss = model(tokens(1, 100), labels=tokens(1, 100)).loss
        with pytest.raises(NotImplementedError, match="no backward pass"):
            loss.backward()


def test_weights_and_dropout_are_refused(model):
    hf.patch(model, "dense")
    with pytest.raises(NotImplementedError, match="eager"):
        model(tokens(1, 100), output_attentions=True)
    dropping = tiny_model("llama", attention_dropout=0.5).train()
    hf.patch(dropping, "dense")
    with pytest.raises(NotImplementedError, match="dropout is 0.5"):
        dropping(tokens(1, 100))
