"""patch() and unpatch(): a loaded model's attention layers on minference, and back as they were."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from transformers import PreTrainedModel

import minference
from minference import _core

from .attention import set_current_cache
from .register import NAME
from .settings import Layer, Settings, Totals, default_totals
from .slicing import slice_modules, unslice_modules


@dataclasses.dataclass
class _Patch:
    """What unpatch() needs to know of a patched model; its attribute `minference_patch`."""

    implementations: list  # (config, name of its attention implementation before), parents first
    totals: Totals


def patch(
    model,
    method="auto",
    *,
    options=None,
    patterns=None,
    guard=None,
    threads=None,
    slice_tokens=0,
    measure=False,
    on_prefill=None,
    explanation=None,
):
    """Computes the prefill of `model` by an attention method from now on; returns the model.

    Nothing of the model's code is replaced: its attention implementation becomes "minference". Patching
    a patched model replaces its settings. Whatever raises leaves the model as it was.

    Args:
        model: a transformers model whose attention layers use the AttentionInterface.
        method: name of an attention method; minference.methods() lists them. "dense" is exact.
        options: values of the method's options by name.
        patterns: a PatternFile, a path, or the name of a shipped file; for methods that take one.
        guard: None, "report", "enforce" or a minference.Guard.
        threads: None: torch.get_num_threads().
        slice_tokens: rows at a time that norms and MLPs take of a longer prompt, so that their
            intermediate results stay small; 0: all at once. The reference system takes 96,000.
        measure: on a CUDA device: wait for every layer's attention and measure it, so that stats() has
            pairs and seconds; otherwise they are None there.
        on_prefill: called with (layer, q, k, v, arguments) before a layer computes a chunk of one
            sequence; see hf.settings.Settings.
        explanation: a minference.Explanation that is shown what every prefill keeps, on the CPU, for
            batches of one; see minference.hf.explain().

    Raises:
        TypeError: model is no transformers model.
        NotImplementedError: its architecture does not use the AttentionInterface, or the method, or
            this build, cannot compute on its device.
        ValueError: unknown method or option, or a value outside its range; a pattern file that does
            not fit the model; a dtype other than float32, float16 and bfloat16.
        OSError: a pattern file that cannot be read.
    """
    modules = attention_modules(model)
    chosen = _core.find_method(method)
    options = dict(options or {})
    _core.check_options(chosen.name, options)
    patterns = patterns_for(model, chosen, patterns)
    if not isinstance(slice_tokens, int) or slice_tokens < 0:
        raise ValueError(f"slice_tokens is {slice_tokens!r}; legal: 0 (off) or a number of rows")
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise ValueError(f"threads is {threads!r}; legal: None or 1 and more")
    if guard is not None and not isinstance(guard, _core.Guard):
        guard = _core.Guard(guard)
    settings = Settings(chosen.name, options, patterns, guard, threads, measure, on_prefill, explanation)
    _try_device(model, settings)

    unpatch(model)
    record = _Patch(_implementations(model), Totals())
    model.minference_patch = record
    try:
        for module in modules:
            module.minference_layer = Layer(module.layer_idx, settings, record.totals)
            module.register_forward_pre_hook(_note_cache, with_kwargs=True)
        if slice_tokens > 0:
            slice_modules(model, modules, slice_tokens)
        model.set_attn_implementation(NAME)
    except BaseException:
        unpatch(model)
        raise
    return model


def unpatch(model):
    """Gives `model` back the attention that it had before patch(); returns the model."""
    record = getattr(model, "minference_patch", None)
    if record is None:
        return model
    for module in model.modules():
        if isinstance(vars(module).get("minference_layer"), Layer):
            del module.minference_layer
            _remove_hook(module)
    unslice_modules(model)
    for config, name in record.implementations:
        config._attn_implementation = name
    del model.minference_patch
    return model


def is_patched(model) -> bool:
    """Whether patch() was the last to set the model's attention."""
    return getattr(model, "minference_patch", None) is not None


def stats(model=None) -> dict:
    """What the attention layers did since patch() or reset_stats().

    Without a model, or for one that was loaded with attn_implementation="minference" and not patched:
    the sum over all such models. Keys: those of minference.Stats for prefill, "prefill_calls" and
    "decode_calls" (one a layer), "fallbacks" (reason -> layers).
    """
    return _totals(model).to_dict()


def reset_stats(model=None) -> None:
    """Sets the figures of stats(model) to 0."""
    _totals(model).reset()


def _totals(model):
    record = getattr(model, "minference_patch", None)
    return default_totals() if record is None else record.totals


def attention_modules(model) -> list[nn.Module]:
    """The self-attention layers of a model's decoder, by layer number.

    Raises TypeError unless model is a transformers model, NotImplementedError when its attention cannot
    be chosen from outside or none is causal.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model is a {type(model).__name__}; legal: a transformers PreTrainedModel (of a PEFT model, "
            "get_base_model(); of a compiled one, the model before torch.compile)"
        )
    if not model._can_set_attn_implementation():
        raise NotImplementedError(
            f"{type(model).__name__} computes attention on its own, without transformers' "
            "AttentionInterface; supported are the models that use it, among them "
            "Llama, Qwen2, Qwen3, Mistral, Phi-3, GLM-4, Gemma 2, Gemma 3 and gpt-oss"
        )
    modules = [
        module
        for module in model.modules()
        if getattr(module, "layer_idx", None) is not None
        and "attention" in type(module).__name__.lower()
        and getattr(module, "is_causal", True)
    ]
    if not modules:
        raise NotImplementedError(
            f"{type(model).__name__} has no causal self-attention layer; supported are decoder models"
        )
    return modules


def patterns_for(model, method, patterns):
    """The PatternFile to use, checked against model and method; None without one."""
    if patterns is None:
        return None
    if not method.takes_patterns:
        takers = ", ".join(m.name for m in _core.methods() if m.takes_patterns)
        raise ValueError(f"method '{method.name}' takes no pattern file; legal with one: {takers}")
    if not isinstance(patterns, _core.PatternFile):
        patterns = minference.find_patterns(patterns)
    config = model.config.get_text_config()
    patterns.check_model(config.num_hidden_layers, config.num_attention_heads, type(model).__name__)
    return patterns


def _try_device(model, settings):
    """Raises what attention on the model's device and dtype, and elsewhere than on the CPU by the method,
    would raise."""
    if model.device.type == "meta":
        return
    token = torch.zeros(1, 1, 1, 8, dtype=model.dtype, device=model.device)
    minference.attention(token, token, token, "dense")
    if model.device.type != "cpu":
        heads = model.config.get_text_config().num_attention_heads
        token = token.expand(1, 1, heads, 8)
        minference.attention(
            token,
            token,
            token,
            settings.method,
            options=settings.options,
            patterns=settings.patterns,
            guard=settings.guard,
        )


def _implementations(model):
    """(config, attention implementation) of every config that set_attn_implementation() may change."""
    configs = []

    def visit(config):
        if any(config is seen for seen, _ in configs):
            return
        configs.append((config, config._attn_implementation))
        for key in config.sub_configs:
            child = getattr(config, key, None)
            if child is not None:
                visit(child)

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            visit(module.config)
    return configs


def _note_cache(module, arguments, keywords):
    if not torch.compiler.is_compiling():
        set_current_cache(keywords.get("past_key_values", keywords.get("past_key_value")))


def _remove_hook(module):
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is _note_cache:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
