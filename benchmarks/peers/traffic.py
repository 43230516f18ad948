"""Requests of a workload, written once as tokens, so that every process replays the same ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fdcache.replay.workloads import WorkItem

Tokens = NDArray[np.int32]

TOKENS, BOUNDS = "tokens.int32", "bounds.npy"


@dataclass(frozen=True)
class Traffic:
    """Prompts and outputs in order of arrival, mapped from a file.

    ``bounds``: for each request, where its prompt begins, where its output begins, and where that ends.
    """

    tokens: Tokens
    bounds: NDArray[np.int64]

    @classmethod
    def load(cls, folder: Path) -> Traffic:
        """Map what ``record`` has written to a folder."""
        return cls(np.memmap(folder / TOKENS, np.int32, "r"), np.load(folder / BOUNDS))

    def __len__(self) -> int:
        return len(self.bounds)

    def lengths(self, index: int) -> tuple[int, int]:
        """Return the numbers of prompt and output tokens of a request."""
        start, middle, end = map(int, self.bounds[index])
        return middle - start, end - middle

    def request(self, index: int) -> tuple[Tokens, Tokens]:
        """Return copies of a request's prompt and output."""
        start, middle, end = self.bounds[index]
        return np.array(self.tokens[start:middle]), np.array(self.tokens[middle:end])

    @property
    def longest(self) -> int:
        """Most tokens of a request, its output included."""
        return int((self.bounds[:, 2] - self.bounds[:, 0]).max())


def record(items: Iterable[WorkItem], folder: Path) -> int:
    """Write the requests of a workload to a folder; return their number."""
    bounds: list[tuple[int, int, int]] = []
    written = 0
    with (folder / TOKENS).open("wb") as file:
        for item in items:
            tokens = item.tokens(seed=0)
            tokens.tofile(file)
            bounds.append((written, written + item.prompt_length, written + len(tokens)))
            written += len(tokens)
    np.save(folder / BOUNDS, np.array(bounds, np.int64).reshape(-1, 3))
    return len(bounds)
