"""Hand-overs between two engines that own their device caches, in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdcache.errors import RequestStateError
from fdcache.manager import MatchStatus, Request
from fdcache.manager.requests import PeerSource
from fdcache.manager.results import LoadStatus
from tests.handover_engine import Engine
from tests.transfer_help import BLOCK, LAYOUT, prompt_of, require_nixl


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Engine, Engine]]:
    with Engine("prefill", tmp_path, "p") as prefill, Engine("decode", tmp_path, "d") as decode:
        yield prefill, decode


@pytest.mark.parametrize("extra", [0, 1, 5])
def test_the_whole_prompt_is_promised_and_arrives(pair: tuple[Engine, Engine], extra: int) -> None:
    prefill, decode = pair
    mine, theirs = Request("p-1", prompt_of(1, 6, extra)), Request("d-1", prompt_of(1, 6, extra))
    prefill.send(mine, "p-1")
    decode.manager.begin([theirs])
    decode.handovers.fetch(theirs, prefill.source("p-1"))
    found = decode.manager.match(theirs, 0)
    assert (found.num_tokens, found.from_peer) == (theirs.num_tokens, theirs.num_tokens)
    table = decode.allocate(found.num_tokens)
    assert decode.manager.load(theirs, table) == len(table)
    decode.until(lambda: decode.outcomes, prefill)
    assert [each.status for each in decode.outcomes] == [LoadStatus.CONFIRMED]
    assert decode.is_right(theirs, table)
    prefill.until(lambda: prefill.ended, decode)
    assert (prefill.ended, decode.ended) == (["done"], ["done"])
    decode.manager.finish([theirs])
    prefill.until(lambda: prefill.is_clean and decode.is_clean, decode)


@pytest.mark.parametrize("connector", ["ipc", "rdma"])
def test_a_last_block_of_one_token_arrives_with_its_bytes(tmp_path: Path, connector: str) -> None:
    """Prompts of 64 blocks and one token, between scattered slots: each byte of prefill's blocks, and no other."""
    if connector == "rdma":
        require_nixl()
    options: dict[str, Any] = {"blocks": 200, "connector": connector}
    with (
        Engine("prefill", tmp_path, "p", **options) as prefill,
        Engine("decode", tmp_path, "d", **options) as decode,
    ):
        for each in (prefill, decode):
            np.random.default_rng(len(each.planes)).shuffle(each._free)
        for number in range(3):
            prompt = prompt_of(number, 64, 1)
            mine, theirs = Request(f"p-{number}", prompt), Request(f"d-{number}", prompt)
            sent = prefill.send(mine, f"t-{number}")
            decode.manager.begin([theirs])
            decode.handovers.fetch(theirs, prefill.source(f"t-{number}"))
            found = decode.manager.match(theirs, 0)
            assert found.from_peer == theirs.num_tokens == 64 * BLOCK + 1
            table = decode.allocate(found.num_tokens)
            before = [plane.copy() for plane in decode.planes]
            assert decode.manager.load(theirs, table) == len(table) == 65
            decode.until(lambda: decode.outcomes, prefill)
            assert [each.status for each in decode.outcomes] == [LoadStatus.CONFIRMED]
            others = np.setdiff1d(np.arange(200), table)
            for here, there, old in zip(decode.planes, prefill.planes, before, strict=True):
                assert np.array_equal(here[table], there[sent])
                assert np.array_equal(here[others], old[others])
            decode.outcomes.clear()
            decode.manager.finish([theirs])
            prefill.until(lambda: prefill.is_clean and decode.is_clean, decode)
            prefill._free += sent.tolist()
            decode._free += table.tolist()


def test_what_the_own_tiers_have_is_loaded_and_the_rest_fetched(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    known = Request("known", prompt_of(2, 6)[: 3 * BLOCK])
    decode.manager.offer(known, known.num_tokens, decode.compute(known))
    decode.until(lambda: decode.host_blocks == 3)
    decode.manager.finish([known])
    mine, theirs = Request("p-2", prompt_of(2, 6)), Request("d-2", prompt_of(2, 6))
    prefill.send(mine, "p-2")
    decode.handovers.fetch(theirs, prefill.source("p-2"))
    found = decode.manager.match(theirs, 0, whole_prompt=True)
    assert (found.num_tokens, found.from_peer) == (theirs.num_tokens, theirs.num_tokens - 3 * BLOCK)
    table = decode.allocate(found.num_tokens)
    decode.manager.load(theirs, table)
    decode.until(lambda: decode.outcomes, prefill)
    assert decode.outcomes[0].status is LoadStatus.CONFIRMED
    assert decode.is_right(theirs, table)
    transfers = decode.controller.transfer_stats()
    assert transfers is not None and transfers.connector.read_bytes == 4 * LAYOUT.payload_bytes
    decode.manager.finish([theirs])
    prefill.until(lambda: prefill.is_clean and decode.is_clean, decode)


def test_fetched_blocks_are_stored_below_the_device(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    mine, theirs = Request("p-3", prompt_of(3, 4)), Request("d-3", prompt_of(3, 4))
    prefill.send(mine, "p-3")
    decode.handovers.fetch(theirs, prefill.source("p-3"))
    table = decode.allocate(decode.manager.match(theirs, 0).num_tokens)
    decode.manager.load(theirs, table)
    decode.until(lambda: decode.outcomes, prefill)
    decode.manager.offer(theirs, theirs.num_tokens, table)
    decode.until(lambda: decode.host_blocks == 4)
    decode.manager.finish([theirs])
    again = Request("again", prompt_of(3, 4))
    assert decode.manager.match(again, 0, whole_prompt=True).num_tokens == 4 * BLOCK


@pytest.mark.parametrize("is_ahead", [True, False], ids=["named by a router", "told by prefill"])
def test_decode_may_ask_before_prefill_knows_the_request(pair: tuple[Engine, Engine], is_ahead: bool) -> None:
    """Prefill tells of a hand-over with the end of a request, and its ranks learn of it with the next step."""
    prefill, decode = pair
    mine, theirs = Request("p-6", prompt_of(6, 4)), Request("d-6", prompt_of(6, 4))
    decode.handovers.fetch(theirs, PeerSource("named", (prefill.address,), is_ahead=is_ahead))
    for _ in range(20):  # it is not told that there is no such hand-over
        decode.step()
        prefill.step()
        time.sleep(0.02)
    table = decode.allocate(decode.manager.match(theirs, 0).num_tokens)
    assert decode.manager.load(theirs, table) == len(table)
    for _ in range(20):
        decode.step()
        prefill.step()
        time.sleep(0.02)
    prefill.send(mine, "named")
    decode.until(lambda: decode.outcomes, prefill)
    assert [each.status for each in decode.outcomes] == [LoadStatus.CONFIRMED]
    assert decode.is_right(theirs, table)
    decode.manager.finish([theirs])
    prefill.until(lambda: prefill.is_clean and decode.is_clean, decode)


@pytest.mark.parametrize("ends", ["finish", "unmatch", "has it all"])
def test_prefill_is_told_that_nothing_is_fetched(pair: tuple[Engine, Engine], ends: str) -> None:
    prefill, decode = pair
    mine, theirs = Request("p-4", prompt_of(4, 4)), Request("d-4", prompt_of(4, 4))
    prefill.send(mine, "p-4")
    decode.handovers.fetch(theirs, prefill.source("p-4"))
    if ends == "has it all":
        assert decode.manager.match(theirs, 4 * BLOCK).num_tokens == 0
        decode.manager.unmatch([theirs])
    elif ends == "unmatch":
        decode.manager.match(theirs, 0)
        decode.manager.unmatch([theirs])
    assert decode.manager.has_pending_work or ends == "finish"
    decode.manager.finish([theirs])
    prefill.until(lambda: prefill.ended, decode)
    assert prefill.ended == ["not_wanted"]
    prefill.until(lambda: prefill.is_clean and decode.is_clean, decode)


@pytest.mark.parametrize("when", ["planned", "asked"])
def test_an_aborted_fetch_ends_on_both_sides(pair: tuple[Engine, Engine], when: str) -> None:
    prefill, decode = pair
    mine, theirs = Request("p-5", prompt_of(5, 4)), Request("d-5", prompt_of(5, 4))
    table = prefill.compute(mine)
    decode.handovers.fetch(theirs, prefill.source("p-5"))
    decode.manager.load(theirs, decode.allocate(decode.manager.match(theirs, 0).num_tokens))
    if when == "asked":
        decode.step()
    decode.manager.finish([theirs])
    prefill.handovers.send(mine, "p-5", mine.num_tokens, table)
    prefill.manager.finish([mine])
    prefill.until(lambda: prefill.ended and decode.ended, decode)
    assert decode.ended[0] in ("cancelled", "declined")
    assert prefill.ended == ["not_wanted"]
    prefill.until(lambda: prefill.is_clean and decode.is_clean, decode)


def test_what_cannot_be_fetched_is_computed(pair: tuple[Engine, Engine], tmp_path: Path) -> None:
    """The prompts differ in the last block alone, which is not full; the other transfer does not exist."""
    prefill, decode = pair
    mine, theirs = Request("p-6", prompt_of(6, 4)), Request("d-6", [*prompt_of(6, 4)[:-1].tolist(), 7])
    prefill.send(mine, "p-6")
    sources = [prefill.source("p-6"), PeerSource("none", (f"ipc://{tmp_path}/nobody.0",))]
    for request, source in zip((theirs, Request("d-7", prompt_of(7, 4))), sources, strict=True):
        decode.handovers.fetch(request, source)
        decode.manager.load(request, decode.allocate(decode.manager.match(request, 0).num_tokens))
        decode.until(lambda: decode.outcomes, prefill)
        outcome = decode.outcomes.pop()
        assert (outcome.status, outcome.recompute_from) == (LoadStatus.FAILED, 0)
        assert decode.manager.match(request, 0).status is MatchStatus.MATCHED
        assert request.device_only
        decode.manager.finish([request])
    prefill.handovers.end(mine)
    prefill.until(lambda: prefill.is_clean and decode.is_clean, decode)


def test_a_request_that_may_load_nothing_declines(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    mine, theirs = Request("p-8", prompt_of(8, 4)), Request("d-8", prompt_of(8, 4), device_only=True)
    prefill.send(mine, "p-8")
    decode.handovers.fetch(theirs, prefill.source("p-8"))
    assert decode.manager.match(theirs, 0).num_tokens == 0
    decode.manager.finish([theirs])
    prefill.until(lambda: prefill.ended, decode)
    assert prefill.ended == ["not_wanted"]


def test_a_request_that_waits_learns_that_prefill_has_given_it_up(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    mine, theirs = Request("p-11", prompt_of(11, 4)), Request("d-11", prompt_of(11, 4))
    prefill.send(mine, "p-11")
    decode.handovers.fetch(theirs, prefill.source("p-11"))
    assert decode.manager.match(theirs, 0).num_tokens == theirs.num_tokens
    prefill.step()
    prefill.handovers.end(mine)
    decode.until(lambda: not decode.manager.match(theirs, 0).num_tokens, prefill)
    decode.manager.finish([theirs])
    prefill.until(lambda: prefill.is_clean and decode.is_clean, decode)


def test_a_fetch_takes_no_longer_than_computing_would(pair: tuple[Engine, Engine], tmp_path: Path) -> None:
    """2 s for what is fetched, of a peer that nobody answers for; without observations as long as the settings say."""
    _, decode = pair
    nobody = PeerSource("none", (f"ipc://{tmp_path}/nobody.0",))

    def timeout_of(request: Request) -> float:
        decode.handovers.fetch(request, nobody)
        decode.manager.load(request, decode.allocate(decode.manager.match(request, 0).num_tokens))
        (task,) = [each for plan in decode.manager.take_plans() for each in plan.peers]
        return task.timeout

    assert timeout_of(Request("before", prompt_of(12, 4))) == 60.0
    for number in range(8):
        seen = Request(f"seen-{number}", prompt_of(20 + number, 4, extra=0))
        decode.manager.observe_prefill([(seen, 0, seen.num_tokens)], seconds=2.0)
    known = timeout_of(Request("known", prompt_of(13, 4, extra=0)))
    assert known == pytest.approx(2.0, rel=0.2)


def test_mistakes_are_named(pair: tuple[Engine, Engine]) -> None:
    prefill, _ = pair
    request = Request("p-9", prompt_of(9, 4))
    table = prefill.compute(request)
    with pytest.raises(RequestStateError, match="has 2 of the 5 blocks"):
        prefill.handovers.send(request, "p-9", request.num_tokens, table[:2])
    prefill.handovers.send(request, "p-9", request.num_tokens, table)
    with pytest.raises(RequestStateError, match="'p-9' is being sent already"):
        prefill.handovers.send(request, "p-9", request.num_tokens, table)
