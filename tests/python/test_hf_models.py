"""Every model family in transformers, with minference's exact attention against transformers' own."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import minference.hf as hf  # noqa: E402
from hf_models import FAMILIES, exact_implementation, tiny_model, tokens  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402

LENGTH = 150
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")


@pytest.fixture(params=FAMILIES, scope="module")
def pair(request):
    """(the model with transformers' own attention, the same on minference's dense method)."""
    own = tiny_model(request.param, exact_implementation(request.param))
    ours = tiny_model(request.param)
    ours.load_state_dict(own.state_dict())
    hf.patch(ours, "dense")
    yield own, ours
    hf.unpatch(ours)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def assert_same(ours, own, where=None):
    if where is not None:
        ours, own = ours[where], own[where]
    torch.testing.assert_close(ours, own, rtol=2e-4, atol=2e-4)


def padding(batch, length, side):
    mask = torch.ones(batch, length, dtype=torch.long)
    for sequence in range(1, batch):
        pads = 37 * sequence
        mask[sequence, :pads] = 0
        if side == "right":
            mask[sequence] = mask[sequence].flip(0)
    return mask


def test_prefill(pair):
    own, ours = pair
    hf.reset_stats(ours)
    ids = tokens(2, LENGTH)
    assert_same(ours(ids).logits, own(ids).logits)
    figures = hf.stats(ours)
    assert figures["prefill_calls"] == 2 and figures["fallbacks"] == {}


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(pair, side):
    own, ours = pair
    ids, mask = tokens(3, LENGTH), padding(3, LENGTH, side)
    hf.reset_stats(ours)
    assert_same(ours(ids, attention_mask=mask).logits, own(ids, attention_mask=mask).logits, mask.bool())
    assert hf.stats(ours)["fallbacks"] == {}


def test_a_neighbour_changes_nothing(pair):
    _, ours = pair
    ids, mask = tokens(2, LENGTH), padding(2, LENGTH, "left")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    together = ours(ids, attention_mask=mask, position_ids=positions).logits[1, 37:]
    alone = ours(ids[1:, 37:]).logits[0]
    assert_same(together, alone)


@pytest.mark.parametrize("chunks", [(70, 80), (1, 149), (100, 1, 49)])
def test_chunks_with_a_dynamic_cache(pair, chunks):
    own, ours = pair
    ids = tokens(2, LENGTH)
    expected = own(ids).logits
    cache, begin = DynamicCache(config=ours.config), 0
    for chunk in chunks:
        logits = ours(ids[:, begin : begin + chunk], past_key_values=cache).logits
        assert_same(logits, expected[:, begin : begin + chunk])
        begin += chunk


@pytest.mark.parametrize("side", [None, "left"])
def test_chunks_with_a_static_cache(pair, side):
    own, ours = pair
    ids = tokens(2, LENGTH)
    mask = None if side is None else padding(2, LENGTH, side)
    expected = own(ids, attention_mask=mask).logits
    cache, begin = StaticCache(config=ours.config, max_cache_len=LENGTH + 30), 0
    for chunk in (70, 79, 1):
        end = begin + chunk
        logits = ours(
            ids[:, begin:end],
            attention_mask=None if mask is None else mask[:, :end],
            position_ids=torch.arange(begin, end)[None],
            past_key_values=cache,
        ).logits
        where = None if mask is None else mask[:, begin:end].bool()
        assert_same(logits, expected[:, begin:end], where)
        begin = end


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 64}])
def test_greedy_tokens(pair, options):
    own, ours = pair
    ids, mask = tokens(2, LENGTH), padding(2, LENGTH, "left")
    arguments = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, disable_compile=True, **options)
    hf.reset_stats(ours)
    assert torch.equal(ours.generate(ids, **arguments), own.generate(ids, **arguments))
    assert hf.stats(ours)["fallbacks"] == {}


def test_a_later_turn_after_right_padding(pair):
    """Padding between tokens: the keys of the first turn's padding must stay hidden."""
    own, ours = pair
    first, later = tokens(2, 90), tokens(2, 70, seed=2)
    mask = padding(2, 90, "right")
    whole = torch.cat([mask, torch.ones(2, 70, dtype=torch.long)], 1)
    caches = {}
    for model in (own, ours):
        cache = DynamicCache(config=model.config)
        model(first, attention_mask=mask, past_key_values=cache)
        caches[model] = model(later, attention_mask=whole, past_key_values=cache).logits
    assert_same(caches[ours], caches[own])


def test_compiled(pair):
    own, ours = pair
    ids, mask = tokens(2, LENGTH), padding(2, LENGTH, "left")
    torch._dynamo.reset()
    hf.reset_stats(ours)
    compiled = torch.compile(ours, backend="eager")
    assert_same(compiled(ids).logits, own(ids).logits)
    assert_same(compiled(ids, attention_mask=mask).logits, own(ids, attention_mask=mask).logits, mask.bool())
    assert hf.stats(ours)["fallbacks"] == {}


def test_slices_change_nothing(pair):
    _, ours = pair
    ids = tokens(2, LENGTH)
    expected = ours(ids).logits
    hf.patch(ours, "dense", slice_tokens=40)
    sliced = ours(ids).logits
    hf.patch(ours, "dense")
    assert_same(sliced, expected)
    assert not any("forward" in vars(module) for module in ours.modules())
