"""New weights in place: nothing of the former ones is found again, and engines with the new ones share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fdcache.errors import ConfigurationError, LayoutError
from fdcache.manager import CacheManager, LoadStatus, Request
from fdcache.settings.cache import CacheSettings, StorageTierSettings, WritePolicy
from tests.service_engine import (
    PROMPT,
    Engine,
    assert_nothing_is_held,
    layout,
    ready_blocks,
)
from tests.service_help import LocalService, local_service, until


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    with local_service(tmp_path) as running:
        yield running


def registered(service: LocalService, revision: str, clients: int = 1) -> bool:
    """Return True if that many engines have the revision and slots to store into."""
    return [each["clients"] for each in service.ask("namespaces") if each["revision"] == revision] == [
        clients
    ]


def stored(service: LocalService) -> int:
    """Blocks that layouts with engines have."""
    return sum(each["tier"]["ready"] for each in service.ask("namespaces") if each["clients"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_old_blocks_are_never_found_and_new_ones_are_shared(service: LocalService, ranks: int) -> None:
    first, second = (Engine(service.address, layout(ranks=ranks)) for _ in range(2))
    first.serve(PROMPT)
    until(lambda: ready_blocks(service) == 10, "the blocks are stored")
    assert first.manager.change_revision("2") == 10
    until(lambda: registered(service, "2"), "it has registered with the new weights")
    first.await_stock()
    assert first.serve(PROMPT) == (0, [])  # neither on the device nor on the host
    until(lambda: ready_blocks(service) == 20, "the blocks of the new weights are stored beside the old ones")
    assert second.manager.change_revision("2") == 0
    until(lambda: registered(service, "2", 2), "the other engine follows")
    second.await_stock()
    found, outcomes = second.serve(PROMPT)
    assert found == 10
    assert [outcome.status for outcome in outcomes] == [LoadStatus.CONFIRMED]
    third = Engine(service.address, layout(ranks=ranks))
    assert third.serve(PROMPT)[0] == 10  # who still has the old weights finds the old blocks
    for engine in (first, second, third):
        engine.close()
    assert_nothing_is_held(service)


def test_what_was_found_before_is_stale_and_harmless(service: LocalService) -> None:
    engine = Engine(service.address)
    engine.serve(PROMPT)
    until(lambda: ready_blocks(service) == 10, "the blocks are stored")
    engine.manager._device.reset()
    request = Request("between", PROMPT)
    assert engine.manager.match_prefix([request])[0].num_host_blocks == 10
    engine.manager.change_revision("2")
    (allocation,) = engine.manager.allocate_device_blocks([(request, len(PROMPT))])
    outcomes = engine.carry_out(engine.manager.take_plans())
    assert not allocation.ok or all(outcome.status is LoadStatus.FAILED for outcome in outcomes)
    engine.manager.finish([request])
    until(lambda: registered(service, "2"), "it has registered with the new weights")
    engine.await_stock()
    assert engine.manager.match_prefix([request])[0].num_cached_tokens == 0
    engine.manager.finish([request])
    assert engine.serve(PROMPT)[0] == 0
    engine.close()
    assert_nothing_is_held(service)


def test_a_copy_under_way_ends_before_the_service_hears_of_the_new_weights(service: LocalService) -> None:
    engine = Engine(service.address)
    request = Request("writes", PROMPT)
    engine.manager.match_prefix([request])
    engine.manager.allocate_device_blocks([(request, len(PROMPT))])
    engine.carry_out(engine.manager.take_plans())
    engine.manager.commit([(request, len(PROMPT))])
    plans = engine.manager.take_plans()
    assert plans[0].backups is not None
    engine.manager.change_revision("2")
    assert not registered(service, "2")
    engine.carry_out(plans)
    until(lambda: registered(service, "2"), "it registers once the copies have ended")
    engine.manager.finish([request])
    engine.close()
    assert_nothing_is_held(service)


def test_blocks_of_new_weights_are_recovered(tmp_path: Path) -> None:
    service = LocalService(tmp_path)
    engine = Engine(service.address)
    engine.serve(PROMPT)
    engine.manager.change_revision("2")
    until(lambda: registered(service, "2"), "it has registered with the new weights")
    engine.await_stock()
    engine.serve(PROMPT)
    until(lambda: ready_blocks(service) == 20, "the blocks of both are stored")
    engine.close()
    service.crash()
    with local_service(tmp_path) as service:
        assert service.server.recovered == 20


def test_more_revisions_than_the_arena_has_extents_find_room(tmp_path: Path) -> None:
    with local_service(tmp_path, FDCACHE_HOST_MEMORY="1MiB") as service:
        engine = Engine(service.address, layout(ranks=2))
        extents = service.ask("stats")["tiers"]["host"]["extents"]
        for turn in range(2, extents + 2):
            engine.serve(PROMPT)
            until(lambda: stored(service), "blocks are stored")
            engine.manager.change_revision(str(turn))
            engine.await_stock()
        engine.serve(PROMPT)
        engine.close()
        other = Engine(service.address, layout(ranks=2).with_revision(str(extents + 1)))
        assert other.serve(PROMPT)[0] > 0
        other.close()
        assert_nothing_is_held(service)
        kept = {each["revision"] for each in service.ask("namespaces")}
        assert "1" not in kept
        assert str(extents) in kept  # the one that was used last is the last to go


class TestEmbedded:
    def engine(self) -> Engine:
        settings = CacheSettings(
            device_blocks=32, host_memory=1 << 20, write_policy=WritePolicy.WRITE_THROUGH
        )
        return Engine(None, settings=settings, stocked=False)

    def test_neither_tier_finds_the_old_blocks_and_a_preempted_request_is_hashed_anew(self) -> None:
        engine = self.engine()
        engine.serve(PROMPT)
        engine.serve(PROMPT)
        preempted = Request("preempted", PROMPT)
        assert engine.manager.match_prefix([preempted])[0].num_cached_tokens == 40
        engine.manager.finish([preempted])
        before = preempted.block_hashes.tobytes()
        assert engine.manager.change_revision("2") >= 20
        match = engine.manager.match_prefix([preempted])[0]
        assert match.num_cached_tokens == 0
        assert preempted.block_hashes.tobytes() != before
        engine.manager.finish([preempted])
        assert engine.serve(PROMPT) == (0, [])
        engine.manager._device.reset()
        assert engine.serve(PROMPT)[0] == 10
        engine.manager.check_integrity()
        engine.close()

    def test_a_running_request_publishes_nothing_more(self) -> None:
        engine = self.engine()
        request = Request("runs", PROMPT)
        engine.manager.match_prefix([request])
        engine.manager.allocate_device_blocks([(request, len(PROMPT))])
        engine.manager.change_revision("2")
        engine.manager.commit([(request, len(PROMPT))])
        engine.manager.finish([request])
        assert engine.serve(PROMPT) == (0, [])
        engine.close()

    def test_the_present_revision_is_refused(self) -> None:
        engine = self.engine()
        with pytest.raises(LayoutError, match="give new weights a new revision"):
            engine.manager.change_revision("1")
        engine.close()

    def test_a_storage_tier_belongs_to_one_revision(self, tmp_path: Path) -> None:
        storage = StorageTierSettings(connector="local", directory=tmp_path, size=1 << 20)
        manager = CacheManager(CacheSettings(host_memory=1 << 20), layout(), storage=storage)
        with pytest.raises(ConfigurationError, match="make a new one"):
            manager.change_revision("2")
