"""The offers of one rank to the decode ranks that read from it."""

from __future__ import annotations

import numpy as np

from fdcache.transfer.messages import Ask, End, EndReason, Failed
from fdcache.transfer.prefill import Effect, Offer, OfferEnded, PrefillSide, SendEnd, SendMessage
from fdcache.transfer.sends import Readers

HASHES = np.arange(64, dtype=np.uint8).reshape(2, 32)
OFFER = Offer(7, "t", HASHES, np.arange(2, dtype=np.int32), num_planes=1, wait=30.0)
ASK = Ask("t", 1, 0, HASHES.tobytes(), 10_000)


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
