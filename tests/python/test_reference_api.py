"""The reference system's names, row by row: signatures, defaults, kernels, refusals, deprecations."""

import copy
import inspect
import pickle

import minference
import numpy as np
import oracle
import pytest
import torch
from minference import MInference, MInferenceConfig

SIGNATURES = {
    "MInference": (
        {"attn_type": "minference", "model_name": None, "config_path": None, "starting_layer": -1}
        | {"kv_cache_cpu": False, "kv_type": "dense", "is_search": False, "attn_kwargs": None}
    ),
    "MInferenceConfig": (
        {"attn_type": "minference", "model_name": None, "config_path": None, "starting_layer": -1}
        | {"kv_cache_cpu": False, "kv_cache_cpu_device": "cpu", "kv_type": "dense", "is_search": False}
        | {"attn_kwargs": None}
    ),
    "get_support_models": {},
    "vertical_slash_sparse_attention": (
        dict.fromkeys(["query", "key", "value", "v_idx", "s_idx"], inspect.Parameter.empty)
        | {"block_size_M": 64, "block_size_N": 64}
    ),
    "block_sparse_attention": (
        dict.fromkeys(["query", "key", "value", "top_k"], inspect.Parameter.empty)
        | {"block_size_M": 64, "block_size_N": 64}
    ),
    "streaming_forward": dict.fromkeys(["q", "k", "v", "n_init", "n_local"], inspect.Parameter.empty),
    "minference_patch": dict.fromkeys(["model", "config"], inspect.Parameter.empty),
    "minference_patch_kv_cache_cpu": {"model": inspect.Parameter.empty},
    "minference_patch_with_kvcompress": dict.fromkeys(["model", "config"], inspect.Parameter.empty),
    "patch_hf": {
        "model": inspect.Parameter.empty,
        "attn_type": "inf_llm",
        "attn_kwargs": None,
        "base": None,
        "distance_scale": None,
    },
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    parameters = inspect.signature(getattr(minference, name)).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == list(SIGNATURES[name].items())
    assert name in minference.__all__


def test_version():
    assert minference.__version__.count(".") == 2


def test_support_models():
    names = minference.get_support_models()
    assert len(names) == len(set(names)) == 18 + len(minference.shipped_patterns())
    assert "Qwen/Qwen2.5-7B-Instruct" in names and "meta-llama/Llama-3.1-8B-Instruct" in names


# Every string that the reference system accepts, and what becomes of it.
METHODS = {
    **{name: name for name in ("minference", "tri_mix_minference", "dense", "static", "dilated1")},
    **{name: name for name in ("dilated2", "a_shape", "tri_shape", "inf_llm", "flexprefill")},
    **{name: name for name in ("xattention", "tri_mix")},
    "hf": None,
    "strided": "dilated2",
    "auto": "auto",
}


@pytest.mark.parametrize("attn_type", METHODS)
def test_attn_types(attn_type):
    config = MInferenceConfig(attn_type)
    assert config.method == METHODS[attn_type]
    assert attn_type in MInferenceConfig.get_available_attn_types()


def test_attn_types_without_vllm():
    for name in ("vllm", "vllm_minference", "vllm_a_shape", "vllm_tri_shape", "vllm_flexprefill"):
        with pytest.raises(NotImplementedError, match=f"'{name}' is not implemented; implemented: auto"):
            MInferenceConfig(name)
    with pytest.raises(ValueError, match="attn_type is 'foo'; legal: auto, minference, .*, hf"):
        MInferenceConfig("foo")
    with pytest.warns(DeprecationWarning, match="use 'dense'"):
        assert MInferenceConfig("minference_with_dense").method == "dense"


def test_kv_types():
    assert MInferenceConfig.get_available_kv_types() == ["dense"]
    assert MInferenceConfig("dense", kv_type="").kv_type == "dense"
    for name in ("streamingllm", "snapkv", "pyramidkv", "quest", "retr_attn", "kivi", "leank"):
        with pytest.raises(NotImplementedError, match=f"'{name}' is not implemented; implemented: dense"):
            MInferenceConfig("dense", kv_type=name)
    with pytest.raises(ValueError, match="kv_type is 'foo'; legal: dense"):
        MInferenceConfig("dense", kv_type="foo")


# The defaults that the reference system injects.
DEFAULTS = {
    "flexprefill": {"gamma": 0.9, "tau": 0.1, "block_size": 128},
    "a_shape": {"n_local": 3968, "n_init": 128},
    "tri_shape": {"n_local": 3968, "n_init": 128, "n_last": 100},
    "tri_mix": {"n_local": 512, "n_init": 8, "n_last": 128},
    "tri_mix_minference": {"n_local": 512, "n_init": 8, "n_last": 128},
    "xattention": {"stride": 8, "norm": 1, "threshold": 0.9, "block_size": 128, "chunk_size": 2048},
    "inf_llm": (
        {"block_size": 128, "n_init": 128, "n_local": 4096, "topk": 16, "repr_topk": 4}
        | {"max_cached_block": 32, "exc_block_size": 512, "base": 1e6, "distance_scale": 1.0}
        | {"dense_decoding": True}
    ),
    "minference": {"minference_ratio": 1.0},
    "dense": {},
}


@pytest.mark.parametrize("attn_type", DEFAULTS)
def test_default_kwargs(attn_type):
    kwargs = MInferenceConfig(attn_type).attn_kwargs
    common = {"is_search": False, "starting_layer": -1, "config_path": None}
    assert {**common, **DEFAULTS[attn_type]}.items() <= kwargs.items()
    # The reference system's whole set of defaults may be given back.
    again = MInferenceConfig(attn_type, attn_kwargs=kwargs)
    assert again.attn_kwargs == kwargs
    minference.attention(*3 * [np.zeros((1, 4, 1, 8), np.float32)], attn_type, options=again.options)


def test_starting_layer():
    assert "starting_layer" not in MInferenceConfig("tri_mix").options  # the method's own default, 16
    for config in (
        MInferenceConfig("minference", starting_layer=5),
        MInferenceConfig("minference", attn_kwargs={"starting_layer": 5}),
    ):
        assert config.options["starting_layer"] == config.starting_layer == config.get("starting_layer") == 5
    with pytest.raises(ValueError, match="starting_layer is 5; legal for attn_type 'a_shape': -1"):
        MInferenceConfig("a_shape", starting_layer=5)


def test_kwargs_are_checked():
    with pytest.raises(ValueError, match="attn_kwargs has 'n_foo', .*; legal: n_init, n_local"):
        MInferenceConfig("a_shape", attn_kwargs={"n_foo": 1})
    with pytest.raises(ValueError, match="option n_local of method a_shape is 0; legal"):
        MInferenceConfig("a_shape", attn_kwargs={"n_local": 0})
    with pytest.raises(ValueError, match=r"attn_kwargs\['chunk_size'\] is 512; legal: 2048"):
        MInferenceConfig("xattention", attn_kwargs={"chunk_size": 512})
    with pytest.raises(ValueError, match="attn_kwargs has 'n_init'"):
        MInferenceConfig("hf", attn_kwargs={"n_init": 1})
    with pytest.warns(DeprecationWarning, match="use 'n_last'"):
        assert MInferenceConfig("tri_mix", attn_kwargs={"last_n": 9}).options == {"n_last": 9}
    assert MInferenceConfig("flexprefill", attn_kwargs={"min_budget": None}).options == {}
    with pytest.raises(TypeError):
        MInference("dense", foo=1)
    with pytest.raises(NotImplementedError, match="kv_cache_cpu is True"):
        MInference("dense", kv_cache_cpu=True)
    with pytest.raises(NotImplementedError, match="minference search"):
        MInference("dense", is_search=True)


def test_the_callers_kwargs_stay_as_they_were():
    given = {"starting_layer": 5, "minference_ratio": 0.5}
    MInferenceConfig("minference", attn_kwargs=given)
    assert given == {"starting_layer": 5, "minference_ratio": 0.5}


def test_pattern_files_by_model():
    config = MInferenceConfig("minference", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert config.patterns_for(config.model_name).layers == 30
    assert MInferenceConfig("minference").patterns_for("somewhere/SmolLM2-135M-Instruct/").layers == 30
    shipped = MInferenceConfig("minference", "any/model", config_path="qwen2.5-coder-0.5b-instruct")
    assert (shipped.patterns_for("any/model").layers, shipped.patterns_for(None).heads) == (24, 14)
    with pytest.warns(UserWarning, match=r"every head takes the default, vertical_and_slash \(1000, 6096\)"):
        MInferenceConfig("minference", "Qwen/Qwen2.5-7B-Instruct")
    for name in ("minference", "tri_mix_minference"):
        with pytest.raises(ValueError, match="no pattern file for model 'a/b'; give config_path"):
            MInferenceConfig(name, "a/b")
    with pytest.raises(ValueError, match="no pattern file for model None"):
        MInferenceConfig("minference").patterns_for(None)
    with pytest.raises(OSError, match="missing.json"):
        MInferenceConfig("minference", "a/b", config_path="missing.json")
    assert MInferenceConfig("a_shape", "a/b").patterns_for("a/b") is None


def test_config_is_plain_data():
    config = MInferenceConfig("flexprefill", attn_kwargs={"gamma": 0.95})
    assert config.get("gamma") == 0.95 and config.get("attn_type") == "flexprefill"
    assert config.get("foo", 3) == 3 and config.get("foo") is None
    for twin in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert vars(twin) == vars(config)
    assert "flexprefill" in repr(config)
    assert "0.95" in repr(MInference("flexprefill", attn_kwargs={"gamma": 0.95}))


@pytest.mark.parametrize(
    "value",
    [
        minference.Guard("enforce", rows=4, min_recall=0.5),
        minference.Segment(3, 9, "visual", stride=3),
        minference.find_patterns("smollm2-135m-instruct"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_pickling(value):
    twin = pickle.loads(pickle.dumps(value))
    assert repr(twin) == repr(value)
    if isinstance(value, minference.PatternFile):
        assert twin.to_json() == value.to_json()


def test_pattern_files_are_written_as_they_were_read(tmp_path):
    patterns = minference.find_patterns("smollm2-135m-instruct")
    patterns.save(str(tmp_path / "twin.json"))
    twin = minference.find_patterns(tmp_path / "twin.json")
    assert twin.to_json() == patterns.to_json() == (tmp_path / "twin.json").read_text()
    assert twin.at(0, 0) == patterns.at(0, 0)


def heads_first(tokens, heads=4, kv_heads=2, dim=32, kind=torch.Tensor):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, h, tokens, dim, generator=generator) for h in (heads, kv_heads, kv_heads)]
    return tensors if kind is torch.Tensor else [t.numpy() for t in tensors]


def check(got, tensors, seen):
    assert type(got) is type(tensors[0]) and got.shape == tensors[0].shape
    for b in range(2):
        q, k, v = (np.asarray(t[b]).swapaxes(0, 1) for t in tensors)
        want, _ = oracle.attend(q, k, v, seen if seen.ndim == 2 else seen[b])
        np.testing.assert_allclose(np.asarray(got[b]).swapaxes(0, 1), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", [torch.Tensor, np.ndarray])
@pytest.mark.parametrize("tokens", [300, 256, 1])
def test_streaming_forward(tokens, kind):
    tensors = heads_first(tokens, kind=kind)
    offset = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    seen = (offset >= 0) & ((offset < 40) | (np.arange(tokens) < 5)[None, :])
    check(minference.streaming_forward(*tensors, 5, 40), tensors, seen)


@pytest.mark.parametrize("kind", [torch.Tensor, np.ndarray])
@pytest.mark.parametrize("shape", [(2, 4, -1), (2, -1)])
def test_vertical_slash(shape, kind):
    tokens = 300
    tensors = heads_first(tokens, kind=kind)
    random = np.random.default_rng(0)
    columns = random.integers(0, tokens, (2, 4, 9)).astype(np.int32)
    offsets = np.concatenate([np.zeros((2, 4, 1), int), random.integers(0, tokens, (2, 4, 5))], 2)
    rows, keys = np.arange(tokens)[:, None], np.arange(tokens)[None, :]
    seen = np.zeros((2, 4, tokens, tokens), bool)
    for b, h in np.ndindex(2, 4):
        for column in columns[b, h]:
            seen[b, h, :, column] = True
        # An offset covers whole tiles of 64 rows and 32 keys.
        for offset in offsets[b, h]:
            hit = np.zeros((320, 320), bool)
            row = np.arange(tokens)[np.arange(tokens) >= offset]
            hit[row, row - offset] = True
            tiles = hit.reshape(5, 64, 10, 32).any((1, 3))
            seen[b, h] |= tiles[np.arange(tokens) // 64][:, np.arange(tokens) // 32]
    seen &= keys <= rows
    index = [array.reshape(shape) for array in (columns, offsets)]
    if kind is torch.Tensor:
        index = [torch.tensor(array) for array in index]
    check(minference.vertical_slash_sparse_attention(*tensors, *index), tensors, seen)


def test_vertical_slash_with_everything_is_dense():
    tensors = heads_first(200)
    everything = torch.arange(200).expand(2, 4, 200)
    got = minference.vertical_slash_sparse_attention(*tensors, everything, everything)
    check(got, tensors, oracle.visible(200, 200))


def test_block_sparse():
    tensors = heads_first(1000)
    check(minference.block_sparse_attention(*tensors, 16), tensors, oracle.visible(1000, 1000))
    got = minference.block_sparse_attention(*tensors, 3)
    assert minference.last_stats().method == "block_sparse" and minference.last_stats().kept_fraction < 0.6
    q, k, v = (t.transpose(1, 2) for t in tensors)
    assert torch.equal(got, minference.attention(q, k, v, "block_sparse", top_k=3).transpose(1, 2))


def test_kernels_refuse_bad_input():
    tensors = heads_first(100)
    index = torch.zeros(2, 4, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="block_size_M is 32; legal: 64"):
        minference.vertical_slash_sparse_attention(*tensors, index, index, block_size_M=32)
    with pytest.raises(ValueError, match="v_idx has shape .3,.; legal"):
        minference.vertical_slash_sparse_attention(*tensors, index[0, 0], index)
    with pytest.raises(ValueError, match="100"):
        minference.vertical_slash_sparse_attention(*tensors, index + 100, index)
    with pytest.raises(ValueError, match="-1"):
        minference.vertical_slash_sparse_attention(*tensors, index, index - 1)
    with pytest.raises(ValueError, match="option top_k of method block_sparse is 0"):
        minference.block_sparse_attention(*tensors, 0)
    with pytest.raises(ValueError, match="option n_local of method a_shape is 0"):
        minference.streaming_forward(*tensors, 4, 0)


def test_older_entry_points_warn():
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="config is a int"):
        minference.minference_patch(None, 3)
    with pytest.warns(DeprecationWarning), pytest.raises(NotImplementedError, match="on the CPU"):
        minference.minference_patch_kv_cache_cpu(None)
    with pytest.warns(DeprecationWarning), pytest.raises(NotImplementedError, match="kv types: dense"):
        minference.minference_patch_with_kvcompress(None, None)
    with pytest.warns(DeprecationWarning), pytest.raises(NotImplementedError, match="base is 3.0"):
        minference.patch_hf(None, base=3.0)
    with pytest.warns(DeprecationWarning), pytest.raises(TypeError, match="model is a NoneType"):
        minference.patch_hf(None)
    with pytest.warns(DeprecationWarning), pytest.raises(TypeError, match="model is a NoneType"):
        minference.minference_patch(None, MInferenceConfig("static"))
