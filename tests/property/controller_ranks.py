"""Ranks of the model engine whose copies are real: a controller over the memory of a device.

A block's value is spelt in the bytes of its planes, so what a step reads is what the copies brought.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, MutableMapping

import msgspec
import numpy as np

from fdcache import _core
from fdcache.controller.layers import LayerDoneCounter
from fdcache.metadata import CacheSwapMetadata, SwapPurpose, TransferPlan, TransferReport
from tests.property.engine_model import GARBAGE, Prefix, Rank, Step
from tests.swaps import PATIENCE, Worker

_EMPTY = _core.SlotHeader(0, 0, bytes(32), bytes(32), bytes(32), 0, 0)


class SpeltBlocks(MutableMapping[int, Prefix]):
    """The device blocks of a worker. Bytes that spell no value, or planes of different ones, are garbage."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._values: dict[tuple[bytes, ...], Prefix] = {}

    def _spell(self, value: Prefix) -> tuple[bytes, ...]:
        return tuple(
            hashlib.shake_128(repr((number, value)).encode()).digest(plane.nbytes)
            for number, plane in enumerate(self._worker.layout.planes)
        )

    def __getitem__(self, slot: int) -> Prefix:
        return self._values.get(tuple(self._worker.block(slot)), GARBAGE)

    def __setitem__(self, slot: int, value: Prefix) -> None:
        spelt = self._spell(value)
        self._values[spelt] = value
        self._worker.set_block(slot, [np.frombuffer(plane, np.uint8) for plane in spelt])

    def __delitem__(self, slot: int) -> None:
        self[slot] = GARBAGE

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return len(self._worker.tensors[0])


class ControllerRank(Rank):
    """Plans are submitted as they come and reported when a step, or the end of the queue, has waited for them."""

    def __init__(self, index: int, worker: Worker) -> None:
        super().__init__(index)
        self._worker = worker
        self._counters: list[LayerDoneCounter] = []
        self._submitted: dict[int, tuple[TransferPlan, frozenset[int]]] = {}
        self.device = SpeltBlocks(worker)

    def execute_next(self, fails: frozenset[int]) -> list[TransferReport]:
        """Run the oldest plan or step; loads fail for real, copies to the host by losing what they wrote."""
        work = self.queue.popleft()
        if isinstance(work, Step):
            for counter in self._counters:
                counter.wait_all()
            reports = self._settle()
            self.compute(work)
            return reports
        self._submitted[work.plan_id] = work, fails
        self._counters.append(
            self._worker.controller.submit_swap_tasks(_spoilt(work, fails), self._worker.idle)
        )
        return [] if self.queue else self._settle()

    def close(self) -> None:
        """The process ends."""
        self._worker.controller.shutdown()

    def _settle(self) -> list[TransferReport]:
        reports: list[TransferReport] = []
        while len(reports) < len(self._submitted):
            ended = self._worker.controller.wait_reports(PATIENCE)
            assert ended, "a copy does not end"
            reports += ended
        self._counters.clear()
        return [self._account(report, *self._submitted.pop(report.plan_id)) for report in reports]

    def _account(self, report: TransferReport, plan: TransferPlan, fails: frozenset[int]) -> TransferReport:
        results = []
        for swap, result in zip(plan.swaps(), report.results, strict=True):
            failed = {*result.failed.tolist(), *_positions(swap, fails)}
            for position in failed:
                if swap.purpose is SwapPurpose.LOAD:
                    self.device[int(swap.dst_block_ids[position])] = GARBAGE
                elif self._worker.controller.host_arena is not None:
                    slot = int(swap.dst_block_ids[position])
                    self._worker.controller.host_arena.table.set_header(slot, _EMPTY)
            results.append(msgspec.structs.replace(result, failed=np.array(sorted(failed), np.int32)))
        return msgspec.structs.replace(report, results=tuple(results))


def _positions(swap: CacheSwapMetadata, fails: frozenset[int]) -> set[int]:
    return {position % len(swap) for position in fails} if len(swap) else set()


def _spoilt(plan: TransferPlan, fails: frozenset[int]) -> TransferPlan:
    """The plan with loads, at the positions that are to fail, of generations that their slots do not have."""
    loads = plan.loads
    if loads is None or not (positions := _positions(loads, fails)):
        return plan
    generations = loads.src_generations.copy()
    generations[sorted(positions)] += np.uint32(1)
    return msgspec.structs.replace(plan, loads=msgspec.structs.replace(loads, src_generations=generations))
