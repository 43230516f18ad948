"""Random frames and requests: they harm neither the service nor another client."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any, get_args

import msgspec
import numpy as np
import psutil
import pytest

from fdcache.errors import ProtocolError
from fdcache.hashing import hash_blocks, root_hash
from fdcache.hints import HintKind
from fdcache.service.client.connection import Argument
from fdcache.service.wire.liveness import LiveFile
from fdcache.service.wire.protocol import (
    Ask,
    Attach,
    Bye,
    Describe,
    DescribedPath,
    EndFetches,
    FindEnd,
    FindStored,
    Forgotten,
    Heartbeat,
    HintGiven,
    Hints,
    LoadEnded,
    Match,
    Missed,
    Prefetch,
    Publish,
    Refill,
    Register,
    Registered,
    Request,
    decode_answer,
    encode_request,
)
from fdcache.tiers.statistics import Copied, Direction, Traffic
from tests.seeds import budget
from tests.service_engine import PROMPT, Engine, layout, ready_blocks
from tests.service_help import TIMEOUT, until
from tests.service_line import Line, code, ints, numbers, register, runs_of


def bodies(
    slots: list[int], live: LiveFile, hashes: np.ndarray, engine: LiveFile | None = None
) -> list[Request]:
    """Return some of each request, all of them sound: what is changed in them reaches far.

    ``engine`` is the process that is registered; its goodbye is among them.
    """
    three, none = hashes[:3].tobytes(), bytes(32)
    own = (engine or live).live
    return [
        *([Bye()] if engine else []),
        Register(layout().to_json().encode(), own, "test"),
        Attach(0, msgspec.structs.replace(live.live, engine=own.path)),
        Hints(
            three,
            [HintGiven(1, HintKind.RETAIN, 0, 3, 5.0), HintGiven(2, HintKind.PRIORITY, 1, 3, None, 7, True)],
        ),
        Match(numbers(1), ints(10), ints(0), hashes.tobytes()),
        Match(numbers(2), ints(1), ints(0), b"x" * 32, numbers(7)),
        Prefetch(7, 0, hashes.tobytes()),
        FindStored(hashes.tobytes()),
        FindEnd(hashes.tobytes(), 1),
        EndFetches([7, 8]),
        Refill(5),
        Describe([DescribedPath(three, ints(*range(12)), b"", "tenant", None, [(0, 4, "image")])]),
        Describe([], b"\2\0\1", three),
        Publish(ints(*slots), none + three[:64], three, b"\1" * 3, bytes(24), b"t" * 16),
        Missed(1, three, ints(1, 2, 3), three[:16], 2**63),
        LoadEnded(ints(0, 1, 2), three, b"\0\1\0"),
        Heartbeat(b'{"counters": {}}', 3, Traffic({Direction.HOST_TO_DEVICE: Copied(5)}), 9),
        Forgotten(5),
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
    seeds += [encode_request(1, 2, Match(numbers(3), ints(1), ints(0), b"x" * 32))]

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


# --- each type of message -----------------------------------------------------------------------------------

NUMBERS = (-(2**63), -(2**31), -1, 0, 1, 2, 255, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 1)
TEXTS = ("", "..", "/", "\0", "x" * 300, "\U0010ffff" * 100, "0" * 64, "host", "nan")


def changed(value: Any, rng: random.Random) -> Any:
    """Return a value with one part of it changed, of its own kind or another."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {each: its for each, its in value.items() if each != key}
        return value | {key: changed(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        kinds = [value[:at], [*value, value[at]], [*value[:at], changed(value[at], rng), *value[at + 1 :]]]
        return rng.choice(kinds)
    if rng.random() < 0.8:
        if isinstance(value, bytes):
            return _changed_bytes(value, rng)
        if isinstance(value, str):
            return _changed_text(value, rng)
    anything: list[Any] = [None, True, {}, [], float("nan"), float("inf"), 1e300, *NUMBERS, *TEXTS]
    return rng.choice([*anything, [[[]]] * 100, "x" * rng.randrange(200)])


def _changed_text(value: str, rng: random.Random) -> str:
    at = rng.randrange(len(value) + 1)
    return rng.choice([*TEXTS, value[:at], value[:at] + rng.choice(TEXTS) + value[at:]])


def _changed_bytes(value: bytes, rng: random.Random) -> bytes:
    data = bytearray(value)
    at = rng.randrange(len(data) + 1)
    kind = rng.randrange(5)
    if kind == 0 and data:
        data[at % len(data)] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[at:at] = rng.randbytes(rng.choice([1, 4, 8, 16, 32]))
    elif kind == 2:
        del data[at : at + rng.choice([1, 4, 8, 16, 32])]
    elif kind == 3 and len(data) >= 4:
        start = at % (len(data) - 3)
        data[start : start + 4] = ints(rng.choice([-(2**31), -1, 0, 1, 2**31 - 1]))
    else:
        data *= rng.choice([2, 64])
    return bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("kind", get_args(Request), ids=lambda kind: kind.__name__.lower())
def test_changed_messages_of_each_type_are_harmless(line: Line, kind: type[Request]) -> None:
    service, connection = line
    rng = random.Random(f"20261124 {kind.__name__}")
    engine = Engine(service.address)
    engine.serve(PROMPT)
    until(lambda: service.ask("namespaces")[0]["tier"]["ready"] == 10, "the blocks are stored")
    hashes = hash_blocks(PROMPT, 4, parent=root_hash(engine.layout.fingerprint))
    live, other = LiveFile(service.directory), LiveFile(service.directory)
    process, before = psutil.Process(), 0
    answers: Counter[str] = Counter()
    for turn in range(budget(5000)):
        if not connection.session or connection.session not in service.service.clients:
            answer, _ = connection.call(Register(layout().to_json().encode(), live.live, "test"), TIMEOUT)
            assert isinstance(answer, Registered)
            connection.session = answer.session
            code(connection, Refill(8))
        slots = list(service.service.clients[connection.session].stock)[:3] or [0, 1, 2]
        sound = [each for each in bodies(slots, other, hashes, live) if isinstance(each, kind)]
        body: Any = msgspec.to_builtins(rng.choice(sound), builtin_types=(bytes,))
        if kind is Register and rng.random() < 0.5:
            body["layout"] = json.dumps(changed(json.loads(body["layout"]), rng)).encode()
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            body = changed(body, rng)
        answers[code(connection, body)] += 1
        if turn % 200 == 0:
            assert service.ask("integrity") == []
        if turn == 200:
            before = process.memory_info().rss
    assert answers["done"] > 0
    assert answers.keys() & {"internal", "silence"} == set(), answers
    assert not before or process.memory_info().rss - before < 64 << 20
    connection.session = 0
    live.close()
    other.close()
    until(lambda: len(service.ask("clients")) == 1, "it is gone")
    assert service.ask("integrity") == []
    engine.manager._device.reset()
    until(lambda: engine.serve(PROMPT) and ready_blocks(service) >= 10, "the engine stores and finds")
    engine.close()


def nonsense(rng: random.Random, slots: list[int], hashes: np.ndarray) -> Request:
    """A request whose arrays fit each other and mean nothing."""

    def any_ints(count: int) -> bytes:
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
    runs = numbers(*(rng.randrange(1, 2**40) for _ in parts))
    paths = Match(runs, ints(*parts), ints(*(rng.randrange(part + 1) for part in parts)), keys(sum(parts)))
    limits: list[Argument] = [-1, 0, 2**64 - 1, None, "x"]
    ages: list[Argument] = [-1, 1e300, float("nan"), True, "1"]
    possible: list[Request] = [
        paths,
        Match(
            numbers(*(rng.choice([-(2**63), -1, 0, 1, 5]) for _ in range(count))),
            any_ints(count),
            any_ints(count),
            keys(count),
            bytes(8 * count),
        ),
        Refill(rng.choice([-(2**63), -1, 0, 3, 2**40])),
        Publish(any_ints(count), keys(count), keys(count), marks, rng.randbytes(8 * count)),
        Publish(ints(*slots), keys(len(slots)), keys(len(slots)), bytes(len(slots)), bytes(8 * len(slots))),
        Missed(
            rng.randrange(9),
            keys(count),
            any_ints(count),
            rng.randbytes(8 * count),
            rng.choice([0, 1, 2**64 - 1]),
        ),
        LoadEnded(any_ints(count), keys(count), marks),
        Prefetch(rng.choice([-1, 0, 1, 2**63]), rng.choice([-1, 0, 1, 9]), keys(count)),
        FindStored(keys(count)),
        FindEnd(keys(count), rng.choice([-1, 0, 1, 2**31])),
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
    assert answers == {"done", "malformed", "not_yours", "unknown"}
    connection.session = 0
    live.close()
    until(lambda: len(service.ask("clients")) == 1, "it is gone")
    assert service.ask("integrity") == []
    assert engine.serve(PROMPT)[1] == []
    engine.close()


def test_random_bytes_in_a_ring_are_harmless(line: Line) -> None:
    service, connection = line
    rng = random.Random(20261122)
    engine = Engine(service.address)
    engine.serve(PROMPT)
    until(lambda: service.ask("namespaces")[0]["tier"]["ready"] == 10, "the blocks are stored")
    hashes = hash_blocks(PROMPT, 4, parent=root_hash(engine.layout.fingerprint))
    body = Match(numbers(2**40), ints(10), ints(0), hashes.tobytes())
    answers = set()
    for _ in range(60):
        live = register(connection, service.directory)
        runs = runs_of(line)
        assert runs.pin(hashes, runs.find(hashes, 0))
        service.ask("stats")
        memory = np.memmap(service.service.clients[connection.session].ring_path, np.uint8, "r+")
        written = int(memory[:8].view(np.uint64)[0])
        records = rng.randrange(1, 5)
        for at in range(128 + written, 128 + written + 16 * records, 16):
            record = memory[at : at + 16]
            record[:8].view(np.int64)[0] = rng.choice([-1, 0, 1, 2, 2**40])
            record[8:].view(np.uint32)[:] = (
                rng.choice([0, 1, 9, 2**17, 2**32 - 1]),
                rng.choice([0, 0, 1, 2**31]),
            )
        memory[:8].view(np.uint64)[0] = written + rng.choice([16 * records, 16 * records, 2**20, 2**63, 5])
        answers.add(code(connection, body))
        assert service.ask("integrity") == []
        connection.session = 0
        live.close()
    assert answers == {"done", "malformed"}
    until(lambda: len(service.ask("clients")) == 1, "they are gone")
    assert service.ask("integrity") == []
    assert engine.serve(PROMPT)[1] == []
    engine.close()
