"""Readings: which document each request of a generated workload asks about, and when.

Each kind is traffic that some order of eviction handles badly. All are endless and depend on their generator alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

Draw = Iterator[int]
"""Numbers of documents."""

_NEVER_AGAIN = 1 << 40
"""First number of documents that are read once, or for a short time."""


class DocumentReading(NamedTuple):
    """One question about one document, ``gap_ms`` after the question before."""

    document: int
    gap_ms: float


def scan(random: np.random.Generator) -> Iterator[DocumentReading]:
    """Popular documents, and from time to time many that are read once."""
    popular, once = _zipf(random, 80, 0.9), itertools.count(_NEVER_AGAIN)
    for turn in itertools.count():
        scanning = turn % 300 >= 200
        draws = once if scanning and random.random() < 0.9 else popular
        yield DocumentReading(next(draws), random.exponential(100 if scanning else 500))


def shift(random: np.random.Generator) -> Iterator[DocumentReading]:
    """Popular documents, all of which change at once every 500 requests."""
    for era in itertools.count():
        for document in itertools.islice(_zipf(random, 120, 1.0), 500):
            yield DocumentReading(era * 120 + document, random.exponential(500))


def loop(random: np.random.Generator) -> Iterator[DocumentReading]:
    """One document after the other, again and again; last use says nothing."""
    for turn in itertools.count():
        yield DocumentReading(turn % 150, random.exponential(500))


def recency(random: np.random.Generator) -> Iterator[DocumentReading]:
    """Documents read a short time ago; last use says it all."""
    for document in _recent(random, 0):
        yield DocumentReading(document, random.exponential(500))


def misleading(random: np.random.Generator) -> Iterator[DocumentReading]:
    """Popular documents among others that are read twice in a row and never again."""
    popular, once = _zipf(random, 100, 0.8), itertools.count(_NEVER_AGAIN)
    while True:
        if random.random() < 0.35:
            document = next(once)
            yield DocumentReading(document, random.exponential(500))
            yield DocumentReading(document, random.exponential(500))
        else:
            yield DocumentReading(next(popular), random.exponential(500))


def load(random: np.random.Generator) -> Iterator[DocumentReading]:
    """Popular documents and documents read a short time ago, at a rate that changes tenfold."""
    popular, recent = _zipf(random, 150, 1.0), _recent(random, 1 << 20)
    for turn in itertools.count():
        gap = 100.0 if turn // 250 % 2 else 1000.0
        yield DocumentReading(next(popular if random.random() < 0.5 else recent), random.exponential(gap))


def mixed(random: np.random.Generator) -> Iterator[DocumentReading]:
    """Popular documents, recent ones, a loop and documents that are read once, all together."""
    draws: list[Draw] = [
        _zipf(random, 150, 1.0),
        _recent(random, 1 << 20),
        (2 << 20 | turn % 60 for turn in itertools.count()),
        itertools.count(_NEVER_AGAIN),
    ]
    while True:
        chosen = draws[int(random.choice(len(draws), p=(0.4, 0.25, 0.2, 0.15)))]
        yield DocumentReading(next(chosen), random.exponential(500))


READINGS: dict[str, Callable[[np.random.Generator], Iterator[DocumentReading]]] = {
    each.__name__: each for each in (scan, shift, loop, recency, misleading, load, mixed)
}
"""The kinds by name."""


def _zipf(random: np.random.Generator, documents: int, exponent: float) -> Draw:
    weights = np.arange(1, documents + 1, dtype=np.float64) ** -exponent
    weights /= weights.sum()
    while True:
        yield from random.choice(documents, size=64, p=weights).tolist()


def _recent(random: np.random.Generator, first: int) -> Draw:
    """Draw from the documents read last, and a new one now and then."""
    read: list[int] = []
    while True:
        back = int(random.geometric(0.05))
        document = read.pop(-back) if back <= len(read) and random.random() < 0.85 else first
        if document == first:
            first += 1
        read.append(document)
        del read[:-200]
        yield document
