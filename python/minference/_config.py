"""MInferenceConfig: the reference system's names for methods, with its defaults, checked."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from . import _core
from ._patterns import find_patterns, model_key, shipped_patterns

# Models that the reference system supports, and those whose pattern file is in the package.
_REFERENCE_MODELS = (
    "gradientai/Llama-3-8B-Instruct-262k",
    "gradientai/Llama-3-8B-Instruct-Gradient-1048k",
    "gradientai/Llama-3-8B-Instruct-Gradient-4194k",
    "gradientai/Llama-3-70B-Instruct-Gradient-262k",
    "gradientai/Llama-3-70B-Instruct-Gradient-1048k",
    "meta-llama/Meta-Llama-3.1-8B-Instruct",
    "meta-llama/Meta-Llama-3.1-70B-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.1-70B-Instruct",
    "01-ai/Yi-9B-200K",
    "microsoft/Phi-3-mini-128k-instruct",
    "THUDM/glm-4-9b-chat-1m",
    "Qwen/Qwen2-7B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen2.5-32B-Instruct",
    "Qwen/Qwen2.5-72B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct-1M",
    "Qwen/Qwen2.5-14B-Instruct-1M",
)
_OTHER_MODELS = ("HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct")

_KV_TYPES = ("dense",)
_PLANNED_KV_TYPES = ("streamingllm", "snapkv", "pyramidkv", "quest", "retr_attn", "kivi", "leank")
_VLLM_TYPES = ("vllm", "vllm_minference", "vllm_a_shape", "vllm_tri_shape", "vllm_flexprefill")
_MODEL_AS_IT_IS = "hf"
_DEPRECATED_TYPES = {"minference_with_dense": "dense"}

# Arguments of the reference system that change nothing here, and the only values that say so.
_FIXED_KWARGS = {
    "xattention": {"chunk_size": 2048},
    "inf_llm": {
        "max_cached_block": 32,
        "base": 1e6,
        "distance_scale": 1.0,
        "dense_decoding": True,
    },
}
# Spelled so in the reference system's README, and otherwise in its code.
_MISSPELLED_KWARGS = {"last_n": "n_last"}
_COMMON_KWARGS = ("is_search", "starting_layer", "config_path")


def get_support_models() -> list[str]:
    """Hub names of the models that MInference("minference", name) knows, a list of str."""
    return [*_REFERENCE_MODELS, *_OTHER_MODELS]


class MInferenceConfig:
    """What MInference(...) was asked for, completed by defaults and checked.

    Args:
        attn_type: an attention method (get_available_attn_types()); "hf" leaves the model as it is.
        model_name: hub name or folder of the model, for the methods that take a pattern file. None: of
            the model that is patched.
        config_path: pattern file, a path or the name of a shipped one.
        starting_layer: layers below it run dense, for the methods with this option; -1: its default.
        kv_cache_cpu, kv_cache_cpu_device: refused unless False, "cpu": keys and values stay where they
            are.
        kv_type: what becomes of keys and values after prefill (get_available_kv_types()).
        is_search: refused unless False; `minference search` and `python -m minference.search` do that.
        attn_kwargs: options of the method by the reference system's names.

    Attributes beyond the arguments:
        method: name of the method, or None for "hf".
        options: the options that were given, as minference.attention() takes them.
        attn_kwargs: all of them with their defaults.

    Raises ValueError for a name, an option or a value that is not legal, and NotImplementedError for one
    that the reference system has and minference has not.
    """

    def __init__(
        self,
        attn_type: str = "minference",
        model_name: str | None = None,
        config_path: str | None = None,
        starting_layer: int = -1,
        kv_cache_cpu: bool = False,
        kv_cache_cpu_device: str = "cpu",
        kv_type: str = "dense",
        is_search: bool = False,
        attn_kwargs: Mapping[str, Any] | None = None,
    ):
        self.attn_type = self._checked_attn_type(attn_type)
        self.kv_type = self._checked_kv_type(kv_type)
        if kv_cache_cpu or kv_cache_cpu_device != "cpu":
            raise NotImplementedError(
                f"kv_cache_cpu is {kv_cache_cpu!r}, kv_cache_cpu_device is {kv_cache_cpu_device!r}; "
                "implemented: False, 'cpu'"
            )
        given = dict(attn_kwargs or {})
        self.is_search = given.pop("is_search", is_search)
        if self.is_search:
            raise NotImplementedError(
                "is_search is True; a search is run by `minference search` or python -m minference.search"
            )
        self.model_name = model_name
        self.config_path = given.pop("config_path", config_path)
        self.starting_layer = given.pop("starting_layer", starting_layer)
        self.kv_cache_cpu = kv_cache_cpu
        self.kv_cache_cpu_device = kv_cache_cpu_device
        self.method = None if self.attn_type == _MODEL_AS_IT_IS else self.attn_type
        self.options = self._checked_options(given)
        self.attn_kwargs = {
            "is_search": self.is_search,
            "starting_layer": self.starting_layer,
            "config_path": self.config_path,
            **self._defaults(),
            **self.options,
        }
        if self._takes_patterns() and model_name is not None:
            self.patterns_for(model_name)  # an unknown model is refused here, not when it is patched

    @classmethod
    def get_available_attn_types(cls) -> list[str]:
        """Names that attn_type may have, a list of str."""
        methods = _core.methods()
        return [m.name for m in methods] + [a for m in methods for a in m.aliases] + [_MODEL_AS_IT_IS]

    @classmethod
    def get_available_kv_types(cls) -> list[str]:
        """Names that kv_type may have, a list of str."""
        return list(_KV_TYPES)

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute or an entry of attn_kwargs by name."""
        return getattr(self, name, self.attn_kwargs.get(name, default))

    def patterns_for(self, model_name: str | None) -> _core.PatternFile | None:
        """The PatternFile to use on this model, or None: the method's own default for every head.

        Raises ValueError for a model that is neither known nor has a config_path, OSError for a path that
        cannot be read.
        """
        if not self._takes_patterns():
            return None
        if self.config_path is not None:
            return find_patterns(self.config_path)
        key = model_key(model_name or "")
        if key in shipped_patterns():
            return find_patterns(key)
        if key not in map(model_key, get_support_models()):
            raise ValueError(
                f"no pattern file for model {model_name!r}; give config_path (`minference search` writes "
                "one), or use attn_type 'auto', which needs none; known models: "
                + ", ".join(get_support_models())
            )
        warnings.warn(
            f"no pattern file for {model_name} is shipped: every head takes the default, "
            "vertical_and_slash (1000, 6096); `minference search` finds better ones",
            stacklevel=4,
        )
        return None

    def __repr__(self):
        return f"MInferenceConfig(attn_type={self.attn_type!r}, kv_type={self.kv_type!r}, {self.attn_kwargs})"

    def _takes_patterns(self):
        return self.method is not None and _core.find_method(self.method).takes_patterns

    @classmethod
    def _checked_attn_type(cls, name):
        if name in _DEPRECATED_TYPES:
            new = _DEPRECATED_TYPES[name]
            warnings.warn(f"attn_type {name!r} is deprecated, use {new!r}", DeprecationWarning, stacklevel=4)
            return new
        types = cls.get_available_attn_types()
        if name in _VLLM_TYPES:
            raise NotImplementedError(
                f"attn_type {name!r} is not implemented; implemented: {', '.join(types)}"
            )
        if name not in types:
            raise ValueError(f"attn_type is {name!r}; legal: {', '.join(types)}")
        return name if name == _MODEL_AS_IT_IS else _core.find_method(name).name

    @classmethod
    def _checked_kv_type(cls, name):
        name = name or "dense"
        if name in _PLANNED_KV_TYPES:
            raise NotImplementedError(
                f"kv_type {name!r} is not implemented; implemented: {', '.join(_KV_TYPES)}"
            )
        if name not in _KV_TYPES:
            raise ValueError(f"kv_type is {name!r}; legal: {', '.join(_KV_TYPES)}")
        return name

    def _defaults(self):
        if self.method is None:
            return {}
        options = {o.name: o.default for o in _core.find_method(self.method).options}
        options.pop("starting_layer", None)  # in attn_kwargs as the caller gave it
        return {**options, **_FIXED_KWARGS.get(self.method, {})}

    def _checked_options(self, given):
        """The options among attn_kwargs; starting_layer is one where the method has it."""
        for old, new in _MISSPELLED_KWARGS.items():
            if old in given:
                warnings.warn(
                    f"attn_kwargs[{old!r}] is deprecated, use {new!r}", DeprecationWarning, stacklevel=4
                )
                given[new] = given.pop(old)
        legal = self._defaults()
        fixed = _FIXED_KWARGS.get(self.method, {})
        options = {}
        for name, value in given.items():
            if name not in legal:
                raise ValueError(
                    f"attn_kwargs has {name!r}, which attn_type {self.attn_type!r} does not know; legal: "
                    + ", ".join([*legal, *_COMMON_KWARGS])
                )
            if name in fixed:
                if value is not None and value != fixed[name]:
                    raise ValueError(f"attn_kwargs[{name!r}] is {value!r}; legal: {fixed[name]!r}")
            elif value is not None:
                options[name] = value
        if self.starting_layer not in (None, -1):
            takers = [m.name for m in _core.methods() if _has_option(m, "starting_layer")]
            if self.method not in takers:
                raise ValueError(
                    f"starting_layer is {self.starting_layer}; legal for attn_type {self.attn_type!r}: -1 "
                    f"(other values: {', '.join(takers)})"
                )
            options["starting_layer"] = self.starting_layer
        if self.method is not None:
            _core.check_options(self.method, options)
        return options


def _has_option(method, name):
    return any(option.name == name for option in method.options)
