"""Spans: the query rows and keys of each sequence of a padded batch, so that padding costs nothing."""

from __future__ import annotations

import dataclasses

import numpy as np

from .masks import BEYOND, TOKEN


@dataclasses.dataclass(frozen=True)
class Span:
    """What one sequence, or several alike, contributes to a call.

    `rows` and `keys` are slices of the query and key axes, or both arrays of indices where padding lies
    between the tokens. The last row stands at the position of the last key.
    """

    sequences: slice
    rows: slice | np.ndarray
    keys: slice | np.ndarray

    @property
    def contiguous(self) -> bool:
        return isinstance(self.keys, slice)


def spans_of(codes: np.ndarray, q_length: int) -> list[Span]:
    """The spans of key codes [batch, kv_tokens]; sequences without a row that is a token have none."""
    spans = []
    for sequence, row in enumerate(codes):
        end = int(np.count_nonzero(row != BEYOND))
        begin = end - q_length  # position of the first query row
        tokens = np.flatnonzero(row[:end] == TOKEN)
        queries = tokens[np.searchsorted(tokens, begin) :]
        if queries.size == 0:
            continue
        rows, keys = queries - begin, tokens
        if int(tokens[-1]) - int(tokens[0]) + 1 == tokens.size:
            rows, keys = _as_slice(rows), _as_slice(keys)
        spans.append(Span(slice(sequence, sequence + 1), rows, keys))
    return _joined(spans)


def _as_slice(indices):
    return slice(int(indices[0]), int(indices[-1]) + 1)


def _joined(spans):
    """Neighbours with the same rows and keys as one span: one call for an unpadded batch."""
    joined = []
    for span in spans:
        before = joined[-1] if joined else None
        if (
            before is not None
            and span.contiguous
            and before.contiguous
            and (before.rows, before.keys) == (span.rows, span.keys)
            and before.sequences.stop == span.sequences.start
        ):
            sequences = slice(before.sequences.start, span.sequences.stop)
            joined[-1] = dataclasses.replace(before, sequences=sequences)
        else:
            joined.append(span)
    return joined
