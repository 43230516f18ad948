"""The ends of offers: what became of the blocks that an engine offered, in the order of the offers."""

from __future__ import annotations

import numpy as np
import pytest

from fdcache.manager import KeyedRequest, OfferEnd
from tests.offload_engine import BLOCK, OffloadEngine, ids, offload_engine
from tests.storage_help import storage_layout
from tests.unit.test_offload_keys import KEYS, keyed

engine = offload_engine


def offer(engine: OffloadEngine, request: KeyedRequest, into: list[int]) -> int:
    """Offer all blocks of a run; return the number of the offer."""
    for block_id, key in zip(into, request.block_hashes, strict=True):
        engine.fill(block_id, key.tobytes())
    number = engine.manager.offer(request, request.num_tokens, ids(*into), tells_end=True)
    engine.manager.finish([request])
    return number


def test_an_offer_ends_once_its_copies_have_and_in_order(engine: OffloadEngine) -> None:
    first = offer(engine, keyed("first", KEYS[:3], parent=None), [0, 1, 2])
    second = offer(engine, keyed("second", KEYS[3:], parent=None), [3, 4, 5])
    assert engine.manager.take_offer_ends() == []
    engine.settle()
    assert engine.manager.take_offer_ends() == [OfferEnd(first, 3, 3), OfferEnd(second, 3, 3)]
    assert engine.manager.take_offer_ends() == []
    assert engine.wrong_records() == 0


def test_what_is_there_already_ends_at_once_without_a_copy(engine: OffloadEngine) -> None:
    offer(engine, keyed("first", KEYS[:4], parent=None), [0, 1, 2, 3])
    engine.settle()
    engine.manager.take_offer_ends()
    copied = engine.manager.get_stats().counters.blocks_backed_up
    again = offer(engine, keyed("again", KEYS[:4], parent=None), [6, 7, 8, 9])
    assert engine.manager.take_offer_ends() == [OfferEnd(again, 4, 0, 4)]
    engine.settle()
    assert engine.manager.get_stats().counters.blocks_backed_up == copied


def test_an_offer_of_nothing_new_ends_in_its_turn(engine: OffloadEngine) -> None:
    first = offer(engine, keyed("first", KEYS[:2], parent=None), [0, 1])
    request = keyed("nothing", KEYS[:2], parent=None, use_cache=False)
    nothing = engine.manager.offer(request, request.num_tokens, ids(2, 3), tells_end=True)
    engine.manager.finish([request])
    assert engine.manager.take_offer_ends() == []
    engine.settle()
    assert [end.number for end in engine.manager.take_offer_ends()] == [first, nothing]


def test_dropped_blocks_are_counted_out() -> None:
    layout = storage_layout(block_size=BLOCK, num_layers=2)
    engine = OffloadEngine(layout=layout, host_blocks=2)
    number = offer(engine, keyed("long", KEYS, parent=None), [0, 1, 2, 3, 4, 5])
    engine.settle()
    (end,) = engine.manager.take_offer_ends()
    assert (end.number, end.blocks, end.is_whole) == (number, 6, False)
    assert end.stored <= 2
    engine.close()


def test_an_offer_ends_with_a_reset(engine: OffloadEngine) -> None:
    number = offer(engine, keyed("first", KEYS[:3], parent=None), [0, 1, 2])
    engine.manager.reset_cache()
    engine.settle()
    assert engine.manager.take_offer_ends() == [OfferEnd(number, 3, 0)]


@pytest.mark.parametrize("bad", [0, 2, 3])
def test_records_that_are_not_intact_are_forgotten_and_not_found(engine: OffloadEngine, bad: int) -> None:
    offer(engine, keyed("first", KEYS[:4], parent=None), [0, 1, 2, 3])
    engine.settle()
    request = keyed("look", KEYS[:4], parent=None)
    assert engine.manager.match(request, 0, whole_prompt=True).num_tokens == 4 * BLOCK
    assert len(engine.manager.found_blocks(request)) == 4
    intact = np.arange(4) != bad
    assert engine.manager.keep_intact(request, intact) == bad * BLOCK
    engine.manager.finish([request])
    assert engine.manager.host_has(KEYS[:4]).tolist() == [each < bad for each in range(4)]
    assert engine.manager._host.in_use == 0
