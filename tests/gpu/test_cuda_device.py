"""CUDA device: tensors of any framework, names of GPUs, failures."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import weakref
from typing import Any

import numpy as np
import pytest

from fdcache import _core
from fdcache.controller.cache_controller import CacheController
from fdcache.devices.cuda import CudaDevice
from fdcache.devices.topology import visible_gpus
from fdcache.errors import DeviceError, HostMemoryError, TensorError
from fdcache.settings.cache import CopySettings
from tests.gpu.test_cuda_swaps import WIDE
from tests.gpu.workers import GpuWorker
from tests.property.test_round_trips import LAYOUTS
from tests.swaps import PATIENCE, plan, uniform_layout

cupy = pytest.importorskip("cupy")


def run_python(code: str, given: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        input=given,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("name", ["uniform", "fp8", "half words", "draft"])
def test_registered_torch_tensors_are_copied(name: str) -> None:
    torch = pytest.importorskip("torch")
    layout = LAYOUTS[name]
    device = CudaDevice()
    with CacheController(CopySettings(), layout, device=device) as controller:
        tensors = [
            torch.zeros(
                (layout.draft_blocks(4) if layout.is_draft(plane.layer) else 4, *plane.shape),
                dtype=getattr(torch, plane.dtype),
                device=f"cuda:{device.gpu.ordinal}",
            )
            for plane in layout.planes
        ]
        for tensor in tensors:
            data = torch.randint(0, 255, (tensor[0].numel() * tensor.element_size(),), dtype=torch.uint8)
            tensor[0].view(torch.uint8).copy_(data.view(tensor[0].view(torch.uint8).shape))
        torch.cuda.synchronize()
        controller.register_kv_cache(tensors)
        controller.initialize_host_cache(4)
        controller.submit_swap_tasks(plan(1, evict=[(0, 2)]), cupy.cuda.Stream(non_blocking=True)).wait_all()
        controller.wait_reports(PATIENCE)
        controller.submit_swap_tasks(plan(2, load=[(2, 3)]), cupy.cuda.Stream(non_blocking=True)).wait_all()
        (report,) = controller.wait_reports(PATIENCE)
        assert report.results[0].success
        for tensor in tensors:
            assert torch.equal(tensor[3].view(torch.uint8), tensor[0].view(torch.uint8))


def test_the_planes_of_an_interleaved_tensor_are_registered_by_their_strides() -> None:
    layout = uniform_layout()
    with CacheController(CopySettings(), layout, device=CudaDevice()) as controller:
        whole = cupy.zeros((4, len(layout.planes), *layout.planes[0].shape), dtype=cupy.uint16)
        whole[0] = cupy.arange(whole[0].size, dtype=cupy.uint16).reshape(whole[0].shape)
        cupy.cuda.runtime.deviceSynchronize()
        controller.register_kv_cache([whole[:, index] for index in range(len(layout.planes))])
        controller.initialize_host_cache(4)
        controller.submit_swap_tasks(plan(1, evict=[(0, 1)]), cupy.cuda.Stream(non_blocking=True)).wait_all()
        controller.wait_reports(PATIENCE)
        controller.submit_swap_tasks(plan(2, load=[(1, 2)]), cupy.cuda.Stream(non_blocking=True)).wait_all()
        assert cupy.array_equal(whole[2], whole[0])
        assert not whole[1].any() and not whole[3].any()


@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_allocated_planes_are_tensors_of_the_framework(framework: str) -> None:
    pytest.importorskip(framework)
    layout = LAYOUTS["fp8"]
    with CacheController(CopySettings(), layout, device=CudaDevice()) as controller:
        tensors = controller.initialize_kv_cache(4, framework=framework)
        assert [tuple(tensor.shape) for tensor in tensors] == [(4, *plane.shape) for plane in layout.planes]
        assert {type(tensor).__module__.partition(".")[0] for tensor in tensors} == {framework}
        if framework == "torch":
            assert [str(tensor.dtype) for tensor in tensors] == [f"torch.{p.dtype}" for p in layout.planes]


def test_host_tensors_and_read_only_memory_are_refused() -> None:
    device = CudaDevice()
    with pytest.raises(TensorError, match="not in GPU memory"):
        device.inspect_tensor(np.zeros(4))
    with pytest.raises(TensorError, match="neither DLPack"):
        device.inspect_tensor("text")


def test_a_gpu_is_found_by_uuid_and_unknown_ones_are_named() -> None:
    first = visible_gpus()[0]
    assert CudaDevice(first.uuid).gpu == first
    with pytest.raises(DeviceError, match=first.uuid):
        CudaDevice("GPU-00000000-0000-0000-0000-000000000000")


def test_a_uuid_names_the_same_gpu_whichever_are_visible() -> None:
    last = visible_gpus()[-1]
    code = f"""
        from fdcache.devices.cuda import CudaDevice
        device = CudaDevice("{last.uuid}")
        print(device.gpu.ordinal, device.gpu.pci_address)
    """
    done = run_python(code, CUDA_VISIBLE_DEVICES=last.uuid)
    assert done.stdout.split() == ["0", last.pci_address], done.stderr


def test_copies_do_not_follow_the_current_device() -> None:
    gpus = visible_gpus()
    if len(gpus) < 2:
        pytest.skip("there is one GPU")
    with cupy.cuda.Device(0), GpuWorker(gpu=gpus[1].uuid) as second, GpuWorker(gpu=gpus[0].uuid) as first:
        for worker in (first, second):
            before = worker.block(0)
            worker.run(plan(1, evict=[(0, 0)]))
            worker.run(plan(2, load=[(0, 3)]))
            assert worker.block(3) == before
        assert {tensor.device.id for tensor in second.tensors} == {1}


def test_memory_that_cannot_be_pinned_is_refused_with_the_remedy() -> None:
    with pytest.raises(HostMemoryError, match="could not be pinned"):
        CudaDevice().pin_memory(4096, 1 << 20, object())


def test_importing_fdcache_loads_no_cupy() -> None:
    done = run_python(
        "import sys, fdcache, fdcache.controller.cache_controller; print('cupy' in sys.modules)"
    )
    assert done.stdout.strip() == "False", done.stderr


LOST = """
    import cupy, numpy as np
    from tests.gpu.test_cuda_order import spin
    from tests.gpu.workers import GpuWorker
    from tests.gpu.test_cuda_swaps import WIDE
    from tests.swaps import plan

    worker = GpuWorker(WIDE["128 KiB"], device_blocks=64, host_blocks=64)
    worker.run(plan(1, evict=[(i, i) for i in range(64)]))
    trap = cupy.RawKernel('extern "C" __global__ void trap() { asm("trap;"); }', "trap")
    trap.compile()
    stream = cupy.cuda.Stream(non_blocking=True)
    spin(stream, 400_000_000)  # the plan is there before the device is lost
    with stream:
        trap((1,), (1,), ())
    counter = worker.controller.submit_swap_tasks(plan(2, load=[(i, i) for i in range(64)]), stream)
    counter.wait_all(20.0)
    (report,) = worker.controller.wait_reports(20.0)
    (result,) = report.results
    assert len(result.failed) == 64, result
    print("REASON", result.error_message)
    worker.controller.submit_swap_tasks(plan(3, load=[(0, 0)]), worker.idle).wait_all(20.0)
    (report,) = worker.controller.wait_reports(20.0)
    print("LOST", report.results[0].error_message)
    worker.controller.shutdown()
    worker.controller.shutdown()
    print("CLOSED")
"""


def test_a_lost_device_fails_its_copies_and_closes_cleanly() -> None:
    done = run_python(LOST)
    assert "REASON" in done.stdout and "the device failed: cu" in done.stdout, done.stdout + done.stderr
    assert "LOST" in done.stdout and "restart this process" in done.stdout, done.stdout + done.stderr
    assert done.stdout.endswith("CLOSED\n"), done.stdout + done.stderr


def test_a_refused_copy_is_a_failed_report_and_the_device_continues(monkeypatch: Any) -> None:
    with GpuWorker(swap_method="kernel") as worker:
        worker.run(plan(1, evict=[(0, 0)]))
        before = worker.block(0)
        gpu = worker.gpu
        monkeypatch.setattr(
            gpu, "_copier", _core.CudaCopier(gpu._context, (0, 0, 0, 0, 0), gpu._policy, gpu._kernels.module)
        )
        monkeypatch.setattr(worker.controller._plans, "launcher", None)  # made with the other copier
        (refused,) = worker.run(plan(2, load=[(0, 1)])).results
        assert refused.failed.tolist() == [0]
        assert "cuLaunchKernel" in str(refused.error_message)
        monkeypatch.undo()
        (loaded,) = worker.run(plan(3, load=[(0, 1)])).results
        assert loaded.success and worker.block(1) == before
        assert worker.gpu.lost is None


def test_sleep_returns_the_memory_to_the_gpu() -> None:
    layout, blocks = WIDE["512 KiB"], 128
    with GpuWorker(layout, device_blocks=blocks, host_blocks=2) as worker:
        awake, _ = cupy.cuda.runtime.memGetInfo()
        worker.tensors = []
        worker.controller.sleep()
        asleep, _ = cupy.cuda.runtime.memGetInfo()
        assert asleep - awake >= blocks * layout.payload_bytes
        worker.tensors = worker.controller.wakeup()
        assert not any(worker.tensors[0][0].reshape(-1).tolist())


def test_closing_a_worker_frees_its_memory_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        with GpuWorker(device_blocks=16, host_blocks=16) as worker:
            every = [(slot, slot) for slot in range(16)]
            for each in (plan(0, backup=every), plan(1, evict=every), plan(2, load=every)):
                worker.run(each)
            counter = worker.controller.submit_swap_tasks(plan(3, load=[(0, 1)]), worker.idle)
            counter.wait_all(PATIENCE)
        held = [weakref.ref(each) for each in (worker.gpu, worker.controller)]
        del worker, counter, each
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()


def test_memory_is_freed_once_and_only_after_the_last_copy() -> None:
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    used = pool.used_bytes()
    worker = GpuWorker(WIDE["128 KiB"], device_blocks=64, host_blocks=64)
    worker.run(plan(1, evict=[(i, i) for i in range(64)]))
    for round_ in range(3):
        worker.controller.submit_swap_tasks(plan(2 + round_, load=[(i, i) for i in range(64)]), worker.idle)
    worker.tensors = []
    worker.controller.shutdown()
    assert all(result.success for report in worker.controller.poll() for result in report.results)
    del worker
    assert pool.used_bytes() <= used + (1 << 20)
