"""Requests of the wire protocol that a service must refuse, and clients that misbehave."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fdcache.errors import ServiceUnavailableError
from fdcache.hashing import hash_blocks, root_hash
from fdcache.service.client.connection import Connection
from fdcache.service.wire.liveness import LiveFile
from fdcache.service.wire.protocol import (
    VERSION,
    Ask,
    Attach,
    Events,
    Granted,
    Heartbeat,
    LoadEnded,
    Match,
    Matched,
    Publish,
    Refill,
    Refused,
    Register,
    Registered,
    Request,
    decode_answer,
)
from tests.service_engine import PROMPT, Engine, layout
from tests.service_help import TIMEOUT, local_service, until
from tests.service_line import Line, code, ints, numbers, register, runs_of
from tests.service_messages import ANSWERS, REQUESTS, tag_of


class TestRefusals:
    def test_another_version_is_named(self, line: Line) -> None:
        _, connection = line
        body = msgspec.msgpack.encode((VERSION + 1, 0, 7, Ask("stats")))
        connection.socket.send(body)
        number, answer = decode_answer(connection.socket.recv())
        assert number == 7
        assert isinstance(answer, Refused)
        assert str(VERSION + 1) in answer.message

    def test_an_unknown_session_is_refused(self, line: Line) -> None:
        _, connection = line
        connection.session = 12345
        for body in (Refill(5), Heartbeat(b"{}"), Match(b"", b"", b"", b"")):
            assert code(connection, body) == "no_session"

    @pytest.mark.parametrize(
        "body",
        [
            Match(numbers(1), ints(2), ints(0), bytes(32)),
            Match(numbers(1), ints(1), ints(2), b"x" * 32),
            Match(numbers(1), ints(-1), ints(0), b""),
            Match(numbers(1), b"123", ints(0), b""),
            Match(numbers(1), ints(1), ints(0), b"x" * 33),
            Match(ints(1), ints(1), ints(0), b"x" * 32),
            Match(numbers(0), ints(1), ints(0), b"x" * 32),
            Match(numbers(2, 2), ints(1, 1), ints(0, 0), b"x" * 64),
            Publish(ints(0), b"x" * 32, b"x" * 31, b"\1", bytes(8)),
            Publish(ints(0), b"x" * 32, b"x" * 32, b"\1\1", bytes(8)),
            LoadEnded(ints(1, 2), b"x" * 32, b"\1\1"),
            Refill(-5),
        ],
    )
    def test_malformed_arrays_are_refused(self, line: Line, body: Request) -> None:
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

    def test_hashes_that_are_not_a_path_find_nothing(self, line: Line) -> None:
        service, connection = line
        engine = Engine(service.address)
        engine.serve(PROMPT)
        hashes = hash_blocks(PROMPT, 4, parent=root_hash(engine.layout.fingerprint))
        until(lambda: service.ask("namespaces")[0]["tier"]["ready"] == 10, "the blocks are stored")
        engine.close()
        until(lambda: not service.ask("clients"), "the engine has said goodbye")
        live = register(connection, service.directory)
        twisted = hashes[:5].tobytes() + hashes[[3, 1, 2]].tobytes()
        assert code(connection, Match(numbers(1, 2), ints(5, 3), ints(0, 0), twisted)) == "done"
        tier = service.ask("namespaces")[0]["tier"]
        assert (tier["pins"], tier["leases"]) == (5, 2)  # those of the first run alone
        assert service.ask("integrity") == []
        live.close()

    def test_a_number_of_a_pinned_run_is_refused(self, line: Line) -> None:
        service, connection = line
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: service.ask("namespaces")[0]["tier"]["ready"] == 10, "the blocks are stored")
        live = register(connection, service.directory)
        hashes = hash_blocks(PROMPT, 4, parent=root_hash(engine.layout.fingerprint))
        body = Match(numbers(7), ints(10), ints(0), hashes.tobytes())
        assert [code(connection, body) for _ in range(2)] == ["done", "malformed"]
        runs_of(line).unpin(7)
        assert code(connection, body) == "done"
        engine.close()
        live.close()

    def test_runs_of_others_cannot_be_unpinned(self, line: Line) -> None:
        service, connection = line
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: service.ask("namespaces")[0]["tier"]["ready"] == 10, "the blocks are stored")
        live = register(connection, service.directory)
        other = Connection(service.address)
        other_live = register(other, service.directory)
        hashes = hash_blocks(PROMPT, 4, parent=root_hash(engine.layout.fingerprint))
        body = Match(numbers(5), ints(len(hashes)), ints(0), hashes.tobytes())
        answer, _ = other.call(body, TIMEOUT)
        assert isinstance(answer, Matched)
        assert answer.runs == numbers(5)
        runs_of(line).unpin(5)
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

    def test_an_invalid_layout_is_refused(self, line: Line) -> None:
        service, connection = line
        live = LiveFile(service.directory)
        for text in (b"", b"[]", b"{}", b"x" * 2_000_000):
            assert code(connection, Register(text, live.live, "test")) != "done"
        live.close()


def test_reset_events_precede_later_grants(line: Line) -> None:
    service, connection = line
    live = register(connection, service.directory)
    for _ in range(20):
        service.ask("reset", tier="host")
        connection.send(Refill(1))
        answers = [connection.receive(TIMEOUT) for _ in range(2)]
        assert [type(answer[1]) for answer in answers if answer] == [Events, Granted]
    live.close()


def test_an_oversized_frame_closes_only_its_own_connection(line: Line) -> None:
    service, connection = line
    connection.socket.send(bytes(20 << 20))
    assert not connection.socket.poll(300)
    assert service.ask("stats")["state"] == "ready"


def test_a_client_that_does_not_read_slows_only_itself(tmp_path: Path) -> None:
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
        until(lambda: service.ask("namespaces")[0]["tier"]["ready"] == 10, "another client is served")
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


class TestAnswers:
    def test_each_request_has_the_answer_that_the_reference_names(self, line: Line) -> None:
        service, connection = line
        live, worker = register(connection, service.directory), LiveFile(service.directory)
        session = connection.session
        for example in REQUESTS:
            connection.session = session
            body = example
            if isinstance(body, Register):
                body = Register(layout().to_json().encode(), live.live, "again")
            elif isinstance(body, Attach):
                body = Attach(0, msgspec.structs.replace(worker.live, engine=live.live.path))
            elif isinstance(body, Publish):
                slot = next(iter(service.service.clients[session].stock))
                body = msgspec.structs.replace(body, slots=ints(slot))
            answer, _ = connection.call(body, TIMEOUT)
            assert tag_of(type(answer)) == ANSWERS[tag_of(type(body))], body
            session = answer.session if isinstance(answer, Registered) else session
        assert service.ask("integrity") == []
        worker.close()
        live.close()
