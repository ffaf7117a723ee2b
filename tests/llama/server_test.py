"""llama-server with the plug-in and four slots: concurrent prompts of different lengths get the
greedy answers that stock llama-server gives; a repeated prompt reuses its prefix and answers
the same.

Usage: server_test.py BIN_DIR MODELS_DIR. Exit code 0 when everything held.
"""

import concurrent.futures
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

PREDICT = 12
START_SECONDS = 60
LENGTHS = (5200, 300, 3600, 1800)  # bytes of text


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """A server that runs `command`, which llama-server's flags are added to."""

    def __init__(self, command, environment, flags=()):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        env = {k: v for k, v in os.environ.items()
               if not k.startswith("MINFERENCE_") and k != "GGML_BACKEND_PATH"}
        env.update(environment)
        command = [*map(str, command), "--port", str(port), "-fa", "on", "-np", "4", "-c", "8192",
                   "-b", "2048", "-ub", "512", "-t", "2", "--no-warmup", *flags]
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.PIPE, text=True)
        self.stderr = []
        self.reader = concurrent.futures.ThreadPoolExecutor(1)
        self.reader.submit(lambda: self.stderr.extend(self.process.stderr))

    def __enter__(self):
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5):
                    return self
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                if self.process.poll() is not None:
                    break
                time.sleep(0.2)
        self.__exit__()
        raise RuntimeError("llama-server did not start:\n" + "".join(self.stderr))

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(30)
        self.reader.shutdown()

    def complete(self, prompt):
        body = {"prompt": prompt, "n_predict": PREDICT, "temperature": 0, "cache_prompt": True,
                "return_tokens": True}
        request = urllib.request.Request(self.url + "/completion", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)


def passages(models_dir):
    """Texts that break off in a passage which they had before: the model's decisions are clear."""
    text = (models_dir / "text/hamlet_gut.txt").read_text(encoding="latin-1")
    result = []
    for i, length in enumerate(LENGTHS):
        passage = text[4000 + 3000 * i:][:260]
        result.append((passage * (length // len(passage) + 1))[:length])
    return result


def run_all(server, prompts):
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(server.complete, prompts))


def check(condition, message):
    if not condition:
        print(f"FAILED: {message}")
        sys.exit(1)
    print(f"ok: {message}")


def main():
    bin_dir, models_dir = Path(sys.argv[1]), Path(sys.argv[2])
    model = models_dir / "smollm2-135m-instruct-q4_1.gguf"
    for path in (model, bin_dir / "llama-server"):
        check(path.is_file(), f"{path.name} is there (make models, make tools)")
    llama_server = [bin_dir / "llama-server", "-m", model]
    prompts = passages(models_dir)
    with Server(llama_server, {}) as server:
        expected = [answer["tokens"] for answer in run_all(server, prompts)]
    check(all(len(tokens) > 0 for tokens in expected), "stock answers four prompts at once")

    plugin = {"GGML_BACKEND_PATH": str(bin_dir / "libggml-minference.so"), "MINFERENCE_LOG": "1"}
    for flags in ([], ["--kv-unified"]):
        name = "one cache for all slots" if flags else "a stream per slot"
        environment = {**plugin, "MINFERENCE_ATTN": "dense"}
        with Server(llama_server, environment, flags) as server:
            answers = run_all(server, prompts)
            check([a["tokens"] for a in answers] == expected, f"dense, {name}: answers of stock")
            # The same prompt again, then a longer one that begins with it.
            again = server.complete(prompts[0])
            check(again["tokens"] == expected[0], f"dense, {name}: repeated prompt, same answer")
            check(again["timings"]["cache_n"] > 0, f"dense, {name}: its prefix was reused")
            longer = server.complete(prompts[0] + prompts[1])
            check(len(longer["tokens"]) > 0, f"dense, {name}: longer prompt")
        table = "".join(server.stderr)
        check("\n     all " in table, f"dense, {name}: the plug-in ran")

    # The same through our own command, which sets the environment itself.
    serve = [bin_dir / "minference", "serve", "-m", model, "--attn", "vertical_slash",
             "--attn-opt", "vertical_size=100,slash_size=200", "--"]
    with Server(serve, {"MINFERENCE_LOG": "1"}) as server:
        answers = run_all(server, prompts)
        check(all(len(a["tokens"]) > 0 for a in answers),
              "minference serve with vertical_slash answers four prompts at once")
    check(" vertical_slash " in "".join(server.stderr), "minference serve: the method ran")


if __name__ == "__main__":
    main()
