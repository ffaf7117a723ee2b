"""MINFERENCE_TEST_DEVICE=cuda runs the Hugging Face tests on that device: all their models and tensors are
made there."""

import os

import pytest

device = os.environ.get("MINFERENCE_TEST_DEVICE")
if device:
    import torch

    torch.set_default_device(device)


@pytest.fixture(scope="session")
def letters_model(tmp_path_factory):
    """A folder with a tiny model, a tokenizer of single letters, and text.txt."""
    import tokenizers
    import transformers
    from hf_models import tiny_model

    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    letters = {chr(code): code for code in range(128)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token=chr(0)))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    (path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return path
