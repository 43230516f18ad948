"""Hand-overs between two instances of manager and controller in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fdcache.errors import RequestStateError, TransferError, TransferNotFoundError
from fdcache.manager import CacheManager, Request
from fdcache.manager.requests import PeerSource
from fdcache.manager.results import LoadStatus, MatchStatus
from fdcache.settings import Settings
from fdcache.settings.cache import CacheSettings
from fdcache.transfer.handovers import Handovers
from tests.transfer_help import BLOCK, LAYOUT, Instance, prompt_of


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Instance, Instance]]:
    with Instance("prefill", tmp_path, "p") as prefill, Instance("decode", tmp_path, "d") as decode:
        yield prefill, decode


def is_clean(*instances: Instance) -> bool:
    return all(each.is_clean for each in instances)


def test_blocks_arrive_while_prefill_computes(pair: tuple[Instance, Instance]) -> None:
    prefill, decode = pair
    mine, theirs = Request("r", prompt_of(1, 6)), Request("r", prompt_of(1, 6))
    assert decode.fetch(theirs, prefill.source("r")) == 6
    prefill.start(mine)
    prefill.handovers.send([(mine, "r")])
    prefill.step()
    prefill.compute(mine, "r", 0, 3)
    decode.until(lambda: decode.transfers.connector.read_bytes == LAYOUT.payload_bytes * 3)
    assert not decode.outcomes
    prefill.compute(mine, "r", 3)
    prefill.manager.finish([mine])
    decode.until(lambda: decode.outcomes)
    assert [(each.status, each.recompute_from) for each in decode.outcomes] == [
        (LoadStatus.CONFIRMED, 6 * BLOCK)
    ]
    assert decode.wrong_blocks(theirs, 0, 6) == []
    decode.manager.finish([theirs])
    prefill.until(lambda: is_clean(prefill, decode))
    again = Request("again", prompt_of(1, 6))
    assert decode.start(again) == 6 * BLOCK
    assert prefill.start(Request("too", prompt_of(1, 6))) == 6 * BLOCK


def test_blocks_that_are_computed_are_sent_without_a_report_of_their_layers(
    pair: tuple[Instance, Instance],
) -> None:
    """An engine that learns of the end of a prefill by its first token alone, perhaps after its request has ended."""
    prefill, decode = pair
    mine, theirs = Request("r", prompt_of(1, 4)), Request("r", prompt_of(1, 4))
    prefill.start(mine)
    prefill.step()
    prefill.compute(mine, "of nobody")
    prefill.handovers.send([(mine, "r")], is_computed=True)
    prefill.manager.finish([mine])
    assert decode.fetch(theirs, prefill.source("r")) == 4
    decode.until(lambda: decode.outcomes, prefill)
    assert decode.outcomes[0].status is LoadStatus.CONFIRMED
    assert decode.wrong_blocks(theirs, 0, 4) == []
    decode.manager.finish([theirs])
    prefill.until(lambda: is_clean(prefill, decode), decode)


def test_only_blocks_that_decode_lacks_are_read(pair: tuple[Instance, Instance]) -> None:
    prefill, decode = pair
    for name, blocks, lacking in (("a", 3, 3), ("b", 6, 3), ("c", 6, 0)):
        mine, theirs = Request(name, prompt_of(2, blocks)), Request(name, prompt_of(2, blocks))
        prefill.start(mine)
        prefill.handovers.send([(mine, name)])
        prefill.step()
        prefill.compute(mine, name)
        prefill.manager.finish([mine])
        assert decode.fetch(theirs, prefill.source(name)) == lacking
        if lacking:
            decode.until(lambda: decode.outcomes)
        assert decode.wrong_blocks(theirs, 0, blocks) == []
        decode.outcomes.clear()
        decode.manager.finish([theirs])
        prefill.until(lambda: is_clean(prefill, decode), decode)
    assert decode.transfers.connector.read_bytes == 6 * LAYOUT.payload_bytes


def test_a_prefix_on_the_host_is_loaded_and_the_rest_fetched(tmp_path: Path) -> None:
    with (
        Instance("prefill", tmp_path, "p") as prefill,
        Instance("decode", tmp_path, "d", blocks=8, host_blocks=32) as decode,
    ):
        first = Request("first", prompt_of(3, 6)[: 3 * BLOCK + 1])
        decode.start(first)
        decode.compute(first, "none")
        decode.manager.finish([first])
        decode.until(lambda: decode.host_blocks == 3)
        other = Request("other", prompt_of(4, 7))
        decode.start(other)  # evicts what is on the device
        decode.step()
        decode.manager.finish([other])
        mine, theirs = Request("r", prompt_of(3, 6)), Request("r", prompt_of(3, 6))
        prefill.start(mine)
        prefill.handovers.send([(mine, "r")])
        prefill.step()
        prefill.compute(mine, "r")
        assert decode.fetch(theirs, prefill.source("r")) == 3
        decode.until(lambda: decode.outcomes)
        assert [(each.status, each.recompute_from) for each in decode.outcomes] == [
            (LoadStatus.CONFIRMED, 6 * BLOCK)
        ]
        assert decode.manager.get_stats().counters.blocks_loaded >= 1
        assert decode.wrong_blocks(theirs, 0, 6) == []


def test_a_changed_block_and_those_above_it_are_computed(pair: tuple[Instance, Instance]) -> None:
    prefill, decode = pair
    mine, theirs = Request("r", prompt_of(5, 6)), Request("r", prompt_of(5, 6))
    prefill.start(mine)
    prefill.handovers.send([(mine, "r")])
    prefill.step()
    prefill.compute(mine, "r")
    prefill.until(lambda: [each.complete for each in prefill.transfers.transfers] == [True])
    prefill.planes[3][mine.block_table[2]][7] ^= 4  # a bit flips
    assert decode.fetch(theirs, prefill.source("r")) == 6
    decode.until(lambda: decode.outcomes)
    outcome = decode.outcomes[0]
    assert (outcome.status, outcome.recompute_from) == (LoadStatus.FAILED, 2 * BLOCK)
    assert "block 2 differ" in (outcome.error_message or "")
    assert decode.manager.get_stats().counters.blocks_corrupt_from_peer == 1
    decode.compute(theirs, "none", 2)
    assert decode.wrong_blocks(theirs, 0, 6) == []
    decode.manager.finish([theirs])
    prefill.manager.finish([mine])
    prefill.until(lambda: is_clean(prefill, decode))
    assert decode.start(Request("again", prompt_of(5, 6))) == 6 * BLOCK


def test_without_verification_a_changed_block_is_used(tmp_path: Path) -> None:
    with (
        Instance("prefill", tmp_path, "p") as prefill,
        Instance("decode", tmp_path, "d", verifies=False) as decode,
    ):
        mine, theirs = Request("r", prompt_of(5, 6)), Request("r", prompt_of(5, 6))
        prefill.start(mine)
        prefill.handovers.send([(mine, "r")])
        prefill.step()
        prefill.compute(mine, "r")
        prefill.until(lambda: [each.complete for each in prefill.transfers.transfers] == [True])
        prefill.planes[3][mine.block_table[2]][7] ^= 4
        decode.fetch(theirs, prefill.source("r"))
        decode.until(lambda: decode.outcomes)
        assert decode.outcomes[0].status is LoadStatus.CONFIRMED
        assert decode.wrong_blocks(theirs, 0, 6) == [2]


def test_decode_that_does_not_want_the_blocks_frees_them_at_once(pair: tuple[Instance, Instance]) -> None:
    prefill, decode = pair
    mine = Request("r", prompt_of(6, 6))
    prefill.start(mine)
    prefill.handovers.send([(mine, "r")])
    prefill.step()
    prefill.manager.finish([mine])
    assert prefill.manager.get_stats().sending_blocks == 6
    decode.handovers.decline([prefill.source("r")])
    decode.step()
    prefill.until(lambda: is_clean(prefill))
    assert {each.result for each in prefill.transfers.counts} == {"not_wanted"}


def test_an_aborted_fetch_tells_prefill_and_gives_its_slots_back(pair: tuple[Instance, Instance]) -> None:
    prefill, decode = pair
    mine, theirs = Request("r", prompt_of(7, 6)), Request("r", prompt_of(7, 6))
    prefill.start(mine)
    prefill.handovers.send([(mine, "r")])
    prefill.step()
    prefill.compute(mine, "r", 0, 2)
    decode.fetch(theirs, prefill.source("r"))
    decode.until(lambda: decode.transfers.connector.read_bytes)
    decode.handovers.end_transfers([theirs])
    decode.manager.finish([theirs])
    decode.until(lambda: is_clean(decode))
    assert decode.manager.num_free_device_blocks == 64
    prefill.manager.finish([mine])
    prefill.until(lambda: is_clean(prefill))
    assert {each.result for each in prefill.transfers.counts} == {"not_wanted"}


def test_an_aborted_prefill_lets_decode_compute(pair: tuple[Instance, Instance]) -> None:
    prefill, decode = pair
    mine, theirs = Request("r", prompt_of(8, 6)), Request("r", prompt_of(8, 6))
    prefill.start(mine)
    prefill.handovers.send([(mine, "r")])
    prefill.step()
    decode.fetch(theirs, prefill.source("r"))
    prefill.compute(mine, "r", 0, 2)
    decode.until(lambda: decode.transfers.connector.read_bytes)
    prefill.handovers.end_transfers([mine])
    prefill.manager.finish([mine])
    prefill.until(lambda: is_clean(prefill))
    decode.until(lambda: decode.outcomes)
    assert (decode.outcomes[0].status, decode.outcomes[0].recompute_from) == (LoadStatus.FAILED, 0)
    assert "given up" in (decode.outcomes[0].error_message or "")


def test_a_request_that_is_still_sent_is_matched_again_later(pair: tuple[Instance, Instance]) -> None:
    prefill, _ = pair
    mine = Request("r", prompt_of(9, 6))
    prefill.start(mine)
    prefill.handovers.send([(mine, "r")])
    prefill.step()
    prefill.manager.finish([mine])
    assert prefill.manager.match_prefix([mine])[0].status is MatchStatus.DEFERRED
    prefill.handovers.end_transfers([mine])
    prefill.until(lambda: is_clean(prefill))
    assert prefill.manager.match_prefix([mine])[0].status is MatchStatus.MATCHED


def test_a_lease_that_nobody_asks_for_ends(tmp_path: Path) -> None:
    with Instance("prefill", tmp_path, "p", wait=0.05) as prefill:
        mine = Request("r", prompt_of(10, 6))
        prefill.start(mine)
        prefill.handovers.send([(mine, "r")])
        prefill.step()
        prefill.manager.finish([mine])
        prefill.until(lambda: is_clean(prefill))
        assert prefill.transfers.leases_expired == 1


def test_a_fetch_without_an_answer_ends_at_its_deadline(tmp_path: Path) -> None:
    with (
        Instance("prefill", tmp_path, "p") as prefill,
        Instance("decode", tmp_path, "d", timeout=0.2) as decode,
    ):
        for name, address in (("a", prefill.address), ("b", f"ipc://{tmp_path}/nobody")):
            source = PeerSource(name, (address,))
            request = Request(name, prompt_of(11, 4))
            assert decode.fetch(request, source) == 4
            decode.until(lambda: decode.outcomes)
            assert decode.outcomes.pop().status is LoadStatus.FAILED
            decode.manager.finish([request])
            decode.until(lambda: is_clean(decode))


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"role": "decode"}, "role"), ({"connector": "ipc", "role": "prefill"}, None)],
)
def test_a_peer_of_another_kind_is_refused_with_the_field(
    tmp_path: Path, settings: dict[str, str], field: str | None
) -> None:
    with (
        Instance(settings["role"], tmp_path, "p") as peer,
        Instance("decode", tmp_path, "d") as decode,
    ):
        request = Request("r", prompt_of(12, 4))
        decode.fetch(request, peer.source("r"))
        if field is None:
            decode.until(lambda: decode.transfers.peers[0].state == "accepted")
            return
        decode.until(lambda: decode.outcomes)
        assert f"refused: {field} is" in (decode.outcomes[0].error_message or "")


def test_held_slots_beyond_the_limit_stop_fetches(tmp_path: Path) -> None:
    with Instance("decode", tmp_path, "d", held=0.0) as decode:
        first, second = Request("a", prompt_of(13, 4)), Request("b", prompt_of(14, 4))
        nowhere = PeerSource("a", (f"ipc://{tmp_path}/nobody",))
        assert decode.fetch(first, nowhere) == 4
        decode.manager.finish([first])
        assert decode.manager.get_stats().held_blocks == 4
        assert decode.fetch(second, nowhere) == 0
        assert decode.manager.get_stats().counters.fetches_skipped == 1
        decode.until(lambda: decode.manager.get_stats().held_blocks == 0)


def test_an_attempt_that_is_being_fetched_is_refused(pair: tuple[Instance, Instance]) -> None:
    prefill, decode = pair
    first, second = Request("first", prompt_of(1, 6)), Request("second", prompt_of(2, 6))
    for each in (first, second):
        assert decode.fetch(each, prefill.source("r")) == 6
    decode.until(lambda: decode.outcomes)
    (refused,) = decode.outcomes
    assert (refused.request_id, refused.recompute_from) == ("second", 0)
    assert "attempt 1 of transfer 'r' is being fetched already" in str(refused.error_message)
    mine = Request("mine", prompt_of(1, 6))
    prefill.start(mine)
    prefill.handovers.send([(mine, "r")])
    prefill.step()
    prefill.compute(mine, "r")
    decode.until(lambda: len(decode.outcomes) == 2, prefill)
    assert decode.outcomes[1].recompute_from == 6 * BLOCK


def test_hand_overs_begin_anew_when_their_thread_has_failed(
    pair: tuple[Instance, Instance], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = pair

    def fail(*_: object) -> None:
        raise MemoryError("no more")

    before, after = Request("before", prompt_of(1, 6)), Request("after", prompt_of(2, 6))
    assert decode.fetch(before, prefill.source("before")) == 6
    transfer = decode.controller._parts.transfer
    assert transfer is not None
    endpoint = transfer.endpoint
    boot = endpoint._links.mine.boot
    monkeypatch.setattr("fdcache.transfer.endpoint._FIRST_PAUSE", 1.0)
    monkeypatch.setattr(endpoint._connector, "poll", fail)
    decode.until(lambda: len(decode.outcomes) == 1)
    assert decode.fetch(after, prefill.source("after")) == 6
    decode.until(lambda: len(decode.outcomes) == 2)
    assert all("MemoryError: no more" in str(each.error_message) for each in decode.outcomes)
    assert "hand-overs have failed" in caplog.text
    with pytest.raises(TransferError, match="no more"):
        decode.controller.transfer_stats()
    for each in (before, after):
        decode.manager.finish([each])
    decode.until(lambda: endpoint._ended is None and is_clean(decode))
    assert endpoint._links.mine.boot != boot
    theirs, mine = Request("again", prompt_of(3, 6)), Request("again", prompt_of(3, 6))
    prefill.start(theirs)
    prefill.handovers.send([(theirs, "again")])
    prefill.step()
    prefill.compute(theirs, "again")
    assert decode.fetch(mine, prefill.source("again")) == 6
    decode.until(lambda: len(decode.outcomes) == 3, prefill)
    assert decode.outcomes[2].recompute_from == 6 * BLOCK
    assert decode.wrong_blocks(mine, 0, 6) == []


def test_there_are_no_hand_overs_unless_they_are_on() -> None:
    manager = CacheManager(CacheSettings(device_blocks=8), LAYOUT)
    assert Handovers.from_settings(manager, Settings.load(environ={})) is None
    with pytest.raises(TransferNotFoundError, match="FDCACHE_TRANSFER=nothing-like-it"):
        Handovers.from_settings(manager, Settings.load(environ={"FDCACHE_TRANSFER": "nothing-like-it"}))


def test_sending_before_the_allocation_is_refused(pair: tuple[Instance, Instance]) -> None:
    prefill, _ = pair
    with pytest.raises(RequestStateError, match="allocate"):
        prefill.handovers.send([(Request("r", prompt_of(1, 2)), "r")])


def test_a_name_that_is_being_sent_is_refused_until_that_has_ended(pair: tuple[Instance, Instance]) -> None:
    prefill, decode = pair
    first, second, theirs = (Request(name, prompt_of(name == "second", 6)) for name in ("r", "second", "r"))
    prefill.start(first)
    prefill.handovers.send([(first, "r")])
    prefill.step()
    prefill.compute(first, "r", 0, 3)
    prefill.start(second)
    with pytest.raises(RequestStateError, match="'r' is being sent already"):
        prefill.handovers.send([(second, "r")])
    prefill.step()
    prefill.compute(first, "r", 3)
    decode.fetch(theirs, prefill.source("r"))
    decode.until(lambda: decode.outcomes, prefill)
    assert decode.outcomes[0].status is LoadStatus.CONFIRMED
    assert decode.wrong_blocks(theirs, 0, 6) == []
    prefill.until(lambda: prefill.results == ["done"])
    prefill.handovers.send([(second, "r")])
    prefill.handovers.end_transfers([second])
    prefill.handovers.send([(second, "r")])


@pytest.mark.parametrize("point", ["matched", "no room", "allocated", "planned"])
def test_an_abort_before_peers_are_asked_frees_the_blocks_of_prefill(
    pair: tuple[Instance, Instance], point: str
) -> None:
    prefill, decode = pair
    mine, theirs = Request("r", prompt_of(15, 6)), Request("r", prompt_of(15, 6))
    prefill.start(mine)
    prefill.handovers.send([(mine, "r")])
    prefill.step()
    prefill.manager.finish([mine])
    plans = []
    decode.manager.match_prefix([theirs])
    decode.handovers.fetch([(theirs, prefill.source("r"))])
    if point == "no room":
        assert not decode.manager.allocate_device_blocks([(theirs, 100 * BLOCK)])[0].ok
        decode.manager.unmatch([theirs])
        assert decode.manager.take_plans() == []  # it will be tried again
    elif point != "matched":
        assert decode.manager.allocate_device_blocks([(theirs, theirs.num_tokens)])[0].ok
    if point == "planned":
        plans = decode.manager.take_plans()
    decode.handovers.end_transfers([theirs])
    decode.manager.finish([theirs])
    for plan in plans:
        decode.controller.submit_swap_tasks(plan)
    prefill.until(lambda: is_clean(prefill, decode), decode)
    assert [each.result for each in prefill.transfers.counts] == ["not_wanted"]
    assert decode.manager.num_free_device_blocks == 64


def test_a_fetch_that_found_no_room_is_asked_for_once_there_is(pair: tuple[Instance, Instance]) -> None:
    prefill, decode = pair
    mine, theirs = Request("r", prompt_of(16, 6)), Request("r", prompt_of(16, 6))
    prefill.start(mine)
    prefill.handovers.send([(mine, "r")])
    prefill.step()
    prefill.compute(mine, "r")
    large = Request("large", prompt_of(17, 62))
    decode.start(large)
    decode.manager.match_prefix([theirs])
    assert decode.handovers.fetch([(theirs, prefill.source("r"))]) == [6]
    assert not decode.manager.allocate_device_blocks([(theirs, theirs.num_tokens)])[0].ok
    decode.manager.unmatch([theirs])
    decode.manager.finish([large])
    assert decode.fetch(theirs, prefill.source("r")) == 6
    decode.until(lambda: decode.outcomes)
    assert decode.outcomes[0].status is LoadStatus.CONFIRMED
    assert decode.wrong_blocks(theirs, 0, 6) == []


def test_a_fetch_that_found_no_room_is_declined_if_prefill_is_asked_once(tmp_path: Path) -> None:
    with (
        Instance("prefill", tmp_path, "p") as prefill,
        Instance("decode", tmp_path, "d", keeps_asking=False) as decode,
    ):
        mine, theirs = Request("r", prompt_of(16, 6)), Request("r", prompt_of(16, 6))
        prefill.start(mine)
        prefill.handovers.send([(mine, "r")])
        prefill.step()
        prefill.manager.finish([mine])
        decode.manager.match_prefix([theirs])
        decode.handovers.fetch([(theirs, prefill.source("r"))])
        assert not decode.manager.allocate_device_blocks([(theirs, 100 * BLOCK)])[0].ok
        decode.manager.unmatch([theirs])
        prefill.until(lambda: is_clean(prefill, decode), decode)
        assert [each.result for each in prefill.transfers.counts] == ["not_wanted"]
