#!/usr/bin/env python3
"""Prompts of different lengths in one batch: padding is neither computed nor looked at.

Example:
  python examples/python/hf_batch.py --lengths 500,2000,4000
"""

import argparse

import minference.hf
import torch
from minference.hf.loading import load_model, load_tokenizer, read_tokens


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/smollm2-135m-instruct-q4_1.gguf")
    parser.add_argument("--file", default="models/text/hamlet_gut.txt")
    parser.add_argument("--lengths", default="500,1500,3000", help="tokens of each prompt")
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]

    model = load_model(arguments.model, "float32", "cpu")
    tokenizer = load_tokenizer(arguments.model)
    text = read_tokens(arguments.model, arguments.file)[0]
    longest = max(lengths)
    ids = torch.full((len(lengths), longest), tokenizer.eos_token_id)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):  # padded on the left, as generate() needs it
        ids[row, longest - length :] = text[:length]
        mask[row, longest - length :] = 1

    minference.hf.patch(model, "auto")
    output = model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)
    for row, length in enumerate(lengths):
        alone = model.generate(text[None, :length], max_new_tokens=16, do_sample=False)[0, length:]
        together = output[row, longest:]
        same = "the same as alone" if torch.equal(alone, together) else f"alone: {tokenizer.decode(alone)!r}"
        print(f"{length} tokens: {tokenizer.decode(together)!r}, {same}")


if __name__ == "__main__":
    main()
