"""Peers that send too much, or too long: there are limits, and hand-overs of others go on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from fdcache.errors import RequestStateError
from fdcache.manager import Request
from fdcache.manager.requests import PeerSource
from fdcache.transfer.messages import (
    NO_BOOT,
    End,
    EndReason,
    Envelope,
    Failed,
    LinkRefused,
    LinkWelcome,
    decode,
    encode,
)
from tests.integration.test_transfer_strangers import hand_over, identity_of, outsider
from tests.transfer_help import Instance, prompt_of


@pytest.fixture
def prefill(tmp_path: Path) -> Iterator[Instance]:
    with Instance("prefill", tmp_path, "p") as instance:
        yield instance


def test_peers_beyond_the_limit_are_refused_by_name(
    prefill: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fdcache.transfer.links._MOST_PEERS", 3)
    with outsider(prefill.address) as peer:
        answers = []
        for index in range(5):
            peer.boot = bytes([index]) * 16
            with outsider(prefill.address, boot=peer.boot) as each:
                answers.append(each.greet(identity_of(prefill), live=None))
        assert [type(each).__name__ for each in answers] == ["LinkWelcome"] * 3 + ["LinkRefused"] * 2
        assert len(prefill.transfers.peers) == 3


def test_peers_that_describe_themselves_at_length_are_refused_by_name(prefill: Instance) -> None:
    """What is kept of peers has a limit in bytes as well: a description may be as long as a message."""
    mine = identity_of(prefill)
    for index in range(5):
        with outsider(prefill.address) as peer:
            answer = peer.greet(mine, live=None, memory=b"x" * (15 << 20))
            if index < 4:
                assert isinstance(answer, LinkWelcome)
            else:
                assert isinstance(answer, LinkRefused)
                assert (answer.field, answer.theirs) == ("peers", "one more of 15 MiB")
    assert len(prefill.transfers.peers) == 4
    hand_over(prefill, "d")


def test_a_frame_that_is_too_long_is_not_read(prefill: Instance) -> None:
    with outsider(prefill.address) as peer:
        peer._socket.send(b"x" * (17 << 20))
        assert peer.answer(0.5) is None
        hand_over(prefill, "d")


def test_names_of_any_length_are_not_remembered(prefill: Instance) -> None:
    """Prefill remembers thousands of transfers that it has not begun yet."""
    with outsider(prefill.address) as peer:
        welcome = peer.greet(identity_of(prefill), live=None)
        assert isinstance(welcome, LinkWelcome)
        for letter in "abc":
            peer.send(End(letter * (15 << 20), 1, EndReason.DONE), welcome.side.boot)
        prefill.until(lambda: prefill.transfers.protocol_errors == 3)
    hand_over(prefill, "d")


def test_a_name_that_no_peer_reads_costs_its_own_hand_over_alone(prefill: Instance, tmp_path: Path) -> None:
    name, theirs = "n" * 5000, Request("p", prompt_of(3, 4))
    prefill.start(theirs)
    with pytest.raises(RequestStateError, match="the name of the transfer has 5000 characters"):
        prefill.handovers.send([(theirs, name)])
    prefill.manager.finish([theirs])
    with Instance("decode", tmp_path, "d") as mine:
        for request, transfer in (
            (Request("a", prompt_of(1, 4)), "a"),
            (Request("b", prompt_of(2, 4)), name),
        ):
            mine.fetch(request, prefill.source(transfer))
            if transfer == name:
                mine.until(lambda: mine.outcomes, prefill)
            mine.step()
        assert [each.request_id for each in mine.outcomes] == ["b"]
        assert "at most 4096" in str(mine.outcomes[0].error_message)
        mine.until(lambda: [each.state for each in mine.transfers.peers] == ["accepted"], prefill)
    assert prefill.transfers.protocol_errors == 0


@pytest.mark.parametrize(
    ("name", "attempt", "fault"),
    [
        ("x\ud800", 1, "UTF-8 cannot encode"),
        ("c", -1, "attempt -1 is not"),
        ("c", 2**64, "is not a number from 0"),
    ],
)
def test_what_no_message_can_have_costs_its_own_hand_over_alone(
    prefill: Instance, tmp_path: Path, name: str, attempt: int, fault: str
) -> None:
    with Instance("decode", tmp_path, "d") as mine:
        mine.fetch(Request("a", prompt_of(1, 4)), prefill.source("a"))
        mine.fetch(Request("b", prompt_of(2, 4)), prefill.source(name, attempt))
        mine.until(lambda: mine.outcomes, prefill)
        assert [each.request_id for each in mine.outcomes] == ["b"]
        assert fault in str(mine.outcomes[0].error_message)
        mine.until(lambda: [each.state for each in mine.transfers.peers] == ["accepted"], prefill)
    assert prefill.transfers.protocol_errors == 0
    hand_over(prefill, "e")


def test_a_peer_that_describes_itself_with_endless_names_is_refused(prefill: Instance) -> None:
    """Views and counts have its address."""
    with outsider(prefill.address) as peer:
        answer = peer.greet(identity_of(prefill), live=None, address="ipc:///" + "a" * 5000)
        assert isinstance(answer, LinkRefused) and answer.field == "protocol"
    assert not prefill.transfers.peers
    hand_over(prefill, "d")


def test_of_what_a_peer_says_log_lines_show_the_beginning(tmp_path: Path) -> None:
    """One that claims to be prefill refuses with 15 MiB of lines, and the outcome has some of them."""
    address, context = f"ipc://{tmp_path}/talker.0", zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(address)
    refused = encode(Envelope(b"p" * 16, NO_BOOT), LinkRefused("rank", "0", "line\n" * (3 << 20)))
    with Instance("decode", tmp_path, "d") as mine:
        mine.fetch(Request("a", prompt_of(1, 4)), PeerSource("a", (address,)))
        mine.step()
        assert router.poll(10_000)
        router.send_multipart([router.recv_multipart()[0], refused])
        mine.until(lambda: mine.outcomes)
        said = str(mine.outcomes[0].error_message)
        assert "rank is line\\nline" in said and "more characters" in said
        assert len(said) < 5000 and said.isprintable()
        failed = encode(Envelope(b"p" * 16, b"d" * 16), Failed("a", 1, "line\n" * (3 << 20)))
        read = decode(failed)[1]
        assert isinstance(read, Failed) and len(read.reason) < 5000 and read.reason.isprintable()
    context.destroy(linger=0)


def test_a_peer_that_never_stops_talking_does_not_stop_the_others(prefill: Instance) -> None:
    code = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
while True:
    socket.send(b"x" * 40)
"""
    talker = subprocess.Popen([sys.executable, "-c", code, prefill.address])
    try:
        prefill.until(lambda: prefill.transfers.protocol_errors > 2000)
        for name in "abc":
            hand_over(prefill, name)
        assert talker.poll() is None
    finally:
        talker.kill()
        talker.wait()
