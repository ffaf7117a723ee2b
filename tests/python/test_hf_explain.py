"""minference.hf.explain(): a prefill of a model looked at head by head."""

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import minference  # noqa: E402
import minference.hf as hf  # noqa: E402
from hf_models import tiny_model, tokens  # noqa: E402

A_SHAPE = dict(method="a_shape", options={"n_init": 32, "n_local": 64})


@pytest.mark.parametrize("chunk", [0, 250])
def test_figures_and_page(tmp_path, chunk):
    model, ids = tiny_model("llama"), tokens(1, 600)
    report = hf.explain(model, ids, **A_SHAPE, chunk=chunk, name="tiny", prompt="numbers")
    assert not hf.is_patched(model) and model.config._attn_implementation == "sdpa"
    hf.patch(model, **A_SHAPE, guard="report")
    with torch.no_grad():
        model(ids)
    assert (
        report.kept_fraction == pytest.approx(hf.stats(model)["kept_fraction"]) and report.kept_fraction < 1
    )
    assert 0 < report.mass_recall < 1
    assert {(head["layer"], head["head"]) for head in report.heads} == {
        (layer, head) for layer in (0, 1) for head in range(4)
    }
    assert {head["kind"] for head in report.heads} == {"diagonal"}

    page = report.write(tmp_path / "new" / "folder")
    text = page.read_text()
    assert "tiny reading numbers (600 tokens)" in text and "a_shape</b> (n_init=32, n_local=64)" in text
    written = json.loads((page.parent / "report.json").read_text())
    assert written["heads"] == report.heads and len(written["shown_heads"]) == 8
    stages = written["stages"]
    assert sum(stages.values()) == pytest.approx(report.ttft_seconds)
    pictures = list(page.parent.glob("*.png"))
    assert len(pictures) == 3 + 3 * 8
    assert not [path for path in page.parent.iterdir() if path.name.startswith(".")]
    assert page.stat().st_mode & 0o444 == pictures[0].stat().st_mode & 0o444 != 0o400
    report.write(page.parent)  # over the same files


def test_asked_heads_and_a_pattern_file(tmp_path):
    patterns = minference.PatternFile(2)
    for layer in range(2):
        for head in range(4):
            patterns.set(layer, head, ["stream_llm", "vertical_and_slash"][layer], 30, 100)
    report = hf.explain(
        tiny_model("qwen2"), tokens(1, 1024), "minference", patterns=patterns, heads=[(1, 3)], guard="report"
    )
    assert report.kept_fraction < 0.7 and {head["kind"] for head in report.heads} == {"diagonal"}
    page = report.write(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*-layer*.png")) == [
        f"{what}-layer1-head3.png" for what in ("attention", "kept", "lost")
    ]
    assert "pattern file: vertical_and_slash 30, 100" in page.read_text()


def test_sliding_windows_count_as_dense():
    kinds = {head["layer"]: head["kind"] for head in hf.explain(tiny_model("gemma2"), tokens(1, 200)).heads}
    assert kinds[0] == "dense"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            dict(input_ids=torch.ones(2, 8, dtype=torch.long)),
            r"input_ids has shape \[2, 8\]; legal: \[1, tokens\]",
        ),
        (dict(chunk=-1), "chunk is -1; legal: 0"),
        (dict(heads=[(2, 0)]), "no head 2:0; legal: layers 0 to 1"),
        (dict(guard_rows=0), "guard_rows is 0; legal: 1 to 64"),
        (dict(method="a_shap"), "a_shape"),
        (dict(patterns=minference.PatternFile(2)), "takes no pattern file"),
        (dict(guard="always"), "legal: off, report, enforce"),
    ],
)
def test_bad_input(arguments, words):
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=words):
        hf.explain(model, **{"input_ids": tokens(1, 200), **arguments})
    assert not hf.is_patched(model)


def test_what_is_no_model():
    with pytest.raises(TypeError, match="Linear"):
        hf.explain(torch.nn.Linear(3, 3), tokens(1, 200))


def test_the_example(tmp_path, monkeypatch, capsys, letters_model):
    examples = Path(__file__).parents[2] / "examples" / "python"
    monkeypatch.syspath_prepend(str(examples))
    import hf_explain

    text = letters_model / "text.txt"
    arguments = ["--model", letters_model, "--file", text, "--tokens", "512", "-o", tmp_path / "report"]
    monkeypatch.setattr(sys, "argv", ["hf_explain.py", *map(str, arguments)])
    hf_explain.main()
    assert "the heads that lost most" in capsys.readouterr().out
    assert (tmp_path / "report" / "index.html").is_file()
