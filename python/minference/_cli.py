"""What the command lines of this package share: exit codes, lengths, and one line for an error."""

import argparse
import json
import os
import sys
from pathlib import Path

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def length(text):
    """4k -> 4096."""
    factor = 1024 if text[-1:] in ("k", "K") else 1
    digits = text[:-1] if factor > 1 else text
    if not (digits.isascii() and digits.isdigit()) or not 0 < int(digits) * factor <= 1 << 24:
        raise argparse.ArgumentTypeError(f"'{text}' is no length; legal: 1 to 16777216, or 4k, 128k")
    return int(digits) * factor


def number_between(kind, low, high):
    """An argparse type: a number of the kind within the range."""

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"'{text}'; legal: {low} to {high}")
        return value

    return parse


def add_model_arguments(parser):
    parser.add_argument(
        "-m", "--model", required=True, help="hub name, folder or GGUF file of a transformers model"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"], help="default: bfloat16"
    )
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1")
    parser.add_argument(
        "-t", "--threads", type=number_between(int, 1, 512), help="threads (default: torch's)"
    )


def run(prog, main, arguments):
    """main(arguments) with its exit code; what the user could have prevented is one line and code 2."""
    try:
        return main(arguments)
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, NotImplementedError, TypeError, ImportError, OSError) as error:
        if os.environ.get("MINFERENCE_TRACEBACK"):
            raise
        print(f"{prog}: {error}", file=sys.stderr)
        return BAD_INPUT


def check_writable(path):
    """Raises OSError now rather than after the work."""
    folder = Path(path).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OSError(f"cannot write to {folder}, for {path}")


def write_bytes(path, content):
    """The path holds the whole content, or what it held before."""
    path = Path(path).absolute()
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_json(path, content):
    write_bytes(path, (json.dumps(content, indent=1) + "\n").encode())


def progress(text):
    """A line on a terminal's standard error that the next one replaces."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def end_progress():
    progress("")
