"""generate() and caches as people use them: reused prefixes, later turns, assistants, compiled steps,
padded prompts in chunks."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import minference.hf as hf  # noqa: E402
from hf_models import FAMILIES, exact_implementation, tiny_model, tokens  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402

GREEDY = dict(max_new_tokens=8, do_sample=False)
A_SHAPE = dict(method="a_shape", options={"n_init": 32, "n_local": 64})


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=FAMILIES, scope="module")
def pair(request):
    """(the model with transformers' own attention, the same on minference's dense method)."""
    own = tiny_model(request.param, exact_implementation(request.param))
    ours = tiny_model(request.param)
    ours.load_state_dict(own.state_dict())
    return own, hf.patch(ours, "dense")


def close(ours, own):
    torch.testing.assert_close(ours, own, rtol=2e-4, atol=2e-4)


def test_a_prefix_is_reused(pair):
    """Two questions on copies of one document's cache: each answered as if it were read anew."""
    own, ours = pair
    document = tokens(1, 160)
    cache = DynamicCache(config=ours.config)
    ours(document, past_key_values=cache)
    hf.reset_stats(ours)
    for seed in (2, 3):
        prompt = torch.cat([document, tokens(1, 90, seed=seed)], 1)
        answer = ours.generate(prompt, past_key_values=copy.deepcopy(cache), **GREEDY)
        assert torch.equal(answer, own.generate(prompt, **GREEDY))
    assert cache.get_seq_length() == 160
    figures = hf.stats(ours)
    assert figures["causal_pairs"] < 2 * ours.config.num_hidden_layers * 4 * 250 * 251 / 2  # of all twice
    assert figures["fallbacks"] == {}


def test_later_turns_of_a_conversation(pair):
    own, ours = pair
    text, cache = tokens(1, 100), DynamicCache(config=ours.config)
    for turn in range(3):
        mask = torch.ones_like(text)  # tokens that look like padding are none
        answer = ours.generate(text, attention_mask=mask, past_key_values=cache, **GREEDY)
        assert torch.equal(answer, own.generate(text, attention_mask=mask, **GREEDY))
        text = torch.cat([answer, tokens(1, 70, seed=10 + turn)], 1)


def test_compiled_steps_with_a_static_cache(pair):
    own, ours = pair
    ids = tokens(2, 150)
    expected = own(ids).logits
    torch._dynamo.reset()
    # The experts of gpt-oss break the graph in transformers 4.
    compiled = torch.compile(ours, backend="eager", fullgraph=ours.config.model_type != "gpt_oss")
    cache, begin = StaticCache(config=ours.config, max_cache_len=200), 0
    for chunk in (100, 48, 1, 1):
        end = begin + chunk
        positions = torch.arange(begin, end)
        logits = compiled(
            ids[:, begin:end], past_key_values=cache, position_ids=positions[None], cache_position=positions
        ).logits
        close(logits, expected[:, begin:end])
        begin = end


def test_padded_prompts_in_chunks(pair):
    own, ours = pair
    ids, mask = tokens(3, 200), torch.ones(3, 200, dtype=torch.long)
    mask[1, :37] = 0
    mask[2, :130] = 0  # all of its first chunks are padding
    arguments = dict(attention_mask=mask, prefill_chunk_size=64, **GREEDY)
    hf.reset_stats(ours)
    assert torch.equal(ours.generate(ids, **arguments), own.generate(ids, **arguments))
    assert hf.stats(ours)["fallbacks"] == {}


@pytest.mark.skipif(
    transformers.__version__.startswith("4."),
    reason="transformers 4 counts padding among the positions of a prompt in chunks",
)
def test_padded_prompts_in_chunks_are_sparse_as_if_alone():
    model = hf.patch(tiny_model("llama"), **A_SHAPE)
    ids, mask = tokens(2, 500), torch.ones(2, 500, dtype=torch.long)
    mask[1, :130] = 0
    together = model.generate(ids, attention_mask=mask, prefill_chunk_size=200, **GREEDY)[:, 500:]
    figures = hf.stats(model)
    assert figures["kept_fraction"] < 0.8 and figures["fallbacks"] == {}
    for row, begin in ((0, 0), (1, 130)):
        alone = model.generate(ids[row : row + 1, begin:], **GREEDY)[0, -8:]
        assert torch.equal(together[row], alone)


def test_an_assistant_changes_no_token():
    model, assistant = tiny_model("llama"), tiny_model("llama", num_hidden_layers=1)
    ids = tokens(1, 40).repeat(1, 10)
    arguments = dict(max_new_tokens=20, do_sample=False, eos_token_id=2)
    hf.patch(model, **A_SHAPE)
    plain = model.generate(ids, **arguments)
    for method in ("dense", "a_shape"):
        hf.patch(assistant, method)
        hf.reset_stats(model)
        assert torch.equal(model.generate(ids, assistant_model=assistant, **arguments), plain)
        assert hf.stats(model)["prefill_calls"] > 2  # candidates were verified several at a time
    hf.unpatch(assistant)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **arguments), plain)
