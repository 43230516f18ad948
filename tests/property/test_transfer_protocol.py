"""The state machines of a transfer under lost, repeated, late and reordered messages, aborts and deaths."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache.errors import ProtocolError
from fdcache.settings.kinds import printable
from fdcache.transfer.decode import FetchEnd
from fdcache.transfer.messages import (
    MOST_WORDS,
    NO_BOOT,
    AskForBlocks,
    BlocksGranted,
    End,
    Envelope,
    Failed,
    Last,
    Ready,
    Renew,
    Stranger,
    decode,
    encode,
)
from fdcache.transfer.prefill import SendEnd
from tests.seeds import budget
from tests.transfer_network import BLOCKS, Network


@settings(max_examples=budget(500), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_wrong_block_is_whole_and_nothing_is_left(seed: int) -> None:
    network = Network(seed)
    network.run()
    assert network.wrong_blocks == 0
    assert not network.fetches and not network.offers
    assert len(network.decode) == len(network.prefill) == network.prefill.num_waiting == 0
    assert network.decode.reads_in_flight == 0


def test_without_verification_the_same_runs_use_wrong_blocks() -> None:
    wrong = 0
    for seed in range(150):
        network = Network(seed, verifies=False)
        network.run()
        wrong += network.wrong_blocks
    assert wrong > 0


def test_the_runs_reach_every_end() -> None:
    ends: Counter[FetchEnd] = Counter()
    send_ends: Counter[SendEnd] = Counter()
    for seed in range(150):
        network = Network(seed)
        network.run()
        ends.update(network.ends)
        send_ends.update(network.send_ends)
    assert set(ends) == set(FetchEnd) - {FetchEnd.REFUSED, FetchEnd.DECLINED}
    assert set(send_ends) == set(SendEnd) - {SendEnd.PEER_GONE}


@settings(max_examples=budget(100), deadline=None)
@given(seed=st.integers(0, 2**32), first=st.integers(0, BLOCKS - 1))
def test_a_transfer_on_a_lossy_network_is_whole_if_nobody_gives_up(seed: int, first: int) -> None:
    network = Network(seed, loses=0.3, repeats=0.3)
    network.offer(1)
    network.fetch(1, first=first)
    for _ in range(150):
        network.random.choice(
            (network.deliver, network.end_read, network.end_sums, network.compute, network.publish)
        )()
        network.tick(0.01)
    network.run(steps=0)
    assert network.ends == [FetchEnd.DONE]
    assert network.whole_blocks == BLOCKS - first


HASHES = st.integers(0, 3).map(lambda count: bytes(32 * count))
NUMBERS = st.integers(0, 2**32)
MESSAGES = st.one_of(
    st.builds(AskForBlocks, st.text(), NUMBERS, NUMBERS, HASHES, NUMBERS),
    st.builds(BlocksGranted, st.text(), NUMBERS, NUMBERS),
    st.builds(
        Ready,
        st.text(),
        NUMBERS,
        NUMBERS,
        NUMBERS,
        NUMBERS,
        NUMBERS,
        NUMBERS,
        st.lists(NUMBERS, max_size=4).map(tuple),
    ),
    st.builds(lambda text, n: Last(text, n, n, bytes(64), bytes(16)), st.text(), NUMBERS),
    st.builds(Renew, st.text(), NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.builds(End, st.text(), NUMBERS, st.sampled_from([0, 1, 2])),
    st.builds(Failed, st.text(), NUMBERS, st.text().filter(str.isprintable)),
    st.builds(Stranger, st.binary(min_size=16, max_size=16)),
)


@given(message=MESSAGES, sender=st.binary(min_size=16, max_size=16))
def test_a_message_comes_back_from_its_bytes(message: AskForBlocks, sender: bytes) -> None:
    envelope = Envelope(sender, NO_BOOT)
    assert decode(encode(envelope, message)) == (envelope, message)


@given(reason=st.text() | st.builds(str.__mul__, st.text(min_size=1, max_size=4), st.integers(300, 1200)))
def test_the_reason_of_a_peer_is_read_short_and_printable(reason: str) -> None:
    _, message = decode(encode(Envelope(NO_BOOT, NO_BOOT), Failed("transfer", 1, reason)))
    assert isinstance(message, Failed)
    assert message.reason.isprintable()
    if len(reason) <= MOST_WORDS:
        assert message.reason == printable(reason)
    else:
        assert message.reason.startswith(printable(reason[:MOST_WORDS]))
        assert message.reason.endswith(f" and {len(reason) - MOST_WORDS} more characters")


@given(message=MESSAGES, seed=st.integers(0, 2**32))
def test_damaged_bytes_are_a_message_or_a_protocol_error(message: AskForBlocks, seed: int) -> None:
    random = np.random.default_rng(seed)
    data = np.frombuffer(encode(Envelope(NO_BOOT, NO_BOOT), message), np.uint8).copy()
    data[random.integers(len(data))] ^= 1 << random.integers(8)
    cut = data[: random.integers(len(data) + 1)].tobytes()
    for damaged in (data.tobytes(), cut):
        with suppress(ProtocolError):
            decode(damaged)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (AskForBlocks("t", 1, 0, bytes(31), 1), "hashes"),
        (Last("t", 1, 0, bytes(64), bytes(8)), "sums"),
        (End("t", 1, 9), "reason"),
        (Renew("t", 1, -1, 0, 0), "negative"),
    ],
)
def test_a_message_with_an_impossible_field_is_refused(message: AskForBlocks, field: str) -> None:
    with pytest.raises(ProtocolError, match=field):
        decode(encode(Envelope(NO_BOOT, NO_BOOT), message))
