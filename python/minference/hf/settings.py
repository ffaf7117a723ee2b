"""Settings of a patched model, and what its attention did."""

from __future__ import annotations

import copy
import dataclasses
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from minference import _core

# Chunks of at most this many query rows are computed exactly: decoding, and the candidates that assisted
# decoding verifies. An estimate looks at 64 rows, so fewer have nothing to gain.
EXACT_ROWS = 64


@dataclasses.dataclass
class Settings:
    """How the attention layers of a model are computed.

    method: name of an attention method; `minference.methods()` lists them, "dense" is exact.
    options: values of the method's options by name.
    patterns: a minference.PatternFile, for methods that take one.
    guard: a minference.Guard, or None.
    threads: None: torch.get_num_threads().
    measure: on a CUDA device: wait for every layer's attention and measure it.
    on_prefill: called with (layer, q, k, v, arguments) for every chunk of one sequence that a layer
        computes, before it is computed; q, k, v [1, tokens, heads, head_dim], arguments as keywords of
        minference.attention().
    explanation: a minference.Explanation of the prefills, or None.
    """

    method: str = "auto"
    options: dict[str, float] = dataclasses.field(default_factory=dict)
    patterns: Any = None
    guard: Any = None
    threads: int | None = None
    measure: bool = False
    on_prefill: Callable | None = None
    explanation: Any = None


_MEASURED = ("kept_pairs", "causal_pairs", "kept_fraction", "index_seconds", "kernel_seconds")


class Totals:
    """Sums over the calls of a model's attention layers. Thread-safe; a copy begins at 0."""

    def __init__(self):
        self._lock = threading.Lock()
        self.reset()

    def __reduce__(self):
        return Totals, ()

    def reset(self):
        with self._lock:
            self._prefill = _core.Stats()
            self._calls = Counter()
            self._fallbacks = Counter()

    def add_prefill(self, stats):
        with self._lock:
            self._calls["prefill"] += 1
            self._prefill.add(stats)

    def add_decode(self):
        with self._lock:
            self._calls["decode"] += 1

    def add_fallback(self, reason: str):
        with self._lock:
            self._fallbacks[reason] += 1

    def to_dict(self) -> dict[str, Any]:
        """Figures by name. Pairs, times and recall are those of prefill; fallbacks: reason -> layers.

        What was not measured (on a CUDA device, without Settings.measure) is None.
        """
        with self._lock:
            figures = self._prefill.to_dict()
            if self._calls["prefill"] > 0 and figures["causal_pairs"] == 0:
                figures.update(dict.fromkeys(_MEASURED))
            figures["prefill_calls"] = self._calls["prefill"]
            figures["decode_calls"] = self._calls["decode"]
            figures["fallbacks"] = dict(Counter(figures["fallbacks"]) + self._fallbacks)
            return figures


class Layer:
    """What minference knows of one attention module: its number, its model's settings and totals.

    Also what methods remember of each cache, so that later chunks of a prompt share estimates.
    """

    _by_handle: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()
    _next_handle = 0
    _lock = threading.Lock()

    def __init__(self, index: int, settings: Settings, totals: Totals):
        self.index = index
        self.settings = settings
        self.totals = totals
        self._states = weakref.WeakKeyDictionary()
        with Layer._lock:
            self.handle = Layer._next_handle
            Layer._next_handle += 1
            Layer._by_handle[self.handle] = self

    def __deepcopy__(self, memo):
        return Layer(self.index, self.settings, copy.deepcopy(self.totals, memo))

    def __reduce__(self):
        return Layer, (
            self.index,
            dataclasses.replace(self.settings, on_prefill=None, explanation=None),
            self.totals,
        )

    def state(self, cache, sequences: slice):
        """The MethodState of these sequences of a cache, or None where the cache is not known."""
        if cache is None:
            return None
        with self._lock:
            states = self._states.setdefault(cache, {})
            return states.setdefault((sequences.start, sequences.stop), _core.MethodState())

    @classmethod
    def of_handle(cls, handle: int) -> Layer:
        """The layer of a handle; a negative one is layer -1 - handle of a model that was not patched."""
        if handle < 0:
            return default_layer(-1 - handle)
        try:
            return cls._by_handle[handle]
        except KeyError:
            raise RuntimeError(
                "this exported or compiled model was made from a model that is no longer patched; patch it "
                "and export it anew"
            ) from None


_default_settings = Settings()
_default_totals = Totals()
_default_layers: dict[int, Layer] = {}


def default_layer(index: int) -> Layer:
    """Layer `index` of models loaded with attn_implementation="minference" and not patched."""
    if index not in _default_layers:
        _default_layers[index] = Layer(index, _default_settings, _default_totals)
    return _default_layers[index]


def default_totals() -> Totals:
    return _default_totals


_warned: set[str] = set()


def warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=3)
