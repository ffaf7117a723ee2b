"""Pattern files by name: those in the package, and the models that they are for."""

from __future__ import annotations

import os
from pathlib import Path

from . import _core
from ._core import PatternFile

_FOLDER = Path(_core.__file__).parent / "patterns"


def shipped_patterns() -> list[str]:
    """Names of the pattern files in the package, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def find_patterns(name_or_path: str | os.PathLike[str]) -> PatternFile:
    """The PatternFile of a shipped name, of a model whose file is shipped, or of a path.

    A model's name counts without its owner and in any case: "HuggingFaceTB/SmolLM2-135M-Instruct" has
    the file "smollm2-135m-instruct". Raises OSError for a path that cannot be read, ValueError for a
    file that has something else in it.
    """
    text = os.fspath(name_or_path)
    name = model_key(text)
    if name in shipped_patterns() and not os.path.isfile(text):
        text = str(_FOLDER / f"{name}.json")
    return PatternFile.load(text)


def model_key(name: str) -> str:
    """A model's name or folder without its owner or path, in lower case."""
    return name.rstrip("/").rpartition("/")[2].lower()
