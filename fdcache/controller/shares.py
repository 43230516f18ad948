"""Copies to the host that several ranks share, since they hold the same bytes: each copies some of the blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from msgspec.structs import replace

from fdcache.controller.transfers import check_countable
from fdcache.layout import KVLayout
from fdcache.metadata import CacheSwapMetadata, Int32Array, TransferPlan, TransferReport, TransferResult
from fdcache.tasks import AsyncTask, TransferStatus

_POSITIONS = ("failed", "lost", "corrupt", "bad_slots", "no_room")


class CopyShares:
    """The share of a rank. All of them together copy every block once, and report as if each had copied all.

    Records move as a whole, so that runs stay long; plans of a few blocks take turns. What is loaded every rank loads.
    """

    def __init__(self, layout: KVLayout, rank: int) -> None:
        self._sharers = layout.replicas
        self._share = rank % layout.replicas
        self._cut: dict[int, TransferPlan] = {}
        self.divides = layout.replicas > 1
        """True if there are others to share with."""

        self.has_storage = not self._share
        """True for the rank that reads and writes the storage for all of them."""

    def cut(self, plan: TransferPlan) -> TransferPlan:
        """Return the plan with the copies of this rank. Raises ``PlanError`` for one whose blocks cannot be counted."""
        if plan.evictions is None and plan.backups is None:
            return plan
        check_countable(plan)
        evictions, backups = (
            None if swap is None else swap[self._part(plan, swap)] for swap in (plan.evictions, plan.backups)
        )
        self._cut.setdefault(plan.plan_id, plan)
        return replace(plan, evictions=evictions, backups=backups)

    def take_whole(self, reports: list[TransferReport]) -> list[TransferReport]:
        """Return the reports, those of plans that were cut with the positions of the plan."""
        if not self._cut:
            return reports
        plans = [self._cut.pop(report.plan_id, None) for report in reports]
        return [
            report if plan is None else self.whole(plan, report)
            for plan, report in zip(plans, reports, strict=True)
        ]

    def task(self, plan_id: int, task: AsyncTask[TransferReport]) -> AsyncTask[TransferReport]:
        """Return the task of a plan in flight, for one that was cut with the report of the plan."""
        plan = self._cut.get(plan_id)
        return task if plan is None else _WholeTask(task, partial(self.whole, plan))

    def whole(self, plan: TransferPlan, report: TransferReport) -> TransferReport:
        """Return the report of this rank's part of a plan with the positions of the plan."""
        results = tuple(
            _widened(result, len(swap), self._part(plan, swap)) if swap.to_host else result
            for swap, result in zip(plan.swaps(), report.results, strict=True)
        )
        return replace(report, results=results)

    def _part(self, plan: TransferPlan, swap: CacheSwapMetadata) -> slice:
        turn, count = (self._share + plan.plan_id) % self._sharers, len(swap)
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


def _widened(result: TransferResult, count: int, part: slice) -> TransferResult:
    checksums = np.zeros(count, np.uint64)
    if len(result.checksums):
        checksums[part] = result.checksums
    positions: dict[str, Int32Array] = {
        name: np.asarray(getattr(result, name) + part.start, np.int32) for name in _POSITIONS
    }
    return replace(result, checksums=checksums, **positions)
