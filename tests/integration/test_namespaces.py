"""Shares of the arena: memory that moves from one namespace to another."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from fdcache.hashing import hash_blocks, root_hash
from fdcache.service.server.clients import RegisteredClient
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.namespaces import Reclaims
from tests.service_engine import PROMPT, Engine, assert_nothing_is_held, layout
from tests.service_help import LocalService, local_service, until

EXTENTS = 16


def namespace_of(service: LocalService, engine: Engine) -> Namespace:
    found: Namespace = service.service.namespaces[engine.layout.fingerprint]
    return found


def only_client(service: LocalService) -> RegisteredClient:
    (client,) = service.service.clients.values()
    return client  # type: ignore[no-any-return]


def extents(service: LocalService, engine: Engine) -> int:
    """Return the extents of an engine's namespace."""
    counts = {each["namespace"]: each["extents"] for each in service.ask("namespaces")}
    return int(counts.get(engine.layout.fingerprint.hex()[:16], 0))


def fill(service: LocalService, engine: Engine, wanted: int) -> None:
    """Serve prompts until the engine's namespace has that many extents."""
    prompt = 0

    def has_them() -> bool:
        nonlocal prompt
        prompt += 1
        engine.serve([1000 + prompt, *PROMPT])
        return extents(service, engine) >= wanted

    until(has_them, f"{wanted} extents")


ARENA = {"FDCACHE_HOST_MEMORY": "1MiB"}


def test_stock_of_an_idle_engine_is_reclaimed_for_another_namespace(
    tmp_path: Path,
) -> None:
    with local_service(tmp_path, **ARENA) as service:
        idle = Engine(service.address)
        fill(service, idle, EXTENTS)
        theirs = namespace_of(service, idle)
        last_extent = theirs.num_slots - theirs.geometry.records_per_extent
        until(
            lambda: max(only_client(service).stock, default=0) >= last_extent,
            "its stock lies in the last extent too",
        )
        other = Engine(service.address, layout("other"))
        fill(service, other, EXTENTS // 2)
        assert extents(service, idle) == EXTENTS // 2
        third = Engine(service.address)
        hashes = hash_blocks(PROMPT, 4, parent=root_hash(idle.layout.fingerprint))
        idle.serve(PROMPT)

        def is_stored() -> bool:
            idle.carry_out(idle.manager.take_plans())
            return bool((third.manager._host.index.contains(hashes) == 1).all())  # type: ignore[union-attr]

        until(is_stored, "it goes on storing")
        assert third.serve(PROMPT)[0] == 10
        for engine in (idle, other, third):
            engine.close()
        assert_nothing_is_held(service)


def test_a_namespace_at_its_quota_takes_no_extents_from_others(tmp_path: Path) -> None:
    service = LocalService(tmp_path, **ARENA)
    engine = Engine(service.address)
    fill(service, engine, EXTENTS)
    engine.close()
    service.crash()
    with local_service(tmp_path, **ARENA, FDCACHE_NAMESPACE_QUOTA="0.25") as service:
        first = Engine(service.address)
        second = Engine(service.address, layout("other"))
        assert extents(service, first) < EXTENTS
        fill(service, second, EXTENTS // 4)
        rest = extents(service, first)
        evicted = namespace_of(service, second).history.totals.evicted
        prompts = count(5000)

        def evicts() -> bool:
            second.serve([next(prompts), *PROMPT])
            return namespace_of(service, second).history.totals.evicted > evicted

        until(evicts, "it evicts its own")
        assert extents(service, first) == rest == EXTENTS * 3 // 4
        first.close()
        second.close()
        assert_nothing_is_held(service)


def test_a_reclaim_without_success_ends_by_itself_and_is_not_repeated_at_once(tmp_path: Path) -> None:
    with local_service(tmp_path, **ARENA) as service:
        engine = Engine(service.address)
        giver = namespace_of(service, engine)
        first = giver.num_slots - giver.geometry.records_per_extent
        now, sent = 100.0, []
        reclaims = Reclaims(lambda: now)
        for moment, held, times in ((100.0, True, 1), (102.0, True, 1), (103.0, False, 1), (113.0, True, 2)):
            now = moment
            reclaims.begin(giver)
            sent += [recall.first for _, recall in reclaims.take_new()]
            assert (reclaims.is_held(giver), sent) == (held, [first] * times)
        reclaims.end()
        assert not reclaims.is_held(giver)
        reclaims.begin(giver)
        assert reclaims.is_held(giver), "after a success the extent may be reclaimed again"
        engine.close()
