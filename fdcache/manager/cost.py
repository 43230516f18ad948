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

_LONGEST = 1e6
_MIN_OBSERVATIONS = 3
_MOST_UNFITTED = 8
_CLEARLY_LONGER = 1.3
"""A step that took this much longer than its loads was computing."""

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

    def add(self, x: Vector, y: float) -> None:
        """Add an observation."""
        self.products += np.outer(x, x)
        self.targets += x * y
        self.energy += y * y

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
        part = np.ix_(subset, subset)
        scale = np.sqrt(np.diag(self.products)[list(subset)])
        if not (scale > 0).all():
            return None
        matrix = self.products[part] / np.outer(scale, scale)
        if np.linalg.cond(matrix) > 1e8:
            return None
        values = np.linalg.solve(matrix, self.targets[list(subset)] / scale) / scale
        if (values < 0).any():
            return None
        found = np.zeros(len(self.targets))
        found[list(subset)] = values
        return found


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

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Count one observation; one without size or time is ignored."""
        size = features[self._scale]
        if not (size > 0 and 0 < seconds < _LONGEST):
            return
        if self.observations >= _MIN_OBSERVATIONS and (expected := self.seconds(features)) > 0:
            seconds = min(max(seconds, expected / _MOST_SURPRISE), expected * _MOST_SURPRISE)
        x, y = np.array(features) / size, seconds / size
        # Relative to the speed, so that every fit has errors of the same kind.
        key = int(size).bit_length() // 2 if self._by_size else 0
        for other, sums in self._sums.items():
            sums.decay(_DECAY if other == key else _DECAY_OF_OTHER_SIZES)
        self._sums.setdefault(key, _Sums(self._num_features)).add(x, y)
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

    ``prior``: bytes a second that a calibration has measured, believed until copies are observed; 0.0 for none.
    """

    def __init__(self, prior: float = 0.0) -> None:
        self._fit = SpeedFit(2, scale=1)
        self._prior = prior
        self.observed_at: float | None = None

    def observe(self, nbytes: int, seconds: float, now: float) -> None:
        """Count a copy."""
        if nbytes > 0 and seconds > 0:
            self._fit.observe((1.0, float(nbytes)), seconds)
            self.observed_at = now

    @property
    def is_known(self) -> bool:
        """True if there is a prior, or observations enough."""
        return self._prior > 0 or self._fit.is_known

    def seconds(self, nbytes: float) -> float:
        """Return the expected seconds of one copy; 0.0 for no bytes."""
        if nbytes <= 0:
            return 0.0
        if self._fit.is_known:
            return self._fit.seconds((1.0, nbytes))
        return nbytes / self._prior if self._prior > 0 else 0.0

    @property
    def latency(self) -> float:
        """Seconds of a copy beside those of its bytes."""
        return float(self._fit.coefficients[0]) if self._fit.is_known else 0.0

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
        if stop <= start:
            return 0.0
        steps = max((stop - start) / self.most_tokens, 1.0)
        return self._fit.seconds((steps, float(stop - start), _pairs(start, stop)))

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
    """

    def __init__(
        self,
        *,
        block_size: int,
        block_bytes: int,
        record_bytes: int = 0,
        stages: int = 1,
        link_prior: float = 0.0,
    ) -> None:
        self.prefill = PrefillSpeed()
        self.link = LinkSpeed(link_prior)
        self.storage = LinkSpeed()
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._record_bytes = record_bytes or block_bytes
        self._stages = max(stages, 1)

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
        """Return the expected seconds to the first token if ``num_blocks`` leading blocks are reused.

        A request waits for its reads. Loads run beside computing, except for the first group of layers.
        """
        from_storage = max(num_blocks - cached.on_device - cached.on_host, 0)
        to_load = max(num_blocks - cached.on_device, 0)
        wait = load = 0.0
        if from_storage:
            wait = self.seconds_of_read(cached.reads_ahead) + self.seconds_of_read(from_storage)
        if to_load:
            ahead = cached.loads_ahead * self._block_bytes
            load = self.link.seconds(ahead) + self.link.seconds(to_load * self._block_bytes)
        compute = self.prefill.seconds(num_blocks * self._block_size, cached.num_tokens)
        return wait + max(load, compute) + min(load, compute) / self._stages

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
        found = {blocks: self.seconds(cached, blocks) for blocks in sorted(self._candidates(cached))}
        best = min(
            found,
            key=lambda blocks: (found[blocks] * _handicap(_choice(cached, blocks), last), -blocks),
        )
        return Decision(best, _choice(cached, best), found[best], found[whole], found[cached.on_device])

    def _candidates(self, cached: Cached) -> set[int]:
        """Return the lengths among which the best is.

        The expected seconds jump after the device's blocks and after the host's, by the latencies, and bend where the
        load would take as long as computing the rest, and where the rest takes one step. Between these lengths they are
        concave: least at an end.
        """
        device, host, whole = cached.on_device, cached.on_device + cached.on_host, cached.num_blocks
        bend = self._last_hidden_load(cached)
        one_step = (cached.num_tokens - self.prefill.most_tokens) // self._block_size
        ends = (device, device + 1, host, host + 1, bend, bend + 1, one_step, one_step + 1, whole)
        return {min(max(each, device), whole) for each in ends}

    def _last_hidden_load(self, cached: Cached) -> int:
        """Return the last length whose load takes no longer than computing the rest."""
        ahead = self.link.seconds(cached.loads_ahead * self._block_bytes)
        first, last = cached.on_device, cached.num_blocks
        while first < last:
            middle = (first + last + 1) // 2
            load = ahead + self.link.seconds((middle - cached.on_device) * self._block_bytes)
            if load <= self.prefill.seconds(middle * self._block_size, cached.num_tokens):
                first = middle
            else:
                last = middle - 1
        return first


def _handicap(choice: LoadChoice, last: LoadChoice | None) -> float:
    if choice is LoadChoice.PART:
        return 1 + MARGIN
    return 1 - MARGIN if choice is last else 1.0


def _choice(cached: Cached, blocks: int) -> LoadChoice:
    if blocks == cached.num_blocks:
        return LoadChoice.WHOLE
    return LoadChoice.PART if blocks > cached.on_device else LoadChoice.NOTHING
