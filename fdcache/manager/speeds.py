"""Speeds of copies and of computing, fitted to what was observed.

Nothing here is a constant of some machine: recent observations weigh most, and a speed that has become quite another is
believed after a few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from operator import mul
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Numbers = TypeVar("Numbers", float, Vector)
"""One number or many. One takes a tenth of the time as a float."""

_DECAY = 0.85
"""Weight of an observation relative to the next one: half the weight is in the last five."""

_DECAY_OF_OTHER_SIZES = 0.99
"""The same for an observation of another size: many short steps in a row do not hide what long ones take."""

_MOST_SURPRISE = 4.0
"""An observation further than this factor from what was expected counts as this factor: one stall is no new speed."""

_NEW_SPEED = 3.0
"""Weight of such observations in a row, all slower or all faster, that are a new speed: older ones are forgotten."""

_LEAST_WEIGHT = 0.01
_LONGEST = 1e6
SHORTEST = 1e-12
_MIN_OBSERVATIONS = 3
_MOST_UNFITTED = 8
_MOST_CONDITION = 1e8
"""Condition of a system of equations from which on its solution is noise."""

_SIMPLER = 0.8
"""A fit with one more coefficient has to leave less than this share of the error."""


def extremes(numbers: Numbers) -> tuple[Callable[..., Numbers], Callable[..., Numbers]]:
    """Return the functions for the larger and the smaller of two."""
    return (np.maximum, np.minimum) if isinstance(numbers, np.ndarray) else (max, min)


class _Sums:
    """Weighted sums over observations, as least squares need them: a few floats, which numpy would be slower with."""

    def __init__(self, num_features: int) -> None:
        self._size = num_features
        self.products = [0.0] * (num_features * num_features)
        self.targets = [0.0] * num_features
        self.energy = 0.0

    def decay(self, factor: float) -> None:
        """Weaken all observations."""
        self.products = [each * factor for each in self.products]
        self.targets = [each * factor for each in self.targets]
        self.energy *= factor

    def add(self, x: Sequence[float], y: float, weight: float) -> None:
        """Add an observation."""
        weighted = [weight * each for each in x]
        pairs = (one * other for one in weighted for other in x)
        self.products = [total + each for total, each in zip(self.products, pairs, strict=True)]
        self.targets = [total + each * y for total, each in zip(self.targets, weighted, strict=True)]
        self.energy += weight * y * y

    def merge(self, other: _Sums) -> None:
        """Add the observations of others."""
        self.products = [mine + its for mine, its in zip(self.products, other.products, strict=True)]
        self.targets = [mine + its for mine, its in zip(self.targets, other.targets, strict=True)]
        self.energy += other.energy

    def error(self, found: Sequence[float]) -> float:
        """Return the sum of squared errors of these coefficients."""
        size, total = self._size, self.energy
        for i, value in enumerate(found):
            row = self.products[i * size : (i + 1) * size]
            total += value * (sum(map(mul, row, found)) - 2 * self.targets[i])
        return max(total, 0.0)

    def fit(self, subset: Sequence[int]) -> tuple[float, ...] | None:
        """Return the least squares of these features alone; None for a negative or undetermined coefficient."""
        values = self._fit_two(*subset) if len(subset) <= 2 else self._fit_three(subset)
        if values is None or min(values) < 0:
            return None
        found = [0.0] * self._size
        for i, value in zip(subset, values, strict=True):
            found[i] = value
        return tuple(found)

    def _fit_two(self, first: int, second: int | None = None) -> tuple[float, ...] | None:
        """Solve for one or two coefficients, which takes a tenth of the time of the general way."""
        size = self._size
        a, x = self.products[first * size + first], self.targets[first]
        if not a > 0:
            return None
        if second is None:
            return (x / a,)
        b, y, c = (
            self.products[second * size + second],
            self.targets[second],
            self.products[first * size + second],
        )
        if not b > 0 or abs(c) >= math.sqrt(a * b) * (1 - 2 / _MOST_CONDITION):
            return None
        determinant = a * b - c * c
        return ((x * b - y * c) / determinant, (y * a - x * c) / determinant)

    def _fit_three(self, subset: Sequence[int]) -> tuple[float, ...] | None:
        """Solve for three coefficients by the inverse of their correlations, None if these are badly conditioned."""
        size = self._size
        scale = [math.sqrt(self.products[each * size + each]) for each in subset]
        if not min(scale) > 0:
            return None
        i, j, k = subset
        p = self.products[i * size + j] / (scale[0] * scale[1])
        q = self.products[i * size + k] / (scale[0] * scale[2])
        r = self.products[j * size + k] / (scale[1] * scale[2])
        rows = (
            (1 - r * r, q * r - p, p * r - q),
            (q * r - p, 1 - q * q, p * q - r),
            (p * r - q, p * q - r, 1 - p * p),
        )
        determinant = 1 + 2 * p * q * r - p * p - q * q - r * r
        norms = (3 + 2 * (p * p + q * q + r * r)) * sum(each * each for row in rows for each in row)
        if not determinant > 0 or norms > (_MOST_CONDITION * determinant) ** 2:
            return None
        targets = [self.targets[each] / by for each, by in zip(subset, scale, strict=True)]
        return tuple(
            sum(map(mul, row, targets)) / (determinant * by) for row, by in zip(rows, scale, strict=True)
        )


class SpeedFit:
    """Seconds as a sum of non-negative coefficients times features, by decayed least squares of the relative error.

    ``scale`` is the position of the feature that observations are weighted by, the number of bytes or tokens. It always
    has a coefficient: with observations of one size only, seconds are proportional to it. ``by_size``: observations of
    one size, to a factor of 4, hardly weaken those of others.
    """

    def __init__(self, num_features: int, scale: int, *, by_size: bool = False) -> None:
        self._scale = scale
        self._by_size = by_size
        self._sums: dict[int, _Sums] = {}
        self._surprises: dict[int, list[tuple[bool, tuple[float, ...], float, float]]] = {}
        self._num_features = num_features
        self._coefficients = (0.0,) * num_features
        self._fitted = 0
        others = [i for i in range(num_features) if i != scale]
        self._subsets = [
            (scale, *rest) for size in range(len(others) + 1) for rest in combinations(others, size)
        ]
        self.observations = 0

    def observe(self, features: Sequence[float], seconds: float, weight: float = 1.0) -> None:
        """Count one observation of a ``weight`` of at most 1; one without size, time or weight is ignored."""
        size = features[self._scale]
        if not (size > 0 and 0 < seconds < _LONGEST and weight > 0):
            return
        # Relative to the speed, so that every fit has errors of the same kind.
        x, y = tuple(each / size for each in features), seconds / size
        key = int(size).bit_length() // 2 if self._by_size else 0
        believed = y
        if self.observations >= _MIN_OBSERVATIONS and (expected := self.seconds(x)) > 0:
            believed = min(max(y, expected / _MOST_SURPRISE), expected * _MOST_SURPRISE)
        self.observations += 1
        if self._is_new_speed(key, x, y, weight, surprise=y - believed):
            return
        for other, sums in self._sums.items():
            sums.decay((_DECAY if other == key else _DECAY_OF_OTHER_SIZES) ** weight)
        self._sums.setdefault(key, _Sums(self._num_features)).add(x, believed, weight)

    def _is_new_speed(
        self, key: int, x: tuple[float, ...], y: float, weight: float, *, surprise: float
    ) -> bool:
        """Return True, and believe the last observations of a size alone, if they are surprises of one kind."""
        surprises = self._surprises.setdefault(key, [])
        if not surprise or (surprises and surprises[0][0] != (surprise > 0)):
            surprises.clear()
        if not surprise:
            return False
        surprises.append((surprise > 0, x, y, weight))
        if len(surprises) < _MIN_OBSERVATIONS or sum(each[-1] for each in surprises) < _NEW_SPEED:
            return False
        sums = self._sums[key] = _Sums(self._num_features)
        for _, features, each, its_weight in surprises:
            sums.decay(_DECAY**its_weight)
            sums.add(features, each, its_weight)
        surprises.clear()
        self._fitted = 0
        return True

    @property
    def is_known(self) -> bool:
        """True once there are enough observations."""
        return self.observations >= _MIN_OBSERVATIONS

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The best non-negative coefficients; simpler ones unless others fit clearly better.

        They are found anew once there are a sixteenth more observations: it takes as long as a small step's schedule.
        """
        if self.observations - self._fitted > min(self._fitted, _MOST_UNFITTED * 16) // 16:
            self._coefficients, self._fitted = self._solve(), self.observations
        return self._coefficients

    def seconds(self, features: Sequence[float]) -> float:
        """Return the expected seconds."""
        return float(sum(map(mul, self.coefficients, features)))

    def _solve(self) -> tuple[float, ...]:
        best, best_error = (0.0,) * self._num_features, math.inf
        total = _Sums(self._num_features)
        for sums in self._sums.values():
            total.merge(sums)
        for subset in self._subsets:
            found = total.fit(subset)
            if found is None:
                continue
            error = total.error(found)
            if error + 1e-9 * total.energy < _SIMPLER * best_error:
                best, best_error = found, error
        return best


class LinkSpeed:
    """Speed of copies of one direction: a latency, and seconds for each byte.

    ``prior``: bytes a second that a calibration has measured, believed until copies are observed; 0.0 for none. The
    same for ``prior_latency``. ``whole``: seconds from which on a copy is a whole observation; one that takes less, and
    was expected to, weighs less.
    """

    def __init__(self, prior: float = 0.0, prior_latency: float = 0.0, *, whole: float = 0.0) -> None:
        self._fit = SpeedFit(2, scale=1)
        self._prior = prior
        self._prior_latency = prior_latency if prior > 0 else 0.0
        self._whole = whole
        self.observed_at: float | None = None

    def observe(self, nbytes: int, seconds: float, now: float) -> None:
        """Count a copy."""
        if nbytes > 0 and 0 < seconds < math.inf:
            expected = self.seconds(float(nbytes)) if self._fit.is_known else 0.0
            weight = min(max(seconds, expected) / self._whole, 1.0) if self._whole else 1.0
            weight = max(weight, _LEAST_WEIGHT)
            self._fit.observe((1.0, float(nbytes)), seconds, weight)
            self.observed_at = now

    @property
    def is_known(self) -> bool:
        """True if there is a prior, or observations enough."""
        return self._prior > 0 or self._fit.is_known

    def seconds(self, nbytes: Numbers) -> Numbers:
        """Return the expected seconds of one copy, or of copies of many sizes; 0.0 for no bytes."""
        return (nbytes > 0) * (self.latency + self._each * nbytes)

    @property
    def latency(self) -> float:
        """Seconds of a copy beside those of its bytes."""
        return self._fit.coefficients[0] if self._fit.is_known else self._prior_latency

    @property
    def _each(self) -> float:
        """Seconds of a byte."""
        if self._fit.is_known:
            return self._fit.coefficients[1]
        return 1 / self._prior if self._prior > 0 else 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes a second without the latency; 0.0 if unknown."""
        if not self._fit.is_known:
            return self._prior
        return 1 / self._each if self._each > 0 else float("inf")


class PrefillSpeed:
    """Speed of an engine's prefill: seconds = step + a * tokens + b * tokens * (context + tokens / 2).

    ``most_tokens`` of a step, as observed: longer prompts take several steps.
    """

    def __init__(self) -> None:
        self._fit = SpeedFit(3, scale=1, by_size=True)
        self.most_tokens = 1

    def observe(self, chunks: Sequence[tuple[int, int]], seconds: float, steps: int = 1) -> None:
        """Count steps that computed the tokens ``start`` to ``stop`` of each chunk."""
        tokens = float(sum(stop - start for start, stop in chunks))
        if not 0 < seconds < _LONGEST:
            return
        self.most_tokens = max(self.most_tokens, int(tokens / steps))
        self._fit.observe((float(steps), tokens, sum(_pairs(start, stop) for start, stop in chunks)), seconds)

    @property
    def is_known(self) -> bool:
        """True once there are observations enough."""
        return self._fit.is_known

    def seconds(self, start: Numbers, stop: int) -> Numbers:
        """Return the expected seconds to compute the tokens from ``start`` to ``stop`` of a prompt, or from many."""
        largest, _ = extremes(start)
        step, token, pair = self._fit.coefficients
        tokens = largest(stop - start, 0.0)
        steps = largest(tokens / self.most_tokens, 1.0)
        return (tokens > 0) * (step * steps + tokens * (token + pair * (start + tokens / 2)))

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Seconds of a step, of a token, and of a token for each token of its context."""
        step, token, pair = self._fit.coefficients
        return step, token, pair


def _pairs(start: int, stop: int) -> float:
    """Return how many earlier tokens the tokens from ``start`` to ``stop`` attend to, half of themselves included."""
    return (stop - start) * (start + (stop - start) / 2)
