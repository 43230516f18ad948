"""The planner of copies to the host against its rules, block by block, above a device of its own and an engine's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache._core import BlockList, DeviceContents, DevicePath, Reservation
from fdcache.manager.copy_out import CopyOut
from fdcache.metadata import CacheLevel, SwapPurpose
from fdcache.plans.ledger import OpenPlan, PlanLedger
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.tiers.host import LocalHostTier
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.statistics import Counters
from tests.property.copy_out_oracle import CopyOutOracle, EngineDevice, OwnDevice, Pair, Path, known_of
from tests.seeds import budget
from tests.tier_help import ROOT_HASH, chain, hash_list, hashes, slots

THRESHOLD = 2
RESERVE = 5
STORED = 0
PURPOSES = (SwapPurpose.EVICT, SwapPurpose.BACKUP)
Families = tuple[int, ...]
families = st.lists(st.integers(0, 2), min_size=1, max_size=10).map(tuple)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("compute"), st.lists(families, min_size=1, max_size=5)),
        st.tuples(st.just("match"), families),
        st.tuples(st.just("evict"), st.integers(1, 8)),
        st.tuples(st.just("step"), st.booleans()),
        st.tuples(st.just("report"), st.integers(0, 255)),
    ),
    min_size=15,
    max_size=40,
)


class Side:
    """A device, a host tier and a planner; both sides of a test do the same."""

    def __init__(self, policy: WritePolicy, device: int, host: int, seed: int) -> None:
        self.policy, self.device_blocks = policy, device
        self.random = random.Random(seed)
        self.host = LocalHostTier(CacheLevel.HOST, host)
        self.copies: list[tuple[SwapPurpose, list[Pair]]] = []

    @property
    def in_flight(self) -> int:
        return sum(len(pairs) for purpose, pairs in self.copies if purpose is SwapPurpose.BACKUP)

    def report(self, copied: int) -> None:
        """End the oldest transfer; bit i of ``copied`` says if block i was copied."""
        if not self.copies:
            return
        _, pairs = self.copies.pop(0)
        flags = np.array([copied >> (i % 8) & 1 for i in range(len(pairs))], np.uint8)
        self.host.complete(slots(target for _, target in pairs), flags, np.zeros(len(pairs), np.uint64))
        self.unhold([source for source, _ in pairs])

    def unhold(self, held: list[int]) -> None:
        pass

    def order(self) -> list[bytes]:
        """Return what is compared of the device."""
        return []


class OwnSide(Side):
    """The device cache is a tier."""

    def __init__(self, policy: WritePolicy, device: int, host: int, seed: int) -> None:
        super().__init__(policy, device, host, seed)
        self.tier = BlockPool(CacheLevel.DEVICE, device)

    def evicted(self, blocks: BlockList) -> None:
        raise NotImplementedError

    def enqueue(self, device_slots: list[int]) -> None:
        raise NotImplementedError

    def match(self, path: Families) -> None:
        lease = self.tier.open_lease()
        self._hit(self.tier.match(lease, hashes(chain(*path))))
        self.tier.release(lease)

    def compute(self, wanted: list[Families]) -> None:
        """Serve requests side by side: match, reserve, commit."""
        for path in wanted:
            blocks = chain(*path)
            lease = self.tier.open_lease()
            run = self.tier.match(lease, hashes(blocks))
            self._hit(run)
            rest = blocks[len(run) :]
            taken = self._reserve(lease, len(rest))
            if rest and not taken.missing:
                above = blocks[len(run) - 1] if len(run) else ROOT_HASH
                status = self.tier.commit(lease, above, hashes(rest), taken.slots).tolist()
                new = taken.slots.tolist()[: len(status)]
                if self.policy is WritePolicy.WRITE_THROUGH:
                    self.enqueue([slot for slot, each in zip(new, status, strict=True) if each == STORED])
            self.tier.release(lease)

    def evict(self, count: int) -> None:
        lease = self.tier.open_lease()
        self._reserve(lease, count)
        self.tier.release(lease)

    def unhold(self, held: list[int]) -> None:
        self.tier.unhold(slots(held))

    def order(self) -> list[bytes]:
        assert self.tier.check_integrity() == []
        return [*hash_list(self.tier.coldest(50).hashes), bytes(self.tier.stats().holds)]

    def _hit(self, run: Any) -> None:
        if self.policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            hits = zip(run.slots.tolist(), run.hits.tolist(), strict=True)
            self.enqueue([slot for slot, count in hits if count == THRESHOLD])

    def _reserve(self, lease: int, count: int) -> Reservation:
        """Reserve slots as an allocation does, also those above blocks that are being copied."""
        taken, way = self.tier.reserve(lease, count), None
        if taken.missing and (way := self.tier.evict_copied(taken.missing)) is not None:
            taken = self.tier.reserve(lease, count)
            assert not taken.missing
        if not taken.missing:
            self.evicted(taken.evicted if way is None else joined(way, taken.evicted))
        return taken


def joined(first: BlockList, second: BlockList) -> BlockList:
    """Return the blocks of two lists as one."""
    made: Any = BlockList.__new__(BlockList)
    made.__setstate__(tuple(a + b for a, b in zip(first.__getstate__(), second.__getstate__(), strict=True)))
    return made  # type: ignore[no-any-return]


class EngineSide(Side):
    """The device cache is an engine's."""

    def __init__(self, policy: WritePolicy, device: int, host: int, seed: int) -> None:
        super().__init__(policy, device, host, seed)
        self.content: dict[int, bytes] = {}
        self.may_repeat = False
        """True if a block may be in several device blocks, and be given away twice at once."""
        self.lately: set[tuple[int, bytes]] = set()
        """Device blocks and what was in them since the history's last operation."""

    def give_away(self, ids: list[int]) -> None:
        raise NotImplementedError

    def offer(self, path: list[bytes], ids: list[int], counted: int) -> None:
        raise NotImplementedError

    def tell_coldest(self, ids: list[int]) -> None:
        raise NotImplementedError

    def on_device(self, blocks: list[bytes]) -> list[int]:
        here = {block: slot for slot, block in self.content.items()}
        kept = next((i for i, block in enumerate(blocks) if block not in here), len(blocks))
        return [here[block] for block in blocks[:kept]]

    def compute(self, wanted: list[Families]) -> None:
        """New requests compute their blocks, but for those that are on the device."""
        for path in wanted:
            blocks = chain(*path)
            have = self.on_device(blocks)
            if not self.may_repeat and set(blocks[len(have) :]) & set(self.content.values()):
                continue
            free = [slot for slot in range(self.device_blocks) if slot not in have]
            if len(free) < len(blocks) - len(have):
                continue
            new = self.random.sample(free, len(blocks) - len(have))
            self.evict_slots(new)
            entered = dict(zip(new, blocks[len(have) :], strict=True))
            self.content |= entered
            self.lately |= set(entered.items())
            self.offer(blocks, have + new, self.random.choice([0, len(have)]))

    def match(self, path: Families) -> None:
        """Another request uses blocks of a path that are on the device."""
        have = self.on_device(blocks := chain(*path))
        self.offer(blocks[: len(have)], have, 0)

    def evict(self, count: int) -> None:
        ids = [self.random.randrange(self.device_blocks + 3) for _ in range(count)]
        self.evict_slots(ids if self.may_repeat else list(dict.fromkeys(ids)))

    def evict_slots(self, ids: list[int]) -> None:
        self.give_away(ids)
        for slot in ids:
            self.content.pop(slot, None)


class Native(Side):
    """The planner under test."""

    def make(self, device: BlockPool | DeviceContents) -> None:
        options = CacheSettings(
            device_blocks=self.device_blocks,
            write_policy=self.policy,
            write_through_threshold=THRESHOLD,
            clean_reserve=RESERVE,
        )
        self.counters = Counters()
        self.planner = CopyOut(options, device, self.host, self.counters, lambda: 0.0)
        self.open, self.ledger = OpenPlan(), PlanLedger(1, 60.0)
        self.numbers: list[int] = []

    def step(self, is_patient: bool) -> None:
        self.planner.is_patient = is_patient
        self.planner.plan_background(self.open, self.in_flight)

    def send(self) -> list[tuple[SwapPurpose, list[Pair]]]:
        if not (self.open.evictions or self.open.backups):
            return []
        plan = self.ledger.send(self.open, 0.0)
        self.numbers.append(plan.plan_id)
        (swap,) = plan.swaps()
        for copy in swap:
            node = self.host.node(copy.dst_block_id)
            assert (copy.hash_value, copy.dst_generation) == (node.hash, node.generation)
            parent = None if node.parent is None else self.host.node(node.parent)
            if parent is None or parent.findable:  # else the copy of the parent has failed meanwhile
                assert copy.parent_hash == (ROOT_HASH if parent is None else parent.hash)
        pairs = [(copy.src_block_id, copy.dst_block_id) for copy in swap]
        self.copies.append((swap.purpose, pairs))
        return [(swap.purpose, pairs)]

    def report(self, copied: int) -> None:
        if self.numbers:
            self.ledger.remove(self.ledger.plans[self.numbers.pop(0)])
        super().report(copied)

    def figures(self) -> tuple[int, int]:
        return self.planner.queued, self.counters.backups_dropped


class NativeOwn(Native, OwnSide):
    """The planner above a tier."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.make(self.tier)

    def evicted(self, blocks: BlockList) -> None:
        self.planner.evict(blocks, self.open)

    def enqueue(self, device_slots: list[int]) -> None:
        self.planner.enqueue(slots(device_slots))


class NativeEngine(Native, EngineSide):
    """The planner above what an engine has told."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.contents = DeviceContents()
        self.make(self.contents)
        self.read_by: dict[int, int] = {}

    def give_away(self, ids: list[int]) -> None:
        readers = {self.read_by[slot] for slot in ids if self.read_by.get(slot) in self.numbers}
        self.planner.give_away(slots(ids), self.contents, self.open, self.ledger)
        assert set(self.open.take_after()) == readers

    def offer(self, path: list[bytes], ids: list[int], counted: int) -> None:
        offered = DevicePath(ROOT_HASH)
        offered.extend(hashes(path), slots(ids))
        self.contents.offered(offered, 0, counted)

    def tell_coldest(self, ids: list[int]) -> None:
        self.contents.next_evicted(slots(ids))

    def send(self) -> list[tuple[SwapPurpose, list[Pair]]]:
        sent = super().send()
        for _, pairs in sent:
            self.contents.sent(self.numbers[-1], slots(source for source, _ in pairs))
            self.read_by |= dict.fromkeys([source for source, _ in pairs], self.numbers[-1])
        return sent


class Oracle(Side):
    """The rules."""

    def make(self, device: Any) -> None:
        self.rules = CopyOutOracle(self.policy, THRESHOLD, RESERVE, device, self.host)

    def step(self, is_patient: bool) -> None:
        self.rules.plan(self.in_flight, is_patient=is_patient)

    def send(self) -> list[tuple[SwapPurpose, list[Pair]]]:
        sent = [(purpose, self.rules.plans[purpose]) for purpose in PURPOSES if self.rules.plans[purpose]]
        self.rules.plans = {purpose: [] for purpose in PURPOSES}
        self.copies += sent
        return sent

    def figures(self) -> tuple[int, int]:
        return len(self.rules.queue), self.rules.dropped


class OracleOwn(Oracle, OwnSide):
    """The rules above a tier."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.make(OwnDevice(self.tier))

    def evicted(self, blocks: BlockList) -> None:
        self.rules.evict(known_of(blocks))

    def enqueue(self, device_slots: list[int]) -> None:
        self.rules.enqueue(device_slots)


class OracleEngine(Oracle, EngineSide):
    """The rules above what an engine has told. Offers are looked at together, before what depends on them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.contents = EngineDevice()
        self.make(self.contents)
        self.offered: list[int] = []

    def take_offered(self) -> None:
        self.rules.offered(self.offered)
        self.offered = []

    def give_away(self, ids: list[int]) -> None:
        self.take_offered()
        self.rules.evict([block for slot in ids if (block := self.contents.block(slot))])
        self.contents.forget(ids)

    def offer(self, path: list[bytes], ids: list[int], counted: int) -> None:
        self.offered += self.contents.offer(Path(path, ids), 0, counted)

    def tell_coldest(self, ids: list[int]) -> None:
        self.contents.tell(ids)

    def step(self, is_patient: bool) -> None:
        self.take_offered()
        super().step(is_patient)

    def figures(self) -> tuple[int, int]:
        self.take_offered()
        return super().figures()


@pytest.mark.parametrize("owner", ["own", "engine"])
@pytest.mark.parametrize("policy", WritePolicy)
@settings(max_examples=budget(400), deadline=None)
@given(done=operations, device=st.integers(4, 40), host=st.integers(1, 30), seed=st.integers(0, 2**32))
def test_plans_follow_the_rules_block_by_block(
    owner: str, policy: WritePolicy, done: list[tuple[str, Any]], device: int, host: int, seed: int
) -> None:
    made: tuple[Any, Any] = (NativeOwn, OracleOwn) if owner == "own" else (NativeEngine, OracleEngine)
    native, oracle = (each(policy, device, host, seed) for each in made)
    for name, argument in done:
        if name == "step" and owner == "engine":
            for side in (native, oracle):
                side.tell_coldest(side.random.sample(range(device), min(device, RESERVE + 1)))
        for side in (native, oracle):
            getattr(side, name)(argument)
        assert native.send() == oracle.send()
        assert native.figures() == oracle.figures()
        assert native.order() == oracle.order()
        assert native.host.check_integrity() == []
        assert hash_list(native.host.coldest(50).hashes) == hash_list(oracle.host.coldest(50).hashes)


@pytest.mark.parametrize("policy", WritePolicy)
@settings(max_examples=budget(400), deadline=None)
@given(done=operations, device=st.integers(4, 40), host=st.integers(1, 30), seed=st.integers(0, 2**32))
def test_plans_above_the_device_of_an_engine_copy_what_its_blocks_hold_below_their_parents(
    policy: WritePolicy, done: list[tuple[str, Any]], device: int, host: int, seed: int
) -> None:
    native = NativeEngine(policy, device, host, seed)
    native.may_repeat = True
    for name, argument in done:
        if name == "step":
            told = native.random.sample(range(device), min(device, RESERVE + 1))
            native.tell_coldest(told)
        native.lately = set(native.content.items())
        getattr(native, name)(argument)
        for _, pairs in native.send():  # which looks at parents and generations
            assert len({target for _, target in pairs}) == len(pairs)
            assert {(source, native.host.node(target).hash) for source, target in pairs} <= native.lately
        assert native.host.check_integrity() == []
    while native.copies or native.planner.queued:
        native.report(255)
        native.step(is_patient=False)
        native.send()
    assert native.host.check_integrity() == []
