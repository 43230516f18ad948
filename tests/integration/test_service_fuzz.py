"""Random frames and requests: they harm neither the service nor another client."""

from __future__ import annotations

import random

import numpy as np
import psutil
import pytest

from fdcache.errors import ProtocolError
from fdcache.hashing import hash_blocks, root_hash
from fdcache.service.client.connection import Argument
from fdcache.service.wire.liveness import LiveFile
from fdcache.service.wire.protocol import (
    Ask,
    Attach,
    EndFetches,
    Heartbeat,
    LoadEnded,
    Match,
    Missed,
    Prefetch,
    Publish,
    Refill,
    Register,
    Release,
    Request,
    decode_answer,
    encode_request,
)
from fdcache.tiers.statistics import Copied, Direction, Traffic
from tests.service_engine import PROMPT, Engine, layout
from tests.service_help import until
from tests.service_line import Line, code, ints, register


def bodies(slots: list[int], live: LiveFile, hashes: np.ndarray) -> list[Request]:
    """One of each request but the goodbye, all of them sound: what is changed in them reaches far."""
    three, none = hashes[:3].tobytes(), bytes(32)
    return [
        Register(layout().to_json().encode(), live.live, "test"),
        Attach(0, live.live),
        Match(ints(10), ints(0), hashes.tobytes()),
        Match(ints(1), ints(0), b"x" * 32, np.array([7], np.int64).tobytes()),
        Prefetch(7, 0, hashes.tobytes()),
        EndFetches([7, 8]),
        Release([1, 2, 3]),
        Refill(5),
        Publish(ints(*slots), none + three[:64], three, b"\1" * 3, bytes(24), b"t" * 16),
        Missed(1, three, ints(1, 2, 3)),
        LoadEnded(ints(0, 1, 2), three, b"\0\1\0"),
        Heartbeat(b'{"counters": {}}', 3, Traffic({Direction.HOST_TO_DEVICE: Copied(5)}), 9),
        Ask("tree", {"limit": 5}),
        Ask("explain", {"hashes": [hashes[0].tobytes().hex()]}),
        Ask("block", {"hash": "0123"}),
        Ask("reset", {"tier": "host", "tenant": "00" * 16, "older_than": 5}),
    ]


def mutations(seeds: list[bytes], rng: random.Random, count: int) -> list[bytes]:
    made = []
    for _ in range(count):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randrange(1, 6)):
            kind = rng.randrange(3)
            at = rng.randrange(len(data)) if data else 0
            if kind == 0 and data:
                data[at] = rng.randrange(256)
            elif kind == 1:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            else:
                del data[at : at + rng.randrange(1, 9)]
        made.append(bytes(data))
    return made


def test_random_frames_are_refused_and_leak_no_memory(line: Line) -> None:
    service, connection = line
    rng = random.Random(20260731)
    socket = connection.socket
    process = psutil.Process()
    engine = Engine(service.address)
    engine.serve(PROMPT)
    until(lambda: service.ask("namespaces")[0]["tier"]["ready"] == 10, "the blocks are stored")
    hashes = hash_blocks(PROMPT, 4, parent=root_hash(engine.layout.fingerprint))
    engine.close()
    live, other = register(connection, service.directory), LiveFile(service.directory)
    assert code(connection, Refill(8)) == "done"
    client = service.service.clients[connection.session]
    sound = bodies(list(client.stock)[:3], other, hashes)
    seeds = [encode_request(connection.session, 2, body) for body in sound]
    seeds += [encode_request(1, 2, Match(ints(1), ints(0), b"x" * 32))]

    def storm(count: int) -> None:
        for data in mutations(seeds, rng, count):
            socket.send(data)
            if rng.random() < 0.1:
                socket.send_multipart([data] * rng.randrange(2, 5))
            while socket.poll(0):
                try:
                    decode_answer(socket.recv())
                except ProtocolError:
                    pytest.fail("an answer of the service cannot be read")

    storm(2000)
    service.ask("stats")
    before = process.memory_info().rss
    storm(10000)
    until(lambda: service.ask("stats")["totals"]["refused"] > 5000, "most of it is refused")
    kinds = {type(body).__name__.lower() for body in sound}
    until(lambda: service.ask("stats")["totals"]["latencies"]["kinds"].keys() >= kinds, "each kind was asked")
    assert client in service.service.clients.values()
    counts = client.namespace.history.totals
    until(
        lambda: min(client.lookups, client.device_resets_applied, counts.in_flight_misses) > 0,
        "sound ones among them counted",
    )
    assert service.ask("integrity") == []
    assert process.memory_info().rss - before < 32 << 20
    live.close()
    other.close()


def nonsense(rng: random.Random, slots: list[int], hashes: np.ndarray) -> Request:
    """A request whose arrays fit each other and mean nothing."""

    def numbers(count: int) -> bytes:
        edges = [-(2**31), -1, 0, 1, 2, 10**6, 2**31 - 1, *slots]
        return ints(*(rng.choice(edges) for _ in range(count)))

    def keys(count: int) -> bytes:
        known = [row.tobytes() for row in hashes]
        return b"".join(
            rng.choice([*known, bytes(32), b"\xff" * 32, rng.randbytes(32)]) for _ in range(count)
        )

    count = rng.randrange(6)
    marks = bytes(rng.randrange(3) for _ in range(count))
    parts = [rng.randrange(4) for _ in range(count)]
    paths = Match(ints(*parts), ints(*(rng.randrange(part + 1) for part in parts)), keys(sum(parts)))
    limits: list[Argument] = [-1, 0, 2**64 - 1, None, "x"]
    ages: list[Argument] = [-1, 1e300, float("nan"), True, "1"]
    possible: list[Request] = [
        paths,
        Match(numbers(count), numbers(count), keys(count), bytes(8 * count)),
        Release([rng.choice([-(2**63), -1, 0, 1, 5, 2**63]) for _ in range(count)]),
        Refill(rng.choice([-(2**63), -1, 0, 3, 2**40])),
        Publish(numbers(count), keys(count), keys(count), marks, rng.randbytes(8 * count)),
        Publish(ints(*slots), keys(len(slots)), keys(len(slots)), bytes(len(slots)), bytes(8 * len(slots))),
        Missed(rng.randrange(9), keys(count), numbers(count)),
        LoadEnded(numbers(count), keys(count), marks),
        Prefetch(rng.choice([-1, 0, 1, 2**63]), rng.choice([-1, 0, 1, 9]), keys(count)),
        EndFetches([rng.choice([-1, 0, 1, 2**63]) for _ in range(count)]),
        Ask(rng.choice(["tree", "tenants"]), {"limit": rng.choice(limits)}),
        Ask(
            "explain",
            {"hashes": [keys(1).hex() for _ in range(count)], "namespace": rng.choice(["", "f"])},
        ),
        Ask("reset", {"tier": "host", "older_than": rng.choice(ages)}),
    ]
    return rng.choice(possible)


def test_random_requests_are_harmless(line: Line) -> None:
    service, connection = line
    rng = random.Random(20261121)
    engine = Engine(service.address)
    engine.serve(PROMPT)
    until(lambda: service.ask("namespaces")[0]["tier"]["ready"] == 10, "the blocks are stored")
    hashes = hash_blocks(PROMPT, 4, parent=root_hash(engine.layout.fingerprint))
    live = register(connection, service.directory)
    client = service.service.clients[connection.session]
    answers = set()
    for turn in range(4000):
        slots = rng.sample(list(client.stock), min(3, len(client.stock)))
        answers.add(code(connection, nonsense(rng, slots, hashes)))
        if turn % 500 == 0:
            assert service.ask("integrity") == []
    assert answers == {"done", "malformed", "not_yours"}
    connection.session = 0
    live.close()
    until(lambda: len(service.ask("clients")) == 1, "it is gone")
    assert service.ask("integrity") == []
    assert engine.serve(PROMPT)[1] == []
    engine.close()
