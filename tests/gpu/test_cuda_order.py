"""Order between the engine's streams and copies, without the CPU."""

from __future__ import annotations

import pytest

from fdcache.errors import LayerSwapTimeoutError, StreamError
from tests.gpu.test_cuda_swaps import WIDE
from tests.gpu.workers import GpuWorker
from tests.swaps import PATIENCE, plan

cupy = pytest.importorskip("cupy")

SPIN = """extern "C" __global__ void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {}
}"""


def spin(stream: object, cycles: int = 100_000_000) -> None:
    with stream:  # type: ignore[attr-defined]
        cupy.RawKernel(SPIN, "spin")((1,), (1,), (cycles,))


@pytest.mark.parametrize("method", ["auto", "kernel", "dma", "staged"])
def test_copies_wait_for_the_work_on_the_compute_stream(method: str) -> None:
    with GpuWorker(WIDE["fp8"], swap_method=method) as worker:
        stream = cupy.cuda.Stream(non_blocking=True)
        spin(stream)
        with stream:
            for tensor in worker.tensors:
                tensor[0] = 7
        (saved,) = worker.run(plan(1, evict=[(0, 3)]), stream).results
        assert saved.success
        stream.synchronize()
        worker.run(plan(2, load=[(3, 5)]))
        assert worker.block(5) == worker.block(0)


@pytest.mark.parametrize("method", ["auto", "kernel", "dma", "staged"])
def test_compute_waits_for_the_eviction_of_the_slots_it_writes(method: str) -> None:
    layout, blocks = WIDE["128 KiB"], 64
    with GpuWorker(layout, device_blocks=blocks, host_blocks=blocks, swap_method=method) as worker:
        before = [worker.block(slot) for slot in range(blocks)]
        stream = cupy.cuda.Stream(non_blocking=True)
        counter = worker.controller.submit_swap_tasks(plan(1, evict=[(i, i) for i in range(blocks)]), stream)
        with stream:
            for tensor in worker.tensors:
                tensor[...] = 9
        counter.wait_all()
        assert all(result.success for result in worker.report().results)
        stream.synchronize()
        worker.run(plan(2, load=[(i, i) for i in range(blocks)]))
        assert [worker.block(slot) for slot in range(blocks)] == before


@pytest.mark.parametrize("method", ["auto", "kernel", "dma", "staged"])
def test_compute_and_loads_wait_for_the_backups_that_their_plan_names(method: str) -> None:
    layout, blocks = WIDE["128 KiB"], 64
    with GpuWorker(layout, device_blocks=blocks, host_blocks=blocks, swap_method=method) as worker:
        before = [worker.block(slot) for slot in range(blocks)]
        worker.run(plan(1, evict=[(0, 0)]))
        stream = cupy.cuda.Stream(non_blocking=True)
        backup = [(slot, slot) for slot in range(1, blocks)]
        worker.controller.submit_swap_tasks(plan(2, backup=backup), stream)
        counter = worker.controller.submit_swap_tasks(plan(3, load=[(0, blocks - 1)], after=(2,)), stream)
        with stream:
            for tensor in worker.tensors:
                tensor[: blocks - 1] = 9
        counter.wait_all()
        stream.synchronize()
        assert worker.block(blocks - 1) == before[0]
        while worker.controller.wait_reports(PATIENCE):
            pass
        worker.run(plan(4, load=[(slot, slot) for slot in range(blocks)]))
        assert [worker.block(slot) for slot in range(blocks)] == before


@pytest.mark.parametrize("method", ["auto", "kernel", "dma", "staged"])
def test_a_stream_waits_for_its_layer_without_the_cpu(method: str) -> None:
    layout, blocks = WIDE["128 KiB"], 64
    with GpuWorker(layout, device_blocks=blocks, host_blocks=blocks, swap_method=method) as worker:
        before = [worker.block(slot) for slot in range(blocks)]
        worker.run(plan(1, evict=[(i, i) for i in range(blocks)]))
        for tensor in worker.tensors:
            tensor[...] = 0
        stream = cupy.cuda.Stream(non_blocking=True)
        counter = worker.controller.submit_swap_tasks(plan(2, load=[(i, i) for i in range(blocks)]), stream)
        seen = []
        for plane, tensor in zip(layout.planes, worker.tensors, strict=True):
            counter.wait_for_layer(plane.layer, stream=stream)
            with stream:
                seen.append(tensor.copy())
        stream.synchronize()
        for slot in range(blocks):
            assert [worker.bytes_of(tensor[slot]) for tensor in seen] == before[slot]
        worker.report()


def test_a_cpu_wait_times_out_with_the_pending_layers() -> None:
    with GpuWorker(WIDE["fp8"]) as worker:
        stream = cupy.cuda.Stream(non_blocking=True)
        spin(stream, 400_000_000)
        counter = worker.controller.submit_swap_tasks(plan(1, evict=[(0, 0)]), stream)
        with pytest.raises(LayerSwapTimeoutError, match="pending layers"):
            counter.wait_for_layer(0, timeout=0.01)
        counter.wait_all(10.0)
        assert counter.is_all_done()


def test_a_captured_stream_is_refused_with_the_remedy() -> None:
    with GpuWorker() as worker:
        worker.run(plan(1, evict=[(0, 0)]))
        counter = worker.controller.submit_swap_tasks(plan(2, load=[(0, 1)]), worker.idle)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            try:
                with pytest.raises(StreamError, match="wait_all"):
                    counter.wait_for_layer(0, stream=stream)
                with pytest.raises(StreamError, match="captured"):
                    worker.controller.submit_swap_tasks(plan(3, load=[(0, 2)]), stream)
                counter.wait_all()
                worker.tensors[0][3] += 1
            finally:
                graph = stream.end_capture()
        reports = {each.plan_id: each for each in worker.controller.wait_reports(PATIENCE)}
        assert reports[3].results[0].failed.tolist() == [0], "the plan that was refused is reported as well"
        assert not reports[2].results[0].failed.size
        counter.wait_all(stream=stream)
        graph.launch(stream)
        stream.synchronize()


def test_streams_of_torch_and_handles_are_accepted() -> None:
    torch = pytest.importorskip("torch")
    with GpuWorker() as worker:
        before = worker.block(0)
        worker.run(plan(1, evict=[(0, 0)]), torch.cuda.Stream())
        worker.run(plan(2, load=[(0, 1)]), torch.cuda.current_stream().cuda_stream)
        assert worker.block(1) == before
        with pytest.raises(StreamError, match="compute_stream: a object is not a CUDA stream"):
            worker.controller.submit_swap_tasks(plan(3, load=[(0, 1)]), object())


def test_a_plan_without_a_compute_stream_is_refused_with_the_remedy_and_reported() -> None:
    with GpuWorker() as worker:
        worker.run(plan(1, evict=[(0, 0)]))
        before = worker.block(1)
        with pytest.raises(
            StreamError, match="compute_stream: None orders nothing on a GPU; pass the stream"
        ):
            worker.controller.submit_swap_tasks(plan(2, load=[(0, 1)]))
        assert worker.report().results[0].failed.tolist() == [0]
        assert worker.block(1) == before
        assert worker.controller.submit_swap_tasks(plan(3)).is_all_done()
        assert worker.report().results == ()


def test_events_are_not_reused_while_their_counter_exists() -> None:
    with GpuWorker(WIDE["fp8"]) as worker:
        worker.run(plan(1, evict=[(i, i) for i in range(8)]))
        first = worker.controller.submit_swap_tasks(plan(2, load=[(0, 0)]), worker.idle)
        worker.report()
        assert first.is_all_done()
        stream = cupy.cuda.Stream(non_blocking=True)
        spin(stream, 400_000_000)
        later = worker.controller.submit_swap_tasks(plan(3, load=[(1, 1)]), stream)
        assert first.is_all_done() and not later.is_all_done()
        later.wait_all()
