"""Hand-overs that begin before their last block is computed, between engines that own their device caches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdcache.errors import PlanError, RequestStateError
from fdcache.manager import Request
from fdcache.manager.requests import PeerSource
from fdcache.manager.results import LoadStatus
from fdcache.metadata import Int32Array
from fdcache.transfer.connector import LocalPlanes
from fdcache.transfer.engine_handovers import EngineSend
from fdcache.transfer.prefill import Offer, OfferEnded, Part, PrefillSide, SendEnd
from tests.handover_engine import Engine
from tests.transfer_help import LAYOUT, prompt_of

BLOCKS = 6


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Engine, Engine]]:
    with Engine("prefill", tmp_path, "p") as prefill, Engine("decode", tmp_path, "d") as decode:
        yield prefill, decode


def begin(prefill: Engine, decode: Engine, seed: int) -> tuple[Request, EngineSend, Int32Array, Int32Array]:
    """Ask both at once; return decode's request, and of each the blocks, those of prefill with their bytes."""
    mine, theirs = (Request(f"{name}-{seed}", prompt_of(seed, BLOCKS, 0)) for name in ("p", "d"))
    decode.handovers.fetch(theirs, PeerSource("named", (prefill.address,), is_ahead=True))
    into = decode.allocate(decode.manager.match(theirs, 0).num_tokens)
    decode.manager.load(theirs, into)
    table = prefill.compute(mine)
    send = prefill.handovers.send_ahead(mine, "named", mine.num_tokens)
    prefill.step()
    assert send.number
    return theirs, send, table, into


def _until_read(decode: Engine, prefill: Engine, blocks: int) -> None:
    """Step until decode has read so many blocks."""
    decode.until(lambda: _bytes_read(decode) == blocks * LAYOUT.payload_bytes, prefill)


def _bytes_read(decode: Engine) -> int:
    stats = decode.controller.transfer_stats()
    assert stats is not None
    return stats.connector.read_bytes


def test_decode_reads_what_is_computed_while_the_rest_is_not(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    theirs, send, table, into = begin(prefill, decode, 1)
    for first, last in ((0, 2), (2, 3)):
        prefill.controller.blocks_computed(send.number, first, table[first:last])
        _until_read(decode, prefill, last)
        assert not decode.outcomes
    assert decode.is_right(theirs, into[:3])
    prefill.controller.blocks_computed(send.number, 3, table[3:])
    decode.until(lambda: decode.outcomes, prefill)
    assert [each.status for each in decode.outcomes] == [LoadStatus.CONFIRMED]
    assert decode.is_right(theirs, into)
    prefill.until(lambda: send.is_over, decode)
    assert send.was_asked and prefill.ended == ["done"]
    assert prefill.handovers.take_over() == [send.number]
    assert prefill.handovers.take_over() == []
    decode.manager.finish([theirs])
    prefill.manager.finish([send.request])
    prefill.until(lambda: prefill.is_clean and decode.is_clean, decode)


def test_decode_reads_layers_of_blocks_whose_last_layers_are_not_computed(
    pair: tuple[Engine, Engine],
) -> None:
    """A group of layers at a time, of the first blocks and then of the others; one call gives the rest."""
    prefill, decode = pair
    theirs, send, table, into = begin(prefill, decode, 6)
    ends = prefill.controller.announced_layers
    assert ends == tuple(range(LAYOUT.total_layers))
    read = 0
    for first, last in ((0, 4), (4, BLOCKS)):
        for layer in ends[:-1]:
            prefill.controller.blocks_computed(send.number, first, table[first:last], layer=layer)
            read += (last - first) * sum(each.nbytes for each in LAYOUT.layer_planes(layer))
            decode.until(lambda: _bytes_read(decode) == read, prefill)  # noqa: B023 - called at once
        assert not decode.outcomes
        prefill.controller.blocks_computed(send.number, first, table[first:last])
        read = last * LAYOUT.payload_bytes
        decode.until(lambda: _bytes_read(decode) == read, prefill)  # noqa: B023 - called at once
    decode.until(lambda: decode.outcomes, prefill)
    assert [each.status for each in decode.outcomes] == [LoadStatus.CONFIRMED]
    assert decode.is_right(theirs, into)
    decode.manager.finish([theirs])
    prefill.manager.finish([send.request])
    prefill.until(lambda: prefill.is_clean and decode.is_clean, decode)


def test_what_is_given_up_is_computed_by_decode(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    theirs, send, table, _ = begin(prefill, decode, 2)
    prefill.controller.blocks_computed(send.number, 0, table[:4])
    _until_read(decode, prefill, 4)
    prefill.handovers.end(send.request)
    decode.until(lambda: decode.outcomes, prefill)
    assert decode.outcomes[0].status is LoadStatus.FAILED
    prefill.until(lambda: send.is_over, decode)
    assert send.was_asked
    prefill.controller.blocks_computed(send.number, 4, table[4:])  # too late, and ignored
    decode.manager.finish([theirs])
    prefill.manager.finish([send.request])
    prefill.until(lambda: prefill.is_clean and decode.is_clean, decode)


def test_bytes_of_slots_that_are_given_away_are_never_taken_for_the_blocks(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part is announced when the request is preempted. Its sums are computed, and decode reads, after that.

    Prefill's thread comes to its commands, the end of the send among them, after decode had time to take the blocks.
    """
    prefill, decode = pair
    is_late, going_on, waiting = threading.Event(), threading.Event(), threading.Semaphore(0)
    endpoints = [each.controller._parts.transfer.endpoint for each in pair]  # type: ignore[union-attr]
    sums, read, run = LocalPlanes.sums, endpoints[1]._connector.read, endpoints[0]._run_commands
    has_taken = threading.Event()

    def wait() -> None:
        waiting.release()
        assert going_on.wait(60)

    def late_sums(planes: LocalPlanes, *arguments: Any) -> Any:
        if is_late.is_set() and planes is endpoints[0]._planes and arguments[-1].stop == LAYOUT.num_planes:
            wait()
        return sums(planes, *arguments)

    def late_read(order: Any) -> None:
        if is_late.is_set():
            wait()
        read(order)

    def late_commands(now: float) -> None:
        if going_on.is_set():
            has_taken.wait(1.0)
        run(now)

    monkeypatch.setattr(LocalPlanes, "sums", late_sums)
    monkeypatch.setattr(endpoints[0], "_run_commands", late_commands)
    monkeypatch.setattr(endpoints[1]._connector, "read", late_read)
    theirs, send, table, into = begin(prefill, decode, 3)
    prefill.controller.blocks_computed(send.number, 0, table[:1])
    _until_read(decode, prefill, 1)
    is_late.set()
    prefill.controller.blocks_computed(send.number, 1, table[1:])
    for _ in range(2):
        assert waiting.acquire(timeout=60)
    prefill.controller.end_handovers([send.number])
    for plane in prefill.planes[-len(LAYOUT.layer_planes(LAYOUT.total_layers - 1)) :]:
        plane[table[1:]] = 1
    going_on.set()
    decode.until(lambda: decode.outcomes)
    has_taken.set()
    assert decode.outcomes[0].status is LoadStatus.FAILED
    assert not decode.is_right(theirs, into)
    decode.manager.finish([theirs])


def test_decode_has_time_to_ask_as_long_as_prefill_computes() -> None:
    side, size = PrefillSide(), 4
    hashes, slots = np.zeros((size, 32), np.uint8), np.arange(size, dtype=np.int32)
    side.offer(Offer(1, "x", hashes, slots, 2, wait=10.0), 0.0)
    for block in range(size):
        side.computed(1, Part(block, block + 1, 0, 2))
        side.tick(8.0 * (block + 1))
        assert side.is_live(1)
    side.tick(8.0 * size + 9.0)
    assert side.is_live(1)
    side.tick(8.0 * size + 11.0)
    ended = [each for each in side.take_effects() if isinstance(each, OfferEnded)]
    assert [each.end for each in ended] == [SendEnd.EXPIRED]


def test_wrong_calls_are_refused_by_name(pair: tuple[Engine, Engine]) -> None:
    prefill, _ = pair
    request = Request("p-4", prompt_of(4, BLOCKS))
    with pytest.raises(RequestStateError, match="ahead"):
        prefill.handovers.send_ahead(request, "x", request.num_tokens + 1)
    send = prefill.handovers.send_ahead(request, "x", request.num_tokens)
    with pytest.raises(RequestStateError, match="is being sent already"):
        prefill.handovers.send_ahead(request, "x", request.num_tokens)
    prefill.step()
    with pytest.raises(PlanError, match="a slot is not one of the"):
        prefill.controller.blocks_computed(send.number, 0, np.array([9999], np.int32))
    prefill.handovers.end(request)
    prefill.manager.finish([request])
    prefill.until(lambda: send.is_over)
