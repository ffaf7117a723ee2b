"""Masks of transformers against attention over the explicit mask, for any padding, offset and window."""

import types

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import minference.hf  # noqa: E402, F401
from minference.hf import masks  # noqa: E402
from minference.hf.attention import minference_attention  # noqa: E402
from transformers import masking_utils  # noqa: E402

HEADS, KV_HEADS, DIM = 4, 2, 16


def explicit(batch, q_length, kv_length, q_offset, window, padding):
    """bool [batch, 1, q_length, kv_length], written out."""
    mask = torch.zeros(batch, 1, q_length, kv_length, dtype=torch.bool)
    for sequence in range(batch):
        for row in range(q_length):
            for key in range(min(q_offset + row + 1, kv_length)):
                near = window == 0 or key > q_offset + row - window
                mask[sequence, 0, row, key] = near and bool(padding[sequence, key])
    return mask


def paddings(batch, length, kind, generator):
    padding = torch.ones(batch, length, dtype=torch.bool)
    if kind == "left":
        for sequence in range(batch):
            padding[sequence, : 11 * sequence] = False
    elif kind == "right":
        for sequence in range(batch):
            padding[sequence, length - 11 * sequence :] = False
    elif kind == "holes":
        padding = torch.rand(batch, length, generator=generator) > 0.3
    return padding


@pytest.mark.parametrize("kind", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("window", [0, 9, 1000])
@pytest.mark.parametrize(
    ("q_length", "q_offset", "unused"), [(40, 0, 0), (25, 15, 0), (1, 39, 0), (30, 20, 14)]
)
def test_any_padding(kind, window, q_length, q_offset, unused):
    generator = torch.Generator(torch.get_default_device()).manual_seed(q_length + window)
    batch, end = 3, q_offset + q_length
    kv_length = end + unused  # a static cache has places that are not used yet
    padding = paddings(batch, end, kind, generator)
    function, extra = masking_utils.causal_mask_function, {}
    if window:
        function, extra = masking_utils.sliding_window_causal_mask_function(window), {"local_size": window}
    mask = masks.minference_mask(
        batch, q_length, kv_length, q_offset, mask_function=function, attention_mask=padding, **extra
    )
    full = torch.nn.functional.pad(padding, (0, unused))
    expected_mask = explicit(batch, q_length, kv_length, q_offset, window, full)

    def normal(heads, length):
        return torch.randn(batch, heads, length, DIM, generator=generator)

    query, key, value = normal(HEADS, q_length), normal(KV_HEADS, kv_length), normal(KV_HEADS, kv_length)
    key[:, :, end:] = value[:, :, end:] = float("nan")
    module = types.SimpleNamespace(config=types.SimpleNamespace(sliding_window=window), layer_idx=0)
    out, weights = minference_attention(module, query, key, value, mask, scaling=0.25)
    assert weights is None and out.shape == (batch, q_length, HEADS, DIM)

    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key.nan_to_num(), value.nan_to_num(), attn_mask=expected_mask, scale=0.25, enable_gqa=True
    ).transpose(1, 2)
    tokens = padding[:, q_offset:end] & expected_mask[:, 0].any(-1)  # nobody reads the rows of padding
    torch.testing.assert_close(out[tokens], expected[tokens], rtol=1e-4, atol=1e-5)


def test_a_mask_survives_being_taken_for_padding():
    """generate() makes the masks of a static cache and gives them to the model as its attention mask."""
    padding = torch.tensor([[False, True, True], [True, True, True]])
    once = masks.minference_mask(2, 3, 8, attention_mask=padding)
    twice = masks.minference_mask(2, 3, 8, attention_mask=once.to(torch.bool))
    assert torch.equal(once, twice)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(1, 1, 5, 5, dtype=torch.bool),
        torch.ones(1, 1, 5, 5, dtype=torch.bool).triu(),
        torch.zeros(1, 1, 5, 5, dtype=torch.bool),
        torch.rand(1, 1, 5, 5),
        torch.ones(1, 2, 5, 5, dtype=torch.bool).tril(),
        torch.ones(1, 1, 5, 5, dtype=torch.bool).tril() & ~torch.ones(5, 5, dtype=torch.bool).tril(-3),
    ],
)
def test_what_is_not_recognised(mask):
    assert masks.recognise(mask) is None
