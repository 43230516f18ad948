"""Loads that wait for a GPU are merged, confirmed one by one, and run before backups."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from fdcache.devices.cuda import CudaDevice
from fdcache.metadata import CacheSwapMetadata, TransferReport
from tests.gpu.test_cuda_device import run_python
from tests.gpu.test_cuda_order import spin
from tests.gpu.test_cuda_swaps import METHODS, WIDE
from tests.gpu.workers import GpuWorker
from tests.swaps import plan

cupy = pytest.importorskip("cupy")

BLOCKS = 32


def reports_of(worker: GpuWorker, count: int) -> dict[int, TransferReport]:
    found: dict[int, TransferReport] = {}
    while len(found) < count:
        ended = worker.controller.wait_reports(20.0)
        assert ended
        found |= {report.plan_id: report for report in ended}
    return found


@pytest.mark.parametrize("name", ["128 KiB", "4 KiB", "fp8"])
@pytest.mark.parametrize("method", METHODS)
def test_loads_behind_a_busy_stream_are_merged(method: str, name: str, monkeypatch: Any) -> None:
    layout = WIDE[name]
    with GpuWorker(
        layout,
        device_blocks=BLOCKS,
        host_blocks=BLOCKS,
        swap_method=method,
        verify="all",
        queued_bytes=12 * layout.payload_bytes,
    ) as worker:
        worker.run(plan(1, backup=[(slot, BLOCKS - 1 - slot) for slot in range(BLOCKS)]))
        worker.run(plan(20, load=[(BLOCKS - 1, 0)]))  # its kernels are compiled
        saved = [worker.block(slot) for slot in range(BLOCKS)]
        copy_blocks, sizes = CudaDevice.copy_blocks, []

        def counted(device: CudaDevice, planes: Any, arena: Any, swap: CacheSwapMetadata) -> Any:
            sizes.append(len(swap))
            return copy_blocks(device, planes, arena, swap)

        monkeypatch.setattr(CudaDevice, "copy_blocks", counted)
        held, first = plan(21, load=[(BLOCKS - 1, 0)]), plan(2, load=[(BLOCKS - 1 - i, i) for i in range(12)])
        wanted = [plan(3 + n, load=[(2 * n + i, 12 + 2 * n + i) for i in range(2)]) for n in range(5)]
        assert wanted[3].loads is not None
        wanted[3].loads.src_generations[1] += 1
        untouched = worker.block(19)
        busy = cupy.cuda.Stream(non_blocking=True)
        gc.collect()  # memory of other tests, freed behind the kernel, would wait for it
        spin(busy, 2_000_000_000)
        worker.controller.submit_swap_tasks(held, busy)
        worker.controller.submit_swap_tasks(first, worker.idle)
        counters = [worker.controller.submit_swap_tasks(each, worker.idle) for each in wanted]
        reports = reports_of(worker, 7)
        assert sizes == [10]  # those with room ahead of them do not come here
        assert [each for each, report in reports.items() if not report.results[0].success] == [6]
        assert reports[6].results[0].failed.tolist() == [1]
        assert "position 1: host slot 7" in str(reports[6].results[0].error_message)
        assert all(counter.is_all_done() for counter in counters)
        for slot in range(12, 22):
            expected = untouched if slot == 19 else saved[BLOCKS - 1 - (slot - 12)]
            assert worker.block(slot) == expected


def test_waiting_for_a_layer_starts_a_waiting_load() -> None:
    layout = WIDE["128 KiB"]
    with GpuWorker(layout, device_blocks=BLOCKS, host_blocks=BLOCKS, queued_bytes=1) as worker:
        worker.run(plan(1, backup=[(slot, slot) for slot in range(BLOCKS)]))
        before = worker.block(3)
        busy, compute = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        spin(busy, 200_000_000)
        worker.controller.submit_swap_tasks(plan(2, load=[(0, 1)]), busy)
        worker.controller.submit_swap_tasks(plan(5, load=[(2, 2)]), worker.idle)
        counter = worker.controller.submit_swap_tasks(plan(3, load=[(3, 4)]), worker.idle)
        seen = []
        for plane, tensor in zip(layout.planes, worker.tensors, strict=True):
            counter.wait_for_layer(plane.layer, stream=compute)
            with compute:
                seen.append(tensor[4].copy())
        compute.synchronize()
        assert [worker.bytes_of(each) for each in seen] == before
        assert set(reports_of(worker, 3)) == {2, 3, 5}


@pytest.mark.parametrize("method", METHODS)
def test_a_load_overtakes_an_earlier_backup(method: str) -> None:
    layout, blocks = WIDE["512 KiB"], 256
    with GpuWorker(layout, device_blocks=blocks, host_blocks=blocks, swap_method=method) as worker:
        worker.run(plan(1, evict=[(0, 0)]))
        before = worker.block(0)
        backup = [(slot, slot) for slot in range(1, blocks)]
        worker.controller.submit_swap_tasks(plan(2, backup=backup), worker.idle)
        counter = worker.controller.submit_swap_tasks(plan(3, load=[(0, 0)]), worker.idle)
        counter.wait_all(20.0)
        assert [report.plan_id for report in worker.controller.poll()] == [3]
        assert worker.block(0) == before
        (backed_up,) = worker.report().results
        assert backed_up.success


LOST = """
    import cupy
    from fdcache.errors import DeviceLostError
    from tests.gpu.test_cuda_order import spin
    from tests.gpu.workers import GpuWorker
    from tests.gpu.test_cuda_swaps import WIDE
    from tests.swaps import plan

    worker = GpuWorker(WIDE["128 KiB"], device_blocks=64, host_blocks=64, queued_bytes=1)
    worker.run(plan(1, evict=[(i, i) for i in range(64)]))
    trap = cupy.RawKernel('extern "C" __global__ void trap() { asm("trap;"); }', "trap")
    trap.compile()
    busy = cupy.cuda.Stream(non_blocking=True)
    spin(busy, 400_000_000)
    large = [(i, i) for i in range(10, 64)]
    worker.controller.submit_swap_tasks(plan(2, load=large, evict=[(0, 0)]), busy)
    counters = [worker.controller.submit_swap_tasks(plan(3 + n, load=[(1 + n, 1 + n)]), worker.idle) for n in range(4)]
    with busy:
        trap((1,), (1,), ())
    found = {}
    while len(found) < 5:
        found |= {report.plan_id: report.results[-1] for report in worker.controller.wait_reports(20.0)}
    print("FAILED", sorted(plan_id for plan_id, result in found.items() if len(result.failed)))
    print("REASON", found[6].error_message)
    assert all(counter.is_all_done() for counter in counters)
    worker.controller.shutdown()
    print("CLOSED")
"""


def test_waiting_loads_of_a_lost_device_fail_with_its_reason() -> None:
    done = run_python(LOST)
    assert "FAILED [" in done.stdout and "6]" in done.stdout, done.stdout + done.stderr
    assert "REASON" in done.stdout and "the device failed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.endswith("CLOSED\n"), done.stdout + done.stderr
