"""Hand-overs between two processes that are given up, go wrong half-way, or whose messages do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fdcache.manager import Request
from fdcache.manager.results import LoadStatus
from fdcache.transfer.connector import ReadOrder
from tests.service_help import until
from tests.transfer_help import BLOCK, Instance, prompt_of
from tests.transfer_peer import GATE, GatedConnector, Peer
from tests.transfer_wire import Parcel
from tests.transfer_world import BLOCKS, MESSAGES, World, quick

MakeWorld = Callable[..., World]


@pytest.fixture
def decode(make_world: MakeWorld) -> World:
    return make_world("decode")


def is_told(world: World, result: str = "not_wanted") -> bool:
    """Return True once prefill has its blocks back."""
    return bool(world.peer.ask("is_clean")) and world.peer.ask("results")[-1:] == [result]


# --- before a transfer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", quick("no room", "aborted", of=("no room", "refused", "aborted")))
def test_prefill_has_its_blocks_back_if_decode_does_not_begin(make_world: MakeWorld, reason: str) -> None:
    world = make_world("decode", blocks=8, keeps_asking=False)
    manager, request = world.mine.manager, Request("r", prompt_of(1, BLOCKS))
    world.peer.ask("send", "r", 1, BLOCKS)
    if reason == "refused":
        world.mine.handovers.decline([world.source("r")])
    else:
        manager.match_prefix([request])
        assert world.mine.handovers.fetch([(request, world.source("r"))]) == [BLOCKS]
        if reason == "no room":
            assert not manager.allocate_device_blocks([(request, 9 * BLOCK)])[0].ok
            manager.unmatch([request])
        else:
            world.mine.handovers.end_transfers([request])
    manager.finish([request])
    world.until(lambda: is_told(world) and world.mine.is_clean)
    assert world.mine.results == ["declined"]
    world.read_by_mine("next", 2)


# --- in mid-transfer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", quick("aborted", "late", of=("aborted", "preempted", "reset", "late")))
def test_slots_are_held_until_the_reads_into_them_have_ended(make_world: MakeWorld, end: str) -> None:
    world = make_world("decode", blocks=2 * BLOCKS + 2)
    manager = world.mine.manager
    GATE.close()
    world.peer.ask("send", "r", 1, BLOCKS)
    request = world.fetch("r", 1)
    slots = set(request.block_table[:BLOCKS].tolist())
    world.until(lambda: GATE.waiting)
    if end == "late":
        assert world.outcome(late=True).recompute_from == 0
    elif end == "reset":
        manager.reset_cache()
    if end != "late":
        world.mine.handovers.end_transfers([request])
    manager.finish([request])
    world.until(lambda: is_told(world))
    assert GATE.waiting, "prefill is told while decode still reads"
    assert manager.get_stats().held_blocks == BLOCKS
    other = Request("r" if end == "preempted" else "other", prompt_of(2, BLOCKS))
    world.mine.start(other)
    world.mine.compute(other, "none")
    assert not slots & set(other.block_table.tolist())
    GATE.open()
    world.until(lambda: not manager.get_stats().held_blocks)
    assert world.mine.wrong_blocks(other, 0, BLOCKS) == []
    manager.finish([other])
    world.until(lambda: world.mine.is_clean)
    assert manager.can_allocate_device_blocks(2 * BLOCKS + 2)
    world.read_by_mine("next", 3)


@pytest.mark.parametrize("verifies", [True, False])
def test_a_source_used_again_under_a_read_is_seen_by_its_sums(make_world: MakeWorld, verifies: bool) -> None:
    world = make_world("decode", verifies=verifies)
    GATE.close()
    last = world.at("Last", Parcel.arrive)
    world.peer.ask("send", "r", 1, BLOCKS)
    request = world.fetch("r", 1)
    world.until(lambda: GATE.waiting and last())
    world.peer.ask("overwrite", "r")
    GATE.open()
    outcome = world.outcome()
    whole = outcome.recompute_from // BLOCK
    if verifies:
        assert (outcome.status, whole) == (LoadStatus.FAILED, 0)
        assert "differ from those of prefill" in (outcome.error_message or "")
        assert world.mine.results == ["corrupt"]
    else:
        assert (outcome.status, whole) == (LoadStatus.CONFIRMED, BLOCKS)
        assert world.mine.wrong_blocks(request, 0, whole) == list(range(BLOCKS))
    world.mine.manager.finish([request])
    world.until(lambda: is_told(world, "failed" if verifies else "done") and world.mine.is_clean)


def test_a_lease_that_ends_under_a_read_costs_a_computation(decode: World) -> None:
    GATE.close()
    decode.peer.ask("send", "r", 1, BLOCKS)
    request = decode.fetch("r", 1)
    decode.until(lambda: GATE.waiting)
    decode.wire.fault = lambda parcel: None  # no renewal arrives
    decode.until(lambda: decode.peer.ask("expire"))
    decode.peer.ask("overwrite", "r")
    GATE.open()
    decode.wire.fault = Parcel.arrive
    outcome = decode.take_whole(request)
    assert outcome.status is LoadStatus.FAILED and outcome.recompute_from == 0
    decode.until(lambda: is_told(decode, "expired") and decode.mine.is_clean)
    decode.read_by_mine("next", 2)


# --- messages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", quick("Ready", of=MESSAGES))
@pytest.mark.parametrize("what", ["lost", "twice", "late"])
def test_a_message_that_goes_astray_costs_time_alone(decode: World, what: str, kind: str) -> None:
    kept: list[Parcel] = []

    def stray(parcel: Parcel) -> None:
        if what == "twice":
            parcel.deliver()
            parcel.deliver()
        kept.append(parcel)

    reached = decode.at(kind, stray)
    decode.peer.ask("send", "r", 1, BLOCKS, 2)
    request = decode.fetch("r", 1)
    if kind in ("LinkHello", "LinkWelcome", "AskForBlocks", "BlocksGranted", "Ready", "Renew"):
        decode.until(reached)
    decode.peer.ask("compute", "r", 2, BLOCKS)
    assert decode.take_whole(request).status is LoadStatus.CONFIRMED
    decode.until(reached)
    decode.peer.ask("finish", "r")
    if what != "lost":
        for each in kept:
            each.deliver()
    decode.until(lambda: decode.mine.is_clean)
    lost_end = what == "lost" and kind == "End"  # then the lease ends the transfer
    decode.until(lambda: decode.peer.ask("expire" if lost_end else "is_clean"))
    # An answer that was repeated before the loss is answered with another end.
    assert decode.peer.ask("results")[0] in (("expired", "done") if lost_end else ("done",))
    assert decode.mine.results == ["done"]
    decode.read_by_mine("next", 2)


def test_messages_in_any_order_arrive_as_if_in_order(decode: World) -> None:
    kept: list[Parcel] = []

    def reverse(parcel: Parcel) -> None:
        """Deliver every three messages in the opposite order."""
        kept.append(parcel)
        if len(kept) == 3:
            while kept:
                kept.pop().deliver()

    decode.wire.fault = reverse
    decode.peer.ask("send", "r", 1, BLOCKS)
    request = decode.fetch("r", 1)
    assert decode.take_whole(request).status is LoadStatus.CONFIRMED
    decode.wire.fault = Parcel.arrive
    for each in kept:
        each.deliver()
    decode.until(lambda: decode.mine.is_clean and decode.peer.ask("is_clean"))


def test_an_older_attempt_that_goes_on_does_not_disturb_the_newer(make_world: MakeWorld) -> None:
    world = make_world("prefill")
    first = world.peer
    stopped = world.stop_at("Ready")
    world.send("r", 1)
    first.ask("fetch", "r", 1, BLOCKS, world.source("r"))
    world.until(stopped)
    second = world.start_peer("second")
    second.ask("close_gate")
    second.ask("fetch", "r", 1, BLOCKS, world.source("r", attempt=2))
    world.until(lambda: second.ask("reads_waiting"))
    late = world.at("Renew", Parcel.arrive)
    first.resume()
    first.ask("give_up", "r")
    world.until(late)
    second.ask("open_gate")
    world.until(lambda: second.ask("outcomes"))
    assert second.ask("outcomes")[0][:2] == ("confirmed", BLOCKS)
    assert second.ask("wrong", "r", BLOCKS) == []
    second.ask("finish", "r")
    world.until(lambda: world.mine.is_clean and first.ask("is_clean") and second.ask("is_clean"))
    assert world.mine.results == ["done"]
    assert second.ask("results") == ["done"]
    assert set(first.ask("results")) <= {"cancelled", "failed", "done"}
    first.close()


# --- groups and ranks -----------------------------------------------------------------------------------------


def test_a_group_that_fails_half_way_leaves_nothing_of_its_blocks(decode: World) -> None:
    decode.peer.ask("send", "r", 1, BLOCKS, 3)
    slots = decode.peer.ask("slots", "r")
    GATE.fails = lambda connector, order: order.first_plane > 0 and slots[3] in order.places
    request = decode.fetch("r", 1)
    decode.until(lambda: decode.mine.transfers.connector.reads)
    decode.peer.ask("compute", "r", 3, BLOCKS)
    decode.peer.ask("finish", "r")
    outcome = decode.take_whole(request)
    assert (outcome.status, outcome.recompute_from) == (LoadStatus.FAILED, 3 * BLOCK)
    assert "the link is down" in (outcome.error_message or "")
    decode.until(lambda: is_told(decode, "failed") and decode.mine.is_clean)
    assert decode.mine.results == ["failed"]


@pytest.mark.parametrize("fault", ["read", "bit"])
def test_what_fails_on_one_rank_of_four_is_computed_on_all(gated: None, tmp_path: Path, fault: str) -> None:
    peer = Peer("prefill", tmp_path, "p", ranks=4)
    with Instance("decode", tmp_path, "d", ranks=4, connector="gated") as mine:
        request, third = Request("r", prompt_of(1, BLOCKS)), mine.rank_planes[2][0].ctypes.data

        def fails(connector: GatedConnector, order: ReadOrder) -> bool:
            mine_starts_at = int(request.block_table[2])
            return fault == "read" and connector.first_address == third and mine_starts_at in order.slots

        GATE.fails = fails
        GATE.close()
        peer.ask("send", "r", 1, BLOCKS)
        until(lambda: peer.ask("is_offered", "r"), "the sums are computed")
        mine.fetch(request, peer.source("r"))
        if fault == "bit":
            peer.ask("flip", "r", 2, 2)
        GATE.open()
        mine.until(lambda: mine.outcomes)
        (outcome,) = mine.outcomes
        first = outcome.recompute_from // BLOCK
        assert outcome.status is LoadStatus.FAILED
        assert first == (2 if fault == "bit" else 0)  # a part is read as a whole
        assert "rank 2" in (outcome.error_message or "")
        assert mine.wrong_blocks(request, 0, first) == []
        mine.compute(request, "none", first)
        assert mine.wrong_blocks(request, 0, BLOCKS) == []
        mine.manager.finish([request])
        mine.until(lambda: mine.is_clean and peer.ask("is_clean"))
        assert Counter(mine.results) == {"corrupt" if fault == "bit" else "failed": 1, "done": 3}
        assert Counter(peer.ask("results")) == {"failed": 1, "done": 3}
    peer.close()


def test_a_thousand_aborts_at_once_leave_nothing(make_world: MakeWorld) -> None:
    count, blocks = 1000, 3200
    world = make_world("decode", blocks=blocks, peer_blocks=blocks)
    manager = world.mine.manager
    world.peer.ask("send_many", count, 100, 2)
    requests = [Request(f"{index}", prompt_of(100 + index, 2)) for index in range(count)]
    for each in requests:
        manager.match_prefix([each])
        world.mine.handovers.fetch([(each, world.source(each.request_id))])
        assert manager.allocate_device_blocks([(each, 2 * BLOCK)])[0].ok
    world.step()
    world.peer.ask("compute_many", count)
    for index in np.random.default_rng(0).permutation(count).tolist():
        world.mine.handovers.end_transfers([requests[index]])
        manager.finish([requests[index]])
    world.until(lambda: world.mine.is_clean)
    world.until(lambda: world.peer.ask("is_clean"))
    assert manager.num_free_device_blocks == blocks
    assert world.peer.ask("free_blocks") == blocks
