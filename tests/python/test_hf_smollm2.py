"""SmolLM2 through transformers, from the GGUF file of the tests: ours against torch's SDPA."""

import copy
import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

import minference  # noqa: E402
import minference.hf as hf  # noqa: E402
from minference.hf.loading import load_model  # noqa: E402

MODELS = Path(__file__).parents[2] / "models"
FILE = "smollm2-135m-instruct-q4_1.gguf"
pytestmark = pytest.mark.skipif(not (MODELS / FILE).is_file(), reason=f"models/{FILE} is not there")


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model():
    return load_model(str(MODELS / FILE), "float32", "cpu")


@pytest.fixture(scope="module")
def ids():
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODELS, gguf_file=FILE)
    text = (MODELS / "text" / "hamlet_gut.txt").read_text(encoding="utf-8", errors="replace")
    return tokenizer(text[20000:40000], return_tensors="pt").input_ids[:, :2000]


@pytest.fixture(autouse=True)
def unpatched(model):
    yield
    hf.unpatch(model)


def perplexity(model, ids):
    logits = model(ids, logits_to_keep=600).logits[0, :-1]
    return math.exp(torch.nn.functional.cross_entropy(logits, ids[0, -599:]))


def test_dense_is_sdpa(model, ids):
    exact = model(ids[:, :1500]).logits
    hf.patch(model, "dense")
    ours = model(ids[:, :1500]).logits
    assert (ours - exact).abs().max() < 1e-3 * exact.abs().max()


def test_dense_in_bfloat16_errs_as_sdpa_does(model, ids):
    def divergence_from(reference, logits):
        divergence = torch.nn.functional.kl_div(
            logits.float().log_softmax(-1), reference.log_softmax(-1), log_target=True, reduction="none"
        )
        return divergence.sum(-1).mean()

    prompt = ids[:, :1000]
    exact = model(prompt).logits
    half = copy.deepcopy(model).bfloat16()
    sdpa = divergence_from(exact, half(prompt).logits)
    hf.patch(half, "dense")
    ours = divergence_from(exact, half(prompt).logits)
    assert ours <= 2 * sdpa


def test_greedy_tokens_are_equal(model, ids):
    prompt = ids[:, :1200]
    arguments = dict(max_new_tokens=24, do_sample=False)
    expected = model.generate(prompt, **arguments)
    for options in ({}, {"prefill_chunk_size": 500}):
        hf.patch(model, "dense")
        assert torch.equal(model.generate(prompt, **arguments, **options), expected)


def test_sparse_perplexity_is_close(model, ids):
    dense = perplexity(model, ids)
    # Sparse wherever an index is found, also where this prompt is too short to gain.
    hf.patch(model, "auto", options={"min_keys": 256, "max_cost": 1000}, guard="report")
    sparse = perplexity(model, ids)
    figures = hf.stats(model)
    assert figures["kept_fraction"] < 0.6 and figures["mass_recall"] > 0.9
    assert abs(sparse / dense - 1) < 0.05


def test_shipped_patterns(model, ids):
    dense = perplexity(model, ids)
    hf.patch(model, "minference", patterns="HuggingFaceTB/SmolLM2-135M-Instruct")
    assert abs(perplexity(model, ids) / dense - 1) < 0.05
    assert hf.stats(model)["kept_fraction"] < 0.7


def test_the_reference_call(model, ids):
    minference.MInference("minference", "HuggingFaceTB/SmolLM2-135M-Instruct")(model)
    pipe = transformers.pipeline(
        "text-generation",
        model=model,
        tokenizer=transformers.AutoTokenizer.from_pretrained(MODELS, gguf_file=FILE),
    )
    text = pipe("The capital of France is", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    assert "Paris" in text
