"""A capacity series: the same workload at several sizes of a tier and under several policies, and the optimum."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from fdcache.replay.capacities import Axis, Capacities
from fdcache.replay.config import ReplayConfig, device_block_bytes
from fdcache.replay.optimum import BlockStream, optimal_hit_rate
from fdcache.replay.parallel import Advance, PointFailure, Task, run_tasks
from fdcache.replay.points import PointResult, run_point
from fdcache.replay.workloads import WorkItem
from fdcache.settings.cache import EvictionPolicy, StorageTierSettings
from fdcache.tiers.host import host_block_bytes


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """A sweep: ``replay`` at each of the ``capacities``, under each of the ``policies``.

    ``jobs`` is the number of processes. ``optimum`` adds Belady's optimum of the same requests.
    """

    replay: ReplayConfig
    capacities: Capacities
    policies: tuple[EvictionPolicy, ...] = (EvictionPolicy.LRU,)
    optimum: bool = False
    jobs: int = 1

    def at(self, value: int, policy: EvictionPolicy) -> ReplayConfig:
        """Return the configuration of one point; storage and services take no part in a sweep."""
        changed = {"eviction": policy, "server": None, self.capacities.axis.setting: value}
        cache = self.replay.cache.model_copy(update=changed)
        return replace(self.replay, cache=cache, storage=StorageTierSettings())

    def blocks(self, value: int) -> tuple[int, int]:
        """Return the blocks of the device tier and of the host tier at one capacity."""
        cache = self.at(value, self.policies[0]).cache
        return cache.device_blocks, cache.host_memory // host_block_bytes(self.replay.layout)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """Results at one capacity of the varied tier: its ``memory`` on all ranks in bytes, and its ``blocks``.

    A policy that is missing was not run before the sweep was interrupted. ``optimum`` is a hit rate.
    """

    memory: int
    blocks: int
    policies: Mapping[str, PointResult | PointFailure]
    optimum: float | None = None

    def hit_rate(self, policy: str) -> float | None:
        """Return the policy's hit rate, or None without one."""
        result = self.policies.get(policy)
        return result.hit_rate if isinstance(result, PointResult) else None

    def gap_closed(self, policy: str) -> float | None:
        """Return the share of the gap between LRU and the optimum that the policy closes; None without a gap."""
        rate, base = self.hit_rate(policy), self.hit_rate(EvictionPolicy.LRU)
        if rate is None or base is None or self.optimum is None or self.optimum <= base:
            return None
        return (rate - base) / (self.optimum - base)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "memory_bytes": self.memory,
            "blocks": self.blocks,
            "policies": {name: self._policy(name) for name in self.policies},
            "optimum": None if self.optimum is None else round(self.optimum, 6),
        }

    def _policy(self, name: str) -> dict[str, Any]:
        result = self.policies[name]
        if isinstance(result, PointFailure):
            return {"error": result.reason}
        gap = self.gap_closed(name)
        return {
            "hit_rate": round(result.hit_rate, 6),
            "gap_closed": None if gap is None else round(gap, 6),
            **{field: getattr(result, field) for field in result.__struct_fields__},
        }


@dataclass(frozen=True, slots=True)
class Sweep:
    """Results of a sweep, in ascending order of capacity. ``failures``: what went wrong where."""

    config: SweepConfig
    points: tuple[SweepPoint, ...]
    failures: tuple[tuple[str, str], ...] = ()
    interrupted: bool = False
    wall_seconds: float = 0.0

    @property
    def clean(self) -> bool:
        """True if no point failed and no block was corrupt."""
        results = [result for point in self.points for result in point.policies.values()]
        return not self.failures and not any(
            isinstance(result, PointResult) and result.corrupt_blocks for result in results
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "axis": self.config.capacities.axis.value,
            "interrupted": self.interrupted,
            "points": [point.to_dict() for point in self.points],
            "failures": [{"point": point, "reason": reason} for point, reason in self.failures],
            "wall_seconds": round(self.wall_seconds, 3),
            "settings": self._settings(),
        }

    def _settings(self) -> dict[str, Any]:
        replayed = self.config.replay
        settings = {
            "block_size": replayed.layout.block_size,
            "record_bytes": replayed.layout.record_bytes,
            "ranks": replayed.layout.tp_size,
            "device_blocks": replayed.cache.device_blocks,
            "host_memory": replayed.cache.host_memory,
            "write_policy": replayed.cache.write_policy.value,
            "policies": [policy.value for policy in self.config.policies],
            "concurrency": replayed.concurrency,
            "verify": replayed.verify.value,
            "seed": replayed.seed,
            "jobs": self.config.jobs,
        }
        del settings[self.config.capacities.axis.setting]
        return settings


@dataclass(frozen=True, slots=True)
class _PointTask:
    config: ReplayConfig

    def run(self, data: Sequence[WorkItem], advance: Advance) -> PointResult:
        return run_point(data, self.config, advance)


@dataclass(frozen=True, slots=True)
class _OptimumTask:
    """Belady's hit rate for pairs of device blocks and blocks of all tiers."""

    config: ReplayConfig
    capacities: Sequence[tuple[int, int]]

    def run(self, data: Sequence[WorkItem], advance: Advance) -> list[float]:
        stream = BlockStream.of(data, self.config, advance)
        rates = []
        for device_blocks, capacity in self.capacities:
            advance(len(data))
            rates.append(optimal_hit_rate(stream, device_blocks, capacity))
        return rates


Progress = Callable[[str, int, int], None]
"""Callback with a task, how many of its requests are done, and how many there are."""


def run_sweep(
    items: Sequence[WorkItem],
    config: SweepConfig,
    *,
    on_progress: Progress = lambda name, done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Sweep:
    """Run every point of a sweep, several at a time, until the last one or until ``should_stop`` returns True.

    A point that fails does not keep the others from running.
    """
    start = time.monotonic()
    axis, values = config.capacities.axis, config.capacities.values
    places = [(value, policy) for value in values for policy in config.policies]
    names = [f"{policy.value}, {axis.describe(value)}" for value, policy in places]
    tasks: list[Task] = [_PointTask(config.at(*place)) for place in places]
    if config.optimum:
        names.append("optimum")
        blocks = [config.blocks(value) for value in values]
        tasks.append(_OptimumTask(config.replay, [(device, device + host) for device, host in blocks]))
    done = [0] * len(tasks)

    def note(task: int, amount: int) -> None:
        done[task] = amount
        on_progress(names[task], amount, len(items))
        on_progress("sweep", sum(done), len(tasks) * len(items))

    results: list[Any] = [None] * len(tasks)
    with closing(run_tasks(tasks, items, config.jobs, on_progress=note, should_stop=should_stop)) as ended:
        for task, result in ended:
            results[task] = result
            note(task, len(items))
    failures = tuple(
        (name, result.reason)
        for name, result in zip(names, results, strict=True)
        if isinstance(result, PointFailure)
    )
    rates = results[len(places)] if config.optimum else None
    optima = rates if isinstance(rates, list) else [None] * len(values)
    by_place = dict(zip(places, results[: len(places)], strict=True))
    points = tuple(
        _point(config, value, {policy.value: by_place[value, policy] for policy in config.policies}, optimum)
        for value, optimum in zip(values, optima, strict=True)
    )
    return Sweep(config, points, failures, None in results, time.monotonic() - start)


def _point(config: SweepConfig, value: int, results: Mapping[str, Any], optimum: float | None) -> SweepPoint:
    device, host = config.blocks(value)
    run = {name: result for name, result in results.items() if result is not None}
    if config.capacities.axis is Axis.HOST_MEMORY:
        return SweepPoint(value, host, run, optimum)
    return SweepPoint(device * device_block_bytes(config.replay.layout), device, run, optimum)
