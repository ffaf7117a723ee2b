"""python -m minference.bench and python -m minference.search on a tiny model."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from minference import PatternFile, _cli, bench, search  # noqa: E402


@pytest.fixture(scope="module")
def folder(letters_model):
    return letters_model


def run(module, name, *arguments):
    return _cli.run(name, module.main, module.parse([str(a) for a in arguments]))


def run_bench(*arguments):
    return run(bench, "minference.bench", "--dtype", "float32", *arguments)


def run_search(folder, *arguments):
    text = folder / "text.txt"
    return run(search, "minference.search", "-m", folder, "-f", text, "--dtype", "float32", *arguments)


def test_bench(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    code = run_bench(
        "-m", folder, "--lengths", "100,300", "-r", 2, "-n", 2, "--json", tmp_path / "b.json",
        "--plot", tmp_path / "b.png", "--attn", "sdpa,dense,a_shape:n_init=32:n_local=64", "--chunk", 150,
    )  # fmt: skip
    assert code == 0
    report = json.loads((tmp_path / "b.json").read_text())
    assert [row["tokens"] for row in report["rows"]] == [100] * 3 + [300] * 3
    assert all(len(row["seconds"]) == 2 for row in report["rows"])
    last = report["rows"][-1]
    assert last["p10"] <= last["p50"] <= last["p90"] and last["kept_fraction"] < 1 and last["decode_ms"] > 0
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 7 and table[-1].split()[1] == "a_shape:n_init=32:n_local=64"


def test_bench_with_text_and_random_weights(folder):
    arguments = ["--lengths", "1k", "-r", 1, "--warmup", 0, "--attn", "auto"]
    assert run_bench("-m", folder, "--text", folder / "text.txt", *arguments) == 0
    assert run_bench("-m", folder, "--random-weights", *arguments) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--attn", "a_shap"], "a_shape"),
        (["--attn", "dense:n_init=3"], "n_init"),
        (["--attn", "sdpa:n_init=3"], "takes no options"),
        (["--text", "no-such-file.txt"], "no-such-file.txt"),
        (["--lengths", "64k", "--text", "TEXT"], "65536"),
        (["--json", "no/such/folder/b.json"], "no/such/folder"),
        (["-m", "no-such-file.gguf"], "no-such-file.gguf"),
        (["--profile", "5"], "--profile works on a CUDA device; --device is cpu"),
    ],
)
def test_bench_refuses(folder, capsys, arguments, words):
    arguments = [str(folder / "text.txt") if a == "TEXT" else a for a in arguments]
    assert run_bench("-m", folder, "--lengths", "100", *arguments) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error


@pytest.mark.parametrize("arguments", [["--lengths", "0"], ["--lengths", "4x"], ["-r", "0"], ["-n", "-1"]])
def test_bench_refuses_numbers(folder, capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        bench.parse(["-m", str(folder), *arguments])
    assert stop.value.code == 2 and "legal" in capsys.readouterr().err


def test_search_writes_the_reference_format(folder, tmp_path, capsys):
    output, report = tmp_path / "pattern.json", tmp_path / "report.json"
    code = run_search(folder, "-o", output, "--report", report, "--chunk", 512, "--budget", 0.6)
    assert code == 0
    patterns = PatternFile.load(str(output))
    assert (patterns.layers, patterns.heads) == (2, 4)
    assert [sorted(layer) for layer in json.loads(output.read_text())] == [["0", "1", "2", "3"]] * 2
    heads = json.loads(report.read_text())["heads"]
    assert len(heads) == 8 and all(0 <= head["mass_recall"] <= 1.0001 for head in heads)
    assert not (tmp_path / "pattern.json.partial").exists()
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "all"


def test_search_goes_on_where_it_was(folder, tmp_path, monkeypatch, capsys):
    whole, output = tmp_path / "whole.json", tmp_path / "pattern.json"
    arguments = ["--chunk", 512, "--budget", 0.6]
    assert run_search(folder, "-o", whole, *arguments) == 0
    chunks = []

    def interrupted(text):
        chunks.append(text)
        if len(chunks) == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_cli, "progress", interrupted)
        assert run_search(folder, "-o", output, *arguments) == 130
    assert output.with_name("pattern.json.partial").exists()
    assert run_search(folder, "-o", output, "--chunk", 256, "--budget", 0.6) == 2
    assert "--restart" in capsys.readouterr().err
    assert run_search(folder, "-o", output, *arguments) == 0
    assert "going on" in capsys.readouterr().err
    assert output.read_text() == whole.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "1k", "--budget", "0"], "budget"),
        (["--tokens", "500"], "1024"),
        (["--tokens", "100k"], "102400"),
        (["-o", "no/such/folder/p.json"], "no/such/folder"),
    ],
)
def test_search_refuses(folder, tmp_path, capsys, arguments, words):
    assert run_search(folder, "-o", tmp_path / "p.json", *arguments) == 2
    assert words in capsys.readouterr().err
