"""A pattern file for a transformers model, from its own attention on a real text.

Examples:
  python -m minference.search -m models/smollm2-135m-instruct-q4_1.gguf -f book.txt -o pattern.json
  python -m minference.search -m Qwen/Qwen2.5-7B-Instruct -f book.txt -o pattern.json --device cuda \\
      --budget 0.15 --report report.json

The text runs through the model once, exactly, in chunks; every candidate pattern of every head is applied
to each chunk as the method "minference" would apply it, and its error on sampled rows is measured, on the
CPU. The file is the reference system's JSON. An interrupted search goes on where it was when the same
command is given again. Exit codes: 0 done, 2 bad input, 130 interrupted.
"""

import argparse
import hashlib
import json
import os
import sys
import time

from . import _cli, _core

_MOST_TOKENS = 32768  # taken unless --tokens says otherwise
_SAVE_EVERY = 10  # seconds
_COSTS = ("runs", "columns", "window", "blocks", "estimate")


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m minference.search",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _cli.add_model_arguments(parser)
    parser.add_argument("-f", "--file", required=True, help="text to search on")
    parser.add_argument("-o", "--output", required=True, help="pattern file (JSON) to write")
    parser.add_argument("--report", help="also write every head's pattern, recall and cost to this file")
    parser.add_argument(
        "--budget",
        type=_cli.number_between(float, 0.0, 1.0),
        default=0.25,
        help="cost of all heads as a share of dense attention's (default: 0.25)",
    )
    parser.add_argument(
        "--equal", action="store_true", help="hold every head to the budget, instead of all together"
    )
    parser.add_argument(
        "--tokens",
        type=_cli.length,
        help=f"tokens of the text (default: all, at most {_MOST_TOKENS} or the model's context)",
    )
    parser.add_argument(
        "--rows",
        type=_cli.number_between(int, 1, _core.MAX_SEARCH_ROWS),
        default=16,
        help="query rows sampled of each chunk and head (default: 16)",
    )
    parser.add_argument(
        "--chunk",
        type=_cli.number_between(int, 64, 16384),
        default=2048,
        help="tokens of a prefill step; patterns are measured for steps of this size (default: 2048)",
    )
    costs = parser.add_mutually_exclusive_group()
    costs.add_argument(
        "--costs",
        type=lambda text: _five_numbers(text),
        help="what a pair costs beside one of dense attention, five numbers: " + ", ".join(_COSTS),
    )
    costs.add_argument("--calibrate", action="store_true", help="measure these on this machine's CPU")
    parser.add_argument(
        "--restart", action="store_true", help="forget what an interrupted search has saved"
    )
    return parser.parse_args(arguments)


def _five_numbers(text):
    number = _cli.number_between(float, 0.0, 1000.0)
    values = [number(item) for item in text.split(",")]
    if len(values) != len(_COSTS):
        raise argparse.ArgumentTypeError(f"'{text}' has {len(values)} numbers; legal: {len(_COSTS)}")
    return dict(zip(_COSTS, values, strict=True))


class Checkpoint:
    """The state of a search beside its output."""

    def __init__(self, search, path, purpose):
        self._search, self._path, self._purpose = search, path, purpose
        self._saved = time.monotonic()
        self._changed = False

    def restore(self):
        """Takes up a saved state; returns whether there was one."""
        try:
            with open(self._path, "rb") as file:
                state = file.read()
        except FileNotFoundError:
            return False
        try:
            self._search.restore(state, self._purpose)
        except ValueError as error:
            raise ValueError(f"{self._path}: {error}; --restart begins a new one") from None
        return True

    def changed(self):
        self._changed = True
        if time.monotonic() - self._saved > _SAVE_EVERY:
            self.save()

    def save(self):
        if self._changed:
            _cli.write_bytes(self._path, self._search.state(self._purpose))
            self._saved, self._changed = time.monotonic(), False

    def remove(self):
        if os.path.exists(self._path):
            os.unlink(self._path)


def prompt(options, model):
    """[1, tokens] of the text that is searched on."""
    from .hf import loading

    tokens = loading.read_tokens(options.model, options.file)
    limit = loading.context_of(model.config) or _MOST_TOKENS
    wanted = options.tokens or min(tokens.shape[1], _MOST_TOKENS, limit)
    if not _core.MIN_SEARCH_TOKENS <= wanted <= tokens.shape[1]:
        raise ValueError(
            f"{options.file} has {tokens.shape[1]} tokens, of which the search takes {wanted}; legal: "
            f"{_core.MIN_SEARCH_TOKENS} and more, no more than there are"
        )
    if wanted > limit:
        raise ValueError(f"--tokens is {wanted}; {options.model} was trained for a context of {limit}")
    return tokens[:, :wanted]


def measure(model, tokens, search, checkpoint, options):
    """Runs the prompt through the model, exactly, and every chunk of every layer through the search.

    Returns the size of a head.
    """
    import torch
    from transformers import DynamicCache

    from . import hf

    layers = model.config.get_text_config().num_hidden_layers
    total = tokens.shape[1]
    head_dims = set()

    def observe(layer, q, k, v, call):
        head_dims.add(q.shape[3])
        keywords = {key: call[key] for key in ("scale", "soft_cap", "sliding_window", "sinks") if key in call}
        if search.add_chunk(
            layer, q.cpu(), k.cpu(), v.cpu(), threads=options.threads or torch.get_num_threads(), **keywords
        ):
            checkpoint.changed()
        _cli.progress(f"{k.shape[1]} of {total} tokens, layer {layer + 1} of {layers}")

    hf.patch(model, "dense", threads=options.threads, on_prefill=observe)
    cache = DynamicCache(config=model.config)
    try:
        with torch.inference_mode():
            for begin in range(0, total, options.chunk):
                part = tokens[:, begin : begin + options.chunk].to(options.device)
                model(part, past_key_values=cache, logits_to_keep=1)
    finally:
        checkpoint.save()
        hf.unpatch(model)
        _cli.end_progress()
    return max(head_dims)


def table(choices):
    """Kinds of pattern and what they keep, by layer and in all."""
    kinds = ("vertical_and_slash", "stream_llm", "block_sparse")
    groups = {}
    for choice in choices:
        groups.setdefault(choice["layer"], []).append(choice)
    lines = ["layer  vertical_and_slash  stream_llm  block_sparse  kept %  cost %  recall %  score"]
    for name, group in [*groups.items(), ("all", choices)]:
        counts = [sum(choice["type"] == kind for choice in group) for kind in kinds]
        keys = ("kept_fraction", "cost", "mass_recall", "score")
        kept, cost, recall, score = (mean(group, key) for key in keys)
        lines.append(
            f"{name:>5}  {counts[0]:>18}  {counts[1]:>10}  {counts[2]:>12}  {100 * kept:>6.1f}  "
            f"{100 * cost:>6.1f}  {100 * recall:>8.2f}  {score:>5.3f}"
        )
    return "\n".join(lines)


def mean(choices, key):
    return sum(choice[key] for choice in choices) / len(choices)


def main(options):
    partial = options.output + ".partial"
    for path in (options.output, options.report):
        if path:
            _cli.check_writable(path)

    import torch

    from .hf import loading

    if options.threads:
        torch.set_num_threads(options.threads)
    _cli.progress(f"loading {options.model}")
    model = loading.load_model(options.model, options.dtype, options.device)
    tokens = prompt(options, model)
    config = model.config.get_text_config()
    search = _core.PatternSearch(
        config.num_hidden_layers, config.num_attention_heads, tokens.shape[1], options.rows
    )
    purpose = json.dumps(
        [_core.__version__, options.model, options.dtype, options.chunk]
        + [hashlib.sha256(tokens.numpy().tobytes()).hexdigest()]
    )
    checkpoint = Checkpoint(search, partial, purpose)
    if options.restart:
        checkpoint.remove()
    if checkpoint.restore():
        print(f"minference.search: going on with the search saved in {partial}", file=sys.stderr)
    head_dim = measure(model, tokens, search, checkpoint, options)

    costs = options.costs
    if options.calibrate:
        costs = _core.measure_search_costs(head_dim, options.threads or torch.get_num_threads())
    share = "equal" if options.equal else "shared"
    choices = search.choose(options.budget, share, costs)
    if not choices:
        raise NotImplementedError(f"{options.model}: no layer computes causal attention that patterns serve")
    patterns = _core.PatternFile(config.num_hidden_layers)
    for choice in choices:
        patterns.set(*(choice[key] for key in ("layer", "head", "type", "vertical", "slash", "score")))
    if options.report:
        report = {
            "model": options.model,
            "tokens": tokens.shape[1],
            "chunk": options.chunk,
            "sampled_rows": options.rows,
            "candidates": search.candidates,
            "budget": options.budget,
            "share": share,
            "costs": costs,
            "kept_fraction": mean(choices, "kept_fraction"),
            "cost": mean(choices, "cost"),
            "mass_recall": mean(choices, "mass_recall"),
            "score": mean(choices, "score"),
            "heads": choices,
        }
        _cli.write_json(options.report, report)
    patterns.save(options.output)
    checkpoint.remove()
    print(table(choices))
    return _cli.OK


if __name__ == "__main__":
    sys.exit(_cli.run("minference.search", main, parse(None)))
