"""WorkItem: one request of a workload, as lengths of deterministic token streams."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 128_000
OUTPUT_STREAMS = 1 << 62
"""Streams from here on belong to the output of one request each, so that outputs are unique."""

_STRIDE = np.uint64(0x9FB21C651E98DF25)
_FOLD = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request: its prompt is the concatenation of ``lengths[i]`` leading tokens of ``streams[i]``.

    Equal streams give equal tokens, so a shared prefix is a shared run of (stream, length). ``timestamp_ms``
    is the arrival on the workload's own clock. ``after`` is the index of the request that must have ended
    before this one arrives (the former turn of its conversation), and ``think_ms`` the time between the two.
    ``clipped_tokens`` of the prompt as it was recorded have no known content and are left out.
    """

    index: int
    timestamp_ms: float
    streams: NDArray[np.uint64]
    lengths: NDArray[np.int64]
    output_stream: int
    output_length: int
    after: int | None = None
    think_ms: float = 0.0
    clipped_tokens: int = 0

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return int(self.lengths.sum())

    @property
    def computed_length(self) -> int:
        """Tokens whose KV the request computes or reuses: all but the last one sampled."""
        return self.prompt_length + max(self.output_length - 1, 0)

    def tokens(self, seed: int) -> NDArray[np.int32]:
        """Prompt and output, shape (prompt_length + output_length,)."""
        streams = np.append(self.streams, np.uint64(self.output_stream))
        lengths = np.append(self.lengths, self.output_length)
        return stream_tokens(streams, lengths, seed)


def stream_tokens(streams: NDArray[np.uint64], lengths: NDArray[np.int64], seed: int) -> NDArray[np.int32]:
    """The leading ``lengths[i]`` tokens of each stream, concatenated, as int32 in [0, VOCABULARY)."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    positions = np.arange(total, dtype=np.uint64) - np.repeat((ends - lengths).astype(np.uint64), lengths)
    keys = _fold(streams * _STRIDE + np.uint64(seed & 0xFFFFFFFFFFFFFFFF))
    mixed = _fold(np.repeat(keys, lengths) + positions * _STRIDE)
    return ((mixed >> _SHIFT) % np.uint64(VOCABULARY)).astype(np.int32)


def _fold(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every bit over the whole word; wraps around by definition of unsigned arithmetic."""
    values = (values ^ (values >> _SHIFT)) * _FOLD
    values = (values ^ (values >> _SHIFT)) * _FOLD
    return values ^ (values >> _SHIFT)
