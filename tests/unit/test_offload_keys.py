"""Requests with keys of the engine, whose runs begin anywhere."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdcache.errors import HashingError
from fdcache.manager import KeyedRequest, LoadStatus, MatchStatus
from tests.offload_engine import BLOCK, OffloadEngine, ids, loaded, offload_engine
from tests.storage_help import storage_layout

engine = offload_engine

KEYS = np.frombuffer(
    b"".join(hashlib.sha256(bytes([number])).digest() for number in range(6)), np.uint8
).reshape(6, 32)


def keyed(name: str, keys: np.ndarray, **options: Any) -> KeyedRequest:
    return KeyedRequest(name, keys, BLOCK, **options)


def store_keys(engine: OffloadEngine, request: KeyedRequest, into: list[int]) -> int:
    """Offer all blocks of a request; return how many more the host tier has afterwards."""
    before = engine.manager.get_stats().host.ready  # type: ignore[union-attr]
    engine.manager.begin([request])
    engine.manager.evicted(ids(*into))
    engine.step()
    engine.manager.offer(request, request.num_tokens, ids(*into))
    for block_id, key in zip(into, request.block_hashes, strict=True):
        engine.fill(block_id, key.tobytes())
    engine.settle()
    engine.manager.finish([request])
    return engine.manager.get_stats().host.ready - before  # type: ignore[union-attr]


def test_an_engine_may_bring_keys_of_its_own(engine: OffloadEngine) -> None:
    assert store_keys(engine, keyed("first", KEYS[:4]), [0, 1, 2, 3]) == 4
    request = keyed("second", KEYS)
    engine.manager.begin([request])
    assert engine.manager.match(request, 0).num_tokens == 4 * BLOCK
    assert loaded(engine, request, ids(7, 8, 9, 5)).recompute_from == 4 * BLOCK
    assert engine.holds(request, [7, 8, 9, 5])
    engine.manager.finish([request])


def test_a_run_that_begins_anywhere_is_found_and_loaded(engine: OffloadEngine) -> None:
    store_keys(engine, keyed("first", KEYS[:4]), [0, 1, 2, 3])
    request = keyed("second", KEYS[2:], parent=None)
    engine.manager.begin([request])
    assert engine.manager.match(request, 0).num_tokens == 2 * BLOCK
    assert loaded(engine, request, ids(7, 8)).status is LoadStatus.CONFIRMED
    assert engine.holds(request, [7, 8])
    engine.manager.finish([request])


def test_a_run_is_stored_below_the_block_that_precedes_it(engine: OffloadEngine) -> None:
    store_keys(engine, keyed("first", KEYS[:2]), [0, 1])
    assert store_keys(engine, keyed("second", KEYS[2:4], parent=KEYS[1].tobytes()), [2, 3]) == 2
    whole = keyed("third", KEYS)
    assert engine.manager.match(whole, 0).num_tokens == 4 * BLOCK
    engine.manager.finish([whole])


def test_a_run_of_unknown_parent_is_stored_below_the_first_block_that_the_host_has(
    engine: OffloadEngine,
) -> None:
    store_keys(engine, keyed("first", KEYS[:3]), [0, 1, 2])
    assert store_keys(engine, keyed("second", KEYS[2:5], parent=None), [3, 4, 5]) == 2
    whole = keyed("third", KEYS)
    assert engine.manager.match(whole, 0).num_tokens == 5 * BLOCK
    engine.manager.finish([whole])


@pytest.mark.parametrize("order", [("tail", "head"), ("head", "tail")])
def test_a_run_of_unknown_parent_is_stored_and_joined_when_a_match_shows_its_parent(
    engine: OffloadEngine, order: tuple[str, str]
) -> None:
    runs = {"head": keyed("head", KEYS[:3], parent=None), "tail": keyed("tail", KEYS[3:], parent=None)}
    for name, into in zip(order, ([0, 1, 2], [3, 4, 5]), strict=True):
        assert store_keys(engine, runs[name], into) == 3
    tail = keyed("look", KEYS[4:], parent=None)
    assert engine.manager.match(tail, 0).num_tokens == 2 * BLOCK
    engine.manager.finish([tail])
    assert engine.manager._host.usage().unjoined == 2
    whole = keyed("whole", KEYS, parent=None)
    assert engine.manager.match(whole, 0).num_tokens == 6 * BLOCK
    assert engine.manager._host.usage().unjoined == 1
    assert loaded(engine, whole, ids(6, 7, 8, 9, 10, 11)).recompute_from == 6 * BLOCK
    assert engine.holds(whole, [6, 7, 8, 9, 10, 11])
    engine.manager.finish([whole])
    assert engine.wrong_records() == 0


def test_a_run_after_missing_blocks_is_found_alone_until_they_come(engine: OffloadEngine) -> None:
    store_keys(engine, keyed("head", KEYS[:2]), [0, 1])
    store_keys(engine, keyed("tail", KEYS[4:], parent=None), [4, 5])
    whole = keyed("whole", KEYS)
    assert engine.manager.match(whole, 0).num_tokens == 2 * BLOCK
    engine.manager.finish([whole])
    middle = keyed("middle", KEYS[2:4], parent=KEYS[1].tobytes())
    assert store_keys(engine, middle, [2, 3]) == 2
    again = keyed("again", KEYS)
    assert engine.manager.match(again, 0).num_tokens == 6 * BLOCK
    engine.manager.finish([again])


def test_an_offer_shows_the_parent_of_a_run(engine: OffloadEngine) -> None:
    store_keys(engine, keyed("tail", KEYS[2:], parent=None), [2, 3, 4, 5])
    assert engine.manager._host.usage().unjoined == 1
    store_keys(engine, keyed("head", KEYS[:2]), [0, 1])
    store_keys(engine, keyed("whole", KEYS), [0, 1, 2, 3, 4, 5])
    assert engine.manager._host.usage().unjoined == 0


@pytest.mark.parametrize("parent", [KEYS[1].tobytes(), None])
def test_a_tail_alone_is_read_from_storage_and_joined_to_what_was_there(
    tmp_path: Path, parent: bytes | None
) -> None:
    layout = storage_layout(block_size=BLOCK, num_layers=2)
    first = OffloadEngine(layout=layout, folder=tmp_path)
    store_keys(first, keyed("head", KEYS[:2]), [0, 1])
    store_keys(first, keyed("tail", KEYS[2:], parent=parent), [2, 3, 4, 5])
    first.settle()
    first.close()
    second = OffloadEngine(layout=layout, folder=tmp_path)
    for run, into in ((KEYS[3:], [7, 8, 9]), (KEYS, [0, 1, 2, 3, 4, 5])):
        request = keyed(f"read {len(run)}", run, parent=None)
        assert second.manager.match(request, 0).status is MatchStatus.DEFERRED
        second.settle()
        assert second.manager.match(request, 0).num_tokens == len(run) * BLOCK
        assert loaded(second, request, ids(*into)).recompute_from == len(run) * BLOCK
        assert second.holds(request, into)
        second.manager.finish([request])
    second.close()


def test_keys_grow_with_their_request(engine: OffloadEngine) -> None:
    request = keyed("first", KEYS[:1])
    engine.manager.begin([request])
    for count in (1, 2, 3):
        engine.fill(count - 1, KEYS[count - 1].tobytes())
        engine.manager.offer(request, request.num_tokens, ids(0, 1, 2))
        engine.settle()
        request.append_keys(KEYS[count : count + 1])
    assert engine.manager.get_stats().host.ready == 3  # type: ignore[union-attr]
    engine.manager.finish([request])
    assert engine.wrong_records() == 0


def test_keys_that_contradict_those_stored_find_nothing_and_are_counted(engine: OffloadEngine) -> None:
    for name, run in (("tail", KEYS[1:3]), ("head", KEYS[:1])):  # the tail has a parent, and does not say so
        request = keyed(name, run)
        engine.manager.begin([request])
        engine.fill(0, run[0].tobytes())
        engine.fill(1, run[-1].tobytes())
        engine.manager.offer(request, request.num_tokens, ids(0, 1))
        engine.settle()
        engine.manager.finish([request])
    whole = keyed("whole", KEYS[:3])
    assert engine.manager.match(whole, 0).num_tokens == 0
    assert engine.manager._host.in_use == 0
    assert engine.manager.get_stats().host.contradictions == 1  # type: ignore[union-attr]
    engine.manager.finish([whole])


def test_nothing_is_read_of_a_run_whose_keys_contradict_those_in_storage(tmp_path: Path) -> None:
    layout = storage_layout(block_size=BLOCK, num_layers=2)
    for name, run in (("first", KEYS[:3]), ("second", KEYS[[5, 2]])):
        engine = OffloadEngine(layout=layout, folder=tmp_path)
        request = KeyedRequest(name, run, BLOCK)
        engine.manager.begin([request])
        assert engine.manager.match(request, 0).num_tokens == 0
        for block, key in enumerate(run):
            engine.fill(block, key.tobytes())
        engine.manager.offer(request, request.num_tokens, ids(*range(len(run))))
        engine.settle()
        engine.manager.finish([request])
        storage = engine.manager.get_stats().storage
        assert storage is not None and (storage.leases, storage.pins) == (0, 0)
        engine.close()


@pytest.mark.parametrize("keeps_reads", [True, False])
def test_reads_of_a_request_that_ends_go_on_if_they_are_kept(tmp_path: Path, keeps_reads: bool) -> None:
    layout = storage_layout(block_size=BLOCK, num_layers=2)
    first = OffloadEngine(layout=layout, folder=tmp_path)
    store_keys(first, keyed("first", KEYS), [0, 1, 2, 3, 4, 5])
    first.close()
    second = OffloadEngine(layout=layout, folder=tmp_path)
    request = keyed("second", KEYS)
    assert second.manager.match(request, 0).status is MatchStatus.DEFERRED
    if keeps_reads:
        second.manager.leave_reads(request)
    second.manager.finish([request])
    second.settle()
    assert second.manager.get_stats().host.ready == (6 if keeps_reads else 0)  # type: ignore[union-attr]
    second.close()


def test_zero_is_no_key() -> None:
    with pytest.raises(HashingError, match="zero"):
        keyed("wrong", np.zeros((1, 32), np.uint8))
    request = keyed("right", KEYS[:1])
    with pytest.raises(HashingError, match="zero"):
        request.append_keys(np.zeros((1, 32), np.uint8))


@pytest.mark.parametrize("keys", [KEYS[0], KEYS[:, :16], KEYS.astype(np.int32), b"key", None])
def test_keys_that_are_none_are_refused(keys: Any) -> None:
    with pytest.raises(HashingError, match=r"shape \(blocks, 32\)"):
        keyed("wrong", keys)
    with pytest.raises(HashingError, match="parent"):
        keyed("wrong", KEYS, parent=b"short")
