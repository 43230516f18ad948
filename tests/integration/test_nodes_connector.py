"""Host tiers of other nodes, and what may go wrong between nodes."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import zmq

from fdcache.errors import StorageError
from fdcache.layout import KVLayout
from fdcache.storage.connector import Outcome
from fdcache.testing.storage import KnownRecords, conformance_layout, path_of
from fdcache.transfer.access import LinkKeys
from fdcache.transfer.nodes.members import Members, RedisDirectory
from fdcache.transfer.nodes.messages import AskHeld, encode
from tests.nodes_help import KEY, Node, RedisServer, free_address, node, open_node
from tests.service_help import until

LAYOUT = conformance_layout()
_TIMEOUT = 30.0


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node, Node]]:
    """Three nodes that know each other."""
    addresses = tuple(free_address() for _ in range(3))
    with (
        node(LAYOUT, address=addresses[0], listed=addresses) as first,
        node(LAYOUT, address=addresses[1], listed=addresses) as second,
        node(LAYOUT, address=addresses[2], listed=addresses) as third,
    ):
        yield first, second, third


def outcomes(result: object) -> list[Outcome]:
    return [Outcome(value) for value in result.outcomes.tolist()]  # type: ignore[attr-defined]


def test_a_path_is_read_from_the_nodes_that_have_its_parts(nodes: tuple[Node, Node, Node]) -> None:
    first, second, third = nodes
    path = path_of(12, "parts")
    first.hold(path[:6])
    second.hold(path[6:])
    assert third.connector.exists(path, _TIMEOUT).length == 12
    assert third.read(path).ok.all()
    assert third.has_read(path)


def read_from(reader: Node) -> dict[str, int]:
    """Return how many blocks were read from each other node."""
    return {each.address: each.hits for each in reader.connector.stats().nodes if each.hits}


def test_a_source_that_is_named_is_asked_first(nodes: tuple[Node, Node, Node]) -> None:
    first, second, third = nodes
    path = path_of(12, "source")
    first.hold(path)
    second.hold(path[:8])
    source = second.options["address"]
    assert third.connector.name_source(path, source)
    assert not third.connector.name_source(path, source), "that was known"
    assert third.read(path).ok.all()
    assert read_from(third) == {source: 8, first.options["address"]: 4}
    assert third.has_read(path)
    assert third.connector.seen(path) == [None] * 12, "no look-up has asked"


def test_a_source_that_has_ended_costs_no_block(nodes: tuple[Node, Node, Node]) -> None:
    first, second, third = nodes
    path = path_of(4, "ended source")
    first.hold(path)
    second.hold(path)
    assert third.connector.exists(path, _TIMEOUT).length == 4
    source = second.options["address"]
    third.connector.name_source(path, source)
    second.connector.close()
    assert third.read(path).ok.all()
    assert read_from(third) == {first.options["address"]: 4}
    (failed,) = [each for each in third.connector.stats().nodes if each.address == source]
    assert failed.failure == failed.last_error == f"{source}: no connection"
    assert failed.failures == 1
    with pytest.raises(StorageError, match="not the address of another node: the others are tcp"):
        third.connector.name_source(path, "tcp://10.0.0.9:1")


def test_blocks_are_seen_where_a_lookup_found_them(nodes: tuple[Node, Node, Node]) -> None:
    first, second, third = nodes
    path = path_of(6, "seen")
    first.hold(path[:2])
    second.hold(path[2:4])
    assert third.connector.exists(path, _TIMEOUT).length == 4
    here, there = first.options["address"], second.options["address"]
    assert third.connector.seen(path) == [here, here, there, there, None, None]
    second.connector.clear(_TIMEOUT)
    assert third.connector.exists(path, _TIMEOUT).length == 2
    assert third.connector.seen(path) == [here, here, None, None, None, None]


def test_what_a_node_has_read_it_serves_in_turn(nodes: tuple[Node, Node, Node]) -> None:
    first, second, third = nodes
    path = path_of(4, "in turn")
    first.hold(path)
    assert second.read(path).ok.all()
    first.connector.close()
    assert third.read(path).ok.all()
    assert third.has_read(path)


def test_an_address_that_is_taken_is_refused_with_its_remedy(nodes: tuple[Node, Node, Node]) -> None:
    taken = nodes[0].options["address"]
    with pytest.raises(
        StorageError, match=rf"FDCACHE_NODES_ADDRESS={taken} cannot be used: .*set it to another"
    ):
        open_node(LAYOUT, address=taken)
    nodes[0].hold(path_of(1, "still served"))
    assert nodes[1].read(path_of(1, "still served")).ok.all()


def test_nodes_of_other_weights_have_nothing_for_each_other() -> None:
    """Even where the hashes were the same."""
    old, new = (
        KVLayout.uniform(
            model="m", revision=each, num_layers=2, block_size=4, kv_heads=1, head_dim=8, dtype="bfloat16"
        )
        for each in ("1", "2")
    )
    addresses = tuple(free_address() for _ in range(2))
    with (
        node(old, address=addresses[0], listed=addresses) as first,
        node(new, address=addresses[1], listed=addresses) as second,
    ):
        path = path_of(4, "weights")
        first.hold(path)
        second.connector.name_source(path, addresses[0])
        assert second.connector.exists(path, _TIMEOUT).length == 0
        assert outcomes(second.read(path)) == [Outcome.MISS] * 4


@pytest.mark.parametrize("mebibytes", [1, 3])
def test_records_as_large_as_those_of_models_are_read(mebibytes: int) -> None:
    layout = KVLayout.uniform(
        model="large",
        revision="1",
        num_layers=8,
        block_size=64,
        kv_heads=8,
        head_dim=64 * mebibytes,
        dtype="bfloat16",
    )
    assert layout.record_bytes == mebibytes << 20
    addresses = tuple(free_address() for _ in range(2))
    with (
        node(layout, address=addresses[0], listed=addresses) as first,
        node(layout, address=addresses[1], listed=addresses) as second,
    ):
        path = path_of(12, "large")
        first.hold(path)
        assert second.read(path).ok.all()
        assert second.has_read(path)


def test_a_block_that_left_the_host_tier_is_a_miss(nodes: tuple[Node, Node, Node]) -> None:
    first, second, _ = nodes
    path = path_of(4, "left")
    first.hold(path)
    other = first.records.batch(path_of(1, "another"))
    header = first.records.table.header(0)
    first.records.table.set_header(2, header)  # the slot has another block now
    assert second.connector.exists(path, _TIMEOUT).length == 2
    assert outcomes(second.read(path)) == [Outcome.OK, Outcome.OK, Outcome.MISS, Outcome.OK]
    assert len(other) == 1


def test_a_damaged_record_is_read_from_another_node(nodes: tuple[Node, Node, Node]) -> None:
    first, second, third = nodes
    path = path_of(4, "damaged")
    first.hold(path)
    first.records.table.record(1)[0] ^= 1
    assert outcomes(third.read(path)) == [Outcome.OK, Outcome.CORRUPT, Outcome.OK, Outcome.OK]
    second.hold(path)
    third.connector.clear(_TIMEOUT)
    assert third.read(path).ok.all()
    assert third.has_read(path)


def test_records_that_are_about_to_go_are_read_no_more(nodes: tuple[Node, Node, Node]) -> None:
    first, second, _ = nodes
    path = path_of(4, "unregistered")
    first.hold(path)
    first.connector.unregister(first.records.table)
    assert second.connector.exists(path, _TIMEOUT).length == 0


def test_a_slot_that_is_overwritten_all_the_time_gives_no_wrong_block(nodes: tuple[Node, Node, Node]) -> None:
    first, second, _ = nodes
    paths = [path_of(1, f"overwritten {i}") for i in range(4)]
    over = threading.Event()

    def overwrite() -> None:
        turn = 0
        while not over.is_set():
            first.hold(paths[turn % len(paths)])
            turn += 1

    with ThreadPoolExecutor(1) as threads:
        writer = threads.submit(overwrite)
        found = 0
        try:
            for turn in range(200):
                path = paths[turn % len(paths)]
                second.connector.clear(_TIMEOUT)
                if second.read(path).ok.all():
                    found += 1
                    assert second.has_read(path)
            until(lambda: second.connector.exists(paths[0], _TIMEOUT).length, "a block is there")
        finally:
            over.set()
        writer.result()


_SERVE = """
import sys
from fdcache.testing.storage import conformance_layout, path_of
from tests.nodes_help import Node
made = Node(conformance_layout(), {"address": sys.argv[1]})
made.hold(path_of(30, sys.argv[2]))
print("ready", flush=True)
sys.stdin.read()
"""


class Elsewhere:
    """A node in a process of its own with 30 blocks of a path."""

    def __init__(self, address: str, path: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, address, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_a_killed_node_costs_one_failure_and_is_found_when_it_is_back() -> None:
    address, path = free_address(), path_of(30, "killed")
    other = Elsewhere(address, "killed")
    try:
        with node(LAYOUT, listed=(address,)) as mine:
            assert mine.read(path).ok.all()
            mine.connector.clear(_TIMEOUT)
            other.kill()
            assert not mine.read(path).ok.any()
            until(lambda: mine.connector.stats().error, "the node is missed")
            assert mine.connector.exists(path, _TIMEOUT).length == 0
            other = Elsewhere(address, "killed")
            until(lambda: mine.connector.exists(path, _TIMEOUT).length == 30, "it is found again")
            assert mine.read(path).ok.all()
            assert mine.has_read(path)
            assert mine.connector.stats().error is None
    finally:
        other.kill()


def test_a_node_that_accepts_and_says_nothing_is_waited_for_once() -> None:
    path = path_of(4, "silent")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address, good = f"tcp://127.0.0.1:{silent.getsockname()[1]}", free_address()
        with (
            node(LAYOUT, address=good) as first,
            node(LAYOUT, listed=(address, good), retry_after=600.0) as mine,
        ):
            first.hold(path)
            answer = mine.connector.exists(path, _TIMEOUT)
            assert (answer.length, answer.outcome) == (4, Outcome.TIMEOUT)
            before = time.process_time()
            again = [mine.connector.exists(path, _TIMEOUT) for _ in range(3)]
            assert [(each.length, each.outcome) for each in again] == [(4, Outcome.OK)] * 3
            assert time.process_time() - before < _TIMEOUT
            assert mine.read(path).ok.all()


def test_a_stranger_gets_nothing_and_a_wrong_message_ends_nothing(nodes: tuple[Node, Node, Node]) -> None:
    first, second, _ = nodes
    path = path_of(4, "stranger")
    first.hold(path)
    server = first.connector._node.server
    assert server is not None
    with node(LAYOUT, listed=(server.address,), key="another-key-than-theirs") as stranger:
        assert stranger.connector.exists(path, _TIMEOUT).length == 0
        assert stranger.connector.stats().error
        assert not stranger.read(path).ok.any()
    assert server.served_records == 0
    context = zmq.Context()
    known = context.socket(zmq.DEALER)
    LinkKeys.derived(f"nodes {KEY}").protect_client(known)
    known.connect(server.address)
    for frames in ([b"x"], [b"n", b"\xc1"], [b"n", encode(AskHeld(b"short", b""))], [b"n", b"m", b"more"]):
        known.send_multipart(frames)
    until(lambda: server.protocol_errors == 4, "the messages are dropped")
    context.destroy(linger=0)
    assert second.connector.exists(path, _TIMEOUT).length == 4


def test_a_record_of_two_ranks_counts_once_both_are_somewhere() -> None:
    layout = conformance_layout("ranks", tp_size=2)
    addresses = (free_address(), free_address())
    path = path_of(4, "ranks")
    with (
        node(layout, address=addresses[0], rank=0) as first,
        node(
            layout,
            address=addresses[1].rsplit(":", 1)[0] + f":{int(addresses[1].rsplit(':', 1)[1]) - 1}",
            rank=1,
        ) as second,
    ):
        scheduler = open_node(layout, None, listed=addresses)
        try:
            first.hold(path)
            assert scheduler.exists(path, _TIMEOUT).length == 0
            second.hold(path[:3])
            assert scheduler.exists(path, _TIMEOUT).length == 3
        finally:
            scheduler.close()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"key": "short", "listed": ("tcp://a:1",)}, "FDCACHE_NODES_KEY"),
        ({"key": None, "listed": ("tcp://a:1",)}, "FDCACHE_NODES_KEY"),
        ({"listed": ("ipc:///tmp/x",)}, "tcp://host:port"),
        ({"listed": ("tcp://a b:7400",)}, "tcp://host:port"),
        ({"listed": ("tcp://a/b:7400",)}, "tcp://host:port"),
        ({"listed": ("tcp://-:7400",)}, "tcp://host:port"),
        ({"listed": ("tcp://own;a:7400",)}, "tcp://host:port"),
        ({"address": "tcp://*:7400"}, "FDCACHE_NODES_ADDRESS"),
        ({"address": "ipc:///tmp/x"}, "tcp://host:port"),
    ],
)
def test_wrong_settings_are_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(StorageError, match=named):
        open_node(LAYOUT, **options)  # type: ignore[arg-type]


def test_what_is_no_address_in_a_directory_is_left_out(redis_server: RedisServer) -> None:
    path, address = path_of(4, "garbage"), free_address()
    garbage = [
        b"",
        b"\xff\xfe",
        b"tcp://a b:7400",
        b"tcp://a/b:7400",
        b"tcp://-:1",
        b"tcp://*:1",
        b"x" * 100_000,
    ]
    RedisDirectory(redis_server.url)._redis.zadd(RedisDirectory.key, dict.fromkeys(garbage, float("inf")))
    with (
        node(LAYOUT, address=address, directory=redis_server.url) as first,
        node(LAYOUT, directory=redis_server.url) as mine,
    ):
        first.hold(path)
        members = mine.connector._node.members
        until(lambda: members.addresses == (address,), "the other node is found, and nothing else")
        assert mine.connector.exists(path, _TIMEOUT).length == 4


@pytest.mark.parametrize(
    "answer", [b"+OK\r\n", b":5\r\n", b"*0\r\n", b"$-1\r\n", b"*1\r\n$1\r\nx\r\n", b"%1\r\n+a\r\n+b\r\n"]
)
def test_a_directory_that_is_no_redis_is_asked_again(answer: bytes) -> None:
    pytest.importorskip("redis", reason="needs the client of Redis: pip install '.[nodes]'")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        threading.Thread(target=_answer_all, args=(server, answer), daemon=True).start()
        members = Members((), RedisDirectory(url), lambda: ("tcp://a:1",))
        try:
            until(lambda: members.error is not None, "the directory is said to fail")
            assert members._thread is not None
            assert members._thread.is_alive()
        finally:
            members.close()


def _answer_all(server: socket.socket, answer: bytes) -> None:
    """Give every client the same answers to whatever it says, until the server is closed."""
    while True:
        try:
            client, _ = server.accept()
        except OSError:
            return
        with client, suppress(OSError):
            while client.recv(1 << 16):
                client.sendall(answer * 8)


def test_an_address_in_use_is_named() -> None:
    address = free_address()
    with node(LAYOUT, address=address), pytest.raises(StorageError, match="FDCACHE_NODES_ADDRESS"):
        open_node(LAYOUT, address=address, listed=("tcp://127.0.0.1:1",))


def test_the_settings_of_a_node_show_no_secret() -> None:
    records = KnownRecords(LAYOUT, 1)
    with node(LAYOUT, listed=("tcp://127.0.0.1:1",)) as mine:
        assert KEY not in repr(mine.connector._options)
        mine.connector.get(records.batch(path_of(1, "secret")), 1.0)
        assert KEY not in str(mine.connector.stats())
