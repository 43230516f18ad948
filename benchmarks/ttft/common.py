"""Prompts, stop watches and rows of a report."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.ttft.model import Shape

Row = dict[str, Any]
Tokens = NDArray[np.int64]


def prompt(shape: Shape, length: int, seed: int) -> Tokens:
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, shape.vocab, length)


def timed(work: Callable[..., object], *arguments: object) -> float:
    """Seconds."""
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start
