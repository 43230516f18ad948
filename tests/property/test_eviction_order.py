"""Device, host and storage evict in order of last use, with any copies between them."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from fdcache import _core
from fdcache.layout import KVLayout
from fdcache.manager import CacheManager
from fdcache.settings.cache import CacheSettings, EvictionPolicy, WritePolicy
from tests.property.eviction_witness import EvictionWitness
from tests.property.test_manager import bounded
from tests.property.test_manager_storage import StorageMachine
from tests.seeds import budget


class OrderMachine(StorageMachine):
    """The manager with storage, and a witness at each tier."""

    policy: WritePolicy
    evicted = passed_over = 0

    def make_manager(self, cache: CacheSettings, layout: KVLayout) -> CacheManager:
        cache = cache.model_copy(update={"write_policy": self.policy, "eviction": EvictionPolicy.LRU})
        manager = super().make_manager(cache, layout)
        witnesses = []
        for pool in manager._tiers.pools.values():
            assert isinstance(pool, _core.Tier)
            witnesses.append(EvictionWitness(pool))
        requests = manager._requests
        requests._blocks = witnesses[0].of_requests(requests._blocks, witnesses[1])
        manager._plans._reports = witnesses[0].of_reports(manager._plans._reports, witnesses[1])
        if (copies := manager._tiers.copies) is not None:
            copies._native = witnesses[1].of_copies(copies._native, witnesses[0])
        self.witnesses.extend(witnesses)
        return manager

    @property
    def witnesses(self) -> list[EvictionWitness]:
        witnesses: list[EvictionWitness] = self.__dict__.setdefault("_witnesses", [])
        return witnesses

    def teardown(self) -> None:
        super().teardown()
        type(self).evicted += sum(witness.evicted for witness in self.witnesses)
        type(self).passed_over += sum(witness.passed_over for witness in self.witnesses)


def check(policy: WritePolicy, examples: int, steps: int) -> None:
    machine: type[OrderMachine] = type(f"{policy.name.title()}Machine", (OrderMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=bounded(examples, steps))
    assert machine.evicted
    assert machine.passed_over


@pytest.mark.parametrize("policy", WritePolicy)
def test_copies_between_tiers_keep_every_eviction_order(policy: WritePolicy) -> None:
    check(policy, examples=20, steps=25)


@pytest.mark.slow
@pytest.mark.parametrize("policy", WritePolicy)
def test_copies_between_tiers_keep_every_eviction_order_in_long_histories(policy: WritePolicy) -> None:
    check(policy, examples=budget(400), steps=50)
