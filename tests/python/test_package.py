"""The package as it is installed: what importing it brings in, its stubs, and the wheel in a fresh venv."""

import importlib
import importlib.util
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import minference
import pytest
from minference import _core

# No NumPy, no torch: a memoryview is a tensor too.
ALONE = """
import sys, minference
for name in ("torch", "numpy", "transformers"):
    assert name not in sys.modules, name
q = memoryview(bytearray(4 * 3 * 8)).cast("f", (1, 3, 1, 8))
out, lse = minference.attention(q, q, q, "dense", return_lse=True)
assert memoryview(out).shape == (1, 3, 1, 8), memoryview(out).shape
assert minference.last_stats().kept_pairs == 6
assert minference.shipped_patterns()
assert minference.MInferenceConfig("minference", "SmolLM2-135M-Instruct").method == "minference"
"""


def test_importing_it_imports_no_other_library():
    subprocess.run([sys.executable, "-c", ALONE], check=True)


def test_the_version_is_the_librarys():
    assert minference.__version__ == (Path(__file__).parents[2] / "VERSION").read_text().strip()


def test_stubs_name_everything():
    stubs = (Path(_core.__file__).parent / "_core.pyi").read_text()
    for name in set(minference.__all__) & set(dir(_core)) - {"__version__"}:
        assert f"class {name}" in stubs or f"def {name}(" in stubs, name
    assert (Path(minference.__file__).parent / "py.typed").exists()


def test_everything_public_has_a_docstring():
    modules = [minference]
    if importlib.util.find_spec("transformers"):
        modules.append(importlib.import_module("minference.hf"))
    for module in modules:
        for name in module.__all__:
            value = getattr(module, name)
            assert value.__doc__, name
            for member, method in vars(value).items() if isinstance(value, type) else ():
                if callable(method) and not member.startswith("_"):
                    assert method.__doc__, f"{name}.{member}"


def test_stubs_have_types_where_callers_look():
    stubs = (Path(_core.__file__).parent / "_core.pyi").read_text()
    assert "def last_stats() -> Stats | None:" in stubs
    assert "-> object" not in stubs


@pytest.mark.skipif("MINFERENCE_TEST_WHEEL" not in os.environ, reason="MINFERENCE_TEST_WHEEL is not set")
def test_wheel_in_a_fresh_environment(tmp_path):
    (wheel,) = Path(os.environ["MINFERENCE_TEST_WHEEL"]).glob("minference-*.whl")
    assert wheel.stat().st_size < 10e6
    names = zipfile.ZipFile(wheel).namelist()
    assert all(name.startswith(("minference/", "minference-")) for name in names)
    for part in ("py.typed", "_core.pyi", "hf/__init__.py", "patterns/smollm2-135m-instruct.json"):
        assert f"minference/{part}" in names
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-index", wheel], check=True)
    subprocess.run([python, "-c", ALONE], check=True, cwd=tmp_path)
