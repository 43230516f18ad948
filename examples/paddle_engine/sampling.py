"""Greedy and seeded sampling that depends on nothing but the logits, the request's seed and the position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sample:
    """A token, and by how much its score beat the second best."""

    token: int
    margin: float


def sample(logits: NDArray[np.float32], temperature: float, seed: int, position: int) -> Sample:
    """The best token, or with ``temperature`` > 0 a random one: the best after Gumbel noise keyed by (seed, position).

    ``position`` is that of the new token, so a request that is preempted and resumed samples the same again.
    """
    scores = logits.astype(np.float64)
    if temperature > 0:
        noise = np.random.default_rng([seed, position]).gumbel(size=len(scores))
        scores = scores / temperature + noise
    second, best = np.argpartition(scores, -2)[-2:]
    return Sample(int(best), float(scores[best] - scores[second]))
