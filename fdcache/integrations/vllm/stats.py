"""Statistics of the connector for vLLM's log and its Prometheus endpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from fdcache.integrations.figures import BYTES, COUNTERS, GAUGES, INTERVAL, gauges, totals
from fdcache.manager import OffloadManager

_INCONSISTENCIES = ("inconsistencies", "Blocks or hooks that were dropped because states did not agree.")


class FdcacheStats(KVConnectorStats):  # type: ignore[misc]
    """What changed in an interval, by name; gauges have their last value."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return the sum with a later interval."""
        total = dict(self.data)
        for name, value in other.data.items():
            total[name] = value if name in GAUGES else total.get(name, 0) + value
        return FdcacheStats(data=total)

    def reduce(self) -> dict[str, int | float]:
        """Return the values for the log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Return True if nothing has changed."""
        return not self.data


class StatsDelta:
    """Differences of a manager's statistics between calls."""

    def __init__(self, manager: OffloadManager, clock: Callable[[], float] = time.monotonic) -> None:
        self._manager = manager
        self._clock = clock
        self._next = 0.0
        self._before: dict[str, int] = {}
        self._gauges: dict[str, int] = {}

    def take(self, inconsistencies: int, *, is_idle: bool = False) -> FdcacheStats | None:
        """Return what has changed since the last answer; None for nothing, and within a second of it.

        ``is_idle``: no request is left. Steps may end then, so that what has changed is told at once.
        """
        moment = self._clock()
        if moment < self._next and not is_idle:
            return None
        self._next = moment + INTERVAL
        stats = self._manager.get_stats()
        now = totals(stats) | {_INCONSISTENCIES[0]: inconsistencies}
        changed = {name: value - self._before.get(name, 0) for name, value in now.items()}
        self._before = now
        found = {name: value for name, value in changed.items() if value > 0}
        told, self._gauges = self._gauges, gauges(stats)
        return FdcacheStats(data=found | self._gauges) if found or self._gauges != told else None


class FdcacheMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """``vllm:fdcache_*`` metrics, one of each for every engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        described = COUNTERS | dict(BYTES.values()) | dict([_INCONSISTENCIES])
        made = {
            name: self._counter_cls(name=f"vllm:fdcache_{name}", documentation=text, labelnames=labelnames)
            for name, text in described.items()
        }
        made |= {
            name: self._gauge_cls(
                name=f"vllm:fdcache_{name}",
                documentation=text,
                labelnames=labelnames,
                **({"multiprocess_mode": "mostrecent"}),
            )
            for name, text in GAUGES.items()
        }
        self._metrics = {
            engine: {name: metric.labels(*values) for name, metric in made.items()}
            for engine, values in per_engine.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's statistics."""
        metrics = self._metrics[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in GAUGES:
                metrics[name].set(value)
            elif name in metrics and value > 0:
                metrics[name].inc(value)
