"""MInference and the reference system's older entry points: methods onto Hugging Face models."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from . import _core
from ._config import MInferenceConfig

# Rows at a time that norms and MLPs of a patched model take, as in the reference system.
_SLICE_TOKENS = 96_000


class MInference:
    """Puts an attention method into a Hugging Face model: model = MInference("minference", name)(model).

    The arguments are those of MInferenceConfig, with two of our own:

        guard: None, "report", "enforce" or a minference.Guard.
        threads: None: torch.get_num_threads().

    Raises what MInferenceConfig raises.
    """

    def __init__(
        self,
        attn_type: str = "minference",
        model_name: str | None = None,
        config_path: str | None = None,
        starting_layer: int = -1,
        kv_cache_cpu: bool = False,
        kv_type: str = "dense",
        is_search: bool = False,
        attn_kwargs: Mapping[str, Any] | None = None,
        *,
        kv_cache_cpu_device: str = "cpu",
        guard: _core.Guard | str | None = None,
        threads: int | None = None,
    ):
        self.config = MInferenceConfig(
            attn_type=attn_type,
            model_name=model_name,
            config_path=config_path,
            starting_layer=starting_layer,
            kv_cache_cpu=kv_cache_cpu,
            kv_cache_cpu_device=kv_cache_cpu_device,
            kv_type=kv_type,
            is_search=is_search,
            attn_kwargs=attn_kwargs,
        )
        self.guard = guard
        self.threads = threads

    def __call__(self, model: Any) -> Any:
        return self.patch_model(model)

    def patch_model(self, model: Any) -> Any:
        """Patches the model in place and returns it; patched twice, the last one counts.

        Raises NotImplementedError for an architecture without transformers' AttentionInterface, ValueError
        when the pattern file does not fit the model or the model is not known.
        """
        from . import hf

        if self.config.method is None:
            return hf.unpatch(model)
        name = self.config.model_name or getattr(getattr(model, "config", None), "_name_or_path", None)
        return hf.patch(
            model,
            self.config.method,
            options=self.config.options,
            patterns=self.config.patterns_for(name),
            guard=self.guard,
            threads=self.threads,
            slice_tokens=_SLICE_TOKENS,
        )

    def __repr__(self):
        return f"MInference({self.config!r})"


def minference_patch(model: Any, config: MInferenceConfig) -> Any:
    """Deprecated: MInference(config.attn_type, ...)(model). config: a MInferenceConfig."""
    _deprecated("minference_patch(model, config)", "MInference(...)(model)")
    if not isinstance(config, MInferenceConfig):
        raise ValueError(f"config is a {type(config).__name__}; legal: a MInferenceConfig")
    patcher = MInference.__new__(MInference)
    patcher.config, patcher.guard, patcher.threads = config, None, None
    return patcher.patch_model(model)


def patch_hf(
    model: Any,
    attn_type: str = "inf_llm",
    attn_kwargs: Mapping[str, Any] | None = None,
    base: float | None = None,
    distance_scale: float | None = None,
) -> Any:
    """Deprecated: MInference(attn_type, attn_kwargs=attn_kwargs)(model).

    base and distance_scale, which stretch the reference system's rotary embedding, are refused unless
    None or its defaults: the model's own embedding is used.
    """
    _deprecated("patch_hf(model, attn_type)", "MInference(attn_type)(model)")
    for name, value, default in (("base", base, 1e6), ("distance_scale", distance_scale, 1.0)):
        if value not in (None, default):
            raise NotImplementedError(f"{name} is {value!r}; implemented: None, {default!r}")
    return MInference(attn_type, attn_kwargs=attn_kwargs)(model)


def minference_patch_kv_cache_cpu(model: Any) -> Any:
    """Deprecated; not implemented: keys and values stay where the model has them."""
    _deprecated("minference_patch_kv_cache_cpu(model)", "MInference(...)(model)")
    raise NotImplementedError(
        "keys and values on the CPU under a model on another device are not implemented; use "
        "MInference(...)(model), which leaves them where they are"
    )


def minference_patch_with_kvcompress(model: Any, config: MInferenceConfig) -> Any:
    """Deprecated: MInference(attn_type, kv_type=...)(model)."""
    _deprecated("minference_patch_with_kvcompress(model, config)", "MInference(..., kv_type=...)(model)")
    raise NotImplementedError(
        "compression of keys and values is not implemented; implemented kv types: "
        + ", ".join(MInferenceConfig.get_available_kv_types())
    )


def _deprecated(old, new):
    warnings.warn(f"{old} is deprecated, use {new}", DeprecationWarning, stacklevel=3)
