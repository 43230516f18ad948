"""Loads that wait for their stream: copied in batches, each reported by itself."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from fdcache.devices.base import (
    ArenaRecords,
    DevicePlanes,
    PlannedCopy,
    Stream,
    enqueue_each,
)
from fdcache.devices.cpu import CpuDevice
from fdcache.errors import DeviceError, PlanError
from fdcache.metadata import CacheSwapMetadata, SwapPurpose, TransferPlan, TransferReport, TransferResult
from fdcache.tasks import CpuEvent, Event, TransferStatus
from tests.swaps import PATIENCE, Gate, Worker, plan, swap, uniform_layout

BLOCKS = 16


class CountingDevice(CpuDevice):
    """Remembers the sizes of the loads that are put on its streams; ``failure`` is raised instead of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[list[int]] = []
        self.failure: Exception | None = None
        self.lost_reason: str | None = None

    @property
    def lost(self) -> str | None:  # type: ignore[override]
        return self.lost_reason

    def copy_blocks(self, planes: DevicePlanes, arena: ArenaRecords, swap: CacheSwapMetadata) -> PlannedCopy:
        if not swap.to_host:
            if self.failure is not None:
                failure, self.failure = self.failure, None
                raise failure
            self.loads.append(swap.device_slots.tolist())
        return super().copy_blocks(planes, arena, swap)


class Busy:
    """A worker whose stream is held until ``open`` by a load, with room for three blocks behind it, which are taken.

    The held load is left out of ``reports`` and of the device's ``loads``.
    """

    def __init__(self, **settings: Any) -> None:
        self.device = CountingDevice()
        layout = uniform_layout()
        options: dict[str, Any] = {"queued_bytes": 3 * layout.payload_bytes, "group_layers": 1} | settings
        self.worker = Worker(layout, device_blocks=BLOCKS, host_blocks=BLOCKS, device=self.device, **options)
        self.controller = self.worker.controller
        self.worker.run(plan(1, backup=[(slot, slot) for slot in range(BLOCKS)]))
        self.saved = [self.worker.block(slot) for slot in range(BLOCKS)]
        self._gate = CpuEvent()
        self._held = self.device.create_stream()
        self._held.wait_event(self._gate)
        self.controller.submit_swap_tasks(plan(0, load=[(3, 0)]), self._held)
        self.device.loads.clear()
        self.controller.submit_swap_tasks(plan(2, load=[(0, 1), (1, 2), (2, 3)]), self._held)

    def open(self) -> None:
        self._gate.set()

    def reports(self, count: int) -> dict[int, TransferReport]:
        found: dict[int, TransferReport] = {}
        while len(found) < count:
            ended = self.controller.wait_reports(PATIENCE)
            assert ended, f"only {sorted(found)} ended"
            found |= {report.plan_id: report for report in ended if report.plan_id}
        return found

    def run(self, submitted: TransferPlan) -> None:
        """Submit a plan of loads and wait for its report; that of the held load may come before it."""
        self.controller.submit_swap_tasks(submitted).wait_all()
        assert all(result.success for result in self.reports(1)[submitted.plan_id].results)


@pytest.fixture
def busy() -> Iterator[Busy]:
    made = Busy()
    try:
        yield made
    finally:
        made.open()
        made.controller.shutdown()


def test_waiting_loads_are_copied_as_one_batch_and_reported_one_by_one(busy: Busy) -> None:
    busy.controller.submit_swap_tasks(plan(3, load=[(4, 8)]))
    busy.controller.submit_swap_tasks(plan(4, load=[(5, 9), (6, 10)]))
    assert busy.controller.poll() == []
    assert busy.device.loads == [[1, 2, 3]]
    busy.open()
    reports = busy.reports(3)
    assert list(reports) == [2, 3, 4]
    assert busy.device.loads == [[1, 2, 3], [8, 9, 10]]
    assert [reports[each].results[0].copied_bytes for each in (3, 4)] == [
        busy.worker.layout.payload_bytes,
        2 * busy.worker.layout.payload_bytes,
    ]
    assert [busy.worker.block(slot) for slot in (8, 9, 10)] == busy.saved[4:7]


def test_a_batch_is_at_most_the_bytes_to_queue(busy: Busy) -> None:
    for index in range(4):
        busy.controller.submit_swap_tasks(
            plan(3 + index, load=[(2 * index, 8 + 2 * index), (1, 9 + 2 * index)])
        )
    busy.controller.submit_swap_tasks(plan(7, load=[(0, 4)]))
    busy.open()
    assert all(result.success for report in busy.reports(6).values() for result in report.results)
    assert busy.device.loads == [[1, 2, 3], [8, 9], [10, 11], [12, 13], [14, 15, 4]]


def test_a_load_larger_than_the_bytes_to_queue_is_a_batch_by_itself(busy: Busy) -> None:
    busy.controller.submit_swap_tasks(plan(3, load=[(4 + i, 8 + i) for i in range(6)]))
    busy.open()
    assert busy.reports(2)[3].results[0].success
    assert [busy.worker.block(8 + i) for i in range(6)] == busy.saved[4:10]


def test_one_load_is_always_enqueued_behind_the_one_being_copied() -> None:
    busy = Busy(queued_bytes=1)
    busy.controller.submit_swap_tasks(plan(3, load=[(4, 8)]))
    assert busy.device.loads == [[1, 2, 3]]
    busy.open()
    assert set(busy.reports(2)) == {2, 3}
    assert busy.device.loads == [[1, 2, 3], [8]]
    busy.controller.shutdown()


def test_failed_positions_are_those_of_the_own_plan(busy: Busy) -> None:
    untouched = busy.worker.block(9)
    busy.controller.submit_swap_tasks(plan(3, load=[(4, 8)]))
    wrong = swap(SwapPurpose.LOAD, [(6, 10), (5, 9)], generation=[1, 7])
    busy.controller.submit_swap_tasks(TransferPlan(plan_id=4, loads=wrong))
    busy.open()
    reports = busy.reports(3)
    assert busy.device.loads[-1] == [8, 10, 9]
    assert reports[3].results[0].success and reports[3].results[0].error_message is None
    (failed,) = reports[4].results
    assert failed.failed.tolist() == [1]
    assert failed.error_message == ("1 of 2 blocks failed; position 1: host slot 5 was given to new content")
    assert failed.copied_bytes == busy.worker.layout.payload_bytes
    assert busy.worker.block(8) == busy.saved[4] and busy.worker.block(10) == busy.saved[6]
    assert busy.worker.block(9) == untouched


@pytest.mark.parametrize("stale", [0, 1, 2])
def test_each_of_three_loads_of_a_batch_has_its_own_result(busy: Busy, stale: int) -> None:
    for index in range(3):
        generation = [7 if index == stale else 1]
        load = swap(SwapPurpose.LOAD, [(4 + index, 8 + index)], generation=generation)
        busy.controller.submit_swap_tasks(TransferPlan(plan_id=3 + index, loads=load))
    busy.open()
    reports = busy.reports(4)
    assert busy.device.loads[-1] == [8, 9, 10]
    failed = [reports[3 + index].results[0].failed.tolist() for index in range(3)]
    assert failed == [[0] if index == stale else [] for index in range(3)]


def test_checksums_are_compared_for_the_plans_that_ask_for_it(busy: Busy) -> None:
    for slot in (5, 7):
        busy.worker.record(slot)[0] ^= 1
    marked = swap(SwapPurpose.LOAD, [(4, 9), (5, 10)])
    marked.unverified = np.ones(2, np.uint8)
    busy.controller.submit_swap_tasks(plan(3, load=[(7, 8)]))
    busy.controller.submit_swap_tasks(TransferPlan(plan_id=4, loads=marked))
    busy.open()
    reports = busy.reports(3)
    assert busy.device.loads[-1] == [8, 9, 10]
    assert reports[3].results[0].success
    assert reports[4].results[0].failed.tolist() == reports[4].results[0].corrupt.tolist() == [1]


def test_a_wait_for_a_layer_starts_its_load_at_once_and_alone(busy: Busy) -> None:
    busy.controller.submit_swap_tasks(plan(3, load=[(4, 8)]))
    wanted = busy.controller.submit_swap_tasks(plan(4, load=[(5, 9)]))
    assert wanted.pending_layers() == [0, 1, 2, 3] and not wanted.is_layer_done(0)
    assert busy.device.loads == [[1, 2, 3]]
    stream = busy.device.create_stream()
    wanted.wait_for_layer(0, stream=stream)
    assert busy.device.loads == [[1, 2, 3], [9]]
    passed = CpuEvent()
    passed.record(stream)
    assert not passed.wait(0.01)
    busy.open()
    assert passed.wait(PATIENCE)
    wanted.wait_all()
    assert busy.worker.block(9) == busy.saved[5]
    assert set(busy.reports(3)) == {2, 3, 4}


def test_a_wait_for_a_waiting_load_returns(busy: Busy) -> None:
    counter = busy.controller.submit_swap_tasks(plan(3, load=[(4, 8)]))
    opening = threading.Timer(0.02, busy.open)
    opening.start()
    counter.wait_for_layer(3, PATIENCE)
    assert counter.is_all_done() and counter.pending_layers() == []
    assert busy.worker.block(8) == busy.saved[4]
    opening.join()


def test_a_handler_waits_for_a_load_that_waits(busy: Busy) -> None:
    busy.controller.submit_swap_tasks(plan(3, load=[(4, 8)]))
    handler = busy.controller.handler(3)
    assert handler.status is TransferStatus.PENDING
    assert not handler.wait(0.01)
    busy.open()
    assert handler.get_result(PATIENCE).results[0].success
    assert busy.worker.block(8) == busy.saved[4]


def test_a_cancelled_waiting_load_is_never_copied(busy: Busy) -> None:
    before = busy.worker.block(8)
    counter = busy.controller.submit_swap_tasks(plan(3, load=[(4, 8), (5, 9)]))
    busy.controller.submit_swap_tasks(plan(4, load=[(6, 10)]))
    assert busy.controller.handler(3).cancel()
    assert counter.is_all_done()
    (report,) = busy.controller.poll()
    assert report.plan_id == 3 and report.results[0].failed.tolist() == [0, 1]
    assert report.results[0].error_message == "2 of 2 blocks failed; position 0: cancelled"
    busy.open()
    assert busy.reports(2)[4].results[0].success
    assert busy.device.loads == [[1, 2, 3], [10]]
    assert busy.worker.block(8) == before


def test_one_load_of_a_batch_cannot_be_cancelled() -> None:
    """All of a batch would be taken back, and the other plans with it."""
    busy = Busy()
    gate = CpuEvent()
    held = busy.device.create_stream()
    held.wait_event(gate)
    for index in range(2):
        busy.controller.submit_swap_tasks(plan(3 + index, load=[(4 + index, 8 + index)]), held)
    busy.open()
    assert list(busy.reports(1)) == [2]
    busy.controller.poll()
    assert busy.device.loads[-1] == [8, 9]
    assert not busy.controller.handler(3).cancel()
    gate.set()
    assert all(report.results[0].success for report in busy.reports(2).values())
    busy.controller.shutdown()


def test_a_batch_waits_for_the_evictions_of_all_its_plans(busy: Busy) -> None:
    written = [busy.worker.scramble(slot) for slot in (8, 9)]
    busy.controller.submit_swap_tasks(plan(3, evict=[(8, 12)], load=[(4, 8)], generation=1))
    busy.controller.submit_swap_tasks(plan(4, evict=[(9, 13)], load=[(5, 9)], generation=1))
    busy.open()
    assert all(result.success for report in busy.reports(3).values() for result in report.results)
    assert busy.device.loads[-1] == [8, 9]
    busy.run(plan(5, load=[(12, 14), (13, 15)]))
    assert [busy.worker.block(slot) for slot in (14, 15)] == written
    assert [busy.worker.block(slot) for slot in (8, 9)] == busy.saved[4:6]


def test_loads_into_one_slot_keep_the_order_of_submission(busy: Busy) -> None:
    busy.controller.submit_swap_tasks(plan(3, load=[(4, 8)]))
    last = busy.controller.submit_swap_tasks(plan(4, load=[(5, 8)]))
    last.wait_for_layer(0, stream=busy.device.create_stream())
    busy.open()
    busy.reports(3)
    assert busy.worker.block(8) == busy.saved[5]


def test_a_wrong_pair_of_a_waiting_load_is_named(busy: Busy) -> None:
    with pytest.raises(PlanError, match=f"load: pair 1: device slot {BLOCKS} is not one of"):
        busy.controller.submit_swap_tasks(plan(3, load=[(4, 8), (5, BLOCKS)]))
    busy.open()
    assert set(busy.reports(2)) == {2, 3}


def test_a_device_that_refuses_the_batch_fails_its_plans_and_goes_on(busy: Busy) -> None:
    counter = busy.controller.submit_swap_tasks(plan(3, load=[(4, 8)]))
    busy.controller.submit_swap_tasks(plan(4, load=[(5, 9)]))
    busy.device.failure = DeviceError("out of memory")
    busy.open()
    reports = busy.reports(3)
    for plan_id in (3, 4):
        (result,) = reports[plan_id].results
        assert result.failed.tolist() == [0]
        assert result.error_message == ("1 of 1 blocks failed; position 0: the device failed: out of memory")
    assert counter.is_all_done()
    busy.run(plan(5, load=[(4, 8)]))
    assert busy.worker.block(8) == busy.saved[4]


@pytest.mark.parametrize("at_once", [True, False])
def test_memory_that_runs_out_fails_the_loads_concerned_and_the_queue_goes_on(
    busy: Busy, at_once: bool
) -> None:
    """A load that a layer is waited for goes alone; those that wait for room go together."""
    counters = [busy.controller.submit_swap_tasks(plan(3 + n, load=[(4 + n, 8 + n)])) for n in range(3)]
    busy.device.failure = MemoryError("no more")
    if at_once:
        counters[1].wait_for_layer(0, stream=busy.device.create_stream())
    busy.open()
    reports = busy.reports(4)
    failed = {number for number in (3, 4, 5) if not reports[number].results[0].success}
    assert failed == ({4} if at_once else {3, 4, 5})
    for number in failed:
        assert "MemoryError: no more" in str(reports[number].results[0].error_message)
    assert all(counter.is_all_done() for counter in counters)
    busy.run(plan(6, load=[(4, 8)]))
    assert busy.worker.block(8) == busy.saved[4]


class _BreaksOff:
    """A copy whose second group of layers cannot be put on the stream."""

    is_certain = False

    def __init__(self, copy: PlannedCopy) -> None:
        self._copy = copy
        self.done, self.started = copy.done, False

    def enqueue(self, stream: Stream, first_plane: int, last_plane: int) -> None:
        if first_plane:
            raise MemoryError("no more")
        self._copy.enqueue(stream, first_plane, last_plane)

    def enqueue_groups(self, stream: Stream, ranges: Sequence[tuple[int, int]]) -> Sequence[Event]:
        return enqueue_each(self, stream, ranges, CpuEvent)

    def cancel(self) -> bool:
        return False

    def result(self, start: int = 0, stop: int | None = None) -> TransferResult:
        raise AssertionError("nothing can be said of a copy that never ends")


class _BreakingDevice(CpuDevice):
    def copy_blocks(self, planes: DevicePlanes, arena: ArenaRecords, swap: CacheSwapMetadata) -> PlannedCopy:
        copy = super().copy_blocks(planes, arena, swap)
        return _BreaksOff(copy) if not swap.to_host else copy


def test_a_load_that_is_refused_midway_holds_its_slots_until_the_accepted_part_has_ended() -> None:
    with Worker(device=_BreakingDevice(), first_group_layers=1, group_layers=1) as worker:
        worker.run(plan(1, backup=[(0, 0)]))
        gate = Gate()
        counter = worker.controller.submit_swap_tasks(plan(2, load=[(0, 5)]), gate.stream)
        assert worker.controller.poll() == []
        assert counter.pending_layers() == [0, 1, 2, 3], "the slot is written still"
        gate.open()
        assert worker.report().results[0].failed.tolist() == [0]
        assert counter.is_all_done()


def test_a_lost_device_refuses_a_waiting_load(busy: Busy) -> None:
    busy.device.lost_reason = "gone"
    assert busy.controller.submit_swap_tasks(plan(3, load=[(4, 8)])).is_all_done()
    (report,) = busy.controller.poll()
    assert "gone" in str(report.results[0].error_message)


def test_a_blocked_backup_delays_no_load(busy: Busy) -> None:
    gate = CpuEvent()
    held = busy.device.create_stream()
    held.wait_event(gate)
    busy.controller.submit_swap_tasks(plan(3, backup=[(12, 12)], generation=2), held)
    for index in range(3):
        busy.controller.submit_swap_tasks(plan(4 + index, load=[(4 + index, 8 + index)]))
    busy.open()
    assert set(busy.reports(4)) == {2, 4, 5, 6}
    gate.set()
    assert list(busy.reports(1)) == [3]


def test_shutdown_copies_waiting_loads() -> None:
    busy = Busy()
    busy.controller.submit_swap_tasks(plan(3, load=[(4, 8)]))
    busy.open()
    busy.controller.shutdown()
    assert all(result.success for report in busy.controller.poll() for result in report.results)
    assert busy.worker.block(8) == busy.saved[4]


def test_a_layer_counter_keeps_no_memory_alive() -> None:
    busy = Busy()
    counters = [busy.controller.submit_swap_tasks(plan(3 + i, load=[(4 + i, 8 + i)])) for i in range(2)]
    busy.open()
    busy.reports(3)
    arena = weakref.ref(busy.controller.host_arena)
    busy.controller.free_cache()
    gc.collect()
    assert arena() is None
    assert all(counter.is_all_done() for counter in counters)
    busy.controller.shutdown()
