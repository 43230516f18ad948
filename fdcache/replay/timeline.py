"""Timeline: hit rate and tier occupancy while a replay runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from fdcache.manager import CacheManager
from fdcache.replay.tally import Tally

_MOST_SAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds since the start, hit rate so far and since the sample before, used share by tier."""

    seconds: float
    hit_rate: float
    recent_hit_rate: float
    occupancy: dict[str, float]


@dataclass(slots=True)
class Timeline:
    """Samples at equal distances; when there are too many, every second one goes and the distance doubles."""

    interval: float = 0.05
    samples: list[Sample] = field(default_factory=list)
    _next: float = 0.0
    _hits: int = 0
    _prompts: int = 0

    def record(self, now: float, tally: Tally, manager: CacheManager, *, last: bool = False) -> None:
        """Take a sample if it is time for one."""
        if now < self._next and not last:
            return
        self._next = now + self.interval
        hits = sum(tally.hit_tokens.values())
        prompts = tally.prompt_tokens - self._prompts
        recent = (hits - self._hits) / prompts if prompts else 0.0
        self._hits, self._prompts = hits, tally.prompt_tokens
        usage = {level.value: usage.usage for level, usage in manager.get_memory_usage().items()}
        self.samples.append(Sample(now, tally.hit_rate, recent, usage))
        if len(self.samples) > _MOST_SAMPLES:
            del self.samples[::2]
            self.interval *= 2
