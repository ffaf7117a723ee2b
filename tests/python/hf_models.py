"""Tiny models with random weights, one of every family that the Hugging Face tests run."""

import torch
import transformers

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "phi3", "glm4", "gemma2", "gemma3", "gpt_oss"]
WINDOW = 48  # of the families with sliding windows: shorter than the prompts

_COMMON = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    # Weights large enough that attention is not flat.
    initializer_range=0.3,
)
_BY_FAMILY = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32}),
    "mistral": ("MistralForCausalLM", {"sliding_window": WINDOW}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": None}),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", {"head_dim": 16, "sliding_window": WINDOW}),
    "gemma3": ("Gemma3ForCausalLM", {"head_dim": 16, "sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {"head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


def tiny_model(family, attn_implementation=None, **overrides):
    """A model of the family in float32, the same weights every time."""
    class_name, own = _BY_FAMILY[family]
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**{**_COMMON, **own, **overrides})
    if attn_implementation is not None:
        config._attn_implementation = attn_implementation
    torch.manual_seed(0)
    model = model_class(config).eval()
    if family == "gpt_oss":  # not initialised by the model itself
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(parameter)
    return model


def exact_implementation(family):
    """transformers' own attention that honours everything the family does; torch's SDPA has no soft cap."""
    return "eager" if family in ("gemma2", "gpt_oss") else "sdpa"


def tokens(batch, length, seed=1):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(3, 128, (batch, length), generator=generator, device="cpu")
    return numbers.to(torch.get_default_device())
