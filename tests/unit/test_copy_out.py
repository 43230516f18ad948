"""The way out of a device: which hits count, room that is missing, and how backups keep the order of eviction."""

from __future__ import annotations

import random
import time
from collections import OrderedDict

import numpy as np
import pytest

from fdcache._core import (
    DeviceContents,
    DevicePath,
    HostIndex,
    MatchForms,
    OutgoingCopies,
    PresenceTable,
    SharedHost,
    SharedRuns,
    Tier,
)
from fdcache.hashing import hash_blocks, root_hash
from fdcache.manager import Request
from fdcache.manager.copy_out import CopyOut
from fdcache.manager.requests import LiveRequests
from fdcache.manager.results import MatchResult, MatchStatus
from fdcache.manager.tiers import Tiers
from fdcache.metadata import CacheLevel, CacheSwapMetadata, SwapPurpose
from fdcache.plans.ledger import OpenPlan
from fdcache.settings.cache import CacheSettings, EvictionPolicy, WritePolicy
from fdcache.tiers.host import LocalHostTier
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.statistics import Counters
from tests.manager_world import TAIL, A, B, C, World, layout
from tests.property.engine_model import BLOCK
from tests.tier_help import ROOT_HASH, chain, hash_list, hashes, slots, store
from tests.unit.test_shared_memory import memory

TOKENS = list(range(3 * BLOCK))
FORMS = MatchForms(1, 0.0, MatchResult, MatchStatus.MATCHED, MatchStatus.DEFERRED)
PATH = hash_list(hash_blocks(TOKENS, BLOCK, parent=root_hash(layout().fingerprint)))


class Stage:
    """A device tier with ``PATH``; blocks are backed up at their third hit, the first being their computation."""

    def __init__(self) -> None:
        self.device = BlockPool(CacheLevel.DEVICE, 8)
        host = LocalHostTier(CacheLevel.HOST, 8)
        settings = CacheSettings(write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE, write_through_threshold=3)
        self.copies = CopyOut(settings, self.device, host, Counters(), time.monotonic)
        tiers = Tiers(host=host, storage=None, copies=self.copies, device=self.device)
        self.requests = LiveRequests(settings, layout(), tiers, Counters())
        store(self.device, PATH)

    def match_and_defer(self, request: Request, blocks: int) -> None:
        """Match a request and defer it."""
        request.max_cached_tokens = blocks * BLOCK
        self.requests.match([request], FORMS, time.monotonic)
        assert request.num_blocks == blocks
        self.requests.unmatch(request)


def request_for_path(request_id: str) -> Request:
    """Return a request whose first blocks are those of ``PATH``."""
    return Request(request_id, [*TOKENS, 0])


def test_a_request_that_is_matched_again_hits_a_block_once() -> None:
    stage, waiting = Stage(), request_for_path("waiting")
    for _ in range(5):
        stage.match_and_defer(waiting, 2)
    assert stage.copies.queued == 0
    assert [node.hit_count for node in stage.device.nodes(stage.device.find(hashes(PATH)).slots)] == [2, 2, 1]


def test_a_deferred_request_can_reach_the_threshold() -> None:
    stage, waiting = Stage(), request_for_path("waiting")
    stage.match_and_defer(request_for_path("earlier"), 2)
    for _ in range(3):
        stage.match_and_defer(waiting, 2)
    assert stage.copies.queued == 2


def test_only_blocks_that_are_new_to_the_request_are_hits() -> None:
    stage, request = Stage(), request_for_path("growing")
    stage.match_and_defer(request_for_path("earlier"), 3)
    stage.match_and_defer(request, 1)
    assert stage.copies.queued == 1
    stage.match_and_defer(request, 3)
    assert stage.copies.queued == 3


class Planner:
    """A planner of write_through above 8 device blocks, which are a tier's or an engine's."""

    def __init__(self, owner: str, host: HostIndex) -> None:
        self.now = 0.0
        self.counters = Counters()
        self.plan = OpenPlan()
        self.device: BlockPool | DeviceContents
        self.device = BlockPool(CacheLevel.DEVICE, 8) if owner == "own" else DeviceContents()
        self.used = 0
        policy = CacheSettings(write_policy=WritePolicy.WRITE_THROUGH)
        self.copies = CopyOut(policy, self.device, host, self.counters, lambda: self.now)

    def compute(self, path: list[bytes]) -> None:
        """Let the device have a path that is wanted on the host."""
        if isinstance(self.device, BlockPool):
            self.copies.enqueue(slots(store(self.device, path)))
            return
        offered = DevicePath(ROOT_HASH)
        offered.extend(hashes(path), slots(range(self.used, self.used + len(path))))
        self.used += len(path)
        self.device.offered(offered, 0, 0)

    def step(self, in_flight: int = 0) -> CacheSwapMetadata | None:
        self.copies.plan_background(self.plan, in_flight)
        return self.plan.swap(SwapPurpose.BACKUP)

    def end(self, swap: CacheSwapMetadata) -> None:
        if isinstance(self.device, BlockPool):
            self.device.unhold(swap.src_block_ids)


@pytest.fixture(params=["own", "engine"])
def owner(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_backups_of_several_paths_come_to_rest_in_a_host_that_is_too_small_for_them(owner: str) -> None:
    host = LocalHostTier(CacheLevel.HOST, 3)
    planner = Planner(owner, host)
    planner.compute(PATH)
    planner.compute(chain(4, 5, 6))
    for _ in range(12):
        swap = planner.step()
        if swap is None:
            break
        host.complete(swap.dst_block_ids, np.ones(len(swap), np.uint8), np.zeros(len(swap), np.uint64))
        planner.end(swap)
    assert planner.copies.queued == 0
    assert host.stats().ready == 3


class Elsewhere:
    """The host tier of a service, as far as a planner asks for it."""

    def __init__(self) -> None:
        shared = memory(32)
        Tier(32).mirror(shared)
        view = PresenceTable(shared)
        self.runs, self.copies = SharedRuns(view, np.zeros(1 << 12, np.uint8)), OutgoingCopies(view)
        self.copies.tier_slots = 32
        self.host = SharedHost()

    def begin_session(self) -> None:
        self.host.begin_session(self.runs, self.copies)

    def grant(self, *granted: int) -> None:
        self.copies.grant(slots(granted), np.array(granted, np.uint32))


def test_blocks_wait_a_second_for_slots_of_a_service_and_are_dropped_then(owner: str) -> None:
    host = Elsewhere()
    host.begin_session()
    planner = Planner(owner, host.host)
    planner.compute(PATH)
    host.grant(5)
    first = planner.step()
    assert first is not None
    assert (len(first), planner.copies.queued, host.copies.take_asked()) == (1, 2, 3)
    planner.now = 0.9
    assert planner.step(1) is None
    host.grant(6)
    second = planner.step(1)
    assert second is not None
    assert second.parent_hashes[0].tobytes() == PATH[0]
    for planner.now, queued, dropped in ((1.0, 1, 0), (1.8, 1, 0), (2.0, 0, 1)):
        assert planner.step(2) is None
        assert (planner.copies.queued, planner.counters.backups_dropped) == (queued, dropped)


def test_blocks_stay_queued_while_there_is_no_service(owner: str) -> None:
    host = Elsewhere()
    planner = Planner(owner, host.host)
    planner.compute(PATH)
    for planner.now in (0.0, 60.0):
        assert planner.step() is None
    assert (planner.copies.queued, planner.copies.has_work, planner.counters.backups_dropped) == (3, False, 0)
    host.begin_session()
    assert planner.copies.has_work
    host.grant(5, 6, 7)
    swap = planner.step()
    assert swap is not None
    assert len(swap) == 3


def test_blocks_evicted_together_keep_their_order_in_the_host() -> None:
    world = World(device=6, host=12, policy=WritePolicy.WRITE_BACK, clean_reserve=0)
    for prompt in ((*A, *B), B, C):
        world.serve(*prompt, *TAIL)
    order = hash_list(world.manager._device.coldest(6).hashes)
    world.serve(*(7,) * 6 * BLOCK)
    host = world.manager._host
    assert isinstance(host, LocalHostTier)
    assert hash_list(host.coldest(4).hashes) == order


@pytest.mark.parametrize(
    ("policy", "reserve"),
    [*((policy, 10) for policy in WritePolicy), (WritePolicy.WRITE_BACK, 0)],
)
def test_device_hits_equal_those_of_an_exact_lru(policy: WritePolicy, reserve: int) -> None:
    world = World(device=50, host=200, policy=policy, clean_reserve=reserve, eviction=EvictionPolicy.LRU)
    draw = random.Random(3)
    lru: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number in range(500):
        block = draw.randrange(20) if draw.random() < 0.6 else 1000 + number
        hits += block in lru
        lru[block] = None
        lru.move_to_end(block)
        # The last token's block is the request's own, and goes with it.
        while len(lru) > 49:
            lru.popitem(last=False)
        world.serve(*(block,) * BLOCK, *TAIL)
    assert hits > 200
    assert world.manager.get_stats().counters.device_hit_tokens == hits * BLOCK


@pytest.mark.parametrize("asked", [1, 4])
def test_a_request_that_waits_for_a_load_counts_one_hit(asked: int) -> None:
    world = World(host=8)
    world.serve(*A, *B, *TAIL)
    world.manager.sleep()
    world.manager.wakeup()
    world.serve(*A, *TAIL)
    world.engine.schedule([world.submit(*A, *B, *TAIL)], 100)
    waiting = world.submit(*A, *B, *TAIL)
    for _ in range(asked):
        world.engine.schedule([waiting], 100)
    assert not waiting.running
    device = world.manager.find_blocks(waiting.request)[CacheLevel.DEVICE]
    assert device[0].hit_count == 3
