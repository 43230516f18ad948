"""Whatever comes down the socket, the service answers what it can and lives on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from fdcache.client.tool import Argument
from fdcache.errors import ProtocolError, ServiceUnavailableError
from fdcache.manager import Request as EngineRequest
from fdcache.node.connection import Connection
from fdcache.node.frames import VERSION, decode_answer, encode_request
from fdcache.node.liveness import LiveFile
from fdcache.node.protocol import (
    Ask,
    Attach,
    EndFetches,
    Events,
    Granted,
    Heartbeat,
    LoadEnded,
    Match,
    Matched,
    Missed,
    Prefetch,
    Publish,
    Refill,
    Refused,
    Register,
    Registered,
    Release,
    Request,
)
from fdcache.node.traffic import Copied, Direction, Traffic
from tests.service_engine import PROMPT, Engine, layout
from tests.service_help import TIMEOUT, LocalService, local_service, until

Line = tuple[LocalService, Connection]


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    with local_service(tmp_path) as service:
        connection = Connection(service.address)
        yield service, connection
        connection.close()


def code(connection: Connection, body: Request) -> str:
    number = connection.send(body)
    while (got := connection.receive(TIMEOUT)) is not None:
        if got[0] == number:
            return got[1].code if isinstance(got[1], Refused) else "done"
    return "silence"


def register(connection: Connection, directory: Path) -> LiveFile:
    live = LiveFile(directory)
    answer, _ = connection.call(Register(layout().to_json().encode(), live.live, "test"), TIMEOUT)
    assert isinstance(answer, Registered)
    connection.session = answer.session
    return live


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


class TestRefusals:
    def test_another_version_is_named(self, line: Line) -> None:
        _, connection = line
        body = msgspec.msgpack.encode((VERSION + 1, 0, 7, Ask("stats")))
        connection.socket.send(body)
        number, answer = decode_answer(connection.socket.recv())
        assert number == 7
        assert isinstance(answer, Refused)
        assert str(VERSION + 1) in answer.message

    def test_an_unknown_session_is_told_to_register(self, line: Line) -> None:
        _, connection = line
        connection.session = 12345
        for body in (Refill(5), Release([1]), Heartbeat(b"{}"), Match(b"", b"", b"")):
            assert code(connection, body) == "no_session"

    @pytest.mark.parametrize(
        "body",
        [
            Match(ints(2), ints(0), bytes(32)),
            Match(ints(1), ints(2), b"x" * 32),
            Match(ints(-1), ints(0), b""),
            Match(b"123", ints(0), b""),
            Match(ints(1), ints(0), b"x" * 33),
            Publish(ints(0), b"x" * 32, b"x" * 31, b"\1", bytes(8)),
            Publish(ints(0), b"x" * 32, b"x" * 32, b"\1\1", bytes(8)),
            LoadEnded(ints(1, 2), b"x" * 32, b"\1\1"),
            Refill(-5),
        ],
    )
    def test_arrays_that_do_not_fit_are_refused(self, line: Line, body: Request) -> None:
        service, connection = line
        live = register(connection, service.directory)
        answer = code(connection, body)
        assert answer == "malformed" or isinstance(body, Refill)
        assert service.ask("integrity") == []
        live.close()

    def test_slots_of_others_cannot_be_published(self, line: Line) -> None:
        service, connection = line
        engine = Engine(service.address)
        (client,) = service.service.clients.values()
        stolen = ints(*client.stock)
        live = register(connection, service.directory)
        count = len(stolen) // 4
        body = Publish(stolen, bytes(32) * count, b"x" * 32 * count, b"\1" * count, bytes(8 * count))
        assert code(connection, body) == "not_yours"
        engine.close()
        live.close()

    def test_hashes_that_are_no_path_leave_nothing_pinned(self, line: Line) -> None:
        service, connection = line
        engine = Engine(service.address)
        engine.serve(PROMPT)
        hashes = EngineRequest("x", PROMPT)._bind(4, engine.layout.fingerprint).hashes
        until(lambda: service.ask("namespaces")[0]["tier"]["ready"] == 10, "the blocks are stored")
        engine.close()
        until(lambda: not service.ask("clients"), "the engine has said goodbye")
        live = register(connection, service.directory)
        twisted = hashes[:5].tobytes() + hashes[[3, 1, 2]].tobytes()
        assert code(connection, Match(ints(5, 3), ints(0, 0), twisted)) == "malformed"
        tier = service.ask("namespaces")[0]["tier"]
        assert (tier["pins"], tier["leases"]) == (0, 1)
        assert service.ask("integrity") == []
        live.close()

    def test_leases_of_others_cannot_be_released(self, line: Line) -> None:
        service, connection = line
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: service.ask("namespaces")[0]["tier"]["ready"] == 10, "the blocks are stored")
        live = register(connection, service.directory)
        other = Connection(service.address)
        other_live = register(other, service.directory)
        hashes = EngineRequest("x", PROMPT)._bind(4, engine.layout.fingerprint).hashes
        answer, _ = other.call(Match(ints(len(hashes)), ints(0), hashes.tobytes()), TIMEOUT)
        assert isinstance(answer, Matched)
        assert code(connection, Release(answer.leases)) == "done"
        assert service.ask("namespaces")[0]["tier"]["pins"] >= len(hashes)
        engine.close()
        for held in (live, other_live):
            held.close()
        other.close()

    def test_a_live_file_elsewhere_is_refused(self, line: Line, tmp_path: Path) -> None:
        _, connection = line
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        live = LiveFile(elsewhere)
        assert code(connection, Register(layout().to_json().encode(), live.live, "test")) == "malformed"
        assert code(connection, Attach(0, live.live)) == "malformed"
        live.close()

    def test_a_layout_that_cannot_be_is_refused(self, line: Line) -> None:
        service, connection = line
        live = LiveFile(service.directory)
        for text in (b"", b"[]", b"{}", b"x" * 2_000_000):
            assert code(connection, Register(text, live.live, "test")) != "done"
        live.close()


def test_a_client_hears_of_a_reset_before_it_is_granted_anything_after_it(line: Line) -> None:
    service, connection = line
    live = register(connection, service.directory)
    for _ in range(20):
        service.ask("reset", tier="host")
        connection.send(Refill(1))
        answers = [connection.receive(TIMEOUT) for _ in range(2)]
        assert [type(answer[1]) for answer in answers if answer] == [Events, Granted]
    live.close()


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


def test_fuzzed_frames_are_refused_and_take_no_memory(line: Line) -> None:
    service, connection = line
    rng = random.Random(20260731)
    socket = connection.socket
    process = psutil.Process()
    engine = Engine(service.address)
    engine.serve(PROMPT)
    until(lambda: service.ask("namespaces")[0]["tier"]["ready"] == 10, "the blocks are stored")
    hashes = EngineRequest("x", PROMPT)._bind(4, engine.layout.fingerprint).hashes
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
    counts = client.namespace.history.counts
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


def test_requests_that_mean_nothing_harm_nothing(line: Line) -> None:
    service, connection = line
    rng = random.Random(20261121)
    engine = Engine(service.address)
    engine.serve(PROMPT)
    until(lambda: service.ask("namespaces")[0]["tier"]["ready"] == 10, "the blocks are stored")
    hashes = EngineRequest("x", PROMPT)._bind(4, engine.layout.fingerprint).hashes
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


def test_frames_beyond_the_limit_close_only_their_own_line(line: Line) -> None:
    service, connection = line
    connection.socket.send(bytes(20 << 20))
    assert not connection.socket.poll(300)
    assert service.ask("stats")["state"] == "ready"


def test_a_client_that_does_not_read_slows_itself_alone(tmp_path: Path) -> None:
    with local_service(tmp_path) as service:
        slow = Connection(service.address)
        live = register(slow, service.directory)
        before = service.ask("namespaces")[0]["tier"]["free"]
        sent = 0

        def overflows() -> bool:
            nonlocal sent
            for _ in range(1000):
                try:
                    slow.send(Refill(1))
                    sent += 1
                except ServiceUnavailableError:
                    break
            return bool(service.service.totals.undelivered > 100)

        until(overflows, "its queue is full")
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(
            lambda: service.ask("namespaces")[0]["tier"]["ready"] == 10, "another client is served meanwhile"
        )
        engine.close()
        while slow.receive(0.5) is not None:
            pass
        assert code(slow, Heartbeat(b"{}")) == "done"
        until(lambda: len(service.ask("clients")) == 1, "the other client has said goodbye")
        (client,) = service.ask("clients")
        slots = service.ask("namespaces")[0]["tier"]
        assert slots["writing"] == client["stock"] <= sent
        assert slots["free"] + client["stock"] >= before - 10
        assert service.ask("integrity") == []
        slow.close()
        live.close()
