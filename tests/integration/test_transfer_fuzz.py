"""Random and damaged messages to real endpoints, of both sides: the thread goes on, and hand-overs of others arrive."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import zmq

from fdcache.manager import Request
from fdcache.manager.requests import PeerSource
from fdcache.transfer.messages import (
    AnyMessage,
    AskForBlocks,
    BlocksGranted,
    Envelope,
    Identity,
    LinkHello,
    LinkRefused,
    LinkWelcome,
    Ready,
    decode,
    encode,
)
from tests.integration.test_transfer_strangers import hand_over, identity_of, outsider
from tests.seeds import budget
from tests.transfer_help import Instance, prompt_of

NUMBERS = (0, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**64 - 1)
TEXTS = ("", "r", "hand-over", "x" * 300, "\0", "../..", "ä" * 5000)


class Monkey:
    """Makes messages whose fields have the right types, and damages some of their bytes."""

    def __init__(self, seed: int, identity: Identity) -> None:
        self._random, self._identity = random.Random(seed), identity

    def message(self) -> AnyMessage:
        kind = self._random.choice([each for each in get_args(AnyMessage) if each is not LinkRefused])
        values = [self._value(field.type) for field in msgspec.structs.fields(kind)]
        return kind(*values)  # type: ignore[no-any-return]

    def damaged(self, data: bytes) -> bytes:
        bytes_ = bytearray(data)
        for _ in range(self._random.choice((0, 0, 0, 1, 3))):
            bytes_[self._random.randrange(len(bytes_))] = self._random.randrange(256)
        return bytes(bytes_)

    def _value(self, kind: Any) -> Any:
        draw = self._random
        if kind is int:
            return draw.choice(NUMBERS)
        if kind is str:
            return draw.choice(TEXTS)
        if kind is bytes:
            return draw.randbytes(draw.choice((0, 16, 31, 32, 64, 4096)))
        if kind is Identity:
            return self._changed_identity()
        return tuple(draw.choice(NUMBERS) for _ in range(draw.choice((0, 1, 2, 6))))

    def _changed_identity(self) -> Identity:
        """Return an identity of which up to two fields differ from one that fits."""
        fields = {each.name: each.type for each in msgspec.structs.fields(Identity)}
        names = self._random.sample(sorted(fields), self._random.choice((0, 1, 1, 2)))
        changes = {name: None if name == "live" else self._value(fields[name]) for name in names}
        return msgspec.structs.replace(self._identity, **changes)


@pytest.fixture
def prefill(tmp_path: Path) -> Iterator[Instance]:
    with Instance("prefill", tmp_path, "p") as instance:
        yield instance


def endpoint_of(instance: Instance) -> Any:
    transfer = instance.controller._parts.transfer
    assert transfer is not None
    return transfer.endpoint


@pytest.mark.parametrize("seed", range(2))
def test_no_message_of_a_decode_peer_ends_prefill(prefill: Instance, seed: int) -> None:
    boot = endpoint_of(prefill)._links.mine.boot
    with outsider(prefill.address) as peer:
        monkey = Monkey(seed, msgspec.structs.replace(identity_of(prefill), boot=peer.boot))
        assert isinstance(peer.greet(identity_of(prefill), live=None), LinkWelcome)
        for _ in range(budget(20_000)):
            peer._socket.send(monkey.damaged(encode(Envelope(peer.boot, boot), monkey.message())))
        prefill.step()
        hand_over(prefill, "d")
    assert endpoint_of(prefill)._links.mine.boot == boot, "the thread has failed and begun anew"


class HostilePrefill:
    """Welcomes a decode rank, and answers its asks with anything."""

    def __init__(self, folder: Path, identity: Identity, monkey: Monkey) -> None:
        self.address = f"ipc://{folder}/hostile"
        self._mine = msgspec.structs.replace(identity, role="prefill", boot=b"h" * 16, live=None)
        self._monkey = monkey
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.address)

    def step(self) -> None:
        while self._router.poll(0):
            route, data = self._router.recv_multipart()
            envelope, message = decode(data)
            answers: list[AnyMessage] = []
            if isinstance(message, LinkHello):
                answers = [LinkWelcome(self._mine)]
            elif isinstance(message, AskForBlocks):
                answers = [BlocksGranted(message.transfer, message.attempt, 0)]
                for seq in range(1, 4):
                    value = self._monkey._value(tuple[int, ...])
                    draw = self._monkey._random.choice
                    numbers = (draw(NUMBERS[:4]), draw(NUMBERS), draw(NUMBERS[:3]), draw(NUMBERS[:4]))
                    answers.append(Ready(message.transfer, message.attempt, seq, *numbers, value))
            for each in answers:
                self._router.send_multipart([route, encode(Envelope(self._mine.boot, envelope.sender), each)])
            if not isinstance(message, LinkHello):
                frame = encode(Envelope(self._mine.boot, envelope.sender), self._monkey.message())
                self._router.send_multipart([route, self._monkey.damaged(frame)])

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.mark.parametrize("seed", range(2))
def test_no_message_of_a_prefill_peer_ends_decode_or_is_taken_for_blocks(
    prefill: Instance, tmp_path: Path, seed: int
) -> None:
    with Instance("decode", tmp_path, "d", timeout=0.3, lease=1.0) as mine:
        boot = endpoint_of(mine)._links.mine.boot
        identity = endpoint_of(prefill)._links.mine
        hostile = HostilePrefill(tmp_path, identity, Monkey(seed, identity))
        try:
            end = time.monotonic() + 60
            for count in itertools.count():
                if count >= budget(50) and (mine.transfers.connector.reads or time.monotonic() > end):
                    break  # on a busy machine few answers are in time
                request = Request(f"r{count}", prompt_of(count, 4))
                mine.fetch(request, PeerSource(f"r{count}", (hostile.address,)))
                mine.until(lambda: mine.outcomes, hostile)
                assert mine.outcomes.pop().recompute_from == 0
                mine.manager.finish([request])
        finally:
            hostile.close()
        assert endpoint_of(mine)._links.mine.boot == boot, "the thread has failed and begun anew"
        assert mine.transfers.connector.reads > 0
        mine.until(lambda: mine.is_clean)
    hand_over(prefill, "e")
