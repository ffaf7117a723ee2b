"""What README promises of the demo: its sparse methods still find the fact that is hidden in the middle
of the prompt.

Usage: demo_test.py BIN_DIR MODELS_DIR. Exit code 0 when everything held.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import demo  # noqa: E402


def main():
    binary = Path(sys.argv[1]) / "minference"
    models = Path(sys.argv[2])
    number = demo.FACT.split()[-1].rstrip(".")
    all_held = True
    with tempfile.TemporaryDirectory() as directory:
        prompt = Path(directory) / "prompt.txt"
        prompt.write_text(demo.make_prompt(models / "text"), encoding="utf-8")
        for name, options in demo.METHODS:
            if "--guard" not in options:  # exact
                continue
            result = demo.run_method(binary, models / demo.MODEL, prompt, options)
            print(f"{name}: kept {result['kept_fraction']:.1%}, answer {result['answer'].strip()!r}")
            if number in result["answer"] and not result["fallbacks"] and result["kept_fraction"] < 0.7:
                continue
            print(f"{number} is missing, {result['fallbacks']} fell back, or nothing was left out")
            all_held = False
    return 0 if all_held else 1


if __name__ == "__main__":
    sys.exit(main())
