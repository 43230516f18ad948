"""Large batches are submitted by a thread of their stream: the order is the same, and no thread remains."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdcache.devices.cuda_memory import CudaMemory
from tests.gpu.test_cuda_loads import reports_of
from tests.gpu.test_cuda_swaps import METHODS, WIDE
from tests.gpu.workers import GpuWorker
from tests.swaps import PATIENCE, plan

cupy = pytest.importorskip("cupy")

BLOCKS = 24
LAYOUT = WIDE["512 KiB"]
"""24 blocks of 5 MiB are more than a calling thread puts on a stream by itself."""


LARGE_TABLE = 1 << 17
"""Bytes of a block table of which no spare ones are made."""


@contextlib.contextmanager
def threads_that_take_turns() -> Iterator[ThreadPoolExecutor]:
    """Run two threads with a switch interval of a microsecond."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            yield pool
    finally:
        sys.setswitchinterval(interval)


def submitting_threads() -> int:
    names = []
    for each in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError):  # it ended meanwhile
            names.append(each.read_text().strip())
    return names.count("fdcache-submit")


def worker_with(host_blocks: int = BLOCKS, **options: Any) -> GpuWorker:
    return GpuWorker(LAYOUT, device_blocks=BLOCKS, host_blocks=host_blocks, **options)


def test_threads_begin_and_end_with_the_controller() -> None:
    every = [(slot, slot) for slot in range(BLOCKS)]
    gc.collect()
    before = submitting_threads()
    with worker_with() as worker:
        assert submitting_threads() == before + 3, "loads, evictions and backups"
        worker.run(plan(1, evict=every))
        worker.run(plan(2, load=every))
        worker.run(plan(3, backup=every, generation=2))
    deadline = time.monotonic() + PATIENCE
    while submitting_threads() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert submitting_threads() == before


@pytest.mark.parametrize("method", METHODS)
def test_the_last_load_of_a_slot_writes_it_last_from_either_thread(method: str) -> None:
    random = np.random.default_rng(3)
    with worker_with(swap_method=method, queued_bytes=1 << 40) as worker:
        worker.run(plan(1, evict=[(slot, slot) for slot in range(BLOCKS)]))
        saved = [worker.block(slot) for slot in range(BLOCKS)]
        expected = list(range(BLOCKS))
        for number in range(30):
            count = BLOCKS if number % 3 == 0 else int(random.integers(1, 4))
            host, device = (random.permutation(BLOCKS)[:count].tolist() for _ in range(2))
            worker.controller.submit_swap_tasks(
                plan(2 + number, load=list(zip(host, device, strict=True))), worker.idle
            )
            for source, target in zip(host, device, strict=True):
                expected[target] = source
        reports = reports_of(worker, 30)
        assert all(result.success for report in reports.values() for result in report.results)
        assert [worker.block(slot) for slot in range(BLOCKS)] == [saved[source] for source in expected]


@pytest.mark.parametrize("method", METHODS)
def test_slots_are_evicted_before_a_large_load_writes_them(method: str) -> None:
    with worker_with(2 * BLOCKS, swap_method=method) as worker:
        compute = cupy.cuda.Stream(non_blocking=True)
        worker.run(plan(1, evict=[(slot, slot) for slot in range(BLOCKS)]))
        first = [worker.block(slot) for slot in range(BLOCKS)]
        worker.run(plan(30, backup=[(slot, BLOCKS + slot) for slot in range(BLOCKS)]))
        placed, host = list(range(BLOCKS)), [*range(BLOCKS), *range(BLOCKS)]
        for number in range(6):
            kept, loaded = (0, BLOCKS) if number % 2 else (BLOCKS, 0)
            turned = [(loaded + slot, (slot + 1) % BLOCKS) for slot in range(BLOCKS)]
            swaps = plan(2 + number, evict=[(slot, kept + slot) for slot in range(BLOCKS)], load=turned)
            counter = worker.controller.submit_swap_tasks(swaps, compute)
            counter.wait_all(stream=compute)
            compute.synchronize()
            assert counter.is_all_done()
            assert all(result.success for result in worker.report().results)
            host[kept : kept + BLOCKS] = placed
            placed = [
                host[loaded + slot - 1] if slot else host[loaded + BLOCKS - 1] for slot in range(BLOCKS)
            ]
            assert [worker.block(slot) for slot in range(BLOCKS)] == [first[each] for each in placed]
        worker.run(plan(20, load=[(slot, slot) for slot in range(BLOCKS)]))
        assert [worker.block(slot) for slot in range(BLOCKS)] == [first[each] for each in host[:BLOCKS]]


def test_layers_are_not_done_while_their_load_is_being_submitted() -> None:
    with worker_with() as worker:
        every = [(slot, slot) for slot in range(BLOCKS)]
        worker.run(plan(1, evict=every))
        before = [worker.block(slot) for slot in range(BLOCKS)]
        for number in range(20):
            for tensor in worker.tensors:
                tensor[...] = 0
            cupy.cuda.runtime.deviceSynchronize()
            counter = worker.controller.submit_swap_tasks(plan(2 + number, load=every), worker.idle)
            while counter.pending_layers():
                pass
            assert [worker.block(slot) for slot in range(BLOCKS)] == before
            counter.wait_all(PATIENCE)
            worker.report()


def test_controllers_of_two_threads_share_a_device() -> None:
    layout, blocks, rounds = WIDE["fp8"], 16, 40

    def work(worker: GpuWorker, seed: int) -> None:
        random = np.random.default_rng(seed)
        worker.run(plan(1, backup=[(slot, slot) for slot in range(blocks)]))
        held = [worker.block(slot) for slot in range(blocks)]
        for number in range(4):
            source = [random.permutation(blocks) for _ in range(rounds)]
            for index, order in enumerate(source):
                pairs = [(int(host), slot) for slot, host in enumerate(order)]
                worker.controller.submit_swap_tasks(
                    plan(2 + number * rounds + index, load=pairs), worker.idle
                )
            reports = reports_of(worker, rounds)
            assert all(report.results[0].success for report in reports.values())
            assert [worker.block(slot) for slot in range(blocks)] == [held[host] for host in source[-1]]

    with (
        threads_that_take_turns() as pool,
        GpuWorker(layout, device_blocks=blocks, host_blocks=blocks, queued_bytes=1 << 40) as first,
        GpuWorker(
            layout, gpu=first.gpu, device_blocks=blocks, host_blocks=blocks, queued_bytes=1 << 40, seed=1
        ) as second,
    ):
        for ended in [pool.submit(work, first, 2), pool.submit(work, second, 3)]:
            ended.result()


def test_each_thread_gets_its_own_block_table(monkeypatch: Any) -> None:
    make = CudaMemory._add_tables

    def make_and_rest(memory: CudaMemory, size: int) -> None:
        make(memory, size)
        time.sleep(0.01)

    with GpuWorker() as worker, threads_that_take_turns() as pool:
        monkeypatch.setattr(CudaMemory, "_add_tables", make_and_rest)
        memory = worker.gpu._memory
        taken = [pool.submit(lambda: [memory.take_table(LARGE_TABLE) for _ in range(10)]) for _ in range(2)]
        tables = [table for each in taken for table in each.result()]
    assert len({table.device for table in tables}) == len({table.host for table in tables}) == 20
