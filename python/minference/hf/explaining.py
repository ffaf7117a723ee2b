"""explain(): one prefill of a model, and a report of which keys every head kept and what it lost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from minference import _cli, _core, _png

from .patching import attention_modules, patch, patterns_for, stats, unpatch


class Report:
    """What explain() found out. `heads`: a dict for every head that was seen, with layer, head,
    kept_fraction, mass_recall and kind (dense, diagonal or blocks)."""

    def __init__(self, explanation: _core.Explanation, about: dict[str, Any]):
        self._explanation = explanation
        self._about = about
        self.heads: list[dict[str, Any]] = explanation.heads
        self.kept_fraction: float = explanation.kept_fraction
        self.mass_recall: float = explanation.mass_recall
        self.ttft_seconds: float = about["ttft_seconds"]

    def write(self, folder) -> Path:
        """Writes index.html, its pictures as PNG files and report.json into a folder, which is made where
        it is missing; files of the same names are replaced. Returns the path of the page. Raises OSError,
        and ValueError when no layer showed causal attention.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self._explanation.files(_png.encode, self._about).items():
            _cli.write_bytes(folder / name, content)
        return folder / "index.html"


def explain(
    model,
    input_ids,
    method: str = "auto",
    *,
    options: dict[str, float] | None = None,
    patterns: Any = None,
    guard: Any = None,
    threads: int | None = None,
    chunk: int = 0,
    heads: Sequence[tuple[int, int]] | None = None,
    guard_rows: int = 16,
    name: str | None = None,
    prompt: str = "the prompt",
) -> Report:
    """Prefills the prompt by a method and looks at the attention of every head meanwhile.

    The model is patched for that, and not patched afterwards.

    Args:
        model: a transformers model that minference.hf.patch() takes, on the CPU.
        input_ids: [1, tokens], int64.
        method, options, patterns, guard, threads: as in minference.hf.patch().
        chunk: tokens of a prefill step; 0: all at once.
        heads: (layer, head) pairs of which the report shows maps, at most 32; None: those with the lowest
            recall and some typical ones, which takes a second prefill.
        guard_rows: query rows of a step on which the kept mass is measured exactly, 1 to 64.
        name, prompt: what the page calls them; name None: the model's own.

    Raises:
        ValueError: as patch(); input_ids of another shape; heads that the model does not have.
        NotImplementedError, TypeError, OSError: as patch(); a model on another device than the CPU.

    Source: the report of `minference explain`, docs/cli.md.
    """
    attention_modules(model)  # raises for what is no such model
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 1:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}; legal: [1, tokens]")
    if not isinstance(chunk, int) or chunk < 0:
        raise ValueError(f"chunk is {chunk!r}; legal: 0 (all at once) or a number of tokens")
    if model.device.type != "cpu":
        raise NotImplementedError(f"model is on {model.device}; explain() looks at attention on the cpu only")
    patterns = patterns_for(model, _core.find_method(method), patterns)
    if guard is not None and not isinstance(guard, _core.Guard):
        guard = _core.Guard(guard)

    def look(shown):
        return _prefill(model, input_ids, chunk or input_ids.shape[1], shown, guard_rows, settings)

    settings = dict(method=method, options=options, patterns=patterns, guard=guard, threads=threads)
    explanation, seconds, figures = look(heads or [])
    if heads is None:
        explanation, _, _ = look(explanation.telling_heads())
    spent = [
        ("attention", "attention", "scores, softmax and values of the kept keys", figures["kernel_seconds"]),
        ("index", "index", "finding out which keys each head needs", figures["index_seconds"]),
        ("guard", "guard", "checking on sampled rows what was lost (guard=)", figures["guard_seconds"]),
    ]
    rest = max(0.0, seconds - sum(stage[3] for stage in spent))
    about = dict(
        model=name or model.config.name_or_path or type(model).__name__,
        prompt=prompt,
        step_tokens=chunk or input_ids.shape[1],
        method=_core.find_method(method).name,
        options=", ".join(f"{key}={value:g}" for key, value in (options or {}).items()),
        guard="off" if guard is None else guard.mode,
        isa=figures["isa"],
        threads=threads or torch.get_num_threads(),
        ttft_seconds=seconds,
        stages=[*spent, ("rest", "rest", "torch: matrix products, norms, the KV cache", rest)],
        notes=[f"computed exactly, {times} times: {why}" for why, times in figures["fallbacks"].items()],
        patterns=patterns,
    )
    return Report(explanation, about)


def _prefill(model, input_ids, step, shown, guard_rows, settings):
    """(the Explanation of one prefill, its seconds without what explaining took, the layers' figures)."""
    config = model.config.get_text_config()
    explanation = _core.Explanation(
        config.num_hidden_layers, config.num_attention_heads, input_ids.shape[1], shown, guard_rows
    )
    patch(model, **settings, explanation=explanation)
    try:
        cache = DynamicCache(config=model.config)
        start = time.perf_counter()
        with torch.inference_mode():
            for begin in range(0, input_ids.shape[1], step):
                part = input_ids[:, begin : begin + step]
                model(part, past_key_values=cache, logits_to_keep=1)
        return explanation, time.perf_counter() - start - explanation.seconds, stats(model)
    finally:
        unpatch(model)
