"""Write policies: which hits count, and how backups keep the order of eviction."""

from __future__ import annotations

import random
import time
from collections import OrderedDict

import numpy as np
import pytest

from fdcache._core import MatchForms
from fdcache.hashing import hash_blocks, root_hash
from fdcache.manager import Request
from fdcache.manager.backups import BackupPlanner
from fdcache.manager.requests import LiveRequests
from fdcache.manager.results import MatchResult, MatchStatus
from fdcache.manager.tiers import Tiers
from fdcache.metadata import CacheLevel, SwapPurpose
from fdcache.plans.ledger import OpenPlan
from fdcache.settings.cache import CacheSettings, EvictionPolicy, WritePolicy
from fdcache.tiers.host import LocalHostTier
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.statistics import Counters
from tests.manager_world import TAIL, A, B, C, World, layout
from tests.property.engine_model import BLOCK
from tests.tier_help import chain, hash_list, hashes, store

TOKENS = list(range(3 * BLOCK))
FORMS = MatchForms(1, 0.0, MatchResult, MatchStatus.MATCHED, MatchStatus.DEFERRED)
PATH = hash_list(hash_blocks(TOKENS, BLOCK, parent=root_hash(layout().fingerprint)))


class Stage:
    """A device tier with ``PATH``; blocks are backed up at their third hit, the first being their computation."""

    def __init__(self) -> None:
        self.device = BlockPool(CacheLevel.DEVICE, 8)
        host = LocalHostTier(CacheLevel.HOST, 8)
        settings = CacheSettings(write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE, write_through_threshold=3)
        self.backups = BackupPlanner(settings, self.device, host, Counters())
        tiers = Tiers(
            host=host, storage=None, backups=self.backups, fetches=None, early=None, device=self.device
        )
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
    assert stage.backups.queued == 0
    assert [node.hit_count for node in stage.device.nodes(stage.device.find(hashes(PATH)).slots)] == [2, 2, 1]


def test_a_deferred_request_can_reach_the_threshold() -> None:
    stage, waiting = Stage(), request_for_path("waiting")
    stage.match_and_defer(request_for_path("earlier"), 2)
    for _ in range(3):
        stage.match_and_defer(waiting, 2)
    assert stage.backups.queued == 2


def test_only_blocks_that_are_new_to_the_request_are_hits() -> None:
    stage, request = Stage(), request_for_path("growing")
    stage.match_and_defer(request_for_path("earlier"), 3)
    stage.match_and_defer(request, 1)
    assert stage.backups.queued == 1
    stage.match_and_defer(request, 3)
    assert stage.backups.queued == 3


def test_backups_of_several_paths_come_to_rest_in_a_host_that_is_too_small_for_them() -> None:
    device, host = BlockPool(CacheLevel.DEVICE, 8), LocalHostTier(CacheLevel.HOST, 3)
    planner = BackupPlanner(CacheSettings(write_policy=WritePolicy.WRITE_THROUGH), device, host, Counters())
    other = chain(4, 5, 6)
    store(device, PATH)
    store(device, other)
    planner.enqueue(device.find(hashes([PATH[2], other[2]])).slots)
    for _ in range(12):
        plan = OpenPlan()
        planner.plan_background(plan, 0)
        swap = plan.swap(SwapPurpose.BACKUP)
        if swap is None:
            break
        host.complete(swap.dst_block_ids, np.ones(len(swap), np.uint8), np.zeros(len(swap), np.uint64))
        device.unhold(swap.src_block_ids)
    assert planner.queued == 0
    assert host.stats().ready == 3


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
