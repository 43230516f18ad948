"""OffloadManager: loads that the engine withdraws before a plan has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fdcache.errors import RequestStateError
from fdcache.manager import LoadStatus, Request
from tests.offload_engine import BLOCK, OffloadEngine, begun, ids, loaded, offload_engine, prompt
from tests.storage_help import storage_layout

engine = offload_engine
LAYOUT = storage_layout(block_size=BLOCK, num_layers=2)


def planned(engine: OffloadEngine, name: str, tokens: list[int], into: np.ndarray) -> Request:
    """Return a request whose load is planned."""
    request = begun(engine, name, tokens)
    engine.manager.match(request, 0)
    assert engine.manager.load(request, into) == len(into)
    return request


def test_what_is_withdrawn_is_not_copied_and_the_loads_beside_it_are(engine: OffloadEngine) -> None:
    first, second, third = prompt(1, 2), prompt(3, 4, 5), prompt(6)
    for number, tokens in enumerate((first, second, third)):
        engine.stored(f"stored {number}", tokens, range(4 * number, 4 * number + len(tokens) // 4))
    other = engine.stored("other", prompt(7, 8, 9), range(13, 16))
    before = engine.manager.get_stats().counters
    one = planned(engine, "one", first, ids(0, 1))
    two = planned(engine, "two", second, ids(13, 14, 15))
    three = planned(engine, "three", third, ids(5))
    assert engine.manager.cancel_load(two)
    assert not engine.manager.cancel_load(two)
    assert engine.manager.load_of(two) == 0
    (plan,) = engine.step()
    assert plan.loads is not None and plan.loads.dst_block_ids.tolist() == [0, 1, 5]
    outcomes = engine.collect()
    assert {each.request_id for each in outcomes} == {"one", "three"}
    assert all(each.status is LoadStatus.CONFIRMED for each in outcomes)
    assert engine.holds(one, [0, 1]) and engine.holds(three, [5])
    assert engine.holds(other, [13, 14, 15])
    counters = engine.manager.get_stats().counters
    assert counters.host_hit_tokens - before.host_hit_tokens == 3 * 4
    assert counters.loads_confirmed - before.loads_confirmed == 2
    engine.manager.finish([one, two, three])


def test_a_request_whose_load_was_withdrawn_can_load_again(engine: OffloadEngine) -> None:
    tokens = prompt(1, 2, 3)
    engine.stored("stored", tokens, range(3))
    request = planned(engine, "a", tokens, ids(5, 6, 7))
    assert engine.manager._host.in_use
    assert engine.manager.cancel_load(request)
    assert not engine.manager._host.in_use
    assert engine.manager.take_plans() == []
    assert engine.manager.match(request, 0).num_tokens == 12
    assert loaded(engine, request, ids(8, 9, 10)).status is LoadStatus.CONFIRMED
    assert engine.holds(request, [8, 9, 10])
    engine.manager.finish([request])


def test_a_load_that_was_sent_ends_by_itself(engine: OffloadEngine) -> None:
    tokens = prompt(1, 2)
    engine.stored("stored", tokens, range(2))
    request = planned(engine, "a", tokens, ids(5, 6))
    engine.step()
    assert not engine.manager.cancel_load(request)
    (outcome,) = engine.collect()
    assert outcome.status is LoadStatus.CONFIRMED
    assert not engine.manager.cancel_load(request)
    engine.manager.finish([request])
    assert not engine.manager.cancel_load(request)


def test_a_load_of_what_is_still_read_is_withdrawn(tmp_path: Path) -> None:
    tokens = prompt(1, 2, 3)
    engine = OffloadEngine(folder=tmp_path, layout=LAYOUT)
    engine.stored("stored", tokens, range(3))
    engine.close()
    engine = OffloadEngine(folder=tmp_path, layout=LAYOUT)
    request = begun(engine, "a", tokens)
    while not (found := engine.manager.match(request, 0)).num_tokens:
        engine.step()
        engine.collect()
    assert found.from_storage == 12
    before = engine.manager.get_stats().counters.storage_hit_tokens
    assert engine.manager.load(request, ids(5, 6, 7)) == 3
    assert engine.manager.cancel_load(request)
    assert engine.manager.get_stats().counters.storage_hit_tokens == before
    engine.manager.finish([request])
    engine.close()


def test_what_is_no_request_is_refused(engine: OffloadEngine) -> None:
    with pytest.raises(RequestStateError, match="request has to be a Request"):
        engine.manager.cancel_load("a")  # type: ignore[arg-type]
    assert not engine.manager.cancel_load(Request("unknown", [1, 2, 3, 4, 5]))
