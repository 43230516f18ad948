"""The offers of one rank to the decode ranks that read from it."""

from __future__ import annotations

import numpy as np

from fdcache.transfer.decode import DecodeSide, FetchEnd, FetchEnded, PeerFetch, SendToPrefill
from fdcache.transfer.messages import AskForBlocks, BlocksGranted, End, EndReason, Failed, Renew
from fdcache.transfer.prefill import Effect, Offer, OfferEnded, PrefillSide, SendEnd, SendMessage
from fdcache.transfer.sends import Readers

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
    prefill.receive(b"d", Renew("t", 1, 0, 0, 10_000), 0.0)
    (answer,) = messages(prefill.take_effects())
    assert isinstance(answer, Failed)
    nothing = np.empty((0, 32), np.uint8)
    decode.fetch(PeerFetch(1, b"p", "t", 1, 0, nothing, np.empty(0, np.int32), timeout=5.0), 0.0)
    decode.take_effects()
    decode.receive(b"p", answer, 0.0)
    (ended,) = decode.take_effects()
    assert isinstance(ended, FetchEnded) and ended.end is FetchEnd.FAILED
