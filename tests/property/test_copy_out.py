"""The native ``CopyOut`` against its rules, block by block."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache import _core
from fdcache.metadata import CacheLevel, SwapPurpose
from fdcache.plans.ledger import OpenPlan, PlanLedger
from fdcache.settings.cache import WritePolicy
from fdcache.tiers.host import LocalHostTier
from tests.property.copy_out_oracle import ROOT, CopyOutOracle, Pair, Path
from tests.seeds import budget
from tests.tier_help import chain, hashes

THRESHOLD, RESERVE, DEVICE = 2, 3, 24


class World:
    """An engine's device blocks, and a host tier for each side, which do the same."""

    def __init__(self, seed: int, policy: WritePolicy, host: int) -> None:
        self.random = random.Random(seed)
        self.hosts = [LocalHostTier(CacheLevel.HOST, host) for _ in range(2)]
        selective = policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        self.native = _core.CopyOut(policy is WritePolicy.WRITE_BACK, THRESHOLD if selective else 1, RESERVE)
        self.oracle = CopyOutOracle(policy, THRESHOLD, RESERVE, self.hosts[1])
        self.ledger = PlanLedger(1, 60.0)
        self.content: dict[int, bytes] = {}
        self.in_flight: dict[int, tuple[SwapPurpose, list[int]]] = {}
        self.plan = OpenPlan()
        self.dropped = 0

    def count(self, planned: _core.PlannedCopies | None) -> None:
        if planned is not None:
            self.dropped += planned.dropped

    def give_away(self, ids: list[int]) -> None:
        planned = self.native.given_away(
            np.array(ids, np.int32), self.hosts[0], self.plan.evictions, self.ledger
        )
        self.count(planned)
        evicted, after = self.oracle.given_away(ids, set(self.in_flight))
        assert set([] if planned is None else planned.after) == after
        self.sent(SwapPurpose.EVICT, self.plan.evictions, evicted)
        for each in ids:
            self.content.pop(each, None)

    def sent(self, purpose: SwapPurpose, copies: _core.BlockCopies, expected: list[Pair]) -> None:
        if not len(copies):
            assert not expected
            return
        plan = self.ledger.send(self.plan, 0.0)
        (swap,) = plan.swaps()
        assert swap.purpose is purpose
        found = list(zip(swap.src_block_ids.tolist(), swap.dst_block_ids.tolist(), strict=True))
        assert found == expected
        self.native.sent(plan.plan_id, [swap.src_block_ids])
        self.oracle.sent(plan.plan_id, expected)
        self.in_flight[plan.plan_id] = purpose, swap.dst_block_ids.tolist()

    def compute(self, families: tuple[int, ...]) -> None:
        """A new request computes its blocks, but for those that are on the device."""
        blocks = chain(*families)
        here = {block: each for each, block in self.content.items()}
        kept = 0
        while kept < len(blocks) and blocks[kept] in here:
            kept += 1
        ids = [here[block] for block in blocks[:kept]]
        free = [each for each in range(DEVICE) if each not in ids]
        new = self.random.sample(free, len(blocks) - kept)
        self.give_away(new)
        self.content |= dict(zip(new, blocks[kept:], strict=True))
        path, model = _core.DevicePath(ROOT), Path()
        for stop in sorted({self.random.randint(1, len(blocks)), len(blocks)}):
            start = len(path)
            path.extend(hashes(blocks), np.array((ids + new)[start:stop], np.int32))
            model.hashes += blocks[start:stop]
            model.ids += (ids + new)[start:stop]
            counted = self.random.choice([0, start])
            self.native.offered(path, start, counted)
            self.oracle.offered(model, start, counted)

    def step(self) -> None:
        coldest = self.random.sample(range(DEVICE), RESERVE + 1)
        self.native.next_evicted(np.array(coldest, np.int32))
        if self.oracle.writes_back:
            self.oracle.coldest = coldest
        backups = (ids for purpose, ids in self.in_flight.values() if purpose is SwapPurpose.BACKUP)
        in_flight, is_patient = sum(map(len, backups)), self.random.random() < 0.5
        has_queue = self.native.has_queue
        planned = self.native.plan(self.hosts[0], in_flight, is_patient, 0.0, self.plan.backups)
        assert planned is None or has_queue
        self.count(planned)
        expected = self.oracle.plan(in_flight, is_patient=is_patient)
        self.sent(SwapPurpose.BACKUP, self.plan.backups, expected)

    def report(self) -> None:
        """A plan ends, some of whose blocks may not have been copied."""
        if not self.in_flight:
            return
        number = self.random.choice(sorted(self.in_flight))
        _, targets = self.in_flight.pop(number)
        self.ledger.remove(self.ledger.plans[number])
        copied = np.array([self.random.random() < 0.9 for _ in targets], np.uint8)
        for host in self.hosts:
            host.complete(np.array(targets, np.int32), copied, np.empty(0, np.uint64))
        self.native.copies_ended()
        self.oracle.may_retry = True

    def check(self) -> None:
        assert self.native.queued(self.hosts[0]) == self.oracle.queued
        assert self.native.num_known == len(self.oracle.known)
        assert self.dropped == self.oracle.dropped


operations = st.lists(
    st.one_of(
        st.tuples(st.just("compute"), st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)),
        st.tuples(st.just("give_away"), st.lists(st.integers(0, DEVICE + 3), min_size=1, max_size=6)),
        st.tuples(st.just("step"), st.none()),
        st.tuples(st.just("report"), st.none()),
    ),
    min_size=10,
    max_size=40,
)


@pytest.mark.parametrize("policy", WritePolicy)
@given(operations, st.integers(0, 2**32), st.sampled_from([3, 8, 40]))
@settings(max_examples=budget(400), deadline=None)
def test_copies_are_those_of_the_rules(
    policy: WritePolicy, history: list[tuple[str, object]], seed: int, host: int
) -> None:
    world = World(seed, policy, host)
    for name, argument in history:
        operation = getattr(world, name)
        operation(argument) if argument is not None else operation()
        world.check()
