"""OffloadManager below several engines: at a service, and with storage that outlives the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples import offloading
from fdcache.errors import ConfigurationError, PlanError
from fdcache.groups import CacheGroup, Reach
from fdcache.manager import (
    KeyedRequest,
    LoadStatus,
    MatchStatus,
    OffloadManager,
    OffloadMatch,
    Request,
    offloaded,
)
from fdcache.metadata import CacheLevel, StorageScan
from fdcache.settings import Settings
from fdcache.settings.cache import PrefetchPolicy, WritePolicy
from fdcache.storage.slab import SlabStore
from fdcache.tiers.host import HostTier, find_and_pin
from tests.offload_engine import BLOCK, LAYOUT, OffloadEngine, ids, prompt
from tests.service_engine import ready_blocks
from tests.service_help import TIMEOUT, LocalService, local_service, until
from tests.storage_help import path_hashes, storage_layout
from tests.swaps import uniform_layout

STATE = CacheGroup(BLOCK, Reach.STATE)
STORED = storage_layout(block_size=BLOCK, num_layers=2)


def at_service(service: LocalService) -> OffloadEngine:
    engine = OffloadEngine(server=service.address, rpc_timeout=TIMEOUT)
    await_slots(engine)
    return engine


def await_slots(engine: OffloadEngine) -> None:
    until(lambda: engine.manager._host.index.room, "slots are granted")


def found(engine: OffloadEngine, request: Request, device_tokens: int = 0) -> OffloadMatch:
    """Return the first answer that does not defer the request."""
    while (match := engine.manager.match(request, device_tokens)).status is MatchStatus.DEFERRED:
        engine.step()
        engine.collect()
    return match


def load_all(engine: OffloadEngine, request: Request, into: list[int]) -> None:
    assert engine.manager.load(request, ids(*into)) == len(into)
    engine.step()
    (outcome,) = engine.collect()
    assert outcome.status is LoadStatus.CONFIRMED
    assert engine.holds(request, into)


# --- service ----------------------------------------------------------------------------------------------


def test_two_engines_at_one_service_share_blocks(tmp_path: Path) -> None:
    with local_service(tmp_path) as service:
        writer, reader = at_service(service), at_service(service)
        writer.stored("first", prompt(1, 2, 3), [0, 1, 2], tenant="acme")
        request = Request("second", prompt(1, 2, 3), tenant="acme")
        reader.manager.begin([request])
        while reader.manager.match(request, 0).num_tokens < 3 * BLOCK:
            reader.manager.unmatch([request])  # not all of it is published yet
        assert reader.manager.match(request, 0).num_tokens == 3 * BLOCK
        load_all(reader, request, [7, 4, 5])
        reader.manager.finish([request])
        writer.close()
        reader.close()
        assert service.ask("integrity") == []


def test_a_repeated_question_sends_nothing_and_a_new_session_is_asked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_service(tmp_path) as service:
        engine = at_service(service)
        engine.stored("first", prompt(1, 2), [0, 1])
        until(lambda: ready_blocks(service) == 2, "it is published")
        request = Request("second", prompt(1, 2))
        engine.manager.begin([request])
        assert found(engine, request).num_tokens == 2 * BLOCK
        host, link = engine.manager._host, engine.manager._host.service
        assert link is not None
        pinned = host.in_use
        for _ in range(5):
            assert engine.manager.match(request, BLOCK).num_tokens == BLOCK
        assert host.in_use == pinned
        asked: list[int] = []

        def counted(host: HostTier, hashes: Any, start: int, fetch: int = 0) -> Any:
            asked.append(start)
            return find_and_pin(host, hashes, start, fetch)

        monkeypatch.setattr(offloaded, "find_and_pin", counted)
        arena = link.arena
        sessions = host.sessions  # type: ignore[attr-defined]
        session = sessions.session
        sessions.lose(session, "the test")
        until(lambda: sessions.session is not None, "it registers again")
        assert link.arena != arena
        assert engine.manager.load(request, ids(6, 7)) == 0
        for _ in range(3):
            assert engine.manager.match(request, 0).num_tokens == 2 * BLOCK
        assert asked == [0]
        load_all(engine, request, [6, 7])
        engine.manager.finish([request])
        engine.close()


def test_the_service_reads_for_a_request_that_has_arrived(tmp_path: Path) -> None:
    settings = {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_DIR": str(tmp_path / "storage")}
    with local_service(tmp_path, **settings, FDCACHE_STORAGE_SIZE="4MiB") as service:
        engine = at_service(service)
        engine.stored("first", prompt(1, 2, 3), [0, 1, 2])
        until(lambda: service.ask("storage")["blocks"] == 3, "they are in storage")
        service.ask("reset", tier="host")
        request = Request("second", prompt(1, 2, 3))
        engine.manager.begin([request])
        until(lambda: engine.manager.match(request, 0).status is MatchStatus.MATCHED, "they are read")
        match = engine.manager.match(request, 0)
        assert (match.num_tokens, match.from_storage) == (3 * BLOCK, 3 * BLOCK)
        load_all(engine, request, [5, 6, 7])
        engine.manager.finish([request])
        engine.close()


def test_without_the_service_nothing_is_found_and_nothing_waits(tmp_path: Path) -> None:
    engine = OffloadEngine(server=f"ipc://{tmp_path}/none.sock")
    request = engine.stored("first", prompt(1, 2), [0, 1])
    assert not engine.manager.has_pending_work
    again = Request("again", request.tokens.tolist())
    engine.manager.begin([again])
    assert engine.manager.match(again, 0).num_tokens == 0
    engine.manager.finish([again])
    engine.close()


def test_blocks_that_wait_for_slots_of_the_service_are_stored_in_the_end(tmp_path: Path) -> None:
    with local_service(tmp_path) as service:
        engine = OffloadEngine(server=service.address, rpc_timeout=TIMEOUT, device_blocks=300)
        await_slots(engine)
        blocks = list(range(300))
        assert engine.manager.store_room < 300
        request = Request("first", prompt(*blocks))
        engine.manager.begin([request])
        engine.compute(request, blocks)
        engine.manager.offer(request, request.num_tokens, ids(*blocks))

        def is_done() -> bool:
            engine.step()
            engine.collect()
            return not engine.manager.has_pending_work

        until(is_done, "the service has granted slots")
        engine.manager.finish([request])
        counters = engine.manager.get_stats().counters
        assert (counters.blocks_backed_up, counters.backups_dropped) == (300, 0)
        engine.close()


def test_the_ranks_of_an_engine_may_each_have_a_manager_of_their_own(tmp_path: Path) -> None:
    shared = uniform_layout(block_size=BLOCK, num_layers=2, tp_size=2)
    with local_service(tmp_path) as service:
        ranks = [
            OffloadEngine(server=service.address, rpc_timeout=TIMEOUT, layout=shared.of_rank(rank))
            for rank in range(2)
        ]
        keys = path_hashes(4)
        for number, engine in enumerate(ranks):
            await_slots(engine)
            stored = KeyedRequest("first", keys[: 4 - number], BLOCK)
            engine.manager.begin([stored])
            for block_id, key in enumerate(stored.block_hashes):
                engine.fill(block_id, key.tobytes())
            engine.manager.offer(stored, stored.num_tokens, ids(0, 1, 2, 3))
            engine.settle()
            engine.manager.finish([stored])
            tail = KeyedRequest("second", keys[1:], BLOCK, parent=None)
            while engine.manager.match(tail, 0).num_tokens < (3 - number) * BLOCK:
                engine.manager.unmatch([tail])  # not all of it is published yet
            into = [9, 8, 7][: 3 - number]
            load_all(engine, tail, into)  # type: ignore[arg-type]
            engine.manager.finish([tail])
        for engine in ranks:
            engine.close()
        assert service.ask("integrity") == []


@pytest.mark.parametrize("is_loading", [False, True])
def test_a_manager_that_is_closed_finds_and_stores_nothing(tmp_path: Path, is_loading: bool) -> None:
    with local_service(tmp_path) as service:
        engine = at_service(service)
        engine.stored("first", prompt(1, 2), [0, 1])
        until(lambda: ready_blocks(service) == 2, "it is published")
        request = Request("second", prompt(1, 2))
        engine.manager.begin([request])
        found(engine, request)
        if is_loading:
            assert engine.manager.load(request, ids(6, 7)) == 2
            engine.step()
        engine.manager.close()
        if is_loading:
            (outcome,) = engine.collect()
            assert outcome.status is LoadStatus.CONFIRMED
        assert engine.manager.match(request, 0).num_tokens == 0
        other = Request("third", prompt(3, 4))
        engine.manager.begin([other])
        engine.manager.offer(other, other.num_tokens, ids(2, 3))
        engine.manager.evicted(ids(2, 3))
        assert engine.manager.take_plans() == []
        engine.manager.reset_cache()
        assert engine.manager.match(other, 0).num_tokens == 0
        engine.manager.finish([request])
        engine.manager.finish([other])
        engine.close()
        assert service.ask("integrity") == []


# --- storage ----------------------------------------------------------------------------------------------


def test_a_restarted_engine_reads_its_blocks_from_storage(tmp_path: Path) -> None:
    engine = OffloadEngine(layout=STORED, folder=tmp_path)
    engine.stored("first", prompt(1, 2, 3), [0, 1, 2])
    engine.settle()
    assert engine.manager.get_stats().counters.blocks_stored == 3
    engine.close()
    engine = OffloadEngine(layout=STORED, folder=tmp_path)
    assert engine.restored == 3
    request = Request("second", prompt(1, 2, 3))
    engine.manager.begin([request])
    assert engine.manager.match(request, 0).status is MatchStatus.DEFERRED
    match = found(engine, request)
    assert (match.num_tokens, match.from_storage) == (3 * BLOCK, 3 * BLOCK)
    match = engine.manager.match(request, BLOCK)
    assert (match.num_tokens, match.from_storage) == (2 * BLOCK, 2 * BLOCK)
    assert found(engine, request, 0).num_tokens == 3 * BLOCK
    load_all(engine, request, [5, 6, 7])
    engine.manager.finish([request])
    assert engine.manager.get_stats().counters.storage_hit_tokens == 3 * BLOCK
    engine.close()


def test_an_engine_that_steps_while_there_is_work_stores_everything(tmp_path: Path) -> None:
    engine = OffloadEngine(
        layout=STORED, folder=tmp_path, host_blocks=8
    )  # of which a quarter is written at a time
    request = Request("first", prompt(1, 2, 3, 4, 5, 6))
    engine.manager.begin([request])
    engine.compute(request, range(6))
    engine.manager.offer(request, request.num_tokens, ids(*range(6)))
    engine.manager.finish([request])
    while engine.manager.has_pending_work:
        engine.step()
        engine.collect()
    stats = engine.manager.get_stats()
    assert (stats.counters.blocks_stored, stats.queued_stores) == (6, 0)
    engine.close()


def test_a_storage_that_takes_nothing_is_no_pending_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(*arguments: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(SlabStore, "put", put)
    engine = OffloadEngine(layout=STORED, folder=tmp_path, host_blocks=8)
    request = Request("first", prompt(1, 2, 3, 4, 5, 6))
    engine.manager.begin([request])
    engine.compute(request, range(6))
    engine.manager.offer(request, request.num_tokens, ids(*range(6)))
    engine.manager.finish([request])
    while engine.manager.has_pending_work:
        engine.step()
        engine.collect()
    assert engine.manager.get_stats().queued_stores
    engine.manager.reset_cache()
    engine.close()


def test_best_effort_computes_what_is_still_being_read(tmp_path: Path) -> None:
    engine = OffloadEngine(layout=STORED, folder=tmp_path)
    engine.stored("first", prompt(1, 2), [0, 1])
    engine.settle()
    engine.close()
    engine = OffloadEngine(layout=STORED, folder=tmp_path, prefetch=PrefetchPolicy.BEST_EFFORT)
    request = Request("second", prompt(1, 2))
    engine.manager.begin([request])
    match = engine.manager.match(request, 0)
    assert (match.status, match.num_tokens) == (MatchStatus.MATCHED, 0)
    engine.manager.finish([request])
    engine.close()


def test_a_request_that_is_aborted_while_it_is_read_leaves_nothing_behind(tmp_path: Path) -> None:
    engine = OffloadEngine(layout=STORED, folder=tmp_path)
    engine.stored("first", prompt(1, 2), [0, 1])
    engine.settle()
    engine.close()
    engine = OffloadEngine(layout=STORED, folder=tmp_path)
    request = Request("second", prompt(1, 2))
    engine.manager.begin([request])
    engine.step()
    engine.manager.finish([request])
    engine.close()


def test_blocks_that_wait_to_be_written_are_work(tmp_path: Path) -> None:
    """An engine that has nothing else to do would leave them in host memory, where its end loses them."""
    engine = OffloadEngine(layout=STORED, folder=tmp_path)
    request = Request("first", prompt(1, 2))
    engine.manager.match(request, 0)
    engine.compute(request, [0, 1])
    engine.manager.offer(request, request.num_tokens, ids(0, 1))
    while engine.manager.has_pending_work:
        engine.step()
        engine.collect()
    assert engine.manager.get_stats().counters.blocks_stored == 2
    engine.manager.finish([request])
    engine.close()


def test_blocks_of_weights_loaded_in_place_are_of_this_process(tmp_path: Path) -> None:
    engine = OffloadEngine(layout=STORED, folder=tmp_path)
    before = engine.stored("before", prompt(1, 2), [0, 1])
    engine.settle()
    running = Request("running", prompt(3, 4))
    assert found(engine, running).num_tokens == 0
    assert engine.manager.weights_changed() == 4, "two on the host, two in storage"
    engine.manager.offer(running, running.num_tokens, ids(2, 3))
    engine.settle()
    assert engine.manager.get_stats().host.ready == 0  # type: ignore[union-attr]
    engine.manager.finish([running])
    engine.manager.finish([before])
    again = Request("again", prompt(1, 2))
    assert found(engine, again).num_tokens == 0
    engine.manager.finish([again])
    engine.stored("after", prompt(1, 2), [0, 1])
    engine.settle()
    second = Request("second", prompt(1, 2))
    assert found(engine, second).num_tokens == 2 * BLOCK
    engine.manager.finish([second])
    assert engine.manager.get_stats().counters.blocks_stored == 4
    engine.manager.check_integrity()
    engine.close()
    engine = OffloadEngine(layout=STORED, folder=tmp_path)
    assert engine.restored == 2
    third = Request("third", prompt(1, 2))
    assert found(engine, third).num_tokens == 0
    engine.manager.finish([third])
    engine.close()


def test_engines_that_are_told_of_the_same_weights_in_place_have_the_same_revision() -> None:
    revisions = []
    for version in ("step 10", "step 10", "step 11", None, None):
        engine = OffloadEngine(layout=STORED)
        engine.manager.weights_changed(version)
        revisions.append(engine.manager.layout.revision)
        engine.close()
    assert revisions[0] == revisions[1]
    assert len(set(revisions)) == 4
    assert all(each.startswith(f"{STORED.revision}+") for each in revisions)


def test_evicted_blocks_reach_storage_with_write_back(tmp_path: Path) -> None:
    engine = OffloadEngine(layout=STORED, folder=tmp_path, policy=WritePolicy.WRITE_BACK)
    request = engine.stored("first", prompt(1, 2), [0, 1])
    engine.manager.evicted(ids(0, 1))
    engine.settle()
    assert len(engine.manager.find_blocks(request)[CacheLevel.HOST]) == 2
    engine.close()


def test_storage_needs_a_scan_of_each_rank(tmp_path: Path) -> None:
    engine = OffloadEngine(layout=STORED, folder=tmp_path)
    scans: list[StorageScan] = []
    with pytest.raises(PlanError, match="each of the 1 ranks"):
        engine.manager.restore_storage(scans)
    engine.close()


# --- settings ---------------------------------------------------------------------------------------------


def test_settings_make_the_manager_and_its_events(tmp_path: Path) -> None:
    arguments = {
        "FDCACHE_HOST_MEMORY": "1MiB",
        "FDCACHE_BLOCK_SIZE": BLOCK,
        "FDCACHE_EVENT_BUFFER": 100,
        "FDCACHE_WRITE_POLICY": "write_through",
    }
    settings = Settings.load(environ={}, arguments=arguments)
    with OffloadManager.from_settings(LAYOUT, settings) as manager:
        engine = OffloadEngine(manager=manager)
        engine.stored("first", prompt(1, 2), [0, 1])
        assert [type(event).__name__ for event in manager.take_events()] == ["BlockStored", "BlockStored"]
        engine.close()


def test_storage_of_an_engine_at_a_service_is_refused(tmp_path: Path) -> None:
    arguments = {
        "FDCACHE_SERVER": f"ipc://{tmp_path}/s",
        "FDCACHE_STORAGE": "local",
        "FDCACHE_BLOCK_SIZE": BLOCK,
    }
    with pytest.raises(ConfigurationError, match="FDCACHE_STORAGE"):
        OffloadManager.from_settings(LAYOUT, Settings.load(environ={}, arguments=arguments))


def test_the_example_finds_its_prompts_below_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FDCACHE_STORAGE", "local")
    monkeypatch.setenv("FDCACHE_STORAGE_DIR", str(tmp_path))
    monkeypatch.setenv("FDCACHE_PREFETCH_POLICY", "wait_complete")
    for _ in range(2):
        offloading.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "first again: 64 tokens on the device, 32 below"
    assert lines[3] == "first: 0 tokens on the device, 96 below"


@pytest.mark.parametrize(
    "groups",
    [(STATE, CacheGroup(BLOCK)), (STATE,), (CacheGroup(BLOCK // 2, Reach.LAST, 6), CacheGroup(BLOCK))],
)
def test_groups_and_states_of_one_engine_are_found_by_another(
    tmp_path: Path, groups: tuple[CacheGroup, ...]
) -> None:
    with local_service(tmp_path) as service:
        layout = uniform_layout(block_size=BLOCK, num_layers=2, groups=groups)
        records, states = layout.page_records, layout.num_states
        first, second = (
            OffloadEngine(server=service.address, rpc_timeout=TIMEOUT, layout=layout, device_blocks=32)
            for _ in range(2)
        )
        await_slots(first)
        request, other = Request("a", prompt(1, 2, 3)), Request("b", prompt(1, 2, 3, 4))
        table = list(range(3 * records))
        first.manager.begin([request])
        first.manager.prepare([request])
        first.compute(request, table)
        first.manager.offer(request, 3 * BLOCK, ids(*table))
        kept = list(range(20, 20 + states))
        for block, key in zip(kept, first.state_keys(request, 3), strict=True):
            first.fill(block, key.tobytes())
        if states:
            first.manager.offer_states(request, 3 * BLOCK, ids(*kept), table[-1] if table else -1)
        first.settle()
        first.manager.finish([request])

        def is_found() -> bool:
            second.now += 1  # an answer is kept for a moment
            return second.manager.match(other, 0).num_tokens == 3 * BLOCK

        until(is_found, "the blocks of the other engine")
        engine_ends = second.manager.match(other, 0).ended_by
        hashes = [row.tobytes().hex() for row in other.block_hashes]
        told = service.ask("explain", namespace="", hashes=hashes)
        assert told["usable"] == 3
        assert engine_ends is not None
        assert told["ended_by"].startswith(f"{engine_ends + 1} of {len(groups)}: {groups[engine_ends].reach}")
        assert service.ask("explain", namespace="", hashes=hashes[:3])["ended_by"] is None
        into = list(range(3 * records + states))
        assert second.manager.load(other, ids(*into)) == len(into)
        second.step()
        (outcome,) = second.collect()
        assert outcome.status is LoadStatus.CONFIRMED
        assert second.holds(other, into[: 3 * records])
        assert second.hold_keys(into[3 * records :], second.state_keys(other, 3))
        second.manager.finish([other])
        first.close()
        second.close()
