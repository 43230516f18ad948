"""Copies of ranks that hold the same bytes: each copies some of the blocks to the host, and what it has of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from fdcache.block_owners import EVERYONE, BlockOwners
from fdcache.controller.transfers import check_countable
from fdcache.layout import KVLayout
from fdcache.metadata import (
    CacheLevel,
    CacheSwapMetadata,
    Int32Array,
    PeerTask,
    TransferPlan,
    TransferReport,
    TransferResult,
)
from fdcache.tasks import AsyncTask, TransferStatus

_POSITIONS = ("failed", "lost", "corrupt", "bad_slots", "no_room")

Part = slice | NDArray[np.intp]
"""Positions of a transfer."""


class CopyShares:
    """The share of a rank. All of them together copy every block once, and report as if each had copied all.

    Records move as a whole, so that runs stay long; plans of a few blocks take turns. What is loaded every rank loads,
    but for the states of others; so it is with what is handed over.
    """

    def __init__(self, layout: KVLayout, rank: int) -> None:
        self._sharers = layout.replicas
        self._share = rank % layout.replicas
        self._owners = BlockOwners(layout)
        self._cut: dict[int, tuple[CacheSwapMetadata, ...]] = {}
        """The swaps of plans that were cut, and of the tasks with peers."""

        self.divides = layout.replicas > 1
        """True if there are others to share with."""

        self.has_storage = not self._share
        """True for the rank that reads and writes the storage for all of them."""

    def cut(self, plan: TransferPlan) -> TransferPlan:
        """Return the plan with the copies of this rank. Raises ``PlanError`` for one whose blocks cannot be counted."""
        if not self._is_cut(plan):
            return plan
        check_countable(plan)
        number = plan.plan_id
        evictions, backups, loads = (
            None if swap is None else self._own(swap, number)
            for swap in (plan.evictions, plan.backups, plan.loads)
        )
        self._cut.setdefault(number, tuple(plan.swaps()))
        if not (plan.peers and self._owners.are_apart):
            return replace(plan, evictions=evictions, backups=backups, loads=loads)
        self._cut |= {task.plan_id: (task.swap,) for task in plan.peers}
        peers = tuple(map(self._own_task, plan.peers))
        return replace(plan, evictions=evictions, backups=backups, loads=loads, peers=peers)

    def take_whole(self, reports: list[TransferReport]) -> list[TransferReport]:
        """Return the reports, those of plans that were cut with the positions of the plan."""
        if not self._cut:
            return reports
        found = [self._cut.pop(report.plan_id, None) for report in reports]
        return [
            report if swaps is None else self.whole(swaps, report)
            for swaps, report in zip(found, reports, strict=True)
        ]

    def task(self, plan_id: int, task: AsyncTask[TransferReport]) -> AsyncTask[TransferReport]:
        """Return the task of a plan in flight, for one that was cut with the report of the plan."""
        swaps = self._cut.get(plan_id)
        return task if swaps is None else _WholeTask(task, partial(self.whole, swaps))

    def whole(self, swaps: tuple[CacheSwapMetadata, ...], report: TransferReport) -> TransferReport:
        """Return the report of this rank's part of these transfers with the positions of the whole."""
        results = tuple(
            result if (part := self._part(swap, report.plan_id)) is None else _widened(result, swap, part)
            for swap, result in zip(swaps, report.results, strict=True)
        )
        return replace(report, results=results)

    def _is_cut(self, plan: TransferPlan) -> bool:
        if plan.evictions is not None or plan.backups is not None:
            return True
        return self._owners.are_apart and (plan.loads is not None or bool(plan.peers))

    def _own(self, swap: CacheSwapMetadata, number: int) -> CacheSwapMetadata:
        """Return this rank's part of a transfer, with the engine's device blocks."""
        part = self._part(swap, number)
        own = swap if part is None else swap[part]
        if not self._owners.are_apart:
            return own
        name = _device_of(swap)
        return replace(own, **{name: self._owners.blocks(getattr(own, name))})

    def _own_task(self, task: PeerTask) -> PeerTask:
        """Return this rank's part of a hand-over: positions in that of the peer's rank, which is cut alike."""
        own = self._own(task.swap, task.plan_id)
        places = "dst_block_ids" if _device_of(own) == "src_block_ids" else "src_block_ids"
        own = replace(own, **{places: getattr(task.swap, places)[: len(own)]})
        return replace(task, swap=own, computed=min(task.computed, len(own)))

    def _part(self, swap: CacheSwapMetadata, number: int) -> Part | None:
        """Return the positions that this rank copies; None for all."""
        if not self._owners.are_apart:
            return self._turn(len(swap), number) if swap.to_host else None
        owners = self._owners.owners(getattr(swap, _device_of(swap)))
        alike = np.flatnonzero(owners == EVERYONE)
        if swap.to_host:
            alike = alike[self._turn(len(alike), number)]
        return np.sort(np.concatenate((alike, np.flatnonzero(owners == self._share))))

    def _turn(self, count: int, number: int) -> slice:
        turn = (self._share + number) % self._sharers
        return slice(turn * count // self._sharers, (turn + 1) * count // self._sharers)


@dataclass(frozen=True, slots=True)
class _WholeTask:
    part: AsyncTask[TransferReport]
    whole: Callable[[TransferReport], TransferReport]

    def wait(self, timeout: float | None) -> bool:
        return self.part.wait(timeout)

    def cancel(self) -> bool:
        return self.part.cancel()

    def status(self) -> TransferStatus:
        return self.part.status()

    def result(self) -> TransferReport:
        return self.whole(self.part.result())


def _device_of(swap: CacheSwapMetadata) -> str:
    """Return the field of a transfer that has its device blocks."""
    return "src_block_ids" if swap.src_type is CacheLevel.DEVICE else "dst_block_ids"


def _widened(result: TransferResult, swap: CacheSwapMetadata, part: Part) -> TransferResult:
    """Return the result of a part of a transfer with the positions of the whole."""
    checksums = np.zeros(len(swap) if swap.to_host else 0, np.uint64)
    if len(result.checksums):
        checksums[part] = result.checksums
    places = np.arange(len(swap), dtype=np.int32)[part]
    positions: dict[str, Int32Array] = {name: places[getattr(result, name)] for name in _POSITIONS}
    return replace(result, checksums=checksums, **positions)
