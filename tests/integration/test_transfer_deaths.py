"""Hand-overs between two processes, one of which is killed, stopped or replaced at a message."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fdcache.manager import Request
from fdcache.manager.results import LoadStatus
from fdcache.transfer import links
from fdcache.transfer.connector import LocalPlanes
from tests.service_help import until
from tests.transfer_help import prompt_of
from tests.transfer_peer import GATE, GatedConnector
from tests.transfer_wire import Parcel
from tests.transfer_world import BLOCKS, MESSAGES, World, quick

MakeWorld = Callable[..., World]


@pytest.mark.parametrize("kind", quick("Ready", "Renew"))
def test_decode_goes_on_when_prefill_is_killed_at_a_message(make_world: MakeWorld, kind: str) -> None:
    world = make_world("decode")
    reached = world.kill_at(kind)
    world.peer.ask("send", "r", 1, BLOCKS, 2 if kind == "Renew" else None)
    request = world.fetch("r", 1)
    world.until(reached)
    world.take_whole(request, late=kind == "LinkHello")  # of which nothing is known that could prove its end
    world.until(lambda: world.mine.is_clean)
    allowed = {"LinkHello": {"timeout", "cancelled"}, "Last": {"done", "peer_gone"}, "End": {"done"}}
    assert set(world.mine.results) <= allowed.get(kind, {"peer_gone"})
    world.start_peer()
    world.read_by_mine("next", 2)


def test_sums_that_wait_when_prefill_is_killed_under_a_read_disturb_nothing(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world("decode")
    transfer = world.mine.controller._parts.transfer
    assert transfer is not None
    connector = transfer.endpoint._connector
    assert isinstance(connector, GatedConnector)
    third_read, last_read, killed = threading.Event(), threading.Event(), threading.Event()

    def wait(_: object, order: Any) -> bool:
        if len(order.slots) < 3:
            return False
        third_read.set()
        return not last_read.wait()

    GATE.fails = wait
    poll, sums = connector.poll, LocalPlanes.sums

    def kill(*arguments: Any) -> Any:
        if not killed.is_set():
            world.peer.kill()
            killed.set()
        return sums(*arguments)

    # Two reads end at once: the peer is killed between their sums, and under the third read.
    def have_ended() -> bool:
        return killed.is_set() or (third_read.is_set() and len(connector._ended) > 1)

    monkeypatch.setattr(connector, "poll", lambda: poll() if have_ended() else [])
    monkeypatch.setattr(LocalPlanes, "sums", kill)
    world.peer.ask("send", "r", 1, BLOCKS, 1)
    request = world.fetch("r", 1)
    world.peer.ask("compute", "r", 1, 3)
    world.peer.ask("compute", "r", 3, BLOCKS)
    try:
        world.until(lambda: killed.is_set() and world.mine.transfers.held_blocks == BLOCKS)
    finally:
        last_read.set()
    assert world.take_whole(request).status is LoadStatus.FAILED
    assert world.mine.results == ["peer_gone"]
    world.start_peer()
    world.read_by_mine("next", 2)


def test_slots_of_a_read_in_flight_are_held_when_hand_overs_have_failed(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise MemoryError("no more")

    world = make_world("decode")
    transfer = world.mine.controller._parts.transfer
    assert transfer is not None
    endpoint = transfer.endpoint
    connector, close = endpoint._connector, endpoint._connector.close
    GATE.close()
    world.peer.ask("send", "r", 1, BLOCKS)
    request = world.fetch("r", 1)
    world.until(lambda: GATE.waiting)
    monkeypatch.setattr(connector, "close", lambda: None)  # as with NIXL and a stopped peer
    monkeypatch.setattr(connector, "poll", fail)
    boot = endpoint._links.mine.boot
    until(lambda: endpoint._links.mine.boot != boot and endpoint._ended is None, "hand-overs begin anew")
    world.mine.manager.finish([request])
    for _ in range(3):
        world.mine.step()
    assert world.mine.manager.get_stats().held_blocks == BLOCKS
    GATE.open()
    close()
    world.mine.controller.shutdown()
    world.until(lambda: world.mine.is_clean)


@pytest.mark.parametrize("kind", quick("Ready", "a read", of=(*MESSAGES, "a read")))
def test_prefill_frees_its_blocks_when_decode_is_killed_at_a_message(
    make_world: MakeWorld, kind: str
) -> None:
    world = make_world("prefill")
    reached = world.kill_at(kind)
    request = world.send("r", 1, 2 if kind == "Renew" else BLOCKS)
    if kind == "a read":
        world.peer.ask("close_gate")
    world.peer.ask("fetch", "r", 1, BLOCKS, world.source("r"))
    if kind == "a read":
        world.until(lambda: world.peer.ask("reads_waiting"))
        world.peer.kill()
    else:
        world.until(reached)
    unknown = kind in ("LinkHello", "LinkWelcome", "AskForBlocks")  # no process is known to have asked
    world.until(lambda: not world.mine.manager.get_stats().sending_blocks, late=unknown)
    allowed = {
        "LinkHello": {"expired"},
        "LinkWelcome": {"expired"},
        "AskForBlocks": {"expired", "peer_gone"},
        "End": {"done", "peer_gone"},
    }
    world.mine.manager.finish([request])
    assert set(world.mine.results) <= allowed.get(kind, {"peer_gone"})
    world.start_peer()
    world.read_by_peer("next", 2)


@pytest.mark.parametrize("kind", quick("Ready", of=("LinkHello", "AskForBlocks", "Ready", "Renew")))
def test_decode_computes_when_prefill_is_stopped_and_nothing_late_hurts(
    make_world: MakeWorld, kind: str
) -> None:
    world = make_world("decode", blocks=8)
    if kind == "Ready":
        GATE.close()

    reached = world.stop_at(kind)
    world.peer.ask("send", "r", 1, BLOCKS, 2 if kind == "Renew" else BLOCKS)
    request = world.fetch("r", 1)
    world.until(reached)
    if kind == "Ready":
        world.until(lambda: GATE.waiting)
    outcome = world.outcome(late=True)
    assert outcome.recompute_from == 0
    assert outcome.status is LoadStatus.OVERDUE or not GATE.waiting
    world.mine.manager.finish([request])
    GATE.open()
    world.until(lambda: world.mine.is_clean)
    other = Request("other", prompt_of(2, 7))
    world.mine.start(other)
    world.mine.compute(other, "none")
    world.peer.resume()
    world.peer.ask("give_up", "r")
    world.until(lambda: world.peer.ask("is_clean"))
    assert world.mine.wrong_blocks(other, 0, 7) == []
    assert set(world.mine.results) <= {"timeout", "cancelled"}
    assert set(world.peer.ask("results")) <= {"not_wanted", "cancelled"}
    world.mine.manager.finish([other])
    world.read_by_mine("next", 3)


@pytest.mark.parametrize("kind", quick("Ready", of=("LinkWelcome", "BlocksGranted", "Ready", "Last")))
def test_prefill_serves_others_when_decode_is_stopped_and_late_reads_hurt_nobody(
    make_world: MakeWorld, kind: str
) -> None:
    world = make_world("prefill", blocks=8)
    reached = world.stop_at(kind)
    world.send("r", 1)
    world.peer.ask("fetch", "r", 1, BLOCKS, world.source("r"))
    world.until(reached)
    world.until(lambda: world.mine.is_clean, late=True)
    assert world.mine.results == ["expired"]
    other = Request("other", prompt_of(2, 7))
    world.mine.start(other)
    world.mine.compute(other, "none")  # where the blocks of the first were
    world.mine.manager.finish([other])
    world.peer.resume()
    world.until(lambda: world.peer.ask("outcomes"))
    status, whole, reason = world.peer.ask("outcomes")[0]
    assert (status == "confirmed") == (whole == BLOCKS) and (whole == BLOCKS or reason)
    assert world.peer.ask("wrong", "r", whole) == []
    world.peer.ask("finish", "r")
    world.until(lambda: world.peer.ask("is_clean"))
    world.read_by_peer("next", 3)


@pytest.mark.parametrize("machine", ["this", pytest.param("another", marks=pytest.mark.slow)])
def test_all_of_a_replaced_prefill_is_dropped_once_its_reads_have_ended(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: str
) -> None:
    if machine == "another":  # the end of the process is not visible from here
        monkeypatch.setattr(links, "machine_id", lambda: "another")
    world = make_world("decode")
    planes = [each for each in tmp_path.iterdir() if is_mapped(each)]
    GATE.close()
    world.peer.ask("send", "r", 1, BLOCKS)
    request = world.fetch("r", 1)
    world.until(lambda: GATE.waiting)
    (mapped,) = [each for each in tmp_path.iterdir() if is_mapped(each) and each not in planes]
    world.peer.kill()
    world.start_peer()
    world.peer.ask("send", "next", 2, BLOCKS)
    following = world.fetch("next", 2)
    assert not set(following.block_table) & set(request.block_table)
    world.until(lambda: world.mine.transfers.held_blocks >= BLOCKS)
    assert is_mapped(mapped), "a read is in flight"
    GATE.open()
    world.until(lambda: len(world.mine.outcomes) == 2)
    assert {each.request_id: each.status for each in world.mine.outcomes}["r"] is LoadStatus.FAILED
    world.mine.manager.finish([request, following])
    world.until(lambda: world.mine.is_clean and not is_mapped(mapped))
    world.mine.outcomes.clear()
    world.read_by_mine("last", 3)


def test_a_replacing_prefill_is_told_what_decode_is_through_with(make_world: MakeWorld) -> None:
    world = make_world("decode")
    world.read_by_mine("read", 1)
    reached = world.kill_at("Ready")
    world.peer.ask("send", "lost", 2, BLOCKS)
    request = world.fetch("lost", 2)
    world.until(reached)
    world.take_whole(request)
    world.start_peer()
    for transfer, seed in (("read", 1), ("lost", 2)):  # as a router repeats what it has no answer to
        world.peer.ask("send", transfer, seed, BLOCKS)
    world.until(lambda: world.peer.ask("is_clean"))
    assert world.peer.ask("results") == ["not_wanted", "not_wanted"]
    world.read_by_mine("next", 3)


def is_mapped(file: Path) -> bool:
    """Return True if this process maps a file, deleted or not."""
    return str(file) in Path("/proc/self/maps").read_text()


def test_a_replaced_decode_gets_nothing_of_the_former(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        links, "machine_id", lambda: "another"
    )  # the end of the process is not visible from here
    world = make_world("prefill")
    first = world.send("r", 1, 2)
    granted = world.at("BlocksGranted", lambda parcel: parcel.deliver())
    world.peer.ask("fetch", "r", 1, BLOCKS, world.source("r"))
    world.until(granted)
    world.peer.kill()
    assert world.mine.manager.get_stats().sending_blocks == BLOCKS
    world.start_peer()
    world.mine.manager.finish([first])
    world.read_by_peer("next", 2)
    assert "peer_gone" in world.mine.results


@pytest.mark.parametrize("role", quick("decode", of=("decode", "prefill")))
def test_late_messages_of_a_killed_process_do_not_disturb_its_successor(
    make_world: MakeWorld, role: str
) -> None:
    world = make_world(role)
    seen: list[Parcel] = []

    def keep(parcel: Parcel) -> None:
        seen.append(parcel)
        parcel.deliver()

    world.wire.fault = keep
    if role == "decode":
        world.peer.ask("send", "r", 1, BLOCKS, 2)
        request = world.fetch("r", 1)
    else:
        request = world.send("r", 1, 2)
        world.peer.ask("fetch", "r", 1, BLOCKS, world.source("r"))
    world.until(lambda: {"LinkWelcome", "Ready", "Renew"} <= {each.kind for each in seen})
    world.peer.kill()
    world.mine.manager.finish([request])
    world.until(lambda: world.mine.is_clean)
    world.start_peer()

    mixed = {"LinkHello", "Stranger"}

    def mix(parcel: Parcel) -> None:
        parcel.deliver()
        if parcel.kind not in mixed:
            mixed.add(parcel.kind)
            for each in seen:
                each.deliver()

    read = world.read_by_mine if role == "decode" else world.read_by_peer
    read("next", 2, mix)
