"""Load or recompute with a disk that becomes slow and fast again: ``python -m benchmarks.ttft.changing_disk``.

It runs in virtual time, so that it takes a second and says the same everywhere: once a second a request comes whose
prompt is in storage alone. Reading takes 0.1 or 5 seconds, computing 0.5.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from fdcache import _core
from fdcache.layout import KVLayout
from fdcache.manager import Request
from fdcache.manager.cost import NO_PRIORS
from fdcache.manager.load_choices import LoadChoices
from fdcache.manager.matching import Waits
from fdcache.settings.cache import LoadOrRecompute
from fdcache.tiers.storage_reads import GroupSize
from fdcache.tiers.waiting_fetches import Wait

PERIODS = {"fast": 60, "slow": 60, "fast again": 60, "slow again": 120, "fast at last": 120}
"""Seconds of each."""

FAST, SLOW, COMPUTE, STEP, LOAD = 0.1, 5.0, 0.5, 0.005, 0.001
"""Seconds to read a prompt, to compute it, of a step beside its tokens, and to load a prompt from the host."""

BLOCKS = 64
_POLL = 0.005


class Machine:
    """One engine, its disk, and the time."""

    def __init__(self, layout: KVLayout) -> None:
        self.now = 0.0
        self._layout = layout
        self._choices = LoadChoices(
            LoadOrRecompute.AUTO, layout, lambda: self.now, lambda: 0, NO_PRIORS, stages=layout.num_layers
        )
        self._waits = Waits(self._choices, lambda: self.now, None)
        self._group = GroupSize(lambda: self.now)
        self._hasher = _core.BlockManager(_core.Tier(1), layout.block_size, layout.fingerprint, 0)
        self._noise = random.Random(1)
        self._reads: list[tuple[float, int, float]] = []  # end, blocks and seconds, in order
        self._served = 0
        for tokens in (64, 1024, 300, 1024, 128, 1024):
            self._compute(self._request(), 0, tokens)

    def _request(self) -> Request:
        self._served += 1
        request = Request(f"{self._served}", [1] * (BLOCKS * self._layout.block_size + 1))
        self._hasher.prepare(request)
        return request

    def _compute(self, request: Request, start: int, stop: int) -> float:
        seconds = STEP + COMPUTE * (stop - start) / request.num_tokens
        self.now += seconds
        self._choices.observe_prefill([(request, start, stop)], seconds, waited=False, steps=1)
        return seconds

    @property
    def seconds_of_read(self) -> float:
        """Seconds that the disk takes now for a prompt."""
        return SLOW if "slow" in period_of(self.now) else FAST

    def _ended(self) -> None:
        """Learn from the reads that have ended."""
        while self._reads and self._reads[0][0] <= self.now:
            end, blocks, seconds = self._reads.pop(0)
            nbytes = blocks * self._layout.record_bytes
            self._choices.model.storage.observe(nbytes, seconds, end)
            self._group.speed = nbytes / seconds

    def _read(self) -> list[tuple[int, float]]:
        """Order the reads of a prompt; return how many blocks have come after each, and when."""
        size = max(self._group.of(BLOCKS * self._layout.record_bytes) // self._layout.record_bytes, 1)
        counts = [min(size, BLOCKS - first) for first in range(0, BLOCKS, size)]
        end, ends = max([self.now, *(end for end, _, _ in self._reads)]), []
        for count in counts:
            seconds = self.seconds_of_read * count / BLOCKS * self._noise.uniform(0.9, 1.1)
            end += seconds
            self._reads.append((end, count, seconds))
            ends.append(end)
        return list(zip(accumulate(counts), ends, strict=True))

    def serve(self) -> float:
        """Return the seconds to the first token of a request that comes now."""
        begin, request = self.now, self._request()
        self._ended()
        ahead = sum(blocks for _, blocks, _ in self._reads)
        judge = self._waits.judge_of(request)
        worth, waits = (BLOCKS, True) if judge is None else judge.worth_reading(0, 0, BLOCKS, ahead)
        reads = self._read() if worth else []
        come = self._wait(request, reads, ahead) if waits else 0
        if come:
            self.now += LOAD
            self._choices.model.link.observe(come * self._layout.payload_bytes, LOAD, self.now)
        self._compute(request, come * self._layout.block_size, request.num_tokens)
        return self.now - begin

    def _wait(self, request: Request, reads: Sequence[tuple[int, float]], ahead: int) -> int:
        """Wait for reads as long as it is worth it; return how many blocks have come."""
        since, come = self.now, 0
        while coming := [stop for stop, end in reads if end > self.now]:
            came = [(stop, end) for stop, end in reads if end <= self.now]
            if came:
                (come, since), ahead = came[-1], 0
            wait = Wait(0, come, coming[-1], since, tuple(coming), ahead)
            if self._choices.is_auto and not self._choices.is_worth_waiting(request, wait):
                return come
            self.now += _POLL
            self._ended()
        return reads[-1][0] if reads else 0


def period_of(seconds: float) -> str:
    """Return the name of a time's period, the last one after its end."""
    ends = accumulate(PERIODS.values())
    return next((name for name, end in zip(PERIODS, ends, strict=True) if seconds < end), list(PERIODS)[-1])


def measure() -> dict[str, list[float]]:
    """Return the seconds to the first token of the requests of each period."""
    layout = KVLayout.uniform(
        model="bench", revision="1", dtype="bfloat16", num_layers=8, block_size=16, kv_heads=8, head_dim=128
    )
    machine, found = Machine(layout), {name: list[float]() for name in PERIODS}
    second = 1
    while second < sum(PERIODS.values()):
        machine.now = max(machine.now, second)
        found[period_of(machine.now)].append(machine.serve())
        second = int(machine.now) + 1
    return found


def main() -> int:
    """Print the table."""
    print("| disk | requests | mean | better of always and never | ratio | longest |")
    print("|---|---|---|---|---|---|")
    for name, seconds in measure().items():
        mean, best = float(np.mean(seconds)), min(SLOW if "slow" in name else FAST, COMPUTE) + STEP
        longest = max(seconds)
        print(f"| {name} | {len(seconds)} | {mean:.3f} | {best:.3f} | {mean / best:.2f} | {longest:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
