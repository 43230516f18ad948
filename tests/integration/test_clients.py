"""Sessions that end or are replaced: copies, pins and figures are neither lost nor counted twice."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fdcache.hashing import hash_blocks, root_hash
from fdcache.manager import LoadStatus, Request
from fdcache.metadata import TransferPlan
from fdcache.service.client.remote_tier import RemoteHostTier
from tests.service_engine import (
    BLOCK,
    PROMPT,
    Engine,
    assert_nothing_is_held,
    ready_blocks,
    totals,
)
from tests.service_help import LocalService, local_service, service_process, until


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    with local_service(tmp_path) as running:
        yield running


@pytest.fixture
def hurried_threads() -> Iterator[None]:
    """Let threads switch as often as possible, so that their steps interleave in many orders."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def namespace(service: LocalService, revision: str) -> dict[str, Any]:
    (found,) = (each for each in service.ask("namespaces") if each["revision"] == revision)
    return dict(found)


def host_of(engine: Engine) -> RemoteHostTier:
    host = engine.manager._host
    assert isinstance(host, RemoteHostTier)
    return host


def compute(engine: Engine, request: Request) -> list[TransferPlan]:
    """Compute blocks and plan their backup without carrying it out."""
    engine.manager.match_prefix([request])
    engine.manager.allocate_device_blocks([(request, request.num_tokens)])
    engine.carry_out(engine.manager.take_plans())
    engine.manager.commit([(request, request.num_tokens)])
    return engine.manager.take_plans()


class TestChangeOfLayout:
    def test_copies_in_flight_are_stored_under_the_former_layout(
        self, service: LocalService, hurried_threads: None
    ) -> None:
        engine = Engine(service.address, device_blocks=64)
        for turn in range(1, 11):
            request = Request(f"r{turn}", PROMPT)
            plans = compute(engine, request)
            assert plans[0].backups is not None
            engine.manager.change_revision(str(turn + 1))
            engine.carry_out(plans)
            engine.manager.finish([request])
            until(lambda: host_of(engine).index.room, "it has registered with the new layout")
            former = namespace(service, str(turn))
            assert (former["tier"]["ready"], former["clients"]) == (10, 0)
        engine.close()
        assert_nothing_is_held(service)

    def test_a_registration_in_flight_is_not_taken_for_one_of_the_new_layout(self, tmp_path: Path) -> None:
        with service_process(tmp_path / "s") as service:
            assert service.process is not None
            service.process.send_signal(signal.SIGSTOP)
            engine = Engine(service.address, stocked=False, rpc_timeout=0.1)
            engine.manager.change_revision("2")
            service.process.send_signal(signal.SIGCONT)
            engine.await_stock()
            engine.serve(PROMPT)
            until(lambda: ready_blocks(service) == 10, "the blocks are stored")
            revisions = {each["revision"]: each["tier"]["ready"] for each in service.ask("namespaces")}
            assert (revisions.get("1", 0), revisions["2"]) == (0, 10)
            engine.close()
            assert_nothing_is_held(service)

    def test_blocks_of_a_load_in_flight_stay_pinned(self, service: LocalService) -> None:
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: ready_blocks(service) == 10, "the blocks are stored")
        engine.manager._device.reset()
        request = Request("reads", PROMPT)
        assert engine.manager.match_prefix([request])[0].num_host_blocks == 10
        engine.manager.allocate_device_blocks([(request, len(PROMPT))])
        plans = engine.manager.take_plans()
        engine.manager.change_revision("2")
        (leaving,) = service.service.clients.values()
        begin = time.monotonic()
        until(lambda: leaving.heartbeat_at > begin + 2, "it sends heartbeats while it leaves")
        assert leaving.runs
        engine.carry_out(plans)
        engine.manager.finish([request])
        until(lambda: namespace(service, "1")["clients"] == 0, "it has left")
        engine.close()
        assert_nothing_is_held(service)

    def test_a_corrupt_block_of_a_load_in_flight_is_dropped(self, tmp_path: Path) -> None:
        service = LocalService(tmp_path)
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: ready_blocks(service) == 10, "the blocks are stored")
        hashes = hash_blocks(PROMPT, BLOCK, parent=root_hash(engine.layout.fingerprint))
        engine.close()
        (own,) = service.service.namespaces.values()
        own.memory.tables[0].record(int(own.tier.find(hashes).slots[4]))[17] ^= 1
        service.crash()
        with local_service(tmp_path) as service:
            engine = Engine(service.address)
            request = Request("reads", PROMPT)
            assert engine.manager.match_prefix([request])[0].num_host_blocks == 10
            engine.manager.allocate_device_blocks([(request, len(PROMPT))])
            plans = engine.manager.take_plans()
            engine.manager.change_revision("2")
            (outcome,) = engine.carry_out(plans)
            assert outcome.status is LoadStatus.FAILED
            engine.manager.finish([request])
            until(lambda: namespace(service, "1")["totals"]["corrupt"] == 1, "the service has heard of it")
            engine.close()
            assert_nothing_is_held(service)


class TestTotals:
    def test_misses_are_counted_before_the_blocks_are_stored(self, service: LocalService) -> None:
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: ready_blocks(service) == 10, "the blocks are stored")
        engine.manager.reset_cache()
        engine.await_stock()
        longer = [*PROMPT[:24], *range(500, 517)]
        engine.serve(PROMPT)  # all of it was there before the reset
        until(lambda: ready_blocks(service) == 10, "the blocks are stored again")
        engine.manager._device.reset()
        assert engine.serve(longer)[0] == 6  # the rest never was
        until(lambda: totals(service)["looked_up_blocks"] == 30, "the service has heard of all look-ups")
        counted = namespace(service, "1")["totals"]
        assert (counted["lookups"], counted["hit_blocks"]) == (3, 6)
        missed = {reason: blocks for reason, blocks in counted["missed"].items() if blocks}
        assert missed == {"not_stored": 10 + 4, "reset": 10}
        engine.close()

    def test_copies_count_once_when_an_engine_registers_again(self, service: LocalService) -> None:
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: service.ask("transfers")[0]["copied"], "it has told what it copied")
        keeper = host_of(engine).sessions
        assert keeper.session is not None
        keeper.lose(keeper.session, "a test")
        engine.await_stock()
        engine.serve(list(range(500, 541)))
        until(lambda: ready_blocks(service) == 20, "the blocks are stored")
        engine.manager.change_revision("2")
        engine.await_stock()
        engine.serve(PROMPT)
        engine.close()
        for revision, blocks in (("1", 20), ("2", 10)):
            copied = namespace(service, revision)["totals"]["traffic"]["copied"]
            assert copied["device_to_host"]["bytes"] == blocks * engine.layout.payload_bytes
        assert_nothing_is_held(service)


def test_slots_of_a_lost_grant_are_requested_again(service: LocalService) -> None:
    engine = Engine(service.address)
    keeper = host_of(engine).sessions
    session = keeper.session
    assert session is not None
    keeper.return_stock(session)
    session.asked = 64  # the answer found no room in a queue
    engine.await_stock()
    engine.serve(PROMPT)
    until(lambda: ready_blocks(service) == 10, "the blocks are stored")
    engine.close()
    assert_nothing_is_held(service)
