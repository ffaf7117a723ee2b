"""Explanation: what heads keep and lose, against fp64, and the report of it."""

import json
import struct
import zlib

import minference
import numpy as np
import oracle
import pytest
from minference import _png

TOKENS, HEADS = 600, 2


def problem(tokens=TOKENS):
    random = np.random.default_rng(3)
    return [random.standard_normal((1, tokens, heads, 32), np.float32) for heads in (HEADS, 1, 1)]


def probabilities(q, k):
    """[heads, rows, keys] in fp64."""
    seen = oracle.visible(q.shape[1], k.shape[1])
    identity = np.eye(k.shape[1])[:, None, :]  # the values: what falls on each key
    return oracle.attend(q[0], k[0], identity, seen)[0].transpose(1, 0, 2)


def test_kept_and_recall_equal_fp64():
    q, k, v = problem()
    explanation = minference.Explanation(3, HEADS, TOKENS, guard_rows=4)
    minference.attention(q, k, v, "a_shape", n_init=5, n_local=64, layer=1, explanation=explanation)
    offset = np.arange(TOKENS)[:, None] - np.arange(TOKENS)[None, :]
    kept = (offset >= 0) & ((np.arange(TOKENS) < 5) | (offset < 64))
    # A guard looks at no more than one row in 128, spread evenly, the last one among them.
    rows = np.array([149, 299, 449, 599])
    mass = (probabilities(q, k) * kept)[:, rows].sum(-1).mean(-1)
    assert [(head["layer"], head["head"], head["kind"]) for head in explanation.heads] == [
        (1, 0, "diagonal"),
        (1, 1, "diagonal"),
    ]
    for head, want in zip(explanation.heads, mass, strict=True):
        assert head["kept_fraction"] == pytest.approx(kept.sum() / (TOKENS * (TOKENS + 1) / 2))
        assert head["mass_recall"] == pytest.approx(want, abs=1e-4)
    assert explanation.kept_fraction == pytest.approx(minference.last_stats().kept_fraction)
    assert explanation.mass_recall == pytest.approx(mass.mean(), abs=1e-4)
    assert explanation.seconds > 0


def test_chunks_are_summed():
    q, k, v = problem()
    whole, chunked = (minference.Explanation(1, HEADS, TOKENS) for _ in range(2))
    options = {"n_init": 5, "n_local": 64}
    minference.attention(q, k, v, "a_shape", options=options, explanation=whole)
    for begin, end in ((0, 200), (200, 600)):
        minference.attention(
            q[:, begin:end], k[:, :end], v[:, :end], "a_shape", options=options, explanation=chunked
        )
    assert chunked.kept_fraction == whole.kept_fraction < 1


def test_the_report(tmp_path):
    q, k, v = problem()
    explanation = minference.Explanation(1, HEADS, TOKENS, shown=[(0, 1)])
    minference.attention(q, k, v, "block_sparse", top_k=2, explanation=explanation)
    assert explanation.telling_heads() == sorted(
        [(0, 0), (0, 1)], key=lambda pair: explanation.heads[pair[1]]["mass_recall"]
    )
    files = explanation.files(_png.encode, {"model": "<a&b>", "ttft_seconds": 1.0, "method": "block_sparse"})
    assert list(files)[-1] == "index.html" and "&lt;a&amp;b&gt;" in files["index.html"].decode()
    assert "loading the model" not in files["index.html"].decode()
    report = json.loads(files["report.json"])
    assert report["heads"] == explanation.heads and report["model"] == "<a&b>"
    pictures = {name for name in files if name.endswith(".png")}
    heads = {"kept.png", "recall.png", "kind.png"}
    assert pictures == heads | {f"{what}-layer0-head1.png" for what in ("attention", "kept", "lost")}
    for name in pictures:
        assert files[name].startswith(b"\x89PNG\r\n\x1a\n")
        (tmp_path / name).write_bytes(files[name])


def test_png_comes_back_as_it_was():
    pixels, palette = bytes([0, 1, 2, 2, 1, 0]), bytes([255, 0, 0, 0, 255, 0, 1, 2, 3])
    png, chunks = _png.encode(3, 2, palette, pixels), {}
    at = 8
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        name, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert struct.unpack(">I", png[at + 8 + size : at + 12 + size]) == (zlib.crc32(name + data),)
        chunks[name], at = data, at + 12 + size
    assert list(chunks) == [b"IHDR", b"PLTE", b"IDAT", b"IEND"]
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (3, 2, 8, 3, 0, 0, 0)
    assert chunks[b"PLTE"] == palette
    assert zlib.decompress(chunks[b"IDAT"]) == b"\0\0\1\2" + b"\0\2\1\0"  # each row after its filter, none


def test_png_is_read_by_others():
    image = pytest.importorskip("PIL.Image")
    import io

    pixels = np.arange(256, dtype=np.uint8).repeat(3)
    palette = bytes(range(256)) * 3
    read = image.open(io.BytesIO(_png.encode(32, 24, palette, pixels.tobytes())))
    assert read.size == (32, 24) and read.mode == "P"
    np.testing.assert_array_equal(np.asarray(read).ravel(), pixels)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 2, 8), "layers is 0; legal: 1 or more"),
        ((1, -1, 8), "q_heads is -1; legal: 1 or more"),
        ((1, 2, 0), "tokens is 0; legal: 1 or more"),
        ((1, 2, 8, [(0, 2)]), "no head 0:2; legal: layers 0 to 0, heads 0 to 1"),
        ((1, 2, 8, [(-1, 0)]), "no head -1:0"),
        ((1, 64, 8, [(0, head) for head in range(33)]), "33 heads; legal: 1 to 32"),
        ((1, 2, 8, [(0, 1), (0, 1)]), "head 0:1 is given twice"),
        ((1, 2, 8, [], 65), "guard_rows is 65; legal: 1 to 64"),
    ],
)
def test_bad_explanations(arguments, words):
    with pytest.raises(ValueError, match=words):
        minference.Explanation(*arguments)


def test_calls_that_cannot_be_explained():
    q, k, v = problem()
    explanation = minference.Explanation(2, HEADS, TOKENS)
    with pytest.raises(ValueError, match="layer is 2; legal: 0 to 1"):
        minference.attention(q, k, v, layer=2, explanation=explanation)
    two = [np.concatenate([t, t]) for t in (q, k, v)]
    with pytest.raises(ValueError, match="batch 2 and 2 heads; legal with explanation=: 1 and 2"):
        minference.attention(*two, explanation=explanation)
    with pytest.raises(ValueError, match="batch 1 and 1 heads"):
        minference.attention(q[:, :, :1], k, v, explanation=explanation)
    short = minference.Explanation(2, HEADS, TOKENS - 1, shown=[(0, 0)])
    with pytest.raises(ValueError, match="599"):
        minference.attention(q, k, v, "a_shape", n_init=5, n_local=64, explanation=short)
    with pytest.raises(ValueError, match="nothing to explain"):
        explanation.files(_png.encode, {})
