"""Timeline: hit rate and tier occupancy while a replay runs."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from fdcache.manager import CacheManager
from fdcache.replay.tally import Tally

_MOST_SAMPLES = 2000
_RECENT_SAMPLES = 20


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds since the start, hit rate so far and over the last samples, used share by tier.

    ``recent_hit_rate`` is not a number where no prompt came in that time.
    """

    seconds: float
    hit_rate: float
    recent_hit_rate: float
    occupancy: dict[str, float]


@dataclass(slots=True)
class Timeline:
    """Samples at equal distances; when there are too many, every second one goes and the distance doubles."""

    interval: float = 0.005
    samples: list[Sample] = field(default_factory=list)
    _next: float = 0.0
    _window: deque[tuple[int, int]] = field(default_factory=lambda: deque([(0, 0)], maxlen=_RECENT_SAMPLES))

    def record(self, now: float, tally: Tally, manager: CacheManager, *, last: bool = False) -> None:
        """Take a sample if it is time for one."""
        if now < self._next and not last:
            return
        self._next = now + self.interval
        hits, prompts = sum(tally.hit_tokens.values()), tally.prompt_tokens
        earlier_hits, earlier_prompts = self._window[0]
        self._window.append((hits, prompts))
        recent = (
            (hits - earlier_hits) / (prompts - earlier_prompts) if prompts > earlier_prompts else math.nan
        )
        usage = {level.value: usage.usage for level, usage in manager.get_memory_usage().items()}
        self.samples.append(Sample(now, tally.hit_rate, recent, usage))
        if len(self.samples) > _MOST_SAMPLES:
            del self.samples[::2]
            self.interval *= 2
