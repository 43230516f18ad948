"""What becomes of host blocks on their way to storage when there is no room, or no time."""

from __future__ import annotations

import pytest

from fdcache.manager.ledger import OpenPlan
from fdcache.manager.stats import Counters
from fdcache.manager.storage_index import LocalIndex
from fdcache.manager.stores import StorePlanner
from fdcache.metadata import CacheLevel
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.settings.storage_tier import StorageTierSettings
from fdcache.tiers import LocalHostTier
from tests.tier_help import chain, copy_in, hashes, store

PATH = chain(1, 2, 3, 4)


class Stage:
    """A host tier of 8 blocks above a storage of 16."""

    def __init__(self, policy: WritePolicy, **storage: int) -> None:
        self.host = LocalHostTier(CacheLevel.HOST, 8)
        self.index = LocalIndex.make(16)
        self.index.restore([])
        self.counters = Counters()
        self.stores = StorePlanner(
            CacheSettings(write_policy=policy),
            StorageTierSettings(**storage),
            self.host,
            self.index,
            self.counters,
        )
        self.host.on_evict = self.stores.on_evict

    def planned(self) -> int:
        plan = OpenPlan()
        self.stores.plan(plan, 0)
        return sum(order.swap.size for order in plan.storage)


def test_what_left_the_host_before_its_turn_is_dropped_and_counted() -> None:
    stage = Stage(WritePolicy.WRITE_THROUGH)
    store(stage.host, PATH)
    stage.stores.on_arrival(hashes(PATH))
    copy_in(stage.host, chain(*range(10, 16)))  # drives two of the four out
    assert [stage.planned(), stage.planned()] == [2, 0]
    assert stage.counters.stores_dropped == 2
    assert stage.stores.queued == 0


@pytest.mark.parametrize(("stored", "lost"), [(0, 2), (3, 1), (4, 0)])
def test_write_back_counts_what_leaves_the_host_before_it_is_stored(stored: int, lost: int) -> None:
    stage = Stage(WritePolicy.WRITE_BACK)
    store(stage.host, PATH)
    if stored:
        store(stage.index.pool, PATH[:stored])
    copy_in(stage.host, chain(*range(10, 16)))
    assert stage.counters.stores_dropped == lost


def test_a_full_queue_gives_up_its_oldest_blocks() -> None:
    stage = Stage(WritePolicy.WRITE_THROUGH, write_blocks=1)
    store(stage.host, PATH)
    stage.stores.on_arrival(hashes(PATH))
    for _ in range(16384 // 4):
        stage.stores.on_arrival(hashes(PATH))
    assert stage.stores.queued == 16384
    assert stage.counters.stores_dropped == 4
