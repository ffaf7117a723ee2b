#!/usr/bin/env python3
"""A transformers pipeline on a long prompt, its prefill on minference.

Example:
  python examples/python/hf_pipeline.py --model Qwen/Qwen2.5-7B-Instruct --file book.txt
"""

import argparse

import minference
import minference.hf
import torch
import transformers
from minference.hf.loading import load_model, load_tokenizer


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/smollm2-135m-instruct-q4_1.gguf")
    parser.add_argument("--file", default="models/text/hamlet_gut.txt")
    parser.add_argument("--characters", type=int, default=12000, help="of the text, from its beginning")
    parser.add_argument("--method", default="auto", help="an attention method, or hf: the model as it is")
    arguments = parser.parse_args()

    model = load_model(arguments.model, "bfloat16", "cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(arguments.model)

    model = minference.MInference(arguments.method)(model)  # the only line that is ours
    answer = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)

    with open(arguments.file, encoding="utf-8", errors="replace") as file:
        text = file.read(arguments.characters)
    messages = [{"role": "user", "content": text + "\n\nWho speaks in this text? Answer in one sentence."}]
    reply = answer(messages, max_new_tokens=48, do_sample=False, return_full_text=False)
    print(reply[0]["generated_text"])

    if minference.hf.is_patched(model):
        figures = minference.hf.stats(model)
        print(f"\n{figures['method']}: {figures['prefill_calls']} calls")
        if figures["kept_fraction"] is not None:  # on a CUDA device nobody waited to measure it
            print(
                f"kept {100 * figures['kept_fraction']:.1f} % of the attention, "
                f"{figures['index_seconds']:.2f} s to choose it and "
                f"{figures['kernel_seconds']:.2f} s to compute it"
            )


if __name__ == "__main__":
    main()
