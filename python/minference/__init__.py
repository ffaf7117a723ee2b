"""Dynamic sparse attention for long prompts.

attention(q, k, v, method="auto") works on NumPy arrays, torch tensors and whatever DLPack can export,
MInference("auto")(model) on models of Hugging Face transformers. torch is imported only when it is used.
"""

from ._attention import attention
from ._config import MInferenceConfig, get_support_models
from ._core import (
    Explanation,
    Guard,
    Method,
    MethodOption,
    MethodState,
    PatternFile,
    Segment,
    SparseIndex,
    Stats,
    __version__,
    find_method,
    isa_levels,
    last_stats,
    methods,
)
from ._kernels import block_sparse_attention, streaming_forward, vertical_slash_sparse_attention
from ._patching import (
    MInference,
    minference_patch,
    minference_patch_kv_cache_cpu,
    minference_patch_with_kvcompress,
    patch_hf,
)
from ._patterns import find_patterns, shipped_patterns

__all__ = [
    "Explanation",
    "Guard",
    "MInference",
    "MInferenceConfig",
    "Method",
    "MethodOption",
    "MethodState",
    "PatternFile",
    "Segment",
    "SparseIndex",
    "Stats",
    "__version__",
    "attention",
    "block_sparse_attention",
    "find_method",
    "find_patterns",
    "get_support_models",
    "isa_levels",
    "last_stats",
    "methods",
    "minference_patch",
    "minference_patch_kv_cache_cpu",
    "minference_patch_with_kvcompress",
    "patch_hf",
    "shipped_patterns",
    "streaming_forward",
    "vertical_slash_sparse_attention",
]
