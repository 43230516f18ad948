"""The native backup planner against its rules, block by block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache._core import BlockList, Reservation
from fdcache.manager.backups import BackupPlanner
from fdcache.metadata import CacheLevel, SwapPurpose
from fdcache.plans.ledger import OpenPlan
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.tiers.host import LocalHostTier
from fdcache.tiers.pool import STORED, BlockPool
from fdcache.tiers.statistics import Counters
from tests.property.backup_oracle import BackupOracle, Pair
from tests.seeds import budget
from tests.tier_help import chain, hash_list, hashes, slots

THRESHOLD = 2
RESERVE = 5
PURPOSES = (SwapPurpose.EVICT, SwapPurpose.BACKUP)

Path = tuple[int, ...]
paths = st.lists(st.integers(0, 2), min_size=1, max_size=10).map(tuple)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("compute"), st.lists(paths, min_size=1, max_size=5)),
        st.tuples(st.just("match"), paths),
        st.tuples(st.just("evict"), st.lists(st.integers(1, 6), min_size=1, max_size=2)),
        st.tuples(st.just("step"), st.none()),
        st.tuples(st.just("report"), st.integers(0, 255)),
    ),
    min_size=15,
    max_size=40,
)


class Side:
    """Tiers of one planner, the same operations for both sides; the planner is told what a manager tells it."""

    def __init__(self, device: int, host: int) -> None:
        self.device, self.host = BlockPool(CacheLevel.DEVICE, device), LocalHostTier(CacheLevel.HOST, host)
        self.copies: list[tuple[SwapPurpose, list[Pair]]] = []
        self.on_commit: Callable[[list[int], list[int]], None]
        self.on_match: Callable[[list[int], list[int]], None]
        self.on_evict: Callable[[list[BlockList]], None]
        self.plan_background: Callable[[int], None]

    @property
    def in_flight(self) -> int:
        return sum(len(pairs) for purpose, pairs in self.copies if purpose is SwapPurpose.BACKUP)

    def match(self, path: Path) -> None:
        lease = self.device.open_lease()
        run = self.device.match(lease, hashes(chain(*path)))
        self.on_match(run.slots.tolist(), run.hits.tolist())
        self.device.release(lease)

    def compute(self, wanted: list[Path]) -> None:
        """Serve requests side by side: match, reserve, commit."""
        for path in wanted:
            blocks = chain(*path)
            lease = self.device.open_lease()
            run = self.device.match(lease, hashes(blocks))
            self.on_match(run.slots.tolist(), run.hits.tolist())
            rest = blocks[len(run) :]
            taken, evicted = self.reserve(lease, len(rest))
            if rest and not taken.missing:
                self.on_evict(evicted)
                above = blocks[len(run) - 1] if len(run) else bytes(32)
                status = self.device.commit(lease, above, hashes(rest), taken.slots)
                self.on_commit(taken.slots.tolist()[: len(status)], status.tolist())
            self.device.release(lease)

    def reserve(self, lease: int, count: int) -> tuple[Reservation, list[BlockList]]:
        """Reserve slots as an allocation does, also those above blocks that are being copied."""
        taken = self.device.reserve(lease, count)
        way = self.device.evict_copied(taken.missing) if taken.missing else None
        if way is None:
            return taken, [taken.evicted]
        taken = self.device.reserve(lease, count)
        assert not taken.missing
        return taken, [way, taken.evicted]

    def evict(self, counts: list[int]) -> None:
        """Take slots as one allocation would, with several lists of evicted blocks."""
        lease = self.device.open_lease()
        self.on_evict([each for count in counts for each in self.reserve(lease, count)[1]])
        self.device.release(lease)

    def report(self, copied: int) -> None:
        """End the oldest transfer; bit i of ``copied`` says if block i was copied."""
        if not self.copies:
            return
        _, pairs = self.copies.pop(0)
        flags = np.array([copied >> (i % 8) & 1 for i in range(len(pairs))], np.uint8)
        self.host.complete(slots(target for _, target in pairs), flags, np.zeros(len(pairs), np.uint64))
        self.device.unhold(slots(source for source, _ in pairs))


class NativeSide(Side):
    """The planner under test."""

    def __init__(self, policy: WritePolicy, device: int, host: int) -> None:
        super().__init__(device, host)
        options = CacheSettings(
            device_blocks=device,
            write_policy=policy,
            write_through_threshold=THRESHOLD,
            clean_reserve=RESERVE,
        )
        self.counters = Counters()
        planner = self.planner = BackupPlanner(options, self.device, self.host, self.counters)
        plan = self.plan = OpenPlan()
        self.on_commit = lambda new, status: self.enqueue(new, status, STORED, planner.follows_commits)
        self.on_match = lambda seen, hits: self.enqueue(
            seen, hits, planner.follows_hits, planner.follows_hits > 0
        )
        self.on_evict = lambda evicted: planner.on_evict(evicted, plan)
        self.plan_background = lambda in_flight: planner.plan_background(plan, in_flight)

    def enqueue(self, device_slots: list[int], values: list[int], wanted: int, follows: bool) -> None:
        """Queue the blocks with this value, as the native side of the requests tells the planner of them."""
        chosen = [slot for slot, value in zip(device_slots, values, strict=True) if value == wanted]
        if follows and chosen:
            self.planner.enqueue(slots(chosen))

    def send(self) -> list[tuple[SwapPurpose, list[Pair]]]:
        """Take the step's plan, whose arrays describe the blocks in its slots."""
        sent = []
        for purpose in PURPOSES:
            swap = self.plan.swap(purpose)
            if swap is None:
                continue
            for copy in swap:
                node = self.host.node(copy.dst_block_id)
                assert (copy.hash_value, copy.dst_generation) == (node.hash, node.generation)
                parent = None if node.parent is None else self.host.node(node.parent)
                if parent is None or parent.findable:  # else the copy of the parent has failed meanwhile
                    assert copy.parent_hash == (bytes(32) if parent is None else parent.hash)
            sent.append((purpose, [(copy.src_block_id, copy.dst_block_id) for copy in swap]))
        self.copies += sent
        return sent


class OracleSide(Side):
    """The rules."""

    def __init__(self, policy: WritePolicy, device: int, host: int) -> None:
        super().__init__(device, host)
        rules = self.rules = BackupOracle(policy, THRESHOLD, RESERVE, device, host)
        rules.attach(self.device, self.host)
        self.on_commit = lambda new, status: rules.on_commit(new, [each == STORED for each in status])
        self.on_match = rules.on_match
        self.on_evict = rules.on_evict
        self.plan_background = rules.plan_background

    def send(self) -> list[tuple[SwapPurpose, list[Pair]]]:
        sent = [(purpose, self.rules.plans[purpose]) for purpose in PURPOSES if self.rules.plans[purpose]]
        self.rules.plans = {purpose: [] for purpose in PURPOSES}
        self.copies += sent
        return sent


@pytest.mark.parametrize("policy", WritePolicy)
@settings(max_examples=budget(400), deadline=None)
@given(done=operations, device=st.integers(4, 40), host=st.integers(1, 30))
def test_plans_follow_the_rules_block_by_block(
    policy: WritePolicy, done: list[tuple[str, object]], device: int, host: int
) -> None:
    native, oracle = NativeSide(policy, device, host), OracleSide(policy, device, host)
    for name, argument in done:
        if name == "step":
            assert native.in_flight == oracle.in_flight
            for side in (native, oracle):
                side.plan_background(side.in_flight)
            assert native.send() == oracle.send()
        else:
            for side in (native, oracle):
                getattr(side, name)(argument)
        assert native.planner.queued == len(oracle.rules.queue)
        assert native.counters.backups_dropped == oracle.rules.dropped
        for mine, theirs in ((native.device, oracle.device), (native.host, oracle.host)):
            assert mine.check_integrity() == []
            assert hash_list(mine.coldest(50).hashes) == hash_list(theirs.coldest(50).hashes)
            assert mine.stats().holds == theirs.stats().holds
