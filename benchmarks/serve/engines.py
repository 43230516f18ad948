"""Measure a service: look-ups from many clients, the scheduler thread's time per step, and a run without reuse.

The echo is an empty ZeroMQ ROUTER/DEALER round trip over ipc:// on the same machine in the same run: the least that
any such service costs. The quietest of several rounds of a scheduler's steps counts, so that other processes on the
machine change little. Exits 1 if a run without reuse costs 1% of a 20 ms step or more.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TypeAlias

import numpy as np
import zmq

from benchmarks.harness import Report, Row
from fdcache import _core
from fdcache.devices.cpu import CpuDevice
from fdcache.hashing import hash_blocks, root_hash
from fdcache.layout import KVLayout
from fdcache.manager import CacheManager, Request
from fdcache.metadata import TransferPlan, TransferReport, TransferResult
from fdcache.service.client.connection import Connection
from fdcache.service.client.shared_arena import SharedHostArena
from fdcache.service.server.lifecycle import Server
from fdcache.service.server.namespace import Namespace
from fdcache.service.wire.liveness import LiveFile
from fdcache.service.wire.protocol import Match, Matched, Register, Registered
from fdcache.service.wire.shared_memory import open_runs, open_table
from fdcache.settings import Settings
from fdcache.settings.cache import CacheSettings, WritePolicy

BLOCKS = 2048
BLOCK = 64
Results: TypeAlias = "Queue[list[float]]"


def layout() -> KVLayout:
    return KVLayout.uniform(
        model="bench", revision="1", block_size=BLOCK, num_layers=1, kv_heads=1, head_dim=8, dtype="uint8"
    )


def path_hashes() -> np.ndarray:
    shape = layout()
    return hash_blocks(list(range(BLOCKS * BLOCK)), BLOCK, parent=root_hash(shape.fingerprint)).copy()


def serve(directory: str, ready: Event, stop: Event) -> None:
    logging.getLogger("fdcache").setLevel(logging.ERROR)
    settings = Settings.load(
        environ={},
        arguments={
            "FDCACHE_SERVER": f"ipc://{directory}/fdcache.sock",
            "FDCACHE_HTTP_ADDRESS": "off",
            "FDCACHE_HOST_MEMORY": "64MiB",
            "FDCACHE_DISCARD": "1",
            "FDCACHE_RUNTIME_DIR": directory,
        },
    )
    server = Server(settings)
    server.start()
    namespace = server.service.namespaces.open(layout())
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
    """Store every block of the path, as clients do."""
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


@contextmanager
def registered(directory: str) -> Iterator[tuple[Connection, _core.SharedRuns]]:
    """Register a client; yield its connection, and what it sees and pins in shared memory."""
    line = Connection(f"ipc://{directory}/fdcache.sock")
    live = LiveFile(Path(directory))
    answer, _ = line.call(Register(layout().to_json().encode(), live.live, "bench"), 30)
    assert isinstance(answer, Registered)
    line.session = answer.session
    table = open_table(Path(answer.geometry.table_path), answer.geometry.table_bytes)
    yield line, open_runs(table, Path(answer.ring))
    live.close()


def ask_service(directory: str, seconds: float, results: Results) -> None:
    hashes = path_hashes()
    counts, starts = np.array([len(hashes)], np.int32).tobytes(), np.zeros(1, np.int32).tobytes()
    times = []
    with registered(directory) as (line, runs):
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            run = runs.next_number()
            answer, _ = line.call(Match(np.array([run]).tobytes(), counts, starts, hashes.tobytes()), 30)
            times.append(time.perf_counter() - began)
            assert isinstance(answer, Matched)
            assert len(answer.slots) == 4 * BLOCKS
            runs.unpin(run)
    results.put(times[len(times) // 10 :])


def find_and_pin(directory: str, blocks: int, seconds: float) -> float:
    """Return the median microseconds of a look-up of so many blocks in shared memory, one each 5 ms."""
    hashes = path_hashes()[:blocks]
    times = []
    with registered(directory) as (_, runs):
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            run = runs.pin(hashes, runs.find(hashes, 0))
            times.append(time.perf_counter() - began)
            assert run, "the service did not read the ring in time"
            runs.unpin(run)
            time.sleep(0.005)
    return float(np.median(times)) * 1e6


STEP_SECONDS = 0.020
GOAL = 0.01
ROUNDS, STEPS_A_ROUND = 6, 50
WAITING_STEPS = 4
_firsts = count(1 << 20, 1 << 20)  # distinct content, so that no engine finds another one's blocks
_SELECTIVE, _THROUGH = WritePolicy.WRITE_THROUGH_SELECTIVE, WritePolicy.WRITE_THROUGH


@dataclass
class Engine:
    """One scheduler, and the microseconds of its steps by wall clock and CPU time, by round.

    A prompt is admitted ``waits`` steps after its arrival. ``different`` is the number of distinct prompts; with None
    every prompt is new.
    """

    name: str
    manager: CacheManager
    waits: int = 0
    arena: SharedHostArena | None = None
    different: int | None = None
    first: int = field(default_factory=lambda: next(_firsts))
    walls: list[list[float]] = field(default_factory=list)
    cpus: list[list[float]] = field(default_factory=list)
    arrived: deque[list[Request]] = field(default_factory=deque)
    steps: int = 0

    def begin_round(self) -> None:
        """Start a new round of measurements."""
        self.walls.append([])
        self.cpus.append([])

    def step(self, prompts: int, blocks: int) -> None:
        """Run one step: new prompts arrive; those that have waited long enough are admitted, computed and finished."""
        self.steps += 1
        new = [self._request(self.steps * prompts + i, blocks) for i in range(prompts)]
        tokens = blocks * BLOCK + 1
        wall, cpu = time.perf_counter(), time.thread_time()
        self.manager.begin(new)
        self.arrived.append(new)
        requests = self.arrived.popleft() if len(self.arrived) > self.waits else []
        self.manager.match_prefix(requests)
        given = self.manager.allocate_device_blocks([(request, tokens) for request in requests])
        assert all(each.ok for each in given), given
        plans = self.manager.take_plans()
        wall, cpu = wall - time.perf_counter(), cpu - time.thread_time()
        reports = [carry_out(plan, self.arena) for plan in plans]
        wall, cpu = wall + time.perf_counter(), cpu + time.thread_time()
        self.manager.apply(reports)
        self.manager.commit([(request, tokens) for request in requests])
        self.manager.finish(requests)
        self.walls[-1].append((time.perf_counter() - wall) * 1e6)
        self.cpus[-1].append((time.thread_time() - cpu) * 1e6)

    def _request(self, number: int, blocks: int) -> Request:
        content = self.first + (number if self.different is None else number % self.different)
        return Request(f"{number}", np.full(blocks * BLOCK + 1, content, np.int32))

    @property
    def wall(self) -> float:
        """Median step of the quietest round, in microseconds."""
        return min(float(np.median(each)) for each in self.walls)

    @property
    def cpu(self) -> float:
        """Median step of the quietest round, in microseconds."""
        return min(float(np.median(each)) for each in self.cpus)


def carry_out(plan: TransferPlan, arena: SharedHostArena | None) -> TransferReport:
    """Write the slot headers of a plan and report success, as a worker does, without copying."""
    nothing = np.empty(0, np.int32)
    if arena is not None:
        refused = arena.attach(plan) or arena.prepare(plan)
        assert refused is None, refused
        for swap in plan.swaps():
            for i, slot in enumerate(swap.dst_block_ids.tolist()):
                if swap is plan.loads:
                    break
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


@contextmanager
def engine(
    name: str,
    policy: WritePolicy = _SELECTIVE,
    *,
    server: str | None = None,
    cache: bool = True,
    waits: int = 0,
    device_blocks: int = 4096,
    different: int | None = None,
) -> Iterator[Engine]:
    """Make an engine: without a cache, embedded, or connected to a service."""
    shape = layout()
    settings = CacheSettings(
        server=server,
        device_blocks=device_blocks,
        host_memory=64 << 20 if cache and not server else 0,
        write_policy=policy,
        rpc_timeout=5.0,
        enable_prefix_caching=cache,
    )
    with CacheManager(settings, shape) as manager:
        arena = SharedHostArena(manager.host_cache, shape, 0, CpuDevice()) if server else None
        yield Engine(name, manager, waits, arena, different)
        if arena is not None:
            arena.close()


def report_steps(report: Report, server: str, prompts: int, blocks: int) -> bool:
    """Measure all engines, one round of each in turn; return True if those at the service meet the goal."""
    with ExitStack() as stack:
        base, *others = (
            stack.enter_context(each)
            for each in (
                engine("no cache", cache=False),
                engine("embedded, selective", _SELECTIVE),
                engine("shared, selective, admitted at once", _SELECTIVE, server=server),
                engine("shared, selective, from the queue", _SELECTIVE, server=server, waits=WAITING_STEPS),
                engine("embedded, write_through", _THROUGH),
                engine("shared, write_through, admitted at once", _THROUGH, server=server),
                engine("shared, write_through, from the queue", _THROUGH, server=server, waits=WAITING_STEPS),
            )
        )
        tight, different = 2 * prompts * (blocks + 1), 4 * prompts
        reusing = [
            stack.enter_context(engine(name, _THROUGH, server=at, device_blocks=tight, different=different))
            for name, at in (("embedded, all reused", None), ("shared, all reused", server))
        ]
        engines = [base, *others, *reusing]
        for _ in range(ROUNDS):
            for each in engines:
                each.begin_round()
                for _ in range(STEPS_A_ROUND):
                    each.step(prompts, blocks)
                    time.sleep(STEP_SECONDS / 4)
        for each in reusing:
            figures = each.manager.get_stats().counters
            assert figures.host_hit_tokens > figures.lookup_tokens // 2, "no prompt was found on the host"
    good = True

    def rows() -> Iterator[Row]:
        nonlocal good
        for each in engines:
            share = (each.wall - base.wall) / 1e6 / STEP_SECONDS
            verdict = ""
            if each.arena is not None and each not in reusing:
                good &= share < GOAL
                verdict = f"within {GOAL:.0%}" if share < GOAL else f"above {GOAL:.0%}"
            cost = "" if each is base else f"{share:+.2%}"
            yield {
                "engine": each.name,
                "wall us": each.wall,
                "CPU us": each.cpu,
                "of a 20 ms step": cost,
                "goal": verdict,
            }

    report.table(f"{prompts} new prompts of {blocks} blocks a step", rows())
    return good


CLIENTS = (1, 8, 64)
STEPS = ((1, 32), (8, 8))
"""New prompts per step, and blocks per prompt."""


def rates(
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


def report_lookups(report: Report, directory: str, seconds: float) -> None:
    def rows() -> Iterator[Row]:
        for clients in CLIENTS:
            base = rates(ask_echo, directory, clients, seconds)
            ours = rates(ask_service, directory, clients, seconds)
            yield {
                "clients": clients,
                "echo/s": base["per_second"],
                "p50 us": base["p50_us"],
                "p99 us": base["p99_us"],
                "look-ups/s": ours["per_second"],
                "their p50 us": ours["p50_us"],
                "their p99 us": ours["p99_us"],
                "to echo's p50": ours["p50_us"] / base["p50_us"],
            }

    report.table(f"Look-ups of {BLOCKS} blocks beside an echo", rows())
    found = {blocks: find_and_pin(directory, blocks, seconds) for blocks in (1, 32, BLOCKS)}
    report.table(
        "Look-ups in shared memory, pins included",
        ({"blocks": blocks, "us": spent} for blocks, spent in found.items()),
    )


def measure_all(report: Report, directory: str, seconds: float) -> bool:
    """Report every table; return True if a run without reuse meets its goal."""
    report_lookups(report, directory, seconds)
    server = f"ipc://{directory}/fdcache.sock"
    verdicts = [report_steps(report, server, prompts, blocks) for prompts, blocks in STEPS]
    good = all(verdicts)
    report.note(
        f"\nA run without reuse {'stays below' if good else 'does not stay below'} {GOAL:.0%} of a step."
    )
    return good


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=3.0)


def measure(options: argparse.Namespace, report: Report) -> bool:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="fdcache-bench-") as directory:
        Path(directory).chmod(0o700)
        stop = context.Event()
        started = []
        try:
            for target in (serve, echo):
                ready = context.Event()
                process = context.Process(target=target, args=(directory, ready, stop))
                process.start()
                started.append(process)
                assert ready.wait(60)
            return measure_all(report, directory, options.seconds)
        finally:
            stop.set()
            for process in started:
                process.join(20)
