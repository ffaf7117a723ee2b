#!/usr/bin/env python3
"""Time to first token of a Llama-3 8B-shaped model on a CUDA device: ours beside torch's SDPA.

The weights are random and the prompt is random tokens, so that nothing has to be fetched. Dense attention
depends on shapes alone, but what a sparse method keeps depends on where attention lies: so queries and keys
get what trained ones have, as in bench/cuda_inputs.cu: a constant part, by which attention falls with the
distance, and keys of some tokens that are heavy from everywhere. "minference" runs with the head mix of
bench/cuda_bench.cc, the proportions of a published configuration of that model.

  bench/python_cuda_bench.py --json ttft.json                       # 32 layers, 32k and 128k tokens
  bench/python_cuda_bench.py --layers 4 --lengths 32k -r 3          # quick
  bench/python_cuda_bench.py --attn sdpa_cudnn,dense,vertical_slash --chunk 32k
  bench/python_cuda_bench.py --layers 4 --lengths 128k --profile 12 # where the time goes

--attn takes what `python -m minference.bench` does, and sdpa_fa2 and sdpa_cudnn: torch's SDPA held to one
kernel (FlashAttention 2, cuDNN). Other arguments are handed to minference.bench.
"""

import argparse
import json
import math
import pathlib
import sys
import tempfile

import minference

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "structured_llama",
    "attention_bias": True,
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 3580165449.0,
    "max_position_embeddings": 1048576,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# Of 32 heads so many have a budget of so many columns and offsets.
HEAD_MIX = [(15, 1000, 6096), (9, 30, 800), (5, 100, 800), (2, 3500, 100), (1, 500, 700)]


def head_mix(layers):
    deck = [(vertical, slash) for share, vertical, slash in HEAD_MIX for _ in range(share)]
    patterns = minference.PatternFile(layers)
    for layer in range(layers):
        for head in range(32):  # a step without common factor with 32 spreads each kind over the KV heads
            patterns.set(layer, head, "vertical_and_slash", *deck[head * 13 % 32])
    return patterns


def register_model():
    """The model type "structured_llama": transformers' Llama, whose random weights get the structure."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    class StructuredConfig(LlamaConfig):
        model_type = "structured_llama"

    class StructuredLlama(LlamaForCausalLM):
        config_class = StructuredConfig

        def __init__(self, config):
            super().__init__(config)
            give_structure(self, torch)

    AutoConfig.register("structured_llama", StructuredConfig)
    AutoModelForCausalLM.register(StructuredConfig, StructuredLlama)


def give_structure(model, torch):
    """Queries and keys of 0.8 standard deviations around a constant of 1 to 2.5 in every pair of dims that
    RoPE turns; the tokens of one direction, one in 400, have 3 more in the slow pairs of their keys."""
    config = model.config
    dim, hidden, kv_heads = config.head_dim, config.hidden_size, config.num_key_value_heads
    direction = torch.randn(hidden)
    direction /= direction.norm()
    # Larger than what the layers add to the residual stream, so that it is there in all of them.
    strength = 2000.0
    embeddings = model.model.embed_tokens.weight
    embeddings.data[torch.rand(config.vocab_size) < 1 / 400] += (strength * direction).to(embeddings.dtype)
    # After the norm a heavy token is nearly this direction alone.
    length = math.sqrt(hidden)
    slow = torch.arange(dim // 2) >= dim * 3 // 8
    for layer in model.model.layers:
        attention = layer.self_attn
        pairs = (kv_heads, dim // 2)
        angle = 2 * math.pi * torch.rand(pairs)
        turned = torch.cat([angle.cos(), angle.sin()], dim=-1)
        constant = (1 + 1.5 * torch.rand(pairs)).repeat(1, 2) * turned
        heavy = 3 * turned * slow.repeat(2)
        group = config.num_attention_heads // kv_heads
        for projection, bias in (
            (attention.q_proj, constant.repeat_interleave(group, dim=0)),
            (attention.k_proj, constant),
        ):
            projection.weight.data *= 0.8 / (config.initializer_range * length)
            projection.bias.data = bias.flatten().to(projection.bias.dtype)
        attention.k_proj.weight.data += torch.outer(heavy.flatten(), direction / length).to(
            attention.k_proj.weight.dtype
        )


def register_sdpa(name, backend):
    """transformers' own SDPA, held to one of torch's kernels, as the attention implementation `name`."""
    from torch.nn.attention import sdpa_kernel
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def forward(*arguments, **keywords):
        with sdpa_kernel(backend):
            return sdpa_attention_forward(*arguments, **keywords)

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, sdpa_mask)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32, help="decoder layers (default: 32, the model's)")
    parser.add_argument(
        "--rope-theta",
        type=float,
        default=CONFIG["rope_theta"],
        help="base of the rotary embedding: the smaller, the faster attention falls with the distance (default: "
        "that of the model of a million tokens whose head mix it is; Llama 3 itself has 500000)",
    )
    parser.add_argument("--attn", default="sdpa_fa2,sdpa_cudnn,dense,minference", help="(default: %(default)s)")
    parser.add_argument("--lengths", default="32k,128k", help="prompt lengths (default: %(default)s)")
    arguments, others = parser.parse_known_args()
    if not 1 <= arguments.layers <= 32:
        parser.error(f"--layers is {arguments.layers}; legal: 1 to 32")

    from minference import _cli, bench
    from torch.nn.attention import SDPBackend

    register_model()
    register_sdpa("sdpa_fa2", SDPBackend.FLASH_ATTENTION)
    register_sdpa("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION)
    with tempfile.TemporaryDirectory() as folder:
        config = {**CONFIG, "num_hidden_layers": arguments.layers, "rope_theta": arguments.rope_theta}
        pathlib.Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        patterns = pathlib.Path(folder, "head_mix.json")
        head_mix(arguments.layers).save(str(patterns))
        options = ["--model", folder, "--random-weights", "--device", "cuda", "--dtype", "bfloat16"]
        options += ["--lengths", arguments.lengths, "--attn", arguments.attn, "--patterns", str(patterns)]
        return _cli.run("python_cuda_bench.py", bench.main, bench.parse(options + others))


if __name__ == "__main__":
    sys.exit(main())
