"""Hints for a workload: what a client that knows its own requests could say, a share of it wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fdcache.hints import Hint, HintKind
from fdcache.replay.workloads import WorkItem

_LONGEST = 6 * 3600.0
"""Seconds after which a request that comes back counts as new."""


def with_hints(items: Sequence[WorkItem], wrong: float, seed: int) -> list[WorkItem]:
    """Return the requests with hints by what follows in ``items``.

    The part that a later request begins with, output included, returns after the time until then; the rest is read
    once. For a share of ``wrong`` requests, chosen at random, the hints say the opposite: what returns is released,
    what does not returns soon.
    """
    random = np.random.default_rng(seed)
    is_wrong = random.random(len(items)) < wrong
    next_use: dict[int, float] = {}
    hinted: list[WorkItem] = []
    for item, errs in zip(reversed(items), reversed(is_wrong.tolist()), strict=True):
        prefixes = _prefixes(item)
        found = [(tokens, next_use[key]) for tokens, key in prefixes if key in next_use]
        tokens, when = found[-1] if found else (0, 0.0)
        seconds = max((when - item.timestamp_ms) / 1000, 1.0)
        returns = tokens if seconds <= _LONGEST else 0
        hinted.append(replace(item, hints=_hints(item, returns, seconds, bool(errs))))
        next_use.update((key, item.timestamp_ms) for _, key in prefixes)
    return hinted[::-1]


def _prefixes(item: WorkItem) -> list[tuple[int, int]]:
    """Return the number of tokens up to the end of each part of a request, and a key of these tokens."""
    tokens, key, found = 0, 0, []
    streams = [*item.streams.tolist(), item.output_stream]
    lengths = [*item.lengths.tolist(), item.output_length]
    for stream, length in zip(streams, lengths, strict=True):
        tokens += length
        key = hash((key, stream, length))
        found.append((tokens, key))
    return found


def _hints(item: WorkItem, returns: int, seconds: float, is_wrong: bool) -> tuple[Hint, ...]:
    total = item.prompt_length + item.output_length
    if is_wrong:
        seconds = 60.0
    comes_back = Hint(kind=HintKind.RETURN, seconds=seconds)
    if not returns:
        return (comes_back,) if is_wrong else (Hint.once(),)
    if is_wrong:
        return (Hint.release(),)
    if returns >= total:
        return (comes_back,)
    return (
        Hint(kind=HintKind.RETURN, seconds=seconds, end=returns),
        Hint(kind=HintKind.ONCE, start=returns),
    )
