"""What a service costs: look-ups from many clients, the scheduler thread's time a step, and a run without reuse.

    python -m benchmarks.serve [--seconds 3]

The echo is an empty ZeroMQ ROUTER/DEALER round trip over ipc:// on the same machine in the same run: what any
such service pays before it does anything.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TypeAlias

import numpy as np
import zmq

from fdcache import _core
from fdcache.controller.shared_arena import SharedHostArena
from fdcache.devices.cpu import CpuDevice
from fdcache.layout import KVLayout
from fdcache.manager import CacheManager, Request
from fdcache.metadata import TransferPlan, TransferReport, TransferResult
from fdcache.node.connection import Connection
from fdcache.node.liveness import LiveFile
from fdcache.node.protocol import Match, Matched, Register, Registered, Release
from fdcache.server.lifecycle import Server
from fdcache.server.namespace import Namespace
from fdcache.settings import Settings
from fdcache.settings.cache import CacheSettings, WritePolicy

BLOCKS = 2048
BLOCK = 64
CLIENTS = (1, 8, 64)
Results: TypeAlias = "Queue[list[float]]"
STEP_SECONDS = 0.020
STEPS = ((1, 32), (8, 8))
"""New prompts in a step, and blocks of each."""


def layout() -> KVLayout:
    return KVLayout.uniform(
        model="bench", revision="1", block_size=BLOCK, num_layers=1, kv_heads=1, head_dim=8, dtype="uint8"
    )


def path_hashes() -> np.ndarray:
    shape = layout()
    return Request("x", list(range(BLOCKS * BLOCK)))._bind(BLOCK, shape.fingerprint).hashes.copy()


# --- processes --------------------------------------------------------------------------------------------


def serve(directory: str, ready: Event, stop: Event) -> None:
    logging.getLogger("fdcache").setLevel(logging.ERROR)
    settings = Settings.load(
        environ={},
        arguments={
            "FDCACHE_SERVER": f"ipc://{directory}/fdcache.sock",
            "FDCACHE_HTTP_ADDRESS": "off",
            "FDCACHE_HOST_MEMORY": "64MiB",
            "FDCACHE_RUNTIME_DIR": directory,
        },
    )
    server = Server(settings)
    server.start()
    namespace = server.service.shares.open(layout())
    while namespace.num_slots < 2 * BLOCKS and namespace.grow():
        pass
    fill(namespace)
    ready.set()

    def end() -> None:
        stop.wait()
        server.stop(force=True)

    threading.Thread(target=end, daemon=True).start()
    server.run()
    server.close()


def fill(namespace: Namespace) -> None:
    """Make every block of the path an entry, as if clients had stored it."""
    hashes = path_hashes()
    parents = np.concatenate((np.zeros((1, 32), np.uint8), hashes[:-1]))
    assert namespace.tier is not None
    lease = namespace.tier.open_lease()
    slots = namespace.tier.reserve(lease, BLOCKS).slots
    ones, sums = np.ones(BLOCKS, np.uint8), np.zeros(BLOCKS, np.uint64)
    namespace.tier.publish(lease, parents, hashes, slots, ones, sums)
    namespace.tier.release(lease)


def echo(directory: str, ready: Event, stop: Event) -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind(f"ipc://{directory}/echo.sock")
    ready.set()
    while not stop.is_set():
        if socket.poll(100):
            while True:
                try:
                    socket.send_multipart(socket.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    break


def ask_echo(directory: str, seconds: float, results: Results) -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(f"ipc://{directory}/echo.sock")
    times = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        socket.send(b"")
        socket.recv()
        times.append(time.perf_counter() - began)
    results.put(times[len(times) // 10 :])


def ask_service(directory: str, seconds: float, results: Results) -> None:
    line = Connection(f"ipc://{directory}/fdcache.sock")
    live = LiveFile(Path(directory))
    registered, _ = line.call(Register(layout().to_json().encode(), live.live, "bench"), 30)
    assert isinstance(registered, Registered)
    line.session = registered.session
    hashes = path_hashes()
    body = Match(
        np.array([len(hashes)], np.int32).tobytes(), np.zeros(1, np.int32).tobytes(), hashes.tobytes()
    )
    times = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        answer, _ = line.call(body, 30)
        times.append(time.perf_counter() - began)
        assert isinstance(answer, Matched)
        assert len(answer.slots) == 4 * BLOCKS
        line.send(Release(answer.leases))
    live.close()
    results.put(times[len(times) // 10 :])


# --- measurements -----------------------------------------------------------------------------------------


def measure(
    target: Callable[[str, float, Results], None], directory: str, clients: int, seconds: float
) -> dict[str, float]:
    context = multiprocessing.get_context("fork")
    results: Results = context.Queue()
    processes = [context.Process(target=target, args=(directory, seconds, results)) for _ in range(clients)]
    for process in processes:
        process.start()
    times = np.concatenate([results.get() for _ in processes])
    for process in processes:
        process.join()
    return {
        "per_second": len(times) / (0.9 * seconds),
        "p50_us": float(np.percentile(times, 50)) * 1e6,
        "p99_us": float(np.percentile(times, 99)) * 1e6,
    }


def scheduler_step(
    server: str | None, policy: WritePolicy, prompts: int, blocks: int, *, cache: bool = True
) -> tuple[float, float]:
    """Wall and CPU microseconds of the scheduler thread per step of new prompts, none of which is reused."""
    shape = layout()
    settings = CacheSettings(
        server=server,
        device_blocks=4096,
        host_memory=0 if server or not cache else 64 << 20,
        write_policy=policy,
        rpc_timeout=5.0,
        enable_prefix_caching=cache,
    )
    with CacheManager(settings, shape) as manager:
        arena = SharedHostArena(manager.host_cache, shape, 0, CpuDevice()) if server else None
        walls, cpus = [], []
        for step in range(300):
            requests = [
                Request(f"{step}-{i}", np.full(blocks * BLOCK + 1, step * prompts + i, np.int32))
                for i in range(prompts)
            ]
            wall, cpu = time.perf_counter(), time.thread_time()
            manager.match_prefix(requests)
            manager.allocate_device_blocks([(request, blocks * BLOCK + 1) for request in requests])
            plans = manager.take_plans()
            wall, cpu = wall - time.perf_counter(), cpu - time.thread_time()
            reports = [copy(plan, arena) for plan in plans]
            wall, cpu = wall + time.perf_counter(), cpu + time.thread_time()
            manager.apply(reports)
            manager.commit([(request, blocks * BLOCK + 1) for request in requests])
            manager.request_finish(requests)
            walls.append(time.perf_counter() - wall)
            cpus.append(time.thread_time() - cpu)
            time.sleep(0.002)
        if arena is not None:
            arena.close()
        return float(np.median(walls)) * 1e6, float(np.mean(cpus)) * 1e6


def copy(plan: TransferPlan, arena: SharedHostArena | None) -> TransferReport:
    """What a worker would do and say; it only writes the headers."""
    nothing = np.empty(0, np.int32)
    if arena is not None:
        assert arena.prepare(plan) is None
        for swap in plan.swaps():
            for i, slot in enumerate(swap.dst_block_ids.tolist()):
                keys = (swap.hash_values[i].tobytes(), swap.parent_hashes[i].tobytes())
                header = _core.SlotHeader(2, int(swap.dst_generations[i]), *keys, arena.fingerprint, 4096, 0)
                arena.table.set_header(slot, header)
    return TransferReport(
        plan_id=plan.plan_id,
        rank=0,
        results=tuple(
            TransferResult(
                purpose=swap.purpose,
                failed=nothing,
                checksums=np.zeros(len(swap), np.uint64),
                copied_bytes=0,
                seconds=0.0,
            )
            for swap in plan.swaps()
        ),
    )


def print_steps(server: str, prompts: int, blocks: int) -> None:
    print(
        f"\n| {prompts} new prompts of {blocks} blocks a step, nothing reused | wall us | CPU us | of a 20 ms step |"
    )
    print("|---|---|---|---|")
    nothing = scheduler_step(None, WritePolicy.WRITE_THROUGH_SELECTIVE, prompts, blocks, cache=False)
    print(f"| no cache | {nothing[0]:.0f} | {nothing[1]:.0f} | |")
    for policy in (WritePolicy.WRITE_THROUGH_SELECTIVE, WritePolicy.WRITE_THROUGH):
        for name, address in (("embedded", None), ("shared", server)):
            wall, cpu = scheduler_step(address, policy, prompts, blocks)
            share = (wall - nothing[0]) / 1e6 / STEP_SECONDS
            print(f"| {name}, {policy.value} | {wall:.0f} | {cpu:.0f} | {share:+.2%} |")


def print_lookups(directory: str, seconds: float) -> None:
    print(f"| clients | echo/s | p50, p99 us | look-ups of {BLOCKS} blocks/s | p50, p99 us | to echo's p50 |")
    print("|---|---|---|---|---|---|")
    for clients in CLIENTS:
        base = measure(ask_echo, directory, clients, seconds)
        ours = measure(ask_service, directory, clients, seconds)
        print(
            f"| {clients} | {base['per_second']:,.0f} | {base['p50_us']:.0f}, {base['p99_us']:.0f} "
            f"| {ours['per_second']:,.0f} | {ours['p50_us']:.0f}, {ours['p99_us']:.0f} "
            f"| {ours['p50_us'] / base['p50_us']:.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    seconds = parser.parse_args().seconds
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="fdcache-bench-") as directory:
        Path(directory).chmod(0o700)
        stop = context.Event()
        started = []
        for target in (serve, echo):
            ready = context.Event()
            process = context.Process(target=target, args=(directory, ready, stop))
            process.start()
            assert ready.wait(60)
            started.append(process)
        machine = platform.processor() or platform.machine()
        print(f"{machine}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
        print_lookups(directory, seconds)
        for prompts, blocks in STEPS:
            print_steps(f"ipc://{directory}/fdcache.sock", prompts, blocks)
        stop.set()
        for process in started:
            process.join(20)


if __name__ == "__main__":
    main()
