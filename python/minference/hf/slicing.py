"""Norms and MLPs of a long prompt a slice of rows at a time: their intermediate results are several times
as large as the hidden states and set the peak of a prefill's memory."""

from __future__ import annotations

import torch


class _Sliced:
    """The forward of a module that treats every row alone, on `tokens` rows at a time."""

    def __init__(self, module, tokens):
        self.replaced = vars(module).get("forward")  # what others, like accelerate, put there
        self.whole = module.forward
        self.tokens = tokens

    def __call__(self, hidden_states, *arguments, **keywords):
        rows = hidden_states.shape[1] if hidden_states.dim() == 3 else 0
        if rows <= self.tokens or arguments or keywords or torch.is_grad_enabled():
            return self.whole(hidden_states, *arguments, **keywords)
        first = self.whole(hidden_states[:, : self.tokens])
        if not isinstance(first, torch.Tensor):  # routers of experts return more than rows
            return self.whole(hidden_states)
        out = first.new_empty(*hidden_states.shape[:2], *first.shape[2:])
        out[:, : self.tokens] = first
        for begin in range(self.tokens, rows, self.tokens):
            end = begin + self.tokens
            out[:, begin:end] = self.whole(hidden_states[:, begin:end])
        return out


def slice_modules(model, attention_modules, tokens: int) -> None:
    """Slices the norms and MLPs beside the attention layers."""
    attention = set(attention_modules)
    for block in list(model.modules()):
        children = dict(block.named_children())
        if attention.isdisjoint(children.values()):
            continue
        for name, child in children.items():
            if child not in attention and ("mlp" in name or "norm" in name or "feed_forward" in name):
                child.forward = _Sliced(child, tokens)


def unslice_modules(model) -> None:
    for module in model.modules():
        sliced = vars(module).get("forward")
        if not isinstance(sliced, _Sliced):
            continue
        if sliced.replaced is None:
            del module.forward
        else:
            module.forward = sliced.replaced
