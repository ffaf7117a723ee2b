"""Makes the name "minference" known to transformers as an attention implementation."""

from __future__ import annotations

NAME = "minference"
OLDEST = (4, 57)  # the oldest version that all tests pass with


def require_transformers() -> None:
    """Raises ImportError unless a version of transformers with the interface is installed."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "minference.hf needs transformers, which is not installed: pip install 'minference[hf]'"
        ) from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < OLDEST:
        raise ImportError(
            f"transformers is {transformers.__version__}; minference.hf needs {OLDEST[0]}.{OLDEST[1]} or "
            "newer"
        )


def register() -> None:
    """Registers attention and mask function. Importing minference.hf does so."""
    require_transformers()
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    from .attention import minference_attention
    from .masks import minference_mask

    AttentionInterface.register(NAME, minference_attention)
    AttentionMaskInterface.register(NAME, minference_mask)
