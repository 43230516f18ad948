"""Cost of loading and of computing, as observed: the length at which loading a cached prefix stops being worth it.

A block costs less to load than to compute, or more, depending on link, disk, model and context. Nothing here is a
constant of some machine: speeds are fitted to reports, recent ones weigh most, and a speed that is not known yet makes
no decision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

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


class _Sums:
    """Weighted sums over observations, as least squares need them."""

    def __init__(self, num_features: int) -> None:
        self.products = np.zeros((num_features, num_features))
        self.targets = np.zeros(num_features)
        self.energy = 0.0

    def decay(self, factor: float) -> None:
        """Weaken all observations."""
        self.products *= factor
        self.targets *= factor
        self.energy *= factor

    def add(self, x: Vector, y: float, weight: float) -> None:
        """Add an observation."""
        self.products += weight * np.outer(x, x)
        self.targets += weight * x * y
        self.energy += weight * y * y

    def merge(self, other: _Sums) -> None:
        """Add the observations of others."""
        self.products += other.products
        self.targets += other.targets
        self.energy += other.energy

    def error(self, found: Vector) -> float:
        """Return the sum of squared errors of these coefficients."""
        return max(float(self.energy - 2 * found @ self.targets + found @ self.products @ found), 0.0)

    def fit(self, subset: Sequence[int]) -> Vector | None:
        """Return the least squares of these features alone; None for a negative or undetermined coefficient."""
        values = self._fit_two(*subset) if len(subset) <= 2 else self._fit_many(list(subset))
        if values is None or min(values) < 0:
            return None
        found = np.zeros(len(self.targets))
        found[list(subset)] = values
        return found

    def _fit_two(self, first: int, second: int | None = None) -> tuple[float, ...] | None:
        """Solve for one or two coefficients, which takes a tenth of the time of the general way."""
        a, x = self.products.item(first, first), self.targets.item(first)
        if not a > 0:
            return None
        if second is None:
            return (x / a,)
        b, y, c = (
            self.products.item(second, second),
            self.targets.item(second),
            self.products.item(first, second),
        )
        if not b > 0 or abs(c) >= math.sqrt(a * b) * (1 - 2 / _MOST_CONDITION):
            return None
        determinant = a * b - c * c
        return ((x * b - y * c) / determinant, (y * a - x * c) / determinant)

    def _fit_many(self, subset: list[int]) -> tuple[float, ...] | None:
        scale = np.sqrt(np.diag(self.products)[subset])
        if not (scale > 0).all():
            return None
        matrix = self.products[np.ix_(subset, subset)] / np.outer(scale, scale)
        if np.linalg.cond(matrix) > _MOST_CONDITION:
            return None
        values = np.linalg.solve(matrix, self.targets[subset] / scale) / scale
        return tuple(values.tolist())


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
        self._coefficients: Vector = np.zeros(num_features)
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
        x, y = np.array(features) / size, seconds / size
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
    def coefficients(self) -> Vector:
        """The best non-negative coefficients; simpler ones unless others fit clearly better.

        They are found anew once there are a sixteenth more observations: it takes as long as a small step's schedule.
        """
        if self.observations - self._fitted > min(self._fitted, _MOST_UNFITTED * 16) // 16:
            self._coefficients, self._fitted = self._solve(), self.observations
        return self._coefficients

    def seconds(self, features: Sequence[float]) -> float:
        """Return the expected seconds."""
        return float(self.coefficients @ np.array(features))

    def _solve(self) -> Vector:
        best, best_error = np.zeros(self._num_features), math.inf
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

    def seconds(self, nbytes: float) -> float:
        """Return the expected seconds of one copy; 0.0 for no bytes."""
        return float(self.all_seconds(np.array([nbytes], np.float64))[0])

    def all_seconds(self, nbytes: Vector) -> Vector:
        """Return the expected seconds of copies of these sizes."""
        if self._fit.is_known:
            latency, each = self._fit.coefficients
        else:
            latency, each = self._prior_latency, 1 / self._prior if self._prior > 0 else 0.0
        return np.where(nbytes > 0, latency + each * nbytes, 0.0)

    @property
    def latency(self) -> float:
        """Seconds of a copy beside those of its bytes."""
        return float(self._fit.coefficients[0]) if self._fit.is_known else self._prior_latency

    @property
    def bandwidth(self) -> float:
        """Bytes a second without the latency; 0.0 if unknown."""
        if not self._fit.is_known:
            return self._prior
        each = float(self._fit.coefficients[1])
        return 1 / each if each > 0 else float("inf")


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

    def seconds(self, start: int, stop: int) -> float:
        """Return the expected seconds to compute the tokens from ``start`` to ``stop`` of a prompt."""
        return float(self.all_seconds(np.array([start], np.float64), stop)[0])

    def all_seconds(self, starts: Vector, stop: int) -> Vector:
        """Return the same for many starts."""
        tokens = np.maximum(stop - starts, 0.0)
        step, token, pair = self._fit.coefficients
        steps = np.maximum(tokens / self.most_tokens, 1.0)
        expected = step * steps + token * tokens + pair * tokens * (starts + tokens / 2)
        return np.where(tokens > 0, expected, 0.0)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Seconds of a step, of a token, and of a token for each token of its context."""
        step, token, pair = self._fit.coefficients.tolist()
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
        return self.storage.seconds(num_blocks * self._record_bytes)

    def seconds(self, cached: Cached, num_blocks: int) -> float:
        """Return the expected seconds to the first token if ``num_blocks`` leading blocks are reused."""
        return float(self._all_seconds(cached, np.array([num_blocks], np.float64))[0])

    def _all_seconds(self, cached: Cached, lengths: Vector) -> Vector:
        """Return the same for many lengths.

        A request waits for its reads. Loads run beside computing, except for the first group of layers.
        """
        wait, load = self._seconds_of_copies(cached, lengths)
        compute = self.prefill.all_seconds(lengths * self._block_size, cached.num_tokens)
        return wait + np.maximum(load, compute) + np.minimum(load, compute) / self._stages

    def _seconds_of_copies(self, cached: Cached, lengths: Vector) -> tuple[Vector, Vector]:
        """Return the seconds of the reads that a request waits for, and of the load that is left then."""
        to_load = np.maximum(lengths - cached.on_device, 0.0)
        from_storage = np.maximum(to_load - cached.on_host, 0.0)
        load = self.link.all_seconds(self._inside(to_load) * self._block_bytes)
        load += np.where(to_load > 0, self.link.seconds(cached.loads_ahead * self._block_bytes), 0.0)
        read = self.storage.all_seconds(from_storage * self._record_bytes)
        wait = read + np.where(from_storage > 0, self.seconds_of_read(cached.reads_ahead), 0.0)
        if not self.streams:
            return wait, load
        # Loads keep up with the reads as far as the link can; what is read last is loaded after it.
        share = np.minimum(self._read_seconds / np.maximum(read, _SHORTEST), 1.0)
        last = self.link.all_seconds(from_storage * share * self._block_bytes)
        return wait, np.where(from_storage > 0, np.minimum(load, np.maximum(load - wait, last)), load)

    def _inside(self, to_load: Vector) -> Vector:
        """Return how many of the blocks to load are in the windows of their groups."""
        if not self._windows:
            return to_load
        pages = to_load / len(self._windows)
        inside = np.zeros_like(pages)
        for window in self._windows:
            inside += np.minimum(pages, window) if window else pages
        return inside

    def observe_waiting(
        self, chunks: Sequence[tuple[int, int]], seconds: float, loaded: int, steps: int
    ) -> None:
        """Learn the engine's speed from steps whose layers waited for ``loaded`` blocks, if computing took longer."""
        load = self.link.seconds(loaded * self._block_bytes)
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
        found = self._all_seconds(cached, lengths)
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
