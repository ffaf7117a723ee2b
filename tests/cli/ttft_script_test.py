"""bench/ttft.py: rows of `minference bench` and of peers in one report, and what it refuses.

Usage: ttft_script_test.py SOURCE_DIR BIN_DIR
"""

import json
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SOURCE_DIR, BIN_DIR = Path(sys.argv[1]), Path(sys.argv[2])
MODEL = SOURCE_DIR / "models/smollm2-135m-instruct-q4_1.gguf"

PEERS = {
    "works": """
import json, sys
words = sys.argv[1:]
option = dict(zip(words[::2], words[1::2]))
assert set(option) == {"--model", "--prompt-file", "--tokens", "--threads", "--mode"}, option
print(json.dumps({"peer": "works", "version": "1", "mode": option["--mode"],
                  "tokens": int(option["--tokens"]),
                  "ttft_seconds": 0.5, "answer_tokens": [1, 2], "peak_mib": 10.0}))
""",
    "missing": ("import sys\n"
                "print('missing is not installed: pip install it', file=sys.stderr)\n"
                "sys.exit(3)\n"),
    "breaks": "import sys\nprint('out of luck', file=sys.stderr)\nsys.exit(1)\n",
    "babbles": "print('{')\n",
    "forgets": "print('{\"version\": \"1\"}')\n",
}


class TtftScript(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        peers = self.folder / "bench/peers"
        peers.mkdir(parents=True)
        shutil.copy(SOURCE_DIR / "bench/ttft.py", self.folder / "bench")
        for name, text in PEERS.items():
            (peers / f"{name}.py").write_text(text, encoding="utf-8")

    def run_script(self, *arguments):
        command = [
            sys.executable, str(self.folder / "bench/ttft.py"), "-m", str(MODEL),
            "--text", str(SOURCE_DIR / "models/text/othello_gut.txt"), "--bin-dir", str(BIN_DIR),
            "-t", "2", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def test_peers_follow_the_methods_of_each_length(self):
        path = self.folder / "report.json"
        result = self.run_script("--tokens", "128,256", "--attn", "stock,dense", "--json",
                                 str(path), "--peers", "works:fast,missing", "--peer-python",
                                 f"works={sys.executable}")
        self.assertEqual(result.returncode, 0, result.stderr)
        # Once, although there are two lengths.
        self.assertEqual(result.stderr,
                         "missing: left out: missing is not installed: pip install it\n")
        report = json.loads(path.read_text(encoding="utf-8"))
        self.assertEqual([(row["tokens"], row["attention"]) for row in report["rows"]],
                         [(128, "stock"), (128, "dense"), (128, "works:fast"),
                          (256, "stock"), (256, "dense"), (256, "works:fast")])
        stock, peer = report["rows"][0], report["rows"][2]
        self.assertAlmostEqual(peer["speedup_over_stock"], stock["ttft_seconds"] / 0.5)
        self.assertEqual(peer["version"], "1")
        self.assertEqual(report["machine"]["threads"], 2)
        self.assertIn("--peers works:fast,missing", report["command"])
        lines = result.stdout.splitlines()
        self.assertEqual(len(lines), 7)
        self.assertIn("works:fast", lines[3])

    def test_failing_peers_are_rows_that_say_why(self):
        result = self.run_script("--tokens", "128", "--attn", "dense", "--peers",
                                 "breaks,babbles,forgets")
        self.assertEqual(result.returncode, 1)
        self.assertIn("failed: out of luck", result.stdout)
        self.assertEqual(result.stdout.count("failed: "), 3)

    def test_refusals(self):
        result = self.run_script("--peers", "no_such_peer")
        self.assertEqual(result.returncode, 2)
        self.assertIn("unknown peer 'no_such_peer', expected one of: babbles, breaks",
                      result.stderr)
        for arguments, words in {("--tokens", "0"): "'0' is not a length",
                                 ("--tokens", "1e3"): "'1e3' is not a length",
                                 ("--tokens", "16k"): "8192",
                                 ("--attn", "no_such_method"): "no_such_method",
                                 ("-r", "0"): "1 to 1000",
                                 ("--peer-python", "works"): "NAME=PATH"}.items():
            result = self.run_script(*arguments)
            self.assertEqual(result.returncode, 2, arguments)
            self.assertIn(words, result.stderr)
            self.assertEqual(result.stdout, "")
        result = self.run_script("--tokens", "128", "--attn", "dense", "--peers", "works",
                                 "--peer-python", "works=/no/such/python3")
        self.assertEqual(result.returncode, 2)
        self.assertIn("/no/such/python3: No such file", result.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
