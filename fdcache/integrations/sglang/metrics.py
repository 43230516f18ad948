"""Figures of fdcache in the metrics of SGLang, which adds up what its processes have."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from fdcache.integrations.figures import BYTES, COUNTERS, GAUGES, INTERVAL, gauges, totals
from fdcache.tiers.statistics import CacheStats

_LABELS = ("model_name", "tp_rank", "pool")


class HasStats(Protocol):
    """A pool of pages with its figures."""

    @property
    def stats(self) -> CacheStats:
        """The figures of the tiers, and what was copied."""


class Metrics:
    """``sglang:fdcache_*`` metrics of the pools of one rank, told once a second while SGLang asks for them."""

    def __init__(self, model_name: str, tp_rank: int, pools: Mapping[str, HasStats]) -> None:
        from prometheus_client import Counter, Gauge

        counters = {
            name: Counter(f"sglang:fdcache_{name}", text, _LABELS)
            for name, text in (COUNTERS | dict(BYTES.values())).items()
        }
        levels = {
            name: Gauge(f"sglang:fdcache_{name}", text, _LABELS, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        }
        self._pools = pools
        self._made: dict[str, dict[str, Any]] = {
            pool: {name: each.labels(model_name, tp_rank, pool) for name, each in (counters | levels).items()}
            for pool in pools
        }
        self._before: dict[str, dict[str, int]] = {pool: {} for pool in pools}
        self._next = 0.0

    def tell(self) -> None:
        """Add what has changed, unless that was done a moment ago."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + INTERVAL
        for pool, each in self._pools.items():
            stats = each.stats
            made, before, found = self._made[pool], self._before[pool], totals(stats)
            for name, value in found.items():
                if value > before.get(name, 0):
                    made[name].inc(value - before.get(name, 0))
            for name, value in gauges(stats).items():
                made[name].set(value)
            self._before[pool] = found


def metrics_of(
    server_args: Any, model_name: str, tp_rank: int, pools: Mapping[str, HasStats]
) -> Metrics | None:
    """Return the metrics of a rank; None if SGLang has none."""
    if not getattr(server_args, "enable_metrics", False):
        return None
    return Metrics(model_name, tp_rank, pools)
