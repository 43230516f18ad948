"""Stopwatch: how long the manager's calls take, per request."""

from __future__ import annotations

import time
from collections import defaultdict

import numpy as np


class Stopwatch:
    """Durations of batched calls, each shared out equally among the requests of its batch."""

    def __init__(self) -> None:
        self._samples: dict[str, list[tuple[int, int]]] = defaultdict(list)

    @staticmethod
    def now() -> int:
        """A time in nanoseconds."""
        return time.perf_counter_ns()

    def add(self, name: str, since: int, requests: int) -> None:
        """A call of ``requests`` requests that began at ``since`` ends now."""
        if requests:
            self._samples[name].append((time.perf_counter_ns() - since, requests))

    def microseconds(self, name: str) -> dict[str, float]:
        """Percentiles per request (a call of n requests counts n times), and the mean; 0 without calls."""
        samples = np.array(self._samples.get(name, [(0, 1)]), dtype=np.float64)
        per_request = np.repeat(samples[:, 0] / samples[:, 1], samples[:, 1].astype(np.int64)) / 1000
        p50, p99 = np.percentile(per_request, [50, 99])
        return {
            "p50": round(float(p50), 3),
            "p99": round(float(p99), 3),
            "mean": round(float(per_request.mean()), 3),
        }
