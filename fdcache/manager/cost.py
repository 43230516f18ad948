"""Cost of loading and of computing, as observed: the length at which loading a cached prefix stops being worth it.

A block costs less to load than to compute, or more, depending on link, disk, model and context. Nothing here is a
constant of some machine: speeds are fitted to reports, recent ones weigh most, and a speed that is not known yet makes
no decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from operator import mul
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Numbers = TypeVar("Numbers", float, Vector)
"""One number or many. One takes a tenth of the time as a float."""

MARGIN = 0.03
"""Advantage in expected time that another choice needs over that of the last decision, and a part over both others."""

_DECAY = 0.85
"""Weight of an observation relative to the next one: half the weight is in the last five."""

_DECAY_OF_OTHER_SIZES = 0.99
"""The same for an observation of another size: many short steps in a row do not hide what long ones take."""

_MOST_SURPRISE = 4.0
"""An observation further than this factor from what was expected counts as this factor: one stall is no new speed."""

_WHOLE_READ = 0.1
"""Seconds of a read that counts as one observation. Reads are made in parts, of which each weighs less."""

_LONGEST, _SHORTEST = 1e6, 1e-12
_MIN_OBSERVATIONS = 3
_MOST_UNFITTED = 8
_CLEARLY_LONGER = 1.3
"""A step that took this much longer than its loads was computing."""

_MOST_CONDITION = 1e8
"""Condition of a system of equations from which on its solution is noise."""

_SIMPLER = 0.8
"""A fit with one more coefficient has to leave less than this share of the error."""


def _extremes(numbers: Numbers) -> tuple[Callable[..., Numbers], Callable[..., Numbers]]:
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
        if self.observations >= _MIN_OBSERVATIONS and (expected := self.seconds(features)) > 0:
            seconds = min(max(seconds, expected / _MOST_SURPRISE), expected * _MOST_SURPRISE)
        x, y = [each / size for each in features], seconds / size
        # Relative to the speed, so that every fit has errors of the same kind.
        key = int(size).bit_length() // 2 if self._by_size else 0
        for other, sums in self._sums.items():
            sums.decay((_DECAY if other == key else _DECAY_OF_OTHER_SIZES) ** weight)
        self._sums.setdefault(key, _Sums(self._num_features)).add(x, y, weight)
        self.observations += 1

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
    same for ``prior_latency``. ``whole``: seconds from which on a copy is a whole observation; shorter ones weigh less.
    """

    def __init__(self, prior: float = 0.0, prior_latency: float = 0.0, *, whole: float = 0.0) -> None:
        self._fit = SpeedFit(2, scale=1)
        self._prior = prior
        self._prior_latency = prior_latency if prior > 0 else 0.0
        self._whole = whole
        self.observed_at: float | None = None

    def observe(self, nbytes: int, seconds: float, now: float) -> None:
        """Count a copy."""
        if nbytes > 0 and seconds > 0:
            weight = min(seconds / self._whole, 1.0) if self._whole else 1.0
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
        self.most_tokens = max(self.most_tokens, int(tokens / steps))
        self._fit.observe((float(steps), tokens, sum(_pairs(start, stop) for start, stop in chunks)), seconds)

    @property
    def is_known(self) -> bool:
        """True once there are observations enough."""
        return self._fit.is_known

    def seconds(self, start: Numbers, stop: int) -> Numbers:
        """Return the expected seconds to compute the tokens from ``start`` to ``stop`` of a prompt, or from many."""
        largest, _ = _extremes(start)
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


class LoadChoice(StrEnum):
    """How much of a cached prefix is loaded."""

    WHOLE = "whole"
    PART = "part"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Priors:
    """What ``fdcache init`` has measured, believed until there are observations: bytes a second, 0.0 if unknown."""

    link: float = 0.0
    storage: float = 0.0
    storage_latency: float = 0.0


NO_PRIORS = Priors()


@dataclass(frozen=True, slots=True)
class Cached:
    """The cached prefix of a request of ``num_tokens`` tokens, in blocks by tier.

    ``in_storage`` blocks have still to be read, behind ``reads_ahead`` blocks of others; ``loads_ahead`` blocks are on
    their way to the device.
    """

    num_tokens: int
    on_device: int
    on_host: int
    in_storage: int = 0
    reads_ahead: int = 0
    loads_ahead: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of all tiers."""
        return self.on_device + self.on_host + self.in_storage


@dataclass(frozen=True, slots=True)
class Decision:
    """How many leading blocks to reuse, and the expected seconds of that, of reusing all, and of loading none.

    The seconds are None if a speed is unknown; all blocks are reused then.
    """

    num_blocks: int
    choice: LoadChoice
    seconds: float | None = None
    seconds_whole: float | None = None
    seconds_nothing: float | None = None


class CostModel:
    """Compares loading with computing for one engine.

    ``block_bytes``, ``record_bytes``: of one block, on the device and in storage, on one rank: the ranks copy side by
    side. ``stages``: groups of layers that are loaded one after another while the layers before them compute.
    ``streams``: a request's blocks are loaded while later ones are read, those of ``read_seconds`` after the others.
    ``windows``: of each group of layers that a path has blocks of in turn, in blocks of that group, 0 for all: only
    those in the window are loaded.
    """

    def __init__(
        self,
        *,
        block_size: float,
        block_bytes: int,
        record_bytes: int = 0,
        stages: int = 1,
        priors: Priors = NO_PRIORS,
        streams: bool = False,
        read_seconds: float = 0.0,
        windows: Sequence[float] = (),
    ) -> None:
        self.prefill = PrefillSpeed()
        self.link = LinkSpeed(priors.link)
        self.storage = LinkSpeed(priors.storage, priors.storage_latency, whole=_WHOLE_READ)
        self.streams = streams
        self._read_seconds = read_seconds
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._record_bytes = record_bytes or block_bytes
        self._stages = max(stages, 1)
        self._windows = windows

    def loads_are_known(self) -> bool:
        """Return True if loads from the host can be compared with computing."""
        return self.prefill.is_known and self.link.is_known

    def reads_are_known(self) -> bool:
        """Return True if reads from storage can be compared with computing."""
        return self.loads_are_known() and self.storage.is_known

    def observe_read(self, num_blocks: int, seconds: float, now: float) -> None:
        """Count a read from storage."""
        self.storage.observe(num_blocks * self._record_bytes, seconds, now)

    def seconds_of_read(self, num_blocks: int) -> float:
        """Return the expected seconds of one read from storage."""
        return self.storage.seconds(float(num_blocks * self._record_bytes))

    def seconds(self, cached: Cached, num_blocks: Numbers) -> Numbers:
        """Return the expected seconds to the first token if ``num_blocks`` leading blocks are reused, or so many each.

        A request waits for its reads. Loads run beside computing, except for the first group of layers.
        """
        largest, least = _extremes(num_blocks)
        wait, load = self._seconds_of_copies(cached, num_blocks)
        compute = self.prefill.seconds(num_blocks * self._block_size, cached.num_tokens)
        return wait + largest(load, compute) + least(load, compute) / self._stages

    def _seconds_of_copies(self, cached: Cached, num_blocks: Numbers) -> tuple[Numbers, Numbers]:
        """Return the seconds of the reads that a request waits for, and of the load that is left then."""
        largest, least = _extremes(num_blocks)
        to_load = largest(num_blocks - cached.on_device, 0.0)
        load = self.link.seconds(self._inside(to_load) * self._block_bytes)
        if cached.loads_ahead:
            load += (to_load > 0) * self.link.seconds(float(cached.loads_ahead * self._block_bytes))
        if not cached.in_storage:
            return 0.0 * load, load
        from_storage = largest(to_load - cached.on_host, 0.0)
        is_read = from_storage > 0
        read = self.storage.seconds(from_storage * self._record_bytes)
        wait = read + is_read * self.seconds_of_read(cached.reads_ahead)
        if not self.streams:
            return wait, load
        # Loads keep up with the reads as far as the link can; what is read last is loaded after it.
        share = least(self._read_seconds / largest(read, _SHORTEST), 1.0)
        last = self.link.seconds(from_storage * share * self._block_bytes)
        return wait, least(load, largest(load - is_read * wait, last + (1 - is_read) * load))

    def _inside(self, to_load: Numbers) -> Numbers:
        """Return how many of the blocks to load are in the windows of their groups."""
        if not self._windows:
            return to_load
        _, least = _extremes(to_load)
        pages = to_load / len(self._windows)
        total = 0.0 * pages
        for window in self._windows:
            total = total + (least(pages, window) if window else pages)
        return total

    def observe_waiting(
        self, chunks: Sequence[tuple[int, int]], seconds: float, loaded: int, steps: int
    ) -> None:
        """Learn the engine's speed from steps whose layers waited for ``loaded`` blocks, if computing took longer."""
        load = self.link.seconds(float(loaded * self._block_bytes))
        if 0 < load * _CLEARLY_LONGER < seconds:
            self.prefill.observe(chunks, seconds - load / self._stages, steps)

    def decide(self, cached: Cached, last: LoadChoice | None = None) -> Decision:
        """Return how much of a cached prefix is worth loading.

        Another choice than the ``last`` one needs an advantage of ``MARGIN``, so that noise changes nothing. A part
        always needs it: a few blocks less, or more, are no gain that the model can tell.
        """
        whole = cached.num_blocks
        is_known = self.reads_are_known() if cached.in_storage else self.loads_are_known()
        if whole == cached.on_device or not is_known:
            return Decision(whole, LoadChoice.WHOLE)
        lengths = np.arange(whole, cached.on_device - 1, -1, dtype=np.float64)  # of equal ones the longest
        found = self.seconds(cached, lengths)
        handicap = np.full(len(found), 1 + MARGIN)
        for end in (0, -1):
            handicap[end] = 1 - MARGIN if _choice(cached, int(lengths[end])) is last else 1.0
        best = int(np.argmin(found * handicap))
        blocks = int(lengths[best])
        return Decision(blocks, _choice(cached, blocks), *map(float, (found[best], found[0], found[-1])))


def _choice(cached: Cached, blocks: int) -> LoadChoice:
    if blocks == cached.num_blocks:
        return LoadChoice.WHOLE
    return LoadChoice.PART if blocks > cached.on_device else LoadChoice.NOTHING
