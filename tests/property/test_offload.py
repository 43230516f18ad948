"""OffloadManager under random interleavings: an engine like vLLM's scheduler, and an oracle of hashes and bytes.

The engine owns its device blocks: it hands them over in the middle of copies, preempts, aborts, and asks repeatedly.
Every record of the host tier, and every loaded block, must hold what its hash stands for.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fdcache.manager import LoadOutcome, LoadStatus, MatchStatus, Request
from fdcache.metadata import CacheSwapMetadata
from fdcache.settings.cache import WritePolicy
from tests.offload_engine import BLOCK, GatedDevice, OffloadEngine
from tests.seeds import budget

DEVICE_BLOCKS = 12
CHUNK = 10


@dataclass
class Sequence:
    """A request of the engine: its block table and the number of tokens that have KV."""

    request: Request
    goal: int
    table: list[int] = field(default_factory=list)
    computed: int = 0
    loading: list[int] | None = None
    aborted: bool = False
    is_running: bool = False


class Engine:
    """A scheduler with a prefix cache of its own: free blocks keep their content until they are used again."""

    def __init__(
        self,
        seed: int,
        policy: WritePolicy,
        *,
        ignores_after: bool = False,
        host_blocks: int = 14,
        **options: Any,
    ) -> None:
        self.random = random.Random(seed)
        self.failures = 0.0
        self.offload = OffloadEngine(
            device_blocks=DEVICE_BLOCKS,
            host_blocks=host_blocks,
            policy=policy,
            device=lambda: GatedDevice(self.failing),
            clean_reserve=2,
            defer_timeout=3.0,
            **options,
        )
        self.manager = self.offload.manager
        device = self.offload.devices[0]
        assert isinstance(device, GatedDevice)
        self.device = device
        self.device.is_gated = True
        self.ignores_after = ignores_after
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(DEVICE_BLOCKS))
        self.uses = [0] * DEVICE_BLOCKS
        self.content: dict[int, bytes] = {}
        self.cached: dict[bytes, int] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.loads: dict[str, Sequence] = {}
        self.reports: list[Any] = []
        self.outcomes = self.planned_loads = 0
        self.names = 0
        self.given: list[int] = []
        self.waited_for = 0
        self.wrong = 0

    def failing(self, swap: CacheSwapMetadata) -> list[int]:
        return [i for i in range(len(swap)) if self.random.random() < self.failures]

    # --- device blocks ------------------------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        taken = []
        for _ in range(count):
            block, _ = self.free.popitem(last=False)
            old = self.content.pop(block, None)
            if old is not None and self.cached.get(old) == block:
                del self.cached[old]
            self.uses[block] = 1
            taken.append(block)
        self.given += taken
        return taken

    def share(self, block: int) -> None:
        self.free.pop(block, None)
        self.uses[block] += 1

    def release(self, sequence: Sequence) -> None:
        for block in reversed(sequence.table):
            self.uses[block] -= 1
            if not self.uses[block]:
                self.free[block] = None
        sequence.table, sequence.computed = [], 0

    def local_hit(self, request: Request) -> list[int]:
        hit = []
        for row in request.block_hashes[: (request.num_tokens - 1) // BLOCK]:
            block = self.cached.get(row.tobytes())
            if block is None:
                break
            hit.append(block)
        return hit

    # --- a step -------------------------------------------------------------------------------------------

    def arrive(self, families: list[int]) -> None:
        self.names += 1
        tokens = [family for family in families for _ in range(BLOCK)] + [self.names] * self.random.randint(
            1, 3
        )
        request = Request(f"r{self.names}", tokens)
        self.manager.begin(request)
        self.waiting.append(Sequence(request, len(tokens) + self.random.choice([0, 0, 5])))

    def step(self) -> None:
        self.given = []
        for sequence in list(self.waiting):
            self.admit(sequence)
        scheduled = self.schedule()
        self.manager.evicted(np.array(self.given, np.int32))
        self.manager.next_evicted(np.array(list(self.free)[:3], np.int32))
        plans = self.manager.take_plans()
        for sequence, tokens in scheduled:
            whole = np.array(sequence.table, np.int32)
            self.manager.offer(sequence.request, tokens, whole)
        self.run(plans, scheduled)

    def admit(self, sequence: Sequence) -> None:
        request = sequence.request
        hit = self.local_hit(request)
        found = self.manager.match(request, len(hit) * BLOCK)
        if found.status is MatchStatus.DEFERRED:
            return
        blocks = found.num_tokens // BLOCK
        new = blocks or -(-min(len(hit) * BLOCK + CHUNK, request.num_tokens) // BLOCK) - len(hit)
        room = len(self.free) - sum(block in self.free for block in hit)
        if new > room or self.random.random() < 0.2:  # asked again in the next step
            return
        self.waiting.remove(sequence)
        for block in hit:
            self.share(block)
        sequence.table = [*hit, *self.take(new)]
        sequence.computed = len(hit) * BLOCK
        if not blocks:
            self.manager.unmatch(request)
            self.running.append(sequence)
            return
        sequence.loading = sequence.table[len(hit) :]
        assert self.manager.load(request, np.array(sequence.loading, np.int32)) == blocks
        self.planned_loads += 1
        self.loads[request.request_id] = sequence

    def schedule(self) -> list[tuple[Sequence, int]]:
        scheduled: list[tuple[Sequence, int]] = []
        for sequence in list(self.running):
            if sequence not in self.running:
                continue
            tokens = min(sequence.computed + CHUNK, sequence.request.num_tokens)
            missing = -(-tokens // BLOCK) - len(sequence.table)
            while missing > len(self.free) and sequence in self.running:
                victim = self.running.pop()
                scheduled = [each for each in scheduled if each[0] is not victim]
                self.release(victim)
                self.waiting.insert(0, victim)
            if sequence in self.running:
                sequence.table += self.take(max(missing, 0))
                scheduled.append((sequence, tokens))
        return scheduled

    def run(self, plans: Any, scheduled: list[tuple[Sequence, int]]) -> None:
        self.waited_for += sum(len(plan.after) for plan in plans)
        if self.ignores_after:
            plans = [replace(plan, after=()) for plan in plans]
        counters = self.offload.submit(plans)
        if any(plan.after for plan in plans) or self.random.random() < 0.3:
            self.device.open()
        for counter in counters:
            counter.wait_all()
        for sequence, tokens in scheduled:
            self.compute(sequence, tokens)
        for sequence, tokens in scheduled:
            if tokens == sequence.request.num_tokens:
                self.accept(sequence)

    def compute(self, sequence: Sequence, tokens: int) -> None:
        request = sequence.request
        for index in range(sequence.computed // BLOCK, -(-tokens // BLOCK)):
            block = sequence.table[index]
            is_whole = (index + 1) * BLOCK <= tokens
            row = request.block_hashes[index].tobytes() if is_whole else None
            self.offload.fill(block, row)
            if row is not None:
                self.content[block] = row
                self.cached.setdefault(row, block)
        sequence.computed = tokens

    def accept(self, sequence: Sequence) -> None:
        if sequence.request.num_tokens < sequence.goal:
            sequence.request.append_tokens(self.names)
            return
        self.running.remove(sequence)
        self.manager.finish(sequence.request)
        self.release(sequence)

    # --- reports and accidents ----------------------------------------------------------------------------

    def report(self) -> None:
        self.reports += [report for rank in self.offload.ranks for report in rank.poll()]
        count = self.random.randint(0, len(self.reports))
        taken, self.reports = self.reports[:count], self.reports[count:]
        for outcome in self.manager.apply(taken):
            self.end_load(outcome)

    def end_load(self, outcome: LoadOutcome) -> None:
        self.outcomes += 1
        sequence = self.loads.pop(outcome.request_id)
        assert sequence.loading is not None
        first = len(sequence.table) - len(sequence.loading)
        good = outcome.recompute_from // BLOCK - first
        assert 0 <= good <= len(sequence.loading)
        assert (good == len(sequence.loading)) == (outcome.status is LoadStatus.CONFIRMED)
        self.wrong += not self.offload.holds(sequence.request, sequence.loading[:good], first)
        for index, block in enumerate(sequence.loading[:good], first):
            row = sequence.request.block_hashes[index].tobytes()
            self.content[block] = row
            self.cached.setdefault(row, block)
        sequence.loading = None
        if sequence.aborted:
            self.release(sequence)
            return
        sequence.computed = outcome.recompute_from
        self.running.append(sequence)

    def abort(self) -> None:
        candidates = [
            *self.waiting,
            *self.running,
            *(each for each in self.loads.values() if not each.aborted),
        ]
        if not candidates:
            return
        sequence = self.random.choice(candidates)
        self.manager.finish(sequence.request)
        if sequence.loading is not None:
            sequence.aborted = True  # its blocks stay until the load has ended
            return
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)
        self.release(sequence)

    def reset(self) -> None:
        self.manager.reset_cache()

    def drain(self) -> None:
        self.failures = 0.0
        for _ in range(300):
            self.offload.now += 1
            self.step()
            self.device.open()
            self.reports += self.offload.reports()
            for outcome in self.manager.apply(self.reports):
                self.end_load(outcome)
            self.reports = []
            if not (self.waiting or self.running or self.loads or self.manager.has_pending_work):
                return
        raise AssertionError("the engine never comes to an end")

    def close(self) -> int:
        """End everything; return the number of wrong loads and records."""
        self.drain()
        assert self.outcomes == self.planned_loads
        wrong = self.wrong + self.offload.wrong_records()
        self.offload.close()
        return wrong


ACTIONS = ("arrive", "arrive", "step", "step", "step", "report", "report", "abort", "reset", "fail", "open")


def play(engine: Engine, steps: int, *, accidents: bool = True) -> None:
    for _ in range(steps):
        action = engine.random.choice(ACTIONS)
        if action == "arrive" and len(engine.waiting) < 4:
            depth = engine.random.randint(1, 5)
            engine.arrive([engine.random.randint(1, 2) for _ in range(depth)])
        elif action == "step":
            engine.offload.now += engine.random.choice([0.0, 0.5])
            engine.step()
        elif action == "report":
            engine.report()
        elif action == "open":
            engine.device.open()
        elif accidents and action == "abort":
            engine.abort()
        elif accidents and action == "reset" and engine.random.random() < 0.1:
            engine.reset()
        elif accidents and action == "fail":
            engine.failures = engine.random.choice([0.0, 0.0, 0.3])
        engine.manager.check_integrity()


@settings(max_examples=budget(150), deadline=None)
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(WritePolicy), host=st.sampled_from([5, 14, 40]))
def test_no_block_of_any_tier_has_wrong_bytes_and_nothing_stays_pinned(
    seed: int, policy: WritePolicy, host: int
) -> None:
    engine = Engine(seed, policy, host_blocks=host)
    play(engine, 150)
    assert engine.close() == 0


def test_an_engine_that_ignores_after_stores_wrong_bytes() -> None:
    wrong = waited = 0
    for seed in range(6):
        engine = Engine(seed, WritePolicy.WRITE_THROUGH, ignores_after=True)
        play(engine, 150, accidents=False)
        wrong += engine.close()
        waited += engine.waited_for
    assert waited
    assert wrong
