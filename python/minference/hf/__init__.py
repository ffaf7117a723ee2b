"""Hugging Face transformers: minference as an attention implementation of any model.

Importing this module registers the name "minference", so that

    AutoModelForCausalLM.from_pretrained(name, attn_implementation="minference")

loads a model whose prefill runs on the method "auto". patch(model, method, ...) chooses another method
and its options for a model that is loaded, unpatch(model) takes minference off it again, and stats(model)
says what its layers did. explain(model, ids) prefills a prompt and reports what each head kept and lost.
"""

from .register import require_transformers

require_transformers()

from .explaining import Report, explain  # noqa: E402
from .patching import is_patched, patch, reset_stats, stats, unpatch  # noqa: E402
from .register import NAME, OLDEST, register  # noqa: E402

register()

__all__ = [
    "NAME",
    "OLDEST",
    "Report",
    "explain",
    "is_patched",
    "patch",
    "register",
    "reset_stats",
    "stats",
    "unpatch",
]
