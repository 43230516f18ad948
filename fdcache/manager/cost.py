"""Cost of loading and of computing, as observed: the length at which loading a cached prefix stops being worth it.

A block costs less to load than to compute, or more, depending on link, disk, model and context. A speed that is not
known yet makes no decision.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from fdcache.manager.speeds import SHORTEST, LinkSpeed, Numbers, PrefillSpeed, extremes

MARGIN = 0.03
"""Advantage in expected time that another choice needs over that of the last decision, and a part over both others."""

_WHOLE_READ = 0.1
"""Seconds of a read that counts as one observation. Reads are made in parts, of which each weighs less."""

_CLEARLY_LONGER = 1.3
"""A step that took this much longer than its loads was computing."""


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
        """Return the expected seconds to the first token if ``num_blocks`` leading blocks are reused.

        An array of numbers gives an array. A request waits for its reads. Loads run beside computing, except for the
        first group of layers.
        """
        largest, least = extremes(num_blocks)
        wait, load = self._seconds_of_copies(cached, num_blocks)
        compute = self.prefill.seconds(num_blocks * self._block_size, cached.num_tokens)
        return wait + largest(load, compute) + least(load, compute) / self._stages

    def _seconds_of_copies(self, cached: Cached, num_blocks: Numbers) -> tuple[Numbers, Numbers]:
        """Return the seconds of the reads that a request waits for, and of the load that is left then."""
        largest, least = extremes(num_blocks)
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
        share = least(self._read_seconds / largest(read, SHORTEST), 1.0)
        last = self.link.seconds(from_storage * share * self._block_bytes)
        return wait, least(load, largest(load - is_read * wait, last + (1 - is_read) * load))

    def _inside(self, to_load: Numbers) -> Numbers:
        """Return how many of the blocks to load are in the windows of their groups."""
        if not self._windows:
            return to_load
        _, least = extremes(to_load)
        pages = to_load / len(self._windows)
        total = 0.0 * pages
        for window in self._windows:
            total = total + (least(pages, window) if window else pages)
        return total

    def observe_waiting(
        self, chunks: Sequence[tuple[int, int]], seconds: float, loaded: int, steps: int
    ) -> None:
        """Measure the engine's speed from steps whose layers waited for ``loaded`` blocks, if computing took longer."""
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
        if cached.in_storage or self._windows:
            lengths = list(range(whole, cached.on_device - 1, -1))
            found = self.seconds(cached, np.array(lengths, np.float64)).tolist()
        else:
            lengths = self._candidates(cached)
            found = [self.seconds(cached, float(each)) for each in lengths]
        # Of equal ones the longest.
        parts = found[1:-1]
        best = {0: found[0] * self._handicap(LoadChoice.WHOLE, last)}
        if parts:
            best[1 + parts.index(min(parts))] = min(parts) * (1 + MARGIN)
        best[len(found) - 1] = found[-1] * self._handicap(LoadChoice.NOTHING, last)
        chosen = min(best, key=best.__getitem__)
        blocks = lengths[chosen]
        return Decision(blocks, _choice(cached, blocks), found[chosen], found[0], found[-1])

    @staticmethod
    def _handicap(choice: LoadChoice, last: LoadChoice | None) -> float:
        return 1 - MARGIN if choice is last else 1.0

    def _candidates(self, cached: Cached) -> list[int]:
        """Return the lengths one of which takes the least time, from all blocks down to those on the device.

        The time is a concave function between the ends, the length from which on loading takes longer than computing,
        and that from which on what is left to compute takes one step: it is least beside one of these.
        """
        whole, device = cached.num_blocks, cached.on_device
        parts = range(device + 1, whole)
        longer = whole
        if parts and self._load_is_longer(cached, parts[-1]):
            longer = parts[bisect_left(parts, True, key=lambda blocks: self._load_is_longer(cached, blocks))]
        one_step = int((cached.num_tokens - self.prefill.most_tokens) / self._block_size)
        near = {device + 1, longer - 1, longer, one_step, one_step + 1, whole - 1}
        return [whole, *sorted((each for each in near if each in parts), reverse=True), device]

    def _load_is_longer(self, cached: Cached, blocks: int) -> bool:
        _, load = self._seconds_of_copies(cached, float(blocks))
        return load >= self.prefill.seconds(blocks * self._block_size, cached.num_tokens)


def _choice(cached: Cached, blocks: int) -> LoadChoice:
    if blocks == cached.num_blocks:
        return LoadChoice.WHOLE
    return LoadChoice.PART if blocks > cached.on_device else LoadChoice.NOTHING
