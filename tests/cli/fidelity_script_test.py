"""bench/fidelity.py: its rules for prompts and scores, a small bench end to end, what it refuses.

Usage: fidelity_script_test.py SOURCE_DIR BIN_DIR
"""

import json
import math
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SOURCE_DIR, BIN_DIR = Path(sys.argv[1]), Path(sys.argv[2])
MODEL = SOURCE_DIR / "models/smollm2-135m-instruct-q4_1.gguf"

sys.path.insert(0, str(SOURCE_DIR / "bench"))
import fidelity  # noqa: E402


class Rules(unittest.TestCase):
    def test_methods(self):
        self.assertEqual(fidelity.parse_methods("a,dense,a,b:x=1"), ["dense", "a", "b:x=1"])
        self.assertEqual(
            fidelity.method_arguments("m:x=1:pattern=p.json:y=2"),
            ["--attn", "m", "--attn-opt", "x=1", "--pattern", "p.json", "--attn-opt", "y=2"])

    def test_texts_are_cut_between_words(self):
        self.assertEqual(fidelity.cut_at_word("one two three", 9), "one two")
        self.assertEqual(fidelity.cut_at_word("one two three", 7), "one two")
        self.assertEqual(fidelity.cut_at_word("one two three", 99), "one two three")
        self.assertEqual(fidelity.cut_at_word("onetwothree", 3), "one")

    def test_needles_are_lines_of_their_own_at_their_depth(self):
        text = "\n".join(f"line {i}" for i in range(101))
        for depth in (0, 10, 50, 90, 100):
            lines = fidelity.hide(text, "needle", depth).split("\n")
            self.assertEqual(len(lines), 102)
            self.assertAlmostEqual(lines.index("needle"), depth, delta=2)
            lines.remove("needle")
            self.assertEqual("\n".join(lines), text)
        self.assertEqual(fidelity.hide("no line", "needle", 50), "no line\nneedle")

    def test_leading_share(self):
        self.assertEqual(fidelity.leading_share([1, 2, 3, 4], [1, 2, 9, 4]), 0.5)
        self.assertEqual(fidelity.leading_share([1, 2], [1, 2]), 1.0)
        self.assertEqual(fidelity.leading_share([1, 2], [1, 2, 3, 4]), 0.5)  # ended too soon
        self.assertEqual(fidelity.leading_share([], []), 1.0)
        self.assertEqual(fidelity.leading_share([], [1]), 0.0)

    def test_perplexity_is_compared_window_by_window(self):
        dense = [{"mean_loss": 3.0}, {"mean_loss": 5.0}]
        change, error = fidelity.loss_change([{"mean_loss": 3.1}, {"mean_loss": 5.1}], dense)
        self.assertAlmostEqual(change, math.exp(0.1) - 1)
        self.assertAlmostEqual(error, 0.0)  # however much the windows differ from each other
        change, error = fidelity.loss_change([{"mean_loss": 3.0}, {"mean_loss": 5.2}], dense)
        self.assertAlmostEqual(change, math.exp(0.1) - 1)
        self.assertAlmostEqual(error, math.exp(0.1) * 0.1)
        self.assertIsNone(fidelity.loss_change(dense[:1], dense[:1])[1])

    def test_rows_with_failed_cells_keep_the_rest(self):
        answers = {"prompts": [{"answer_tokens": [1], "ttft_seconds": 2.0, "kept_fraction": 0.5}]}
        dense = {"answers": answers, "perplexity": {"error": "no"}}
        cells = {"answers": answers, "perplexity": {"error": "broken"}}
        row = fidelity.summarize(64, "m", cells, dense)
        self.assertEqual((row["error"], row["exact_share"], row["ttft_seconds"]),
                         ("broken", 1, 2.0))
        table = fidelity.markdown([row])
        self.assertIn("`m` failed: broken", table)
        self.assertEqual(len({len(line) for line in table.splitlines()[:3]}), 1)


class Script(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.report = self.folder / "report.json"

    def run_script(self, *arguments):
        command = [
            sys.executable, str(SOURCE_DIR / "bench/fidelity.py"), "-m", str(MODEL),
            "--text", str(SOURCE_DIR / "models/text/othello_gut.txt"), "--bin-dir", str(BIN_DIR),
            "-t", "2", "--last", "64", "--windows", "2", "--prompts", "1", "--answer", "4",
            "--depths", "50", "--json", str(self.report), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def test_a_small_bench_and_its_continuation(self):
        near = "a_shape:n_init=32:n_local=64"
        result = self.run_script("--tokens", "768", "--attn", near)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stderr.count(": done"), 6)
        report = json.loads(self.report.read_text(encoding="utf-8"))
        dense, other = report["rows"]
        self.assertEqual((dense["attention"], other["attention"]), ("dense", near))
        self.assertEqual(
            (dense["perplexity_change"], dense["leading_share"], dense["needle_score"]), (0, 1, 1))
        self.assertLess(other["kept_fraction"], 0.7)
        self.assertLess(other["mass_recall"], 1.0)
        self.assertEqual(report["machine"]["threads"], 2)
        for cell in report["cells"]:
            for prompt in cell.get("prompts", []):
                self.assertTrue(768 - 64 <= prompt["prompt_tokens"] <= 768, prompt)
        lines = result.stdout.splitlines()
        self.assertEqual(len(lines), 4)
        self.assertIn("perplexity change %", lines[0])
        self.assertIn(near, lines[3])

        result = self.run_script("--tokens", "768", "--attn", f"{near},stock", "--parts", "needles",
                                 "--resume")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stderr.count(": done"), 1)  # stock's needles
        again = json.loads(self.report.read_text(encoding="utf-8"))
        self.assertEqual(again["rows"][:2], report["rows"])

        result = self.run_script("--tokens", "768", "--windows", "1", "--resume")
        self.assertEqual(result.returncode, 2)
        self.assertIn("measured with windows 2, not 1", result.stderr)

    def test_refusals(self):
        for arguments, words in {
            ("--attn", "no_such_method"): "unknown method 'no_such_method', expected one of",
            ("--attn", "a_shape:x=1"): "valid options: n_init, n_local",
            ("--attn", "minference:pattern=/no/such"): "/no/such",
            ("--tokens", "16k"): "to 8192",
            ("--tokens", "x"): "'x' is not a length",
            ("--depths", "101"): "0 to 100",
            ("--windows", "0"): "from 1",
            ("--parts", "x"): "perplexity, answers, needles",
            ("--text", "/no/such"): "/no/such",
            ("-m", "/no/such.gguf"): "/no/such.gguf",
            ("--json", "/no/such/report.json"): "/no/such"
        }.items():
            result = self.run_script("--parts", "needles", "--tokens", "512", *arguments)
            self.assertEqual(result.returncode, 2, arguments)
            self.assertIn(words, result.stderr)
            self.assertEqual(result.stdout, "")
            self.assertFalse(self.report.exists())


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
