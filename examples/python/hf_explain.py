#!/usr/bin/env python3
"""Which keys every head of a transformers model kept for a prompt, and what it lost: a page with pictures.

Example:
  python examples/python/hf_explain.py --method minference --patterns smollm2-135m-instruct -o report
"""

import argparse
from pathlib import Path

import minference.hf
from minference.hf.loading import load_model, read_tokens


MODELS = Path(__file__).resolve().parents[2] / "models"  # where `make models` puts them


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(MODELS / "smollm2-135m-instruct-q4_1.gguf"))
    parser.add_argument("--file", default=str(MODELS / "text" / "hamlet_gut.txt"))
    parser.add_argument("--tokens", type=int, default=4096, help="of the text, from its beginning")
    parser.add_argument(
        "--chunk", type=int, default=0, help="tokens of a prefill step (default: all at once)"
    )
    parser.add_argument("--method", default="auto")
    parser.add_argument("--patterns", help="pattern file, or the name of a shipped one")
    parser.add_argument("-o", "--output", default="report", help="folder of the page (default: report)")
    arguments = parser.parse_args()

    model = load_model(arguments.model, "bfloat16", "cpu")
    report = minference.hf.explain(
        model,
        read_tokens(arguments.model, arguments.file)[:, : arguments.tokens],
        arguments.method,
        patterns=arguments.patterns,
        chunk=arguments.chunk,
        name=Path(arguments.model).name,
        prompt=Path(arguments.file).name,
    )
    print(
        f"kept {100 * report.kept_fraction:.1f} % of the attention and {100 * report.mass_recall:.2f} % of its "
        f"mass in {report.ttft_seconds:.2f} s; the heads that lost most:"
    )
    for head in sorted(report.heads, key=lambda head: head["mass_recall"])[:5]:
        print(
            f"  layer {head['layer']:>2}, head {head['head']:>2}: kept {100 * head['kept_fraction']:>5.1f} %, "
            f"recall {100 * head['mass_recall']:.2f} %, {head['kind']}"
        )
    print(f"page: {report.write(arguments.output)}")


if __name__ == "__main__":
    main()
