"""CacheController: bytes, order and reports of one worker's plans."""

from __future__ import annotations

import pytest

from fdcache import _core
from fdcache.controller.cache_controller import CacheController
from fdcache.devices.base import ArenaRecords, DevicePlanes, PlannedCopy
from fdcache.errors import (
    LayerSwapTimeoutError,
    PlanError,
)
from fdcache.metadata import (
    CacheSwapMetadata,
    SwapPurpose,
    TransferPlan,
    decode_plan,
    decode_report,
    encode,
)
from fdcache.settings.cache import CopySettings
from fdcache.tasks import CpuEvent
from tests.faults import PausingDevice
from tests.swaps import PATIENCE, Gate, Worker, header_of, host_slot_hash, plan, uniform_layout


class RefusesLoads(PausingDevice):
    """A device that accepts no load."""

    def copy_blocks(self, planes: DevicePlanes, arena: ArenaRecords, swap: CacheSwapMetadata) -> PlannedCopy:
        if swap.purpose is SwapPurpose.LOAD:
            raise RuntimeError("no loads today")
        return super().copy_blocks(planes, arena, swap)


@pytest.fixture
def worker() -> Worker:  # type: ignore[misc]
    with Worker(first_group_layers=1, group_layers=2) as made:
        yield made


class TestRoundTrip:
    def test_a_backup_and_a_load_restore_the_bytes(self, worker: Worker) -> None:
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

    def test_the_header_describes_the_record(self, worker: Worker) -> None:
        (result,) = worker.run(plan(1, evict=[(3, 5)], generation=9)).results
        header = header_of(worker, 5)
        assert header.is_valid
        assert (header.state, header.generation) == (2, 9)
        assert header.hash == host_slot_hash(5).tobytes()
        assert header.payload_checksum == result.checksums[0]
        assert header.payload_bytes == worker.layout.payload_bytes
        assert header.fingerprint == worker.layout.fingerprint[:16]

    def test_a_plan_may_load_into_a_slot_that_it_evicts(self, worker: Worker) -> None:
        first, second = worker.block(1), worker.block(2)
        worker.run(plan(1, backup=[(1, 0)]))
        worker.run(plan(2, evict=[(2, 4)], load=[(0, 2)]))
        assert worker.block(2) == first
        worker.run(plan(3, load=[(4, 7)]))
        assert worker.block(7) == second

    def test_a_report_has_one_result_per_transfer_even_if_empty(self, worker: Worker) -> None:
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
        with CacheController(CopySettings(), uniform_layout()) as controller:
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
            seen += [report.plan_id for report in worker.controller.wait_reports(PATIENCE)]
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
        device = PausingDevice(pause_at=-1, purposes=[SwapPurpose.EVICT])
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

    def test_loads_and_layers_wait_for_the_earlier_reads_that_a_plan_names(self) -> None:
        device = PausingDevice(pause_at=-1, purposes=[SwapPurpose.BACKUP])
        with Worker(uniform_layout(), device=device) as worker:
            worker.run(plan(1, backup=[(0, 0)]))
            before = worker.block(1)
            device.pause_at = 0
            worker.controller.submit_swap_tasks(plan(2, backup=[(1, 1)]))
            worker.controller.submit_swap_tasks(plan(3, backup=[(2, 2)]))
            unrelated = worker.controller.submit_swap_tasks(plan(4, load=[(0, 5)], after=(1,)))
            unrelated.wait_all()  # plan 1 has ended
            loading = worker.controller.submit_swap_tasks(
                plan(5, load=[(0, 1)], evict=[(3, 3)], after=(1, 2, 3))
            )
            computing = worker.controller.submit_swap_tasks(plan(6, after=(2,)))
            for counter in (loading, computing):
                with pytest.raises(LayerSwapTimeoutError):
                    counter.wait_for_layer(0, 0.03)
            assert worker.block(1) == before
            device.resume.set()
            for counter in (loading, computing):
                counter.wait_all()
            assert worker.block(1) == worker.block(0)
            worker.controller.submit_swap_tasks(plan(7, load=[(1, 4)])).wait_all()
            assert worker.block(4) == before

    def test_the_compute_stream_waits_for_the_earlier_reads_that_a_plan_names(self) -> None:
        device = PausingDevice(pause_at=0, purposes=[SwapPurpose.BACKUP])
        with Worker(uniform_layout(), device=device) as worker:
            compute = device.create_stream()
            worker.controller.submit_swap_tasks(plan(1, backup=[(1, 1)]), compute)
            worker.controller.submit_swap_tasks(plan(2, after=(1,)), compute)
            passed = CpuEvent()
            passed.record(compute)
            assert not passed.wait(0.03)
            device.resume.set()
            assert passed.wait(PATIENCE)

    def test_a_refused_plan_waits_for_the_earlier_reads_all_the_same(self) -> None:
        device = RefusesLoads(pause_at=0, purposes=[SwapPurpose.BACKUP])
        with Worker(uniform_layout(), device=device) as worker:
            worker.controller.submit_swap_tasks(plan(1, backup=[(1, 1)]))
            counter = worker.controller.submit_swap_tasks(plan(2, load=[(0, 1)], after=(1,)))
            assert worker.report().results[0].error_message == "RuntimeError: no loads today"
            with pytest.raises(LayerSwapTimeoutError):
                counter.wait_for_layer(0, 0.03)
            device.resume.set()
            counter.wait_all()

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
        assert passed.wait(PATIENCE)

    def test_a_blocked_backup_delays_no_later_eviction_or_load(self, worker: Worker) -> None:
        gate = Gate()
        worker.controller.submit_swap_tasks(plan(1, backup=[(1, 1)]), gate.stream)
        assert worker.run(plan(2, evict=[(2, 2)])).plan_id == 2
        assert worker.run(plan(3, load=[(2, 3)])).plan_id == 3
        assert worker.controller.poll() == []
        gate.open()
        assert worker.report().plan_id == 1

    def test_the_layer_counter_does_not_wait_for_backups(self, worker: Worker) -> None:
        gate = Gate()
        counter = worker.controller.submit_swap_tasks(plan(1, backup=[(1, 1)]), gate.stream)
        assert counter.is_all_done()
        assert worker.controller.poll() == []
        gate.open()
        worker.report()

    def test_a_layer_that_does_not_exist_is_refused(self, worker: Worker) -> None:
        counter = worker.controller.submit_swap_tasks(plan(1))
        for layer in (-1, 4):
            with pytest.raises(PlanError, match="not one of the 4 layers"):
                counter.wait_for_layer(layer)
