"""CacheController: failed copies, refused plans, cancelled copies."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from fdcache import _core
from fdcache.controller.cache_controller import CacheController
from fdcache.devices.base import (
    ArenaRecords,
    DevicePlanes,
    PlannedCopy,
)
from fdcache.devices.cpu import CpuDevice, CpuStream
from fdcache.errors import (
    CacheNotReadyError,
    DeviceError,
    PlanError,
    StreamError,
    TaskCancelledError,
    TransferTimeoutError,
)
from fdcache.metadata import (
    CacheLevel,
    CacheSwapMetadata,
    StorageTask,
    SwapPurpose,
    TransferPlan,
    TransferReport,
)
from fdcache.settings.cache import CopySettings
from fdcache.tasks import AsyncTaskHandler, CpuEvent, Event, TransferStatus
from tests.faults import PausingDevice
from tests.swaps import PATIENCE, Gate, Worker, block_hash, header_of, plan, swap, uniform_layout


@pytest.fixture
def worker() -> Worker:  # type: ignore[misc]
    with Worker(first_group_layers=1, group_layers=2) as made:
        yield made


def status_of(handler: AsyncTaskHandler[TransferReport]) -> TransferStatus:
    return handler.status


def rewrite_header(worker: Worker, slot: int, **changes: object) -> None:
    old = header_of(worker, slot)
    fields = {
        "state": old.state,
        "generation": old.generation,
        "block_hash": old.hash,
        "parent": old.parent,
        "fingerprint": old.fingerprint,
        "payload_bytes": old.payload_bytes,
        "payload_checksum": old.payload_checksum,
    }
    assert worker.controller.host_arena is not None
    table = worker.controller.host_arena.table
    table.set_header(slot, _core.SlotHeader(**(fields | changes)))  # type: ignore[arg-type]


class TestFailedLoads:
    @pytest.fixture
    def loaded(self, worker: Worker) -> Worker:
        worker.run(plan(1, backup=[(0, 0), (1, 1), (2, 2)], generation=4))
        return worker

    def run_load(self, worker: Worker, reason: str, *, generation: int = 4) -> None:
        untouched = worker.block(6)
        (result,) = worker.run(plan(2, load=[(0, 5), (1, 6), (2, 7)], generation=generation)).results
        assert result.failed.tolist() == [1]
        assert result.error_message is not None
        assert reason in result.error_message
        assert result.copied_bytes == 2 * worker.layout.payload_bytes
        assert worker.block(6) == untouched
        assert worker.block(5) == worker.block(0)

    def test_a_slot_given_to_new_content(self, loaded: Worker) -> None:
        rewrite_header(loaded, 1, generation=5)
        self.run_load(loaded, "position 1: host slot 1 was given to new content")

    def test_another_block(self, loaded: Worker) -> None:
        rewrite_header(loaded, 1, block_hash=block_hash("other").tobytes())
        self.run_load(loaded, "another block")

    def test_a_slot_being_written(self, loaded: Worker) -> None:
        rewrite_header(loaded, 1, state=1)
        self.run_load(loaded, "not ready")

    def test_another_layout(self, loaded: Worker) -> None:
        rewrite_header(loaded, 1, fingerprint=b"x" * 32)
        self.run_load(loaded, "another layout")

    def test_a_torn_header(self, loaded: Worker) -> None:
        torn = bytearray(header_of(loaded, 1).to_bytes())
        torn[40] ^= 1
        assert loaded.controller.host_arena is not None
        loaded.controller.host_arena.table.set_header(1, _core.SlotHeader.from_bytes(bytes(torn)))
        self.run_load(loaded, "no valid header")

    def test_a_slot_never_written(self, loaded: Worker) -> None:
        (result,) = loaded.run(plan(2, load=[(7, 5)])).results
        assert result.failed.tolist() == [0]

    def test_a_plan_that_evicts_into_the_slot_it_loads_from_serves_no_foreign_bytes(
        self, loaded: Worker
    ) -> None:
        """The eviction runs first; the slot then has another generation than the load names."""
        evictions = swap(SwapPurpose.EVICT, [(3, 1)], generation=5)
        loads = swap(SwapPurpose.LOAD, [(1, 3)], generation=4)
        before = loaded.block(3)
        report = loaded.run(TransferPlan(plan_id=2, evictions=evictions, loads=loads))
        assert [result.success for result in report.results] == [True, False]
        assert loaded.block(3) == before

    def test_a_slot_that_changes_between_two_layer_groups(self) -> None:
        """Layer 0 arrives, then the slot is given away: the block fails, later layers are not touched."""
        device = PausingDevice(pause_at=1)
        with Worker(device=device, first_group_layers=1, group_layers=3) as worker:
            worker.run(plan(1, backup=[(0, 0), (1, 1)]))
            before = worker.block(5)
            counter = worker.controller.submit_swap_tasks(plan(2, load=[(0, 5), (1, 6)]))
            counter.wait_for_layer(0)
            assert counter.pending_layers() == [1, 2, 3]
            rewrite_header(worker, 0, generation=2)
            device.resume.set()
            counter.wait_all()
            (result,) = worker.report().results
            assert result.failed.tolist() == [0]
            assert worker.block(5)[:2] == worker.block(0)[:2]
            assert worker.block(5)[2:] == before[2:]
            assert worker.block(6) == worker.block(1)


class TestRefusedPlans:
    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            (plan(1, load=[(0, 1), (2, 8)]), "load: pair 1: device slot 8 is not one of the 8"),
            (plan(1, evict=[(-1, 1)]), "evict: pair 0: device slot -1"),
            (plan(1, backup=[(1, 99)]), "backup: pair 0: host slot 99"),
            (plan(1, load=[(0, 1), (2, 3), (4, 1)]), "load: pairs 0 and 2: both"),
            (plan(1, evict=[(0, 3), (1, 3)]), "evict: pairs 0 and 1: both"),
            (plan(1, evict=[(0, 3)], backup=[(1, 3)]), "backup: pair 0: host slot 3 is evicted into"),
            (plan(1, evict=[(0, 3)], backup=[(1, 2), (0, 1)]), "backup: pair 1: device slot 0 is emptied"),
            (plan(1, load=[(0, 3)], backup=[(3, 3)]), "backup: pair 0: device slot 3 is loaded"),
            (TransferPlan(plan_id=1, loads=swap(SwapPurpose.EVICT, [(0, 1)])), "the transfer is a evict"),
        ],
    )
    def test_a_wrong_pair_is_named_and_nothing_is_copied(
        self, worker: Worker, bad: TransferPlan, message: str
    ) -> None:
        before = [worker.block(slot) for slot in range(8)]
        with pytest.raises(PlanError, match=message):
            worker.controller.submit_swap_tasks(bad)
        (report,) = worker.controller.wait_reports(0)
        for refused, result in zip(bad.swaps(), report.results, strict=True):
            assert result.failed.tolist() == list(range(len(refused)))
            assert message in str(result.error_message)
        assert [worker.block(slot) for slot in range(8)] == before

    @pytest.mark.parametrize(
        "field",
        ["dst_block_ids", "src_generations", "dst_generations", "hash_values", "parent_hashes", "unverified"],
    )
    def test_unequal_lengths(self, worker: Worker, field: str) -> None:
        loads = swap(SwapPurpose.LOAD, [(0, 1), (1, 2)])
        loads.unverified = np.ones(2, np.uint8)
        setattr(loads, field, getattr(loads, field)[:0])
        with pytest.raises(PlanError, match=f"load: {field} has shape"):
            worker.controller.submit_swap_tasks(TransferPlan(plan_id=1, loads=loads))

    @pytest.mark.parametrize(
        ("field", "value", "found"),
        [
            ("src_block_ids", np.array([0, 1 << 32], np.int64), "an array of int32, got int64"),
            ("src_block_ids", None, "an array of int32, got NoneType"),
            ("dst_block_ids", None, "an array of int32, got NoneType"),
            ("dst_block_ids", np.array([1.0, 2.0]), "an array of int32, got float64"),
            ("dst_block_ids", [1, 2], "an array of int32, got list"),
            ("src_generations", np.array([1, 1 << 32], np.uint64), "an array of uint32, got uint64"),
            ("hash_values", np.zeros((2, 32), np.int8), "an array of uint8, got int8"),
        ],
    )
    def test_arrays_of_wider_integers(self, worker: Worker, field: str, value: object, found: str) -> None:
        worker.run(plan(1, evict=[(0, 0)]))
        loads = swap(SwapPurpose.LOAD, [(0, 1), (1, 2)])
        setattr(loads, field, value)
        with pytest.raises(PlanError, match=f"load: {field} must be {found}"):
            worker.controller.submit_swap_tasks(TransferPlan(plan_id=2, loads=loads))
        (report,) = worker.controller.poll()
        (result,) = report.results
        assert result.failed.tolist() == [0, 1] and found in str(result.error_message)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"dst_block_ids": np.array([0, 1 << 33], np.int64)}, "dst_block_ids must be an array of int32"),
            (
                {"hash_values": np.zeros((3, 32), np.uint8)},
                r"hash_values has shape \(3, 32\), but 2 blocks need",
            ),
            ({"unverified": np.ones(1, np.uint8)}, r"unverified has shape \(1,\), but 2 blocks need \(2,\)"),
            ({"src_block_ids": np.array([3, 8], np.int32)}, "pair 1: host slot 8 is not one of the 8"),
        ],
    )
    def test_the_device_checks_the_arrays_of_a_copy(
        self, worker: Worker, changes: dict[str, Any], message: str
    ) -> None:
        sound = swap(SwapPurpose.LOAD, [(0, 0), (1, 1)])
        core = worker.controller
        planes = core._parts.memory.planes
        assert planes is not None and core.host_arena is not None
        with pytest.raises(PlanError, match=message):
            core.device.copy_blocks(planes, core.host_arena, msgspec.structs.replace(sound, **changes))

    def test_a_plan_already_in_flight(self, worker: Worker) -> None:
        gate = Gate()
        worker.controller.submit_swap_tasks(plan(1, evict=[(1, 1)]), gate.stream)
        with pytest.raises(PlanError, match="plan 1 is in flight already"):
            worker.controller.submit_swap_tasks(plan(1))
        gate.open()

    def test_memory_that_is_not_there(self) -> None:
        with CacheController(CopySettings(), uniform_layout()) as controller:
            with pytest.raises(CacheNotReadyError, match="no device planes"):
                controller.submit_swap_tasks(plan(1, load=[(0, 0)]))
            controller.initialize_kv_cache(2)
            with pytest.raises(CacheNotReadyError, match="initialize_host_cache"):
                controller.submit_swap_tasks(plan(2, load=[(0, 0)]))
            assert [report.plan_id for report in controller.poll()] == [1, 2]


class _FailingDevice(CpuDevice):
    """Raises ``error`` once: where ``step`` says, and for backups alone if that is ``backup``."""

    def __init__(self, step: str, error: Exception) -> None:
        super().__init__()
        self.step = step
        self.error: Exception | None = None
        self._next = error

    def arm(self) -> None:
        self.error = self._next

    def _fail(self, step: str) -> None:
        if step == self.step and self.error is not None:
            error, self.error = self.error, None
            raise error

    def as_stream(self, stream: Any) -> CpuStream:
        self._fail("stream")
        return super().as_stream(stream)

    def create_event(self) -> CpuEvent:
        self._fail("event")
        return super().create_event()

    def copy_blocks(self, planes: DevicePlanes, arena: ArenaRecords, swap: CacheSwapMetadata) -> PlannedCopy:
        self._fail("copy")
        return super().copy_blocks(planes, arena, swap)


class _FullStream(CpuStream):
    """Takes no more copies from ``full`` on."""

    error: Exception | None = None

    def wait_event(self, event: Event) -> None:
        if self.error is not None:
            raise self.error
        super().wait_event(event)


class _FullBackups(CpuDevice):
    """Its background stream refuses what ``error`` says, once there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.background: _FullStream | None = None

    def create_stream(self, *, background: bool = False) -> CpuStream:
        if not background:
            return super().create_stream()
        self.background = _FullStream(1, background=True)
        return self.background


class TestPlansThatCannotBeSubmitted:
    """``poll`` is all that an engine needs."""

    @pytest.mark.parametrize(
        ("step", "error"),
        [
            ("stream", DeviceError),
            ("event", DeviceError),
            ("copy", DeviceError),
            ("copy", MemoryError),
        ],
    )
    def test_errors_of_the_device_are_reported_and_not_raised(
        self, step: str, error: type[Exception]
    ) -> None:
        device = _FailingDevice(step, error("broken"))
        gate = Gate()
        gate.open()
        with Worker(device=device) as worker:
            worker.run(plan(1, backup=[(0, 0)]))
            device.arm()
            counter = worker.controller.submit_swap_tasks(
                plan(2, evict=[(1, 1), (2, 2)], load=[(0, 5)], backup=[(3, 3)]), gate.stream
            )
            counter.wait_all()
            report = worker.report()
            assert [result.failed.tolist() for result in report.results] == [[0, 1], [0], [0]]
            assert all("broken" in str(result.error_message) for result in report.results)
            worker.run(plan(3, load=[(0, 5)]))
            assert worker.block(5) == worker.block(0)

    @pytest.mark.parametrize("error", [DeviceError, RuntimeError])
    def test_a_plan_that_fails_midway_is_reported_when_its_evictions_have_ended(
        self, error: type[Exception]
    ) -> None:
        device = _FullBackups()
        with Worker(device=device) as worker:
            gate = Gate()
            assert device.background is not None
            device.background.error = error("full")
            submitted = plan(1, evict=[(1, 1)], backup=[(3, 3)])
            counter = worker.controller.submit_swap_tasks(submitted, gate.stream)
            assert worker.controller.poll() == [], "the eviction is in flight: its slots are in use"
            assert counter.pending_layers() == [0, 1, 2, 3]
            gate.open()
            evicted, backed_up = worker.report().results
            assert evicted.success
            assert backed_up.failed.tolist() == [0]
            assert "full" in str(backed_up.error_message)

    def test_a_foreign_stream_is_named_and_the_plan_reported(self, worker: Worker) -> None:
        with pytest.raises(StreamError, match="compute_stream: expected a stream of the CPU device, got str"):
            worker.controller.submit_swap_tasks(plan(1, load=[(0, 1)]), "stream 0")
        assert worker.report().results[0].failed.tolist() == [0]

    def test_another_type_than_a_plan_is_refused(self, worker: Worker) -> None:
        with pytest.raises(PlanError, match=r"a TransferPlan of CacheManager\.take_plans, got list"):
            worker.controller.submit_swap_tasks([plan(1)])  # type: ignore[arg-type]

    def test_storage_tasks_of_a_refused_plan_are_reported_too(self, worker: Worker) -> None:
        with pytest.raises(CacheNotReadyError, match="initialize_storage"):
            worker.controller.submit_swap_tasks(_with_storage(1, load=[(0, 1)]))
        reports = {report.plan_id: report for report in worker.controller.poll()}
        assert set(reports) == {1, 101}
        assert all(report.results[0].failed.tolist() == [0] for report in reports.values())

    def test_a_plan_that_the_engine_refuses_is_reported_once(self, worker: Worker) -> None:
        worker.controller.refuse(_with_storage(1, evict=[(0, 1), (1, 2)]), "the step was given up")
        with pytest.raises(PlanError, match="in flight already"):
            worker.controller.submit_swap_tasks(plan(1))
        reports = {report.plan_id: report for report in worker.controller.poll()}
        assert {number: report.results[0].failed.tolist() for number, report in reports.items()} == {
            1: [0, 1],
            101: [0],
        }
        assert worker.controller.poll() == []

    def test_a_plan_after_shutdown_is_reported(self) -> None:
        with Worker() as worker:
            pass
        with pytest.raises(CacheNotReadyError, match="shut down"):
            worker.controller.submit_swap_tasks(plan(1, load=[(0, 1)]))
        assert [report.plan_id for report in worker.controller.poll()] == [1]


def _with_storage(plan_id: int, **pairs: Any) -> TransferPlan:
    """A plan that also wants host slot 0 written to storage, as plan 100 + ``plan_id``."""
    store = swap(SwapPurpose.STORE, [(0, 0)])
    store.src_type, store.dst_type = CacheLevel.HOST, CacheLevel.STORAGE
    task = StorageTask(plan_id=100 + plan_id, swap=store, timeout=1.0)
    return msgspec.structs.replace(plan(plan_id, **pairs), storage=(task,))


class TestCancel:
    def test_cancelled_copies_stay_cancelled(self, worker: Worker) -> None:
        gate = Gate()
        worker.controller.submit_swap_tasks(plan(1, backup=[(1, 1), (2, 2)]), gate.stream)
        handler = worker.controller.handler(1)
        assert status_of(handler) is TransferStatus.PENDING
        assert not handler.wait(0.01)
        with pytest.raises(TransferTimeoutError):
            handler.get_result(0.01)
        assert handler.cancel()
        assert handler.cancel()
        (result,) = worker.report().results
        assert result.failed.tolist() == [0, 1]
        assert result.error_message is not None
        assert "cancelled" in result.error_message
        assert result.copied_bytes == 0
        gate.open()
        worker.run(plan(2, backup=[(3, 3)]))
        assert status_of(handler) is TransferStatus.CANCELLED
        with pytest.raises(TaskCancelledError):
            handler.get_result()
        assert not worker.record(1).any()

    def test_a_finished_plan_cannot_be_cancelled(self, worker: Worker) -> None:
        worker.controller.submit_swap_tasks(plan(1, evict=[(1, 1)]))
        handler = worker.controller.handler(1)
        report = handler.get_result(PATIENCE)
        assert not handler.cancel()
        assert status_of(handler) is TransferStatus.COMPLETED
        assert handler.get_result(0) is report
        assert worker.controller.poll() == [report]
        with pytest.raises(PlanError, match="plan 1 is not in flight"):
            worker.controller.handler(1)

    def test_cancel_takes_back_only_transfers_that_have_not_begun(self) -> None:
        device = PausingDevice(pause_at=1)
        with Worker(device=device, first_group_layers=1) as worker:
            worker.run(plan(1, backup=[(0, 0)]))
            counter = worker.controller.submit_swap_tasks(plan(2, load=[(0, 5)]))
            counter.wait_for_layer(0)
            handler = worker.controller.handler(2)
            assert status_of(handler) is TransferStatus.IN_PROGRESS
            assert not handler.cancel()
            device.resume.set()
            assert handler.get_result(PATIENCE).results[0].success

    def test_the_handler_of_a_failed_plan_has_its_report(self, worker: Worker) -> None:
        worker.controller.submit_swap_tasks(plan(1, load=[(1, 1)]))
        handler = worker.controller.handler(1)
        assert handler.get_result(PATIENCE).results[0].failed.tolist() == [0]
        assert status_of(handler) is TransferStatus.FAILED

    def test_a_cancel_wakes_a_waiting_thread(self, worker: Worker) -> None:
        gate = Gate()
        worker.controller.submit_swap_tasks(plan(1, backup=[(1, 1)]), gate.stream)
        reports = []
        longer = 2 * PATIENCE
        waiting = threading.Thread(target=lambda: reports.extend(worker.controller.wait_reports(longer)))
        waiting.start()
        worker.controller.handler(1).cancel()
        waiting.join(PATIENCE)
        assert not waiting.is_alive()
        assert [report.plan_id for report in reports] == [1]
