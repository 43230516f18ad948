"""Plans carried out by one worker: order, confirmation, failure, memory."""

from __future__ import annotations

import threading

import pytest

from fdcache import _core
from fdcache.controller.cache_controller import CacheController
from fdcache.devices.base import Direction
from fdcache.devices.cpu import CpuDevice, CpuEvent
from fdcache.errors import (
    CacheNotReadyError,
    HostMemoryError,
    LayerSwapTimeoutError,
    PlanError,
    TaskCancelledError,
    TransferTimeoutError,
)
from fdcache.metadata import (
    AsyncTaskHandler,
    SwapPurpose,
    TransferPlan,
    TransferReport,
    TransferStatus,
    decode_plan,
    decode_report,
    encode,
)
from fdcache.settings.transfer import TransferSettings
from tests.faults import PausingDevice
from tests.swaps import Worker, block_hash, host_slot_hash, plan, swap, uniform_layout


@pytest.fixture
def worker() -> Worker:  # type: ignore[misc]
    with Worker(first_group_layers=1, group_layers=2) as made:
        yield made


class Gate:
    """A stream held up by an event: what waits for the stream waits for ``open``."""

    def __init__(self) -> None:
        device = CpuDevice()
        self.stream = device.create_stream()
        self._event = CpuEvent()
        self.stream.wait_event(self._event)

    def open(self) -> None:
        self._event.set()


def status_of(handler: AsyncTaskHandler[TransferReport]) -> TransferStatus:
    return handler.status


def header_of(worker: Worker, slot: int) -> _core.SlotHeader:
    assert worker.controller.host_arena is not None
    return worker.controller.host_arena.table.header(slot)


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


class TestRoundTrip:
    def test_a_backup_and_a_load_bring_the_bytes_back(self, worker: Worker) -> None:
        original = worker.block(3)
        report = worker.run(plan(1, backup=[(3, 5)]))
        assert report.results[0].success
        worker.scramble(3)
        worker.run(plan(2, load=[(5, 6)]))
        assert worker.block(6) == original

    def test_the_report_has_checksums_bytes_and_time_of_copies_to_the_host(self, worker: Worker) -> None:
        (result,) = worker.run(plan(1, backup=[(3, 5), (1, 0)])).results
        offsets = [each.offset for each in worker.layout.planes]
        sizes = [each.nbytes for each in worker.layout.planes]
        expected = [_core.record_checksum(worker.record(slot), offsets, sizes) for slot in (5, 0)]
        assert result.checksums.tolist() == expected
        assert result.copied_bytes == 2 * worker.layout.payload_bytes
        assert result.seconds > 0
        (load,) = worker.run(plan(2, load=[(5, 6)])).results
        assert load.checksums.tolist() == []
        assert load.copied_bytes == worker.layout.payload_bytes

    def test_the_header_says_what_is_in_the_slot(self, worker: Worker) -> None:
        (result,) = worker.run(plan(1, evict=[(3, 5)], generation=9)).results
        header = header_of(worker, 5)
        assert header.is_valid
        assert (header.state, header.generation) == (2, 9)
        assert header.hash == host_slot_hash(5).tobytes()
        assert header.payload_checksum == result.checksums[0]
        assert header.payload_bytes == worker.layout.payload_bytes
        assert header.fingerprint == worker.layout.fingerprint[:16]

    def test_a_plan_may_load_into_the_slot_that_it_empties(self, worker: Worker) -> None:
        first, second = worker.block(1), worker.block(2)
        worker.run(plan(1, backup=[(1, 0)]))
        worker.run(plan(2, evict=[(2, 4)], load=[(0, 2)]))
        assert worker.block(2) == first
        worker.run(plan(3, load=[(4, 7)]))
        assert worker.block(7) == second

    def test_a_report_has_one_result_per_transfer_empty_ones_too(self, worker: Worker) -> None:
        report = worker.run(plan(1, evict=[(1, 1)], load=[], backup=[(2, 2)]))
        assert [result.purpose for result in report.results] == [
            SwapPurpose.EVICT,
            SwapPurpose.LOAD,
            SwapPurpose.BACKUP,
        ]
        assert all(result.success for result in report.results)
        assert report.results[1].copied_bytes == 0

    def test_an_empty_plan_is_done_at_once_and_reported(self, worker: Worker) -> None:
        counter = worker.controller.submit_swap_tasks(TransferPlan(plan_id=1))
        assert counter.is_all_done()
        counter.wait_all(0)
        assert worker.controller.poll()[0].results == ()

    def test_an_empty_plan_needs_no_memory(self) -> None:
        with CacheController(TransferSettings(), uniform_layout()) as controller:
            controller.submit_swap_tasks(plan(1, load=[])).wait_all(0)
            assert len(controller.poll()[0].results) == 1

    def test_plans_and_reports_survive_packing(self, worker: Worker) -> None:
        original = worker.block(3)
        worker.run(decode_plan(encode(plan(1, backup=[(3, 5)]))))
        report = worker.run(decode_plan(encode(plan(2, load=[(5, 6)]))))
        assert decode_report(encode(report)).results[0].success
        assert worker.block(6) == original

    def test_reports_come_in_order_of_submission_once_each(self, worker: Worker) -> None:
        for plan_id in range(1, 6):
            worker.controller.submit_swap_tasks(plan(plan_id, evict=[(plan_id, plan_id)]))
        seen: list[int] = []
        while len(seen) < 5:
            seen += [report.plan_id for report in worker.controller.wait_reports(5.0)]
        assert seen == [1, 2, 3, 4, 5]
        assert worker.controller.poll() == []
        assert worker.controller.wait_reports(None) == []

    def test_several_threads_share_a_copy(self) -> None:
        pairs = [(slot, 63 - slot) for slot in range(64)]
        with Worker(device_blocks=64, host_blocks=64, copy_threads=4) as worker:
            before = [worker.block(slot) for slot in range(64)]
            assert worker.run(plan(1, backup=pairs)).results[0].success
            assert (
                worker.run(plan(2, load=[(host, (device + 1) % 64) for device, host in pairs]))
                .results[0]
                .success
            )
            assert [worker.block((slot + 1) % 64) for slot in range(64)] == before


class TestOrder:
    def test_copies_wait_for_the_compute_stream(self, worker: Worker) -> None:
        gate = Gate()
        counter = worker.controller.submit_swap_tasks(plan(1, evict=[(1, 1)]), gate.stream)
        assert counter.pending_layers() == [0, 1, 2, 3]
        with pytest.raises(LayerSwapTimeoutError, match="layer 2 of plan 1"):
            counter.wait_for_layer(2, 0.01)
        with pytest.raises(LayerSwapTimeoutError):
            counter.wait_all(0.01)
        assert worker.controller.poll() == []
        assert worker.controller.wait_reports(0.01) == []
        written = worker.scramble(1)  # what the compute stream still had to write
        gate.open()
        counter.wait_all()
        worker.report()
        worker.run(plan(2, load=[(1, 2)]))
        assert worker.block(2) == written

    def test_loads_wait_for_the_evictions_of_their_plan(self) -> None:
        device = PausingDevice(pause_at=-1, directions=[Direction.TO_HOST])
        with Worker(uniform_layout(), device=device) as worker:
            worker.run(plan(1, backup=[(0, 0)]))
            before = worker.block(1)
            device.pause_at = 0  # the eviction cannot begin; nothing but its event can hold the load
            counter = worker.controller.submit_swap_tasks(plan(2, evict=[(1, 1)], load=[(0, 1)]))
            with pytest.raises(LayerSwapTimeoutError):
                counter.wait_for_layer(0, 0.05)
            assert worker.block(1) == before
            device.resume.set()
            counter.wait_all()
            assert worker.block(1) == worker.block(0)
            worker.report()
            worker.run(plan(3, load=[(1, 2)]))
            assert worker.block(2) == before

    def test_layers_of_one_group_are_done_together_and_groups_in_order(self) -> None:
        device = PausingDevice(pause_at=99)
        layout = uniform_layout(num_layers=6, num_draft_layers=1)
        with Worker(layout, device=device, first_group_layers=2, group_layers=3) as worker:
            worker.run(plan(1, evict=[(1, 1)]))
            worker.run(plan(2, load=[(1, 2)]))
        assert device.ranges == [(0, 14), (0, 4), (4, 10), (10, 14)]

    def test_a_stream_can_wait_for_a_layer_without_the_thread(self, worker: Worker) -> None:
        gate = Gate()
        counter = worker.controller.submit_swap_tasks(plan(1, evict=[(1, 1)]), gate.stream)
        stream = worker.controller.device.create_stream()
        counter.wait_for_layer(3, stream=stream)
        passed = CpuEvent()
        passed.record(stream)
        assert not passed.wait(0.01)
        gate.open()
        assert passed.wait(5)

    def test_a_held_backup_delays_no_later_eviction_or_load(self, worker: Worker) -> None:
        gate = Gate()
        worker.controller.submit_swap_tasks(plan(1, backup=[(1, 1)]), gate.stream)
        assert worker.run(plan(2, evict=[(2, 2)])).plan_id == 2
        assert worker.run(plan(3, load=[(2, 3)])).plan_id == 3
        assert worker.controller.poll() == []
        gate.open()
        assert worker.report().plan_id == 1

    def test_the_counter_does_not_wait_for_backups(self, worker: Worker) -> None:
        gate = Gate()
        counter = worker.controller.submit_swap_tasks(plan(1, backup=[(1, 1)]), gate.stream)
        assert counter.is_all_done()
        assert worker.controller.poll() == []
        gate.open()
        worker.report()

    def test_refuses_a_layer_that_does_not_exist(self, worker: Worker) -> None:
        counter = worker.controller.submit_swap_tasks(plan(1))
        for layer in (-1, 4):
            with pytest.raises(PlanError, match="not one of the 4 layers"):
                counter.wait_for_layer(layer)


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
    def test_names_the_pair_and_launches_nothing(
        self, worker: Worker, bad: TransferPlan, message: str
    ) -> None:
        before = [worker.block(slot) for slot in range(8)]
        with pytest.raises(PlanError, match=message):
            worker.controller.submit_swap_tasks(bad)
        assert worker.controller.wait_reports(0) == []
        assert [worker.block(slot) for slot in range(8)] == before

    @pytest.mark.parametrize(
        "field",
        ["dst_block_ids", "src_generations", "dst_generations", "hash_values", "parent_hashes"],
    )
    def test_unequal_lengths(self, worker: Worker, field: str) -> None:
        loads = swap(SwapPurpose.LOAD, [(0, 1), (1, 2)])
        setattr(loads, field, getattr(loads, field)[:0])
        with pytest.raises(PlanError, match=f"load: {field} has shape"):
            worker.controller.submit_swap_tasks(TransferPlan(plan_id=1, loads=loads))

    def test_a_plan_already_in_flight(self, worker: Worker) -> None:
        gate = Gate()
        worker.controller.submit_swap_tasks(plan(1, evict=[(1, 1)]), gate.stream)
        with pytest.raises(PlanError, match="plan 1 is in flight already"):
            worker.controller.submit_swap_tasks(plan(1))
        gate.open()

    def test_memory_that_is_not_there(self) -> None:
        with CacheController(TransferSettings(), uniform_layout()) as controller:
            with pytest.raises(CacheNotReadyError, match="no device planes"):
                controller.submit_swap_tasks(plan(1, load=[(0, 0)]))
            controller.initialize_kv_cache(2)
            with pytest.raises(CacheNotReadyError, match="initialize_host_cache"):
                controller.submit_swap_tasks(plan(1, load=[(0, 0)]))


class TestCancel:
    def test_queued_copies_are_taken_back_for_good(self, worker: Worker) -> None:
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

    def test_what_is_done_cannot_be_cancelled(self, worker: Worker) -> None:
        worker.controller.submit_swap_tasks(plan(1, evict=[(1, 1)]))
        handler = worker.controller.handler(1)
        report = handler.get_result(5.0)
        assert not handler.cancel()
        assert status_of(handler) is TransferStatus.COMPLETED
        assert handler.get_result(0) is report
        assert worker.controller.poll() == [report]
        with pytest.raises(PlanError, match="plan 1 is not in flight"):
            worker.controller.handler(1)

    def test_a_plan_under_way_loses_only_what_has_not_started(self) -> None:
        device = PausingDevice(pause_at=1)
        with Worker(device=device, first_group_layers=1) as worker:
            worker.run(plan(1, backup=[(0, 0)]))
            counter = worker.controller.submit_swap_tasks(plan(2, load=[(0, 5)]))
            counter.wait_for_layer(0)
            handler = worker.controller.handler(2)
            assert status_of(handler) is TransferStatus.IN_PROGRESS
            assert not handler.cancel()
            device.resume.set()
            assert handler.get_result(5.0).results[0].success

    def test_a_failed_plan_says_so_and_has_its_report(self, worker: Worker) -> None:
        worker.controller.submit_swap_tasks(plan(1, load=[(1, 1)]))
        handler = worker.controller.handler(1)
        assert handler.get_result(5.0).results[0].failed.tolist() == [0]
        assert status_of(handler) is TransferStatus.FAILED

    def test_a_waiting_thread_learns_of_a_cancel(self, worker: Worker) -> None:
        gate = Gate()
        worker.controller.submit_swap_tasks(plan(1, backup=[(1, 1)]), gate.stream)
        reports = []
        waiting = threading.Thread(target=lambda: reports.extend(worker.controller.wait_reports(30)))
        waiting.start()
        worker.controller.handler(1).cancel()
        waiting.join(10)
        assert not waiting.is_alive()
        assert [report.plan_id for report in reports] == [1]


class TestLifeCycle:
    @pytest.mark.parametrize("method", ["free_cache", "sleep", "shutdown"])
    def test_memory_under_a_held_copy_is_not_freed(self, method: str) -> None:
        worker = Worker(drain_timeout=0.02)
        gate = Gate()
        worker.controller.submit_swap_tasks(plan(1, evict=[(1, 1)]), gate.stream)
        written = worker.block(1)
        with pytest.raises(TransferTimeoutError, match="plan 1 is still in flight"):
            getattr(worker.controller, method)()
        gate.open()
        assert worker.report().results[0].success
        worker.run(plan(2, load=[(1, 3)]))
        assert worker.block(3) == written
        worker.controller.shutdown()

    def test_shutdown_waits_for_a_copy_that_ends_in_time(self) -> None:
        worker = Worker()
        gate = Gate()
        worker.controller.submit_swap_tasks(plan(1, evict=[(1, 1)]), gate.stream)
        opening = threading.Timer(0.05, gate.open)
        opening.start()
        worker.controller.shutdown(30)
        opening.join()
        assert worker.controller.poll()[0].results[0].success

    def test_shutdown_is_idempotent_and_final(self) -> None:
        worker = Worker()
        worker.controller.shutdown()
        worker.controller.shutdown()
        for use in (
            lambda: worker.controller.submit_swap_tasks(plan(1)),
            lambda: worker.controller.initialize_kv_cache(1),
            lambda: worker.controller.initialize_host_cache(1),
            worker.controller.free_cache,
            worker.controller.sleep,
            worker.controller.wakeup,
        ):
            with pytest.raises(CacheNotReadyError, match="shut down"):
                use()

    def test_sleep_gives_up_the_planes_and_keeps_the_host_cache(self, worker: Worker) -> None:
        original = worker.block(3)
        worker.run(plan(1, backup=[(3, 5)]))
        worker.tensors.clear()
        worker.controller.sleep()
        with pytest.raises(CacheNotReadyError, match="wakeup"):
            worker.controller.submit_swap_tasks(plan(2, load=[(5, 6)]))
        worker.tensors = worker.controller.wakeup()
        assert not any(any(data) for data in worker.block(3))
        worker.run(plan(3, load=[(5, 6)]))
        assert worker.block(6) == original

    def test_caches_can_be_made_again_after_free_cache(self, worker: Worker) -> None:
        worker.run(plan(1, backup=[(3, 5)]))
        worker.controller.free_cache()
        with pytest.raises(CacheNotReadyError, match="registered by the engine"):
            worker.controller.wakeup()
        worker.tensors = worker.controller.initialize_kv_cache(4)
        worker.controller.initialize_host_cache(8)
        assert worker.run(plan(2, load=[(5, 3)])).results[0].failed.tolist() == [0]

    def test_a_second_cache_is_refused(self, worker: Worker) -> None:
        with pytest.raises(CacheNotReadyError, match="device planes already"):
            worker.controller.initialize_kv_cache(4)
        with pytest.raises(CacheNotReadyError, match="host cache already"):
            worker.controller.initialize_host_cache(4)

    def test_a_host_cache_beyond_the_memory_is_refused_and_leaves_nothing(self) -> None:
        with CacheController(TransferSettings(), uniform_layout()) as controller:
            with pytest.raises(HostMemoryError, match="ask for at most"):
                controller.initialize_host_cache(1 << 40)
            controller.initialize_host_cache(1)
