#!/usr/bin/env python3
"""A long document read in chunks, and several questions about it, each a later turn on the same cache.

Every chunk and every turn is sparse, not only the first prefill.

Example:
  python examples/python/hf_chunked_prefill.py --chunk 2048
"""

import argparse
import copy
import time

import minference.hf
import torch
from minference.hf.loading import load_model, load_tokenizer, read_tokens
from transformers import DynamicCache

QUESTIONS = ["\n\nThe king's name is", "\n\nThis play was written by"]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/smollm2-135m-instruct-q4_1.gguf")
    parser.add_argument("--file", default="models/text/hamlet_gut.txt")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--chunk", type=int, default=2048)
    arguments = parser.parse_args()

    model = load_model(arguments.model, "bfloat16", "cpu")
    tokenizer = load_tokenizer(arguments.model)
    document = read_tokens(arguments.model, arguments.file)[:, : arguments.tokens]
    minference.hf.patch(model, "auto")

    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        for begin in range(0, document.shape[1], arguments.chunk):
            minference.hf.reset_stats(model)
            start = time.perf_counter()
            model(document[:, begin : begin + arguments.chunk], past_key_values=cache, logits_to_keep=1)
            kept = minference.hf.stats(model)["kept_fraction"]
            print(f"tokens from {begin:>5}: {time.perf_counter() - start:.2f} s, kept {100 * kept:.0f} %")

    for question in QUESTIONS:  # the document's cache is reused: only the question is computed
        prompt = torch.cat([document, tokenizer(question, return_tensors="pt").input_ids], 1)
        output = model.generate(
            prompt, past_key_values=copy.deepcopy(cache), max_new_tokens=8, do_sample=False
        )
        print(question.strip(), tokenizer.decode(output[0, prompt.shape[1] :]))


if __name__ == "__main__":
    main()
