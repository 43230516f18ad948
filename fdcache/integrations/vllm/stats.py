"""Statistics of the connector for vLLM's log and its Prometheus endpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from fdcache.manager import OffloadManager
from fdcache.tiers.statistics import CacheStats, Direction

_INTERVAL = 1.0
"""Seconds between two answers: a step pays for none of them."""

_COUNTERS = {
    "host_hit_tokens": "Tokens that were loaded from host memory.",
    "storage_hit_tokens": "Tokens that were loaded from storage.",
    "matches_ended_by_all": "Prompts of which the layers that attend to all tokens had no more.",
    "matches_ended_by_last": "Prompts of which the layers with a sliding window had no more.",
    "matches_ended_by_chunk": "Prompts of which the layers with chunked attention had no more.",
    "matches_ended_by_state": "Prompts of which the layers with states had none further on.",
    "loads_confirmed": "Loads of requests that every rank completed.",
    "loads_failed": "Loads of requests that failed; their tokens were computed.",
    "loads_overdue": "Loads of requests that missed their deadline.",
    "loads_cut_short": "Loads whose last blocks did not come from storage in time, or whose request ended before.",
    "blocks_loaded": "Blocks copied from host memory to the device.",
    "blocks_backed_up": "Blocks copied from the device to host memory.",
    "blocks_evicted_to_host": "Blocks copied to host memory before vLLM gave them away.",
    "blocks_stored": "Blocks written to storage.",
    "blocks_prefetched": "Blocks read from storage.",
    "blocks_sent": "Blocks handed over to decode engines.",
    "blocks_fetched": "Blocks fetched from prefill engines.",
    "blocks_corrupt_from_peer": "Blocks whose bytes differed from those of the prefill engine; never used.",
    "fetches_skipped": "Hand-overs that were computed, as reads that nobody waited for held blocks.",
    "backups_dropped": "Blocks that found no room in host memory.",
    "copies_failed": "Copies of blocks that failed.",
    "blocks_corrupt_in_host": "Blocks whose bytes in host memory were wrong; never used.",
    "blocks_corrupt_in_storage": "Blocks whose bytes in storage were wrong; never used.",
}
_BYTES = {
    Direction.HOST_TO_DEVICE: ("bytes_loaded", "Bytes copied from host memory to the device."),
    Direction.DEVICE_TO_HOST: ("bytes_saved", "Bytes copied from the device to host memory."),
}
_INCONSISTENCIES = ("inconsistencies", "Blocks or hooks that were dropped because states did not agree.")
_GAUGES = {
    "host_blocks": "Blocks of the host tier.",
    "host_blocks_ready": "Blocks of the host tier that can be found.",
    "plans_in_flight": "Plans that some rank has not reported.",
}


class FdcacheStats(KVConnectorStats):  # type: ignore[misc]
    """What changed in an interval, by name; gauges have their last value."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return the sum with a later interval."""
        total = dict(self.data)
        for name, value in other.data.items():
            total[name] = value if name in _GAUGES else total.get(name, 0) + value
        return FdcacheStats(data=total)

    def reduce(self) -> dict[str, int | float]:
        """Return the values for the log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Return True if nothing has changed."""
        return not any(value for name, value in self.data.items() if name not in _GAUGES)


class StatsDelta:
    """Differences of a manager's statistics between calls."""

    def __init__(self, manager: OffloadManager, clock: Callable[[], float] = time.monotonic) -> None:
        self._manager = manager
        self._clock = clock
        self._next = 0.0
        self._before: dict[str, int] = {}

    def take(self, inconsistencies: int, *, is_idle: bool = False) -> FdcacheStats | None:
        """Return what has changed since the last answer; None for nothing, and within a second of it.

        ``is_idle``: no request is left. Steps may end then, so that what has changed is told at once.
        """
        moment = self._clock()
        if moment < self._next and not is_idle:
            return None
        self._next = moment + _INTERVAL
        stats = self._manager.get_stats()
        now = _totals(stats) | {_INCONSISTENCIES[0]: inconsistencies}
        changed = {name: value - self._before.get(name, 0) for name, value in now.items()}
        self._before = now
        found = {name: value for name, value in changed.items() if value > 0}
        return FdcacheStats(data=found | _gauges(stats)) if found else None


def _totals(stats: CacheStats) -> dict[str, int]:
    counters = msgspec.structs.asdict(stats.counters)
    copied = stats.traffic.copied
    sizes = {name: copied[way].bytes for way, (name, _) in _BYTES.items() if way in copied}
    return {name: counters[name] for name in _COUNTERS} | sizes


def _gauges(stats: CacheStats) -> dict[str, int]:
    host = stats.host
    return {
        "host_blocks": host.blocks if host is not None else 0,
        "host_blocks_ready": host.ready if host is not None else 0,
        "plans_in_flight": stats.plans_in_flight,
    }


class FdcacheMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """``vllm:fdcache_*`` metrics, one of each for every engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        described = _COUNTERS | dict(_BYTES.values()) | dict([_INCONSISTENCIES])
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
            for name, text in _GAUGES.items()
        }
        self._metrics = {
            engine: {name: metric.labels(*values) for name, metric in made.items()}
            for engine, values in per_engine.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's statistics."""
        metrics = self._metrics[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in _GAUGES:
                metrics[name].set(value)
            elif name in metrics and value > 0:
                metrics[name].inc(value)
