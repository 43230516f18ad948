"""Two GPUs in one process: each controller uses its own, no matter which is current or visible first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import numpy as np
import pytest

from fdcache.controller.cache_controller import CacheController
from fdcache.devices.cuda import CudaDevice
from fdcache.devices.topology import Gpu, visible_gpus
from fdcache.errors import TensorError
from fdcache.metadata import TransferReport
from fdcache.settings.cache import CopySettings
from tests.gpu.test_cuda_device import run_python
from tests.gpu.test_cuda_order import spin
from tests.gpu.test_cuda_swaps import METHODS, WIDE, shuffled
from tests.gpu.workers import GpuWorker
from tests.swaps import plan, uniform_layout

cupy = pytest.importorskip("cupy")

BLOCKS = 48


@pytest.fixture(autouse=True)
def gpus() -> Iterator[list[Gpu]]:
    found = visible_gpus()
    if len(found) < 2:
        pytest.skip("there is one GPU")
    yield found
    cupy.cuda.Device(0).use()


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_controllers_on_both_copy_at_once(gpus: list[Gpu], method: str, current: int) -> None:
    layout = WIDE["128 KiB"]
    options = {"device_blocks": BLOCKS, "host_blocks": BLOCKS, "swap_method": method, "verify": "all"}
    cupy.cuda.Device(current).use()
    workers = [GpuWorker(layout, gpu=gpus[i].uuid, rank=i, seed=i, **options) for i in range(2)]
    assert [{tensor.device.id for tensor in worker.tensors} for worker in workers] == [{0}, {1}]
    before = [[worker.block(slot) for slot in range(BLOCKS)] for worker in workers]
    assert before[0] != before[1]
    host, back = shuffled(BLOCKS, 1), shuffled(BLOCKS, 2)
    for number, (first, stop) in enumerate([(0, 7), (7, 8), (8, BLOCKS)]):
        pairs = list(zip(range(first, stop), host[first:stop], strict=True))
        for worker in workers:
            worker.controller.submit_swap_tasks(plan(1 + number, evict=pairs), worker.idle)
    for worker in workers:
        reports: list[TransferReport] = []
        while len(reports) < 3:
            reports += worker.controller.wait_reports(20.0)
        assert all(result.success for report in reports for result in report.results)
    counters = [
        worker.controller.submit_swap_tasks(plan(9, load=list(zip(host, back, strict=True))), worker.idle)
        for worker in workers
    ]
    for counter, worker, blocks in zip(counters, workers, before, strict=True):
        counter.wait_all(20.0)
        (result,) = worker.report().results
        assert result.success, result.error_message
        assert [worker.block(slot) for slot in back] == blocks
    assert cupy.cuda.runtime.getDevice() == current
    for worker in workers:
        worker.controller.shutdown()


def test_copies_follow_the_compute_stream_of_their_own_gpu(gpus: list[Gpu]) -> None:
    layout = WIDE["fp8"]
    for mine, other in permutations(range(2)):
        with GpuWorker(layout, gpu=gpus[mine].uuid) as worker:
            with cupy.cuda.Device(mine):
                stream = cupy.cuda.Stream(non_blocking=True)
                spin(stream)
                with stream:
                    for tensor in worker.tensors:
                        tensor[0] = 7
            with cupy.cuda.Device(other):
                (saved,) = worker.run(plan(1, evict=[(0, 3)]), stream).results
                worker.run(plan(2, load=[(3, 5)]))
            assert saved.success
            assert worker.block(5) == worker.block(0)
            assert set(b"".join(worker.block(5))) <= {*bytes([7]), *np.float32(7).tobytes()}


def test_a_tensor_of_the_other_gpu_is_refused(gpus: list[Gpu]) -> None:
    layout = uniform_layout()
    with cupy.cuda.Device(1):
        tensors = [cupy.zeros((4, *plane.shape), cupy.uint16) for plane in layout.planes]
    first, second = (
        CacheController(CopySettings(), layout, device=CudaDevice(gpus[i].uuid)) for i in range(2)
    )
    with first, second:
        with pytest.raises(TensorError, match=gpus[0].uuid):
            first.register_kv_cache(tensors)
        second.register_kv_cache(tensors)


def test_host_memory_pinned_by_one_gpu_serves_the_other(gpus: list[Gpu]) -> None:
    """An arena is pinned for all GPUs of a process."""
    layout = WIDE["fp8"]
    with GpuWorker(layout, gpu=gpus[0].uuid) as first, GpuWorker(layout, gpu=gpus[1].uuid, seed=1) as second:
        before = [first.block(slot) for slot in range(8)]
        first.run(plan(1, evict=[(slot, 7 - slot) for slot in range(8)]))
        second.controller._parts.arena = first.controller.host_arena
        (loaded,) = second.run(plan(2, load=[(7 - slot, slot) for slot in range(8)])).results
        assert loaded.success, loaded.error_message
        assert [second.block(slot) for slot in range(8)] == before


REORDERED = """
    import sys
    from fdcache.devices.topology import visible_gpus
    from tests.gpu.workers import GpuWorker
    from tests.swaps import plan

    print(*[f"{gpu.ordinal}={gpu.uuid}={gpu.pci_address}" for gpu in visible_gpus()])
    for uuid in sys.stdin.read().split():
        with GpuWorker(gpu=uuid) as worker:
            before = worker.block(0)
            worker.run(plan(1, evict=[(0, 5)]))
            worker.run(plan(2, load=[(5, 3)]))
            assert worker.block(3) == before
            print(uuid, worker.gpu.gpu.ordinal, {tensor.device.id for tensor in worker.tensors})
"""


@pytest.mark.parametrize("by", ["index", "uuid"])
def test_reordering_the_visible_gpus_changes_only_their_ordinals(gpus: list[Gpu], by: str) -> None:
    order = "1,0" if by == "index" else f"{gpus[1].uuid},{gpus[0].uuid}"
    done = run_python(REORDERED, given=f"{gpus[0].uuid} {gpus[1].uuid}", CUDA_VISIBLE_DEVICES=order)
    shown, *placed = done.stdout.splitlines()
    assert shown.split() == [
        f"0={gpus[1].uuid}={gpus[1].pci_address}",
        f"1={gpus[0].uuid}={gpus[0].pci_address}",
    ], done.stderr
    assert placed == [f"{gpus[0].uuid} 1 {{1}}", f"{gpus[1].uuid} 0 {{0}}"], done.stderr


LOST = """
    import cupy
    from fdcache.devices.topology import visible_gpus
    from fdcache.errors import DeviceError
    from tests.gpu.test_cuda_order import spin
    from tests.gpu.workers import GpuWorker
    from tests.swaps import plan

    gpus = visible_gpus()
    first, second = (GpuWorker(gpu=gpus[i].uuid) for i in range(2))
    before = second.block(0)
    trap = cupy.RawKernel('extern "C" __global__ void trap() { asm("trap;"); }', "trap")
    trap.compile()
    stream = cupy.cuda.Stream(non_blocking=True)
    spin(stream, 400_000_000)  # the plan is there before the device is lost
    with stream:
        trap((1,), (1,), ())
    first.controller.submit_swap_tasks(plan(1, evict=[(0, 0)]), stream)
    (lost,) = first.controller.wait_reports(20.0)
    print("FAILED", lost.results[0].failed.tolist())
    try:
        with cupy.cuda.Device(1):
            second.run(plan(1, evict=[(0, 0)]))
            (loaded,) = second.run(plan(2, load=[(0, 3)])).results
            is_same = loaded.success and second.block(3) == before
            print("SAME" if is_same else "DIFFERENT" if loaded.success else "REFUSED")
    except DeviceError:
        print("REFUSED")
    first.controller.shutdown()
    second.controller.shutdown()
    print("CLOSED")
"""


def test_a_lost_gpu_leaves_the_other_usable_or_refused_with_a_reason() -> None:
    """The driver decides whether a kernel's failure affects the other GPUs of its process."""
    done = run_python(LOST)
    lost, other, closed = done.stdout.splitlines()
    assert (lost, closed) == ("FAILED [0]", "CLOSED"), done.stderr
    assert other in {"SAME", "REFUSED"}, done.stderr
