"""Models and prompts for the command lines: a hub name, a folder or a GGUF file to a loaded model."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _source(model: str) -> tuple[str, dict]:
    """Arguments of from_pretrained() for a hub name, a folder or a GGUF file."""
    if not model.endswith(".gguf"):
        return model, {}
    path = Path(model)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {model}")
    return str(path.parent), {"gguf_file": path.name}


def load_model(model: str, dtype: str, device: str, random_weights: bool = False):
    """The causal language model, in evaluation mode on the device.

    GGUF weights are unpacked: products with packed ones take several times as long in a prefill. With
    random_weights only the config is read, for models whose weights are not at hand.
    """
    name, arguments = _source(model)
    if random_weights:
        config = transformers.AutoConfig.from_pretrained(name, **arguments)
        with torch.device(device):
            return transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).eval()
    unpacked = getattr(transformers, "GgufConfig", None)
    if arguments and unpacked is not None:
        arguments["quantization_config"] = unpacked(dequantize=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=DTYPES[dtype], **arguments)
    return loaded.to(device).eval()


def load_tokenizer(model: str):
    name, arguments = _source(model)
    return transformers.AutoTokenizer.from_pretrained(name, **arguments)


def read_tokens(model: str, text: str) -> torch.Tensor:
    """[1, tokens] of a text file by the model's tokenizer."""
    content = Path(text).read_text(encoding="utf-8", errors="replace")
    return torch.tensor([load_tokenizer(model)(content, verbose=False)["input_ids"]])


def random_tokens(config, length: int) -> torch.Tensor:
    """[1, length] of one fixed draw, for models with random weights."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = config.get_text_config().vocab_size
    return torch.randint(0, vocabulary, (1, length), generator=generator)


def context_of(config) -> int | None:
    """The length that the model was trained for, where its config says so."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)
