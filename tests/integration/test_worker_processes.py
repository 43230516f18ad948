"""Workers as processes of their own: plans and reports over pipes, forks, and what is left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection

import psutil
import pytest

from fdcache.controller.cache_controller import CacheController
from fdcache.errors import ForkedProcessError, HostMemoryError
from fdcache.metadata import decode_plan, decode_report, encode
from fdcache.settings.cache import CopySettings
from tests.service_help import TIMEOUT, until
from tests.swaps import Worker, plan, uniform_layout

RANKS = 2


def serve_plans(rank: int, pipe: Connection) -> None:
    """Carry out the plans that come, answer with reports; at the end send the device blocks."""
    with Worker(rank=rank, seed=rank) as worker:
        pipe.send([worker.block(slot) for slot in range(8)])
        while data := pipe.recv_bytes():
            worker.controller.submit_swap_tasks(decode_plan(data)).wait_all()
            pipe.send_bytes(encode(worker.report()))
        pipe.send([worker.block(slot) for slot in range(8)])


def test_two_ranks_carry_out_the_same_plans() -> None:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(RANKS)]
    workers = [context.Process(target=serve_plans, args=(rank, pipes[rank][1])) for rank in range(RANKS)]
    for worker in workers:
        worker.start()
    ends = [pipe[0] for pipe in pipes]
    before = [end.recv() for end in ends]
    plans = [
        plan(1, backup=[(0, 3), (1, 2)]),
        plan(2, evict=[(5, 0)], load=[(3, 5)]),
        plan(3, load=[(0, 1), (7, 2)]),
    ]
    for sent in plans:
        for end in ends:
            end.send_bytes(encode(sent))
        reports = [decode_report(end.recv_bytes()) for end in ends]
        assert [(report.plan_id, report.rank) for report in reports] == [(sent.plan_id, 0), (sent.plan_id, 1)]
        failed = [[result.failed.tolist() for result in report.results] for report in reports]
        assert failed[0] == failed[1] == ([[1]] if sent.plan_id == 3 else [[]] * len(sent.swaps()))
    for end in ends:
        end.send_bytes(b"")
    after = [end.recv() for end in ends]
    for worker in workers:
        worker.join(TIMEOUT)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert before[0] != before[1]
    for old, new in zip(before, after, strict=True):
        assert new == [old[0], old[5], old[2], old[3], old[4], old[0], old[6], old[7]]


def use_after_fork(worker: Worker) -> list[str]:
    uses: dict[str, Callable[[], object]] = {
        "submit": lambda: worker.controller.submit_swap_tasks(plan(9, evict=[(1, 1)])),
        "poll": worker.controller.poll,
        "wait_reports": lambda: worker.controller.wait_reports(1),
        "handler": lambda: worker.controller.handler(1),
        "free_cache": worker.controller.free_cache,
        "sleep": worker.controller.sleep,
        "wakeup": worker.controller.wakeup,
        "shutdown": worker.controller.shutdown,
        "initialize": lambda: worker.controller.initialize_kv_cache(1),
    }
    refused = []
    for name, use in uses.items():
        try:
            use()
        except ForkedProcessError:
            refused.append(name)
    return refused


def ask_for_more_than_allowed(pipe: Connection) -> None:
    """Under a limit on address space: a host cache too large, then one that fits."""
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20), used + (400 << 20)))
    layout = uniform_layout()
    controller = CacheController(CopySettings(), layout)
    try:
        controller.initialize_host_cache((640 << 20) // layout.record_bytes)
    except HostMemoryError as error:
        pipe.send(str(error))
    controller.initialize_host_cache((256 << 20) // layout.record_bytes)
    pipe.send(controller.host_arena is not None)
    controller.shutdown()


def test_memory_that_the_system_refuses_half_way_is_given_back() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=ask_for_more_than_allowed, args=(theirs,))
    child.start()
    theirs.close()
    assert "the system refused" in ours.recv()
    assert ours.recv() is True
    child.join(TIMEOUT)
    assert child.exitcode == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_use_after_a_fork_is_refused_and_the_child_ends_cleanly() -> None:
    worker = Worker()
    counter = worker.controller.submit_swap_tasks(plan(1, evict=[(1, 1)]))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            refused = use_after_fork(worker)
            try:
                counter.wait_for_layer(0)
            except ForkedProcessError:
                refused.append("counter")
            # Dropping the controller joins no thread: there is none in this process.
            del counter, worker
            gc.collect()
            os.write(writing, " ".join(refused).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        refused = pipe.read().split()
    assert os.waitpid(child, 0)[1] == 0
    assert len(refused) == 10
    counter.wait_all()
    assert worker.report().results[0].success
    worker.controller.shutdown()


def test_workers_leave_no_thread_and_no_memory_behind() -> None:
    process = psutil.Process()
    gc.collect()
    threads = {thread.id for thread in process.threads()}

    def cycle() -> None:
        with Worker(device_blocks=32, host_blocks=2048, copy_threads=2) as worker:
            worker.run(plan(1, evict=[(slot, slot) for slot in range(32)]))
        # One that is dropped without a shutdown, under copies that never start.
        dropped = Worker(device_blocks=32, host_blocks=2048, copy_threads=2)
        stream = dropped.controller.device.create_stream()
        stream.wait_event(dropped.controller.device.create_event())
        dropped.controller.submit_swap_tasks(plan(1, evict=[(1, 1)], backup=[(2, 2)]), stream)

    for _ in range(3):
        cycle()
    gc.collect()
    before = process.memory_info().rss
    for _ in range(20):
        cycle()
    gc.collect()
    until(lambda: {thread.id for thread in process.threads()} <= threads, "every thread is gone")
    # Each cycle takes more than 16 MiB; 20 that leaked would hold 320.
    assert process.memory_info().rss - before < 32 << 20
