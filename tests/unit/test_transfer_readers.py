"""The offers of one rank to the decode ranks that read from it."""

from __future__ import annotations

import numpy as np
import pytest

from fdcache.transfer.connector import ConnectorStats
from fdcache.transfer.decode import BeginRead, DecodeSide, FetchEnd, FetchEnded, PeerFetch, SendToPrefill
from fdcache.transfer.messages import AskForBlocks, BlocksGranted, End, EndReason, Failed, Last, Ready, Renew
from fdcache.transfer.prefill import Effect, Offer, OfferEnded, PrefillSide, SendEnd, SendMessage
from fdcache.transfer.sends import PlaceShares, Readers
from tests.transfer_help import LAYOUT

HASHES = np.arange(64, dtype=np.uint8).reshape(2, 32)
OFFER = Offer(7, "t", HASHES, np.arange(2, dtype=np.int32), num_planes=1, wait=30.0)
ASK = AskForBlocks("t", 1, 0, HASHES.tobytes(), 10_000)


def messages(effects: list[Effect]) -> list[object]:
    return [each.message for each in effects if isinstance(each, SendMessage)]


def test_an_offer_of_which_one_reader_is_gone_ends_for_all() -> None:
    readers = Readers(2)
    readers.greet(b"a", 0)
    readers.greet(b"b", 1)
    readers.offer(OFFER, 0.0)
    readers.receive(b"a", ASK, 0.0)
    readers.take_effects()
    readers.peer_gone(b"a")
    (ended,) = [effect for _, effect in readers.take_effects() if isinstance(effect, OfferEnded)]
    assert ended.end is SendEnd.PEER_GONE
    assert not readers.is_live(7)
    readers.receive(b"b", ASK, 0.0)
    (answer,) = messages([effect for _, effect in readers.take_effects()])
    assert isinstance(answer, Failed)


def test_an_ask_of_an_attempt_that_decode_has_ended_is_answered() -> None:
    side = PrefillSide()
    side.receive(b"a", End("t", 1, EndReason.NOT_WANTED), 0.0)
    side.receive(b"a", ASK, 0.0)
    (answer,) = messages(side.take_effects())
    assert isinstance(answer, Failed)
    assert answer.attempt == 1


def test_the_attempt_after_one_that_ended_before_the_offer_is_served() -> None:
    side = PrefillSide()
    side.receive(b"a", End("t", 1, EndReason.NOT_WANTED), 0.0)
    second = AskForBlocks("t", 2, 0, HASHES.tobytes(), 10_000)
    side.receive(b"b", second, 0.0)
    side.offer(OFFER, 1.0)
    (answer,) = messages(side.take_effects())
    assert isinstance(answer, BlocksGranted)
    assert answer.attempt == 2


def test_a_second_decode_instance_is_told_that_another_reads() -> None:
    side = PrefillSide()
    side.offer(OFFER, 0.0)
    side.receive(b"a", ASK, 0.0)
    side.take_effects()
    side.receive(b"b", ASK, 0.0)
    (answer,) = messages(side.take_effects())
    assert isinstance(answer, Failed)
    assert "another decode instance" in answer.reason
    assert side.is_live(7)


def test_prefill_keeps_an_offer_for_a_decode_instance_that_has_no_room_yet() -> None:
    """The offer waits 30 s to be asked for, the other side says so every 2 s, and asks after a minute."""
    prefill, decode = PrefillSide(), DecodeSide(1, lease=10.0, renew=2.0, verifies=True)
    prefill.offer(OFFER, 0.0)
    nothing = np.empty((0, 32), np.uint8)
    decode.fetch(PeerFetch(1, b"p", "t", 1, 0, nothing, np.empty(0, np.int32), timeout=5.0), 0.0)
    for second in range(60):
        decode.tick(float(second))
        for effect in decode.take_effects():
            assert isinstance(effect, SendToPrefill) and isinstance(effect.message, Renew)
            prefill.receive(b"d", effect.message, float(second))
        prefill.tick(float(second))
    decode.cancel(1)
    assert decode.take_effects() == [FetchEnded(1, FetchEnd.CANCELLED, 0, (), "cancelled")]
    prefill.receive(b"d", ASK, 60.0)
    (answer,) = messages(prefill.take_effects())
    assert isinstance(answer, BlocksGranted)


def test_one_that_waits_for_what_is_gone_is_told() -> None:
    prefill, decode = PrefillSide(), DecodeSide(1, lease=10.0, renew=2.0, verifies=True)
    for now in (0.0, 4.0):  # the ranks may learn of it with the next step
        prefill.receive(b"d", Renew("t", 1, 0, 0, 10_000), now)
        assert not prefill.take_effects()
    prefill.receive(b"d", Renew("t", 1, 0, 0, 10_000), 6.0)
    (answer,) = messages(prefill.take_effects())
    assert isinstance(answer, Failed)
    nothing = np.empty((0, 32), np.uint8)
    decode.fetch(PeerFetch(1, b"p", "t", 1, 0, nothing, np.empty(0, np.int32), timeout=5.0), 0.0)
    decode.take_effects()
    decode.receive(b"p", answer, 0.0)
    (ended,) = decode.take_effects()
    assert isinstance(ended, FetchEnded) and ended.end is FetchEnd.FAILED


def reading(side: DecodeSide, number: int, blocks: int) -> list[BeginRead]:
    """Announce all blocks of a new fetch; return the reads that begin."""
    hashes = np.full((blocks, 32), number, np.uint8)
    slots = np.arange(number * blocks, (number + 1) * blocks, dtype=np.int32)
    side.fetch(PeerFetch(number, b"p", f"t{number}", 1, 0, hashes, slots, timeout=5.0), 0.0)
    side.receive(b"p", BlocksGranted(f"t{number}", 1, 0), 0.0)
    side.receive(b"p", Ready(f"t{number}", 1, 1, 0, blocks, 0, 1, tuple(slots.tolist())), 0.0)
    return [each for each in side.take_effects() if isinstance(each, BeginRead)]


@pytest.mark.parametrize("hashes", [1, 1 << 18], ids=["many", "large"])
def test_asks_for_what_prefill_never_offers_are_bounded(hashes: int) -> None:
    """The oldest are refused; those that came last wait, and are served."""
    side, asked = PrefillSide(), 0
    data = bytes(32 * hashes)
    for number in range(5000 if hashes == 1 else 20):
        side.receive(b"a", AskForBlocks(f"t{number}", 1, 0, data, 600_000), 0.0)
        asked += 1
    refused = messages(side.take_effects())
    assert all(isinstance(each, Failed) and "does not know" in each.reason for each in refused)
    assert [each.transfer for each in refused if isinstance(each, Failed)] == [
        f"t{n}" for n in range(len(refused))
    ]
    assert side.num_waiting == asked - len(refused) == (4096 if hashes == 1 else 8)
    side.receive(b"a", ASK, 0.0)
    side.offer(OFFER, 1.0)
    assert isinstance(messages(side.take_effects())[-1], BlocksGranted)


def test_nothing_of_decode_instances_that_are_gone_stays() -> None:
    readers = Readers(2)
    for number in range(10):
        readers.greet(b"%d" % number, number % 2)
        readers.peer_gone(b"%d" % number)
    assert not readers._of


def messages_to_prefill(side: DecodeSide) -> list[object]:
    return [each.message for each in side.take_effects() if isinstance(each, SendToPrefill)]


def test_prefill_hears_of_places_that_are_free_while_their_bytes_are_copied() -> None:
    side = DecodeSide(1, lease=10.0, renew=2.0, verifies=False, acknowledges=True)
    (first,) = reading(side, 1, 4)
    side.tick(0.5)
    assert not messages_to_prefill(side)
    side.reads_arrived([first.read_id])
    side.tick(0.6)
    (told,) = messages_to_prefill(side)
    assert isinstance(told, Renew) and told.read == 2  # the grant, and the part
    assert side.is_reading(1) and side.blocks_in_flight == 4
    side.read_ended(first.read_id, None)
    side.tick(0.7)
    assert not messages_to_prefill(side)  # it knows


def test_reads_that_nobody_waits_for_hold_no_more_than_is_allowed() -> None:
    """Twelve fetches of ten blocks, twenty slots: those that cannot begin end at their deadline, and hold nothing."""
    side = DecodeSide(1, lease=10.0, renew=2.0, verifies=False, most_read=20)
    begun = [read for number in range(12) for read in reading(side, number, 10)]
    assert [each.plan_id for each in begun] == [0, 1]
    side.tick(6.0)
    ended = [each.plan_id for each in side.take_effects() if isinstance(each, FetchEnded)]
    assert ended == list(range(2, 12))
    assert side.blocks_held == 20
    for each in begun:
        side.read_ended(each.read_id, "the peer is gone")
    assert side.blocks_held == side.blocks_in_flight == 0


def test_reads_that_wait_begin_in_order_and_one_that_is_larger_alone() -> None:
    side = DecodeSide(1, lease=10.0, renew=2.0, verifies=False, most_read=20)
    (large,) = reading(side, 0, 30)
    assert [reading(side, number, 10) for number in (1, 2, 3)] == [[], [], []]
    side.read_ended(large.read_id, None)
    side.receive(b"p", Last("t0", 1, 2, np.zeros((30, 32), np.uint8).tobytes(), bytes(240)), 0.0)
    effects = side.take_effects()
    assert [each.plan_id for each in effects if isinstance(each, FetchEnded)] == [0]
    assert [each.plan_id for each in effects if isinstance(each, BeginRead)] == [1, 2]
    renewals = {each.message.transfer: each.message for each in effects if isinstance(each, SendToPrefill)}
    side.tick(3.0)
    for each in side.take_effects():
        if isinstance(each, SendToPrefill) and isinstance(each.message, Renew):
            renewals[each.message.transfer] = each.message
    waiting = renewals["t3"]
    assert isinstance(waiting, Renew) and waiting.read == 1, (
        "prefill would use the places of what was not read again"
    )


class Room:
    """A connector with so many bytes of room, a chunk for each block."""

    def __init__(self, total: int, block_bytes: int) -> None:
        self.total, self.block_bytes, self.taken = total, block_bytes, 0
        self.sizes: dict[tuple[int, ...], int] = {}

    def stats(self) -> ConnectorStats:
        return ConnectorStats(name="room", places_used=self.taken, places_total=self.total)

    def publish(self, slots: np.ndarray, first: int, last: int, pieces: object) -> tuple[int, ...] | None:
        size = len(slots) * self.block_bytes
        if self.taken + size > self.total:
            return None
        self.taken += size
        places = (len(self.sizes) + 1,)
        self.sizes[places] = size
        return places

    def withdraw(self, places: tuple[int, ...]) -> None:
        self.taken -= self.sizes.pop(places, 0)


def test_readers_that_stop_leave_room_for_others() -> None:
    block = sum(plane.nbytes for plane in LAYOUT.planes)
    room = Room(16 * block, block)
    shares = PlaceShares(room, LAYOUT, room.total)  # type: ignore[arg-type]

    def published(peer: bytes) -> list[tuple[int, ...]]:
        """Publish block after block until there is no room for the peer."""
        found: list[tuple[int, ...]] = []
        while (
            places := shares.publish(peer, np.zeros(1, np.int32), 0, len(LAYOUT.planes), None)
        ) is not None:
            found.append(places)
        return found

    assert [len(published(name)) for name in (b"a", b"b", b"c")] == [8, 4, 2]
    mine = published(b"d")
    assert len(mine) == 1
    shares.withdraw(mine[0])
    assert len(published(b"d")) == 1, "it goes on with what it has read"
