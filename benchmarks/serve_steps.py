"""What the scheduler's thread spends in a step with new prompts: no cache, embedded, shared."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from benchmarks.serve_node import BLOCK, layout
from fdcache import _core
from fdcache.devices.cpu import CpuDevice
from fdcache.manager import CacheManager, Request
from fdcache.metadata import TransferPlan, TransferReport, TransferResult
from fdcache.service.client.arena import SharedHostArena
from fdcache.settings.cache import CacheSettings, WritePolicy

STEP_SECONDS = 0.020
GOAL = 0.01
ROUNDS, STEPS_A_ROUND = 6, 50
WAITING_STEPS = 4
_firsts = count(1 << 20, 1 << 20)  # so that no engine finds what another one stored
_SELECTIVE, _THROUGH = WritePolicy.WRITE_THROUGH_SELECTIVE, WritePolicy.WRITE_THROUGH


@dataclass
class Engine:
    """One scheduler, and what its steps took: microseconds of the thread by the wall and by its CPU, by round.

    A prompt is admitted ``waits`` steps after it came. ``different``: how many prompts there are; None: each is new.
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
        """What is measured from now on is a round of its own."""
        self.walls.append([])
        self.cpus.append([])

    def step(self, prompts: int, blocks: int) -> None:
        """New prompts arrive; those whose turn it is are admitted, computed and finished."""
        self.steps += 1
        new = [self._request(self.steps * prompts + i, blocks) for i in range(prompts)]
        tokens = blocks * BLOCK + 1
        wall, cpu = time.perf_counter(), time.thread_time()
        self.manager.prefetch(new)
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
        self.manager.request_finish(requests)
        self.walls[-1].append((time.perf_counter() - wall) * 1e6)
        self.cpus[-1].append((time.thread_time() - cpu) * 1e6)

    def _request(self, number: int, blocks: int) -> Request:
        content = self.first + (number if self.different is None else number % self.different)
        return Request(f"{number}", np.full(blocks * BLOCK + 1, content, np.int32))

    @property
    def wall(self) -> float:
        """Of the quietest round, the median step."""
        return min(float(np.median(each)) for each in self.walls)

    @property
    def cpu(self) -> float:
        """Of the quietest round, the median step."""
        return min(float(np.median(each)) for each in self.cpus)


def carry_out(plan: TransferPlan, arena: SharedHostArena | None) -> TransferReport:
    """What a worker would do and say; it only writes the headers."""
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
    """An engine of the benchmark, without a cache, embedded, or at a service."""
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


def print_steps(server: str, prompts: int, blocks: int) -> bool:
    """Measure all engines, a round of each in turn; whether those at the service are within the goal."""
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
        tight = 2 * prompts * (blocks + 1)
        reused = stack.enter_context(
            engine("shared, all reused", _THROUGH, server=server, device_blocks=tight, different=4 * prompts)
        )
        everybody = [base, *others, reused]
        for _ in range(ROUNDS):
            for each in everybody:
                each.begin_round()
                for _ in range(STEPS_A_ROUND):
                    each.step(prompts, blocks)
                    time.sleep(STEP_SECONDS / 4)
        figures = reused.manager.get_stats().counters
        assert figures.host_hit_tokens > figures.lookup_tokens // 2, "the host was to have been hit"
    print(f"\n| {prompts} new prompts of {blocks} blocks a step | wall us | CPU us | of a 20 ms step | |")
    print("|---|---|---|---|---|")
    good = True
    for each in everybody:
        share = (each.wall - base.wall) / 1e6 / STEP_SECONDS
        verdict = ""
        if each.arena is not None and each is not reused:
            good &= share < GOAL
            verdict = f"within {GOAL:.0%}" if share < GOAL else f"above {GOAL:.0%}"
        cost = "" if each is base else f"{share:+.2%}"
        print(f"| {each.name} | {each.wall:.0f} | {each.cpu:.0f} | {cost} | {verdict} |")
    return good
