"""Long questions of tools at a service: engines come first, answers come in slices, and what waits is bounded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from fdcache.errors import RefusedError, ServiceUnavailableError
from fdcache.hashing import TokenBlocks, root_hash
from fdcache.service.client.connection import Client, Connection
from fdcache.service.server.block_views import BLOCKS_A_SLICE
from fdcache.service.server.lifecycle import Server
from fdcache.service.server.queues import MAX_BYTES, MAX_QUESTIONS, PART_BYTES, SendQueues, Sent
from fdcache.service.wire.protocol import (
    MAX_FRAME,
    VERSION,
    Alive,
    Answer,
    Ask,
    Heartbeat,
    Refused,
    ToolAnswer,
    decode_answer,
    encode_request,
)
from fdcache.service.wire.views import ServiceView
from fdcache.settings import Settings
from tests.service_engine import BLOCK, PROMPT, Engine, layout, ready_blocks
from tests.service_help import TIMEOUT, LocalService, arguments, local_service, service_process, until
from tests.service_line import register


def unknown(count: int) -> list[str]:
    """Hashes that no service has."""
    return [os.urandom(32).hex() for _ in range(count)]


def explain(count: int) -> Ask:
    return Ask("explain", {"namespace": "", "hashes": unknown(count)})


def receive(line: Connection) -> Answer:
    got = line.receive(TIMEOUT)
    assert got is not None
    return got[1]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    """A service that has one namespace with ten blocks."""
    with local_service(tmp_path) as running:
        engine = Engine(running.address)
        engine.serve(PROMPT)
        until(lambda: ready_blocks(running) == 10, "the blocks are stored")
        yield running
        engine.close()


class TestLongAnswers:
    def test_a_path_of_100_000_blocks_is_explained(self, service: LocalService) -> None:
        (shape,) = (each.layout for each in service.service.namespaces.values())
        known = TokenBlocks(BLOCK, root_hash(shape.fingerprint))
        known.append(PROMPT)
        hashes = [row.tobytes().hex() for row in known.hashes] + unknown(100_000)
        answer = service.ask("explain", namespace="", hashes=hashes)
        assert len(msgspec.json.encode(answer)) > MAX_FRAME
        assert [each["hash"] for each in answer["blocks"]] == hashes
        assert [each["position"] for each in answer["blocks"]] == [*range(len(hashes))]
        assert [each["tier"] for each in answer["blocks"]] == ["host"] * 10 + [None] * 100_000
        assert answer["broken_at"] == 10

    def test_no_message_is_longer_than_a_part(self, service: LocalService) -> None:
        line = Connection(service.address)
        line.send(explain(20_000))
        sizes = []
        while True:
            answer = receive(line)
            assert isinstance(answer, ToolAnswer)
            sizes.append(len(answer.value))
            if not answer.more:
                break
        assert max(sizes) <= PART_BYTES < sum(sizes)
        line.close()

    def test_an_error_in_a_later_slice_is_a_refusal(self, service: LocalService) -> None:
        with pytest.raises(RefusedError, match="hashes: "):
            service.ask("explain", namespace="", hashes=[*unknown(20_000), "x" * 64])
        assert len(service.ask("explain", namespace="", hashes=unknown(3))["blocks"]) == 3

    def test_large_messages_of_engines_are_no_questions(self, service: LocalService) -> None:
        line = Connection(service.address)
        live = register(line, service.directory)
        assert isinstance(line.call(Heartbeat(bytes(3 << 20)), TIMEOUT)[0], Alive)
        line.close()
        live.close()

    def test_a_large_malformed_question_is_refused(self, service: LocalService) -> None:
        line = Connection(service.address)
        body = {"type": "ask", "what": 7, "arguments": {"hashes": unknown(5_000)}}
        line.socket.send(msgspec.msgpack.encode((VERSION, 0, 1, body)))
        answer = receive(line)
        assert isinstance(answer, Refused)
        assert answer.code == "malformed"
        line.close()

    @pytest.mark.parametrize("what", ["stats", "namespaces", "clients", "tenants", "transfers", "tree"])
    def test_views_of_many_records_are_whole(self, tmp_path: Path, what: str) -> None:
        with local_service(tmp_path) as service:
            empty = service.ask(what)
            if what == "stats":
                assert msgspec.convert(empty, ServiceView).namespaces == []
            else:
                assert empty == []
            lines = [Connection(service.address) for _ in range(20)]
            lives = [register(each, service.directory) for each in lines]
            answer = service.ask(what)
            clients = answer["clients"] if what == "stats" else answer
            if what in ("stats", "clients"):
                assert [each["session"] for each in clients] == [f"{each.session:x}" for each in lines]
            for line, live in zip(lines, lives, strict=True):
                line.close()
                live.close()


def test_blocks_that_leave_between_two_slices_are_left_out(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    server = Server(Settings.load(environ={}, arguments=arguments(tmp_path)))
    server.start()  # and it does not run: slices are made here
    namespace = server.service.namespaces.open(layout())
    count = BLOCKS_A_SLICE + 10
    while namespace.num_slots < count:
        assert namespace.grow()
    assert namespace.tier is not None
    hashes = np.random.default_rng(1).integers(1, 256, (count, 32), np.uint8)
    lease = namespace.tier.open_lease()
    slots = namespace.tier.reserve(lease, count).slots
    nothing, ones, sums = np.zeros_like(hashes), np.ones(count, np.uint8), np.zeros(count, np.uint64)
    namespace.tier.publish(lease, nothing, hashes, slots, ones, sums)
    namespace.tier.release(lease)
    slices = server.views.slices(Ask("tree", {"limit": 1000}))
    parts = [next(slices)]
    namespace.reset()
    while namespace.shrink():
        pass
    assert not namespace.num_slots
    nodes = msgspec.json.decode(b"".join([*parts, *slices]))
    assert len({each["hash"] for each in nodes}) == len(nodes) == BLOCKS_A_SLICE
    server.close()


class TestOrder:
    def test_engines_are_served_between_the_slices_of_an_answer(self, service: LocalService) -> None:
        tool, engine = Connection(service.address), Connection(service.address)
        live = register(engine, service.directory)
        tool.send(explain(60_000))
        served, more = 0, True
        while more:
            answer, _ = engine.call(Heartbeat(b"{}"), TIMEOUT)
            assert isinstance(answer, Alive)
            served += 1
            while more and tool.socket.poll(0):
                part = receive(tool)
                assert isinstance(part, ToolAnswer)
                more = part.more
        assert served > 10
        for each in (tool, engine, live):
            each.close()

    def test_a_short_question_does_not_wait_for_long_ones(self, service: LocalService) -> None:
        slow, question = [Connection(service.address) for _ in range(20)], explain(60_000)
        for each in slow:
            each.send(question)
        for each in slow:
            assert each.socket.poll(int(TIMEOUT * 1000)), "its answer has begun"
        assert service.ask("config")["version"]
        begun = [receive(each) for each in slow]
        assert sum(isinstance(each, ToolAnswer) and each.more for each in begun) == len(slow)
        unfinished = 0
        for each in slow:
            rest = []
            while each.socket.poll(0):
                rest.append(receive(each))
            unfinished += all(isinstance(part, ToolAnswer) and part.more for part in rest)
        assert unfinished > len(slow) // 2
        for each in slow:
            each.close()

    def test_an_engine_resets_at_once(self, service: LocalService) -> None:
        tool, engine = Connection(service.address), Connection(service.address)
        live = register(engine, service.directory)
        tool.send(explain(60_000))
        assert tool.socket.poll(int(TIMEOUT * 1000)), "the answer has begun"
        answer, _ = engine.call(Ask("reset", {"tier": "host", "in_flight": "keep"}), TIMEOUT)
        assert isinstance(answer, ToolAnswer)
        parts = []
        while tool.socket.poll(0):
            parts.append(receive(tool))
        assert all(isinstance(each, ToolAnswer) and each.more for each in parts)
        for each in (tool, engine, live):
            each.close()

    def test_questions_of_one_client_are_answered_in_order(self, service: LocalService) -> None:
        line = Connection(service.address)
        numbers = [line.send(each) for each in (explain(5_000), Ask("config"), Ask("nothing"), explain(1))]
        answered: list[int] = []
        while len(answered) < len(numbers):
            got = line.receive(TIMEOUT)
            assert got is not None
            if not (isinstance(got[1], ToolAnswer) and got[1].more):
                answered.append(got[0])
        assert answered == numbers
        line.close()


class TestBounds:
    def test_a_client_may_have_few_questions_in_wait(self, service: LocalService) -> None:
        line = Connection(service.address)
        line.send(explain(60_000))
        assert line.socket.poll(int(TIMEOUT * 1000)), "the answer has begun"
        for _ in range(3 * MAX_QUESTIONS):
            line.send(Ask("config"))
        answers: list[Answer] = []
        while len(answers) < 1 + 3 * MAX_QUESTIONS:
            answer = receive(line)
            if not (isinstance(answer, ToolAnswer) and answer.more):
                answers.append(answer)
        refusals = [each.code for each in answers if isinstance(each, Refused)]
        assert refusals == ["busy"] * (1 + 3 * MAX_QUESTIONS - MAX_QUESTIONS)
        line.close()

    def test_answers_that_are_not_read_take_little_memory(self, tmp_path: Path) -> None:
        with service_process(tmp_path / "s") as service:
            assert service.process is not None
            engine = Engine(service.address)
            process = psutil.Process(service.process.pid)
            line: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
            line.setsockopt(zmq.RCVHWM, 1)
            line.setsockopt(zmq.LINGER, 0)
            line.connect(service.address)
            before = process.memory_info().rss
            for number in range(200):
                line.send(encode_request(0, number, explain(5_000)))
            for _ in range(20):  # long after the service has taken all
                service.ask("explain", namespace="", hashes=unknown(5_000))
            assert process.memory_info().rss - before < 64 << 20
            read = 0
            while read < 200:
                assert line.poll(int(TIMEOUT * 1000)), "each is answered or refused"
                number, answer = decode_answer(line.recv())
                read += not (isinstance(answer, ToolAnswer) and answer.more)
            line.close()
            engine.close()

    def test_messages_that_are_not_served_wait_at_the_client(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o700)
        server = Server(Settings.load(environ={}, arguments=arguments(tmp_path)))
        server.start()  # and it does not run
        line: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        line.setsockopt(zmq.SNDHWM, 1)
        line.setsockopt(zmq.LINGER, 0)
        line.connect(f"ipc://{tmp_path}/fdcache.sock")
        sent = 0
        while sent < 100 and line.poll(1000, zmq.POLLOUT):
            line.send(bytes(1 << 20))
            sent += 1
        assert 0 < sent < 20
        line.close()
        server.close()

    def test_what_waits_for_a_client_is_bounded_in_bytes_and_keeps_the_order(self) -> None:
        router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        for each in (router, dealer):
            each.setsockopt(zmq.LINGER, 0)
            each.setsockopt(zmq.SNDHWM, 2)
            each.setsockopt(zmq.RCVHWM, 2)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(b"hello")
        identity, _ = router.recv_multipart()
        queues, size, taken = SendQueues(router), 1 << 20, 0
        while queues.send(identity, b"%8d" % taken + bytes(size)) is Sent.TAKEN:
            taken += 1
            assert taken < 100
        assert taken >= MAX_BYTES // size
        assert queues.send(identity, b"at once", may_wait=False) is Sent.FULL
        is_draining = [queues.is_draining]
        for _ in range(1000):
            queues.flush()
        is_draining.append(queues.is_draining)
        assert is_draining == [True, False], "nobody reads"
        read: list[Any] = []
        while len(read) < taken:
            queues.flush()
            if dealer.poll(10):
                read.append(int(dealer.recv()[:8]))
        assert read == [*range(taken)]
        assert not queues.is_draining, "nothing waits"
        until(lambda: queues.send(identity, b"again", may_wait=False) is Sent.TAKEN, "there is room again")
        assert queues.send(b"nobody", b"") is Sent.GONE
        router.close()
        dealer.close()


def test_a_client_whose_threads_wait_too_long_says_so(tmp_path: Path) -> None:
    with Client(f"ipc://{tmp_path}/none.sock", timeout=0.2) as client:
        client._lock.acquire()
        with pytest.raises(ServiceUnavailableError, match="other questions of this client"):
            client.ask("stats")
        client._lock.release()
