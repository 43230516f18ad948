"""ReadLeases of reads between nodes: what a node holds while another one reads it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from fdcache.metadata import CacheLevel, HashArray
from fdcache.storage.connector import Outcome, RecordBatch
from fdcache.testing.storage import conformance_layout, path_of
from fdcache.tiers.pool import BlockPool
from fdcache.transfer.leases import MOST_LEASES
from fdcache.transfer.nodes.connector import NodesConnector
from fdcache.transfer.nodes.leases import ReadLeases
from fdcache.transfer.nodes.messages import EndLease
from tests.nodes_help import BLOCKS, Node, free_address, node
from tests.service_help import until

LAYOUT = conformance_layout()
_TIMEOUT = 30.0
_MOST_HELD = BLOCKS // 4


class Lender:
    """A node whose records are in the slots of a tier."""

    def __init__(self, made: Node) -> None:
        self.node = made
        self.pool = BlockPool(CacheLevel.HOST, BLOCKS)
        self._paths = 0
        made.connector.lend_from(self.pool)

    @property
    def leases(self) -> ReadLeases:
        server = self.node.connector._node.server
        assert server is not None
        return server.leases

    def hold(self, path: HashArray) -> None:
        """Bring a path to the tier, in place of others if it must, and serve it."""
        parents = np.concatenate((np.zeros((1, 32), np.uint8), path[:-1]))
        taken = self.pool.reserve_copies(0, parents, path)
        assert not taken.missing
        records = self.node.records
        for slot, generation, row, parent in zip(
            taken.slots.tolist(), taken.generations.tolist(), path, parents, strict=True
        ):
            records.put_block(slot, generation, row.tobytes(), parent.tobytes())
        self.pool.complete(taken.slots, np.ones(len(path), np.uint8), np.empty(0, np.uint64))
        batch = RecordBatch(records.table, taken.slots, taken.generations, path, parents)
        assert self.node.connector.put(batch, _TIMEOUT).ok.all()

    def evict_all_it_can(self) -> None:
        """Store other paths until nothing is left of what could be evicted."""
        for _ in range(2):
            self._paths += 1
            self.hold(path_of(self.pool.available, f"another {self._paths}"))

    def has(self, path: HashArray) -> int:
        return int((self.pool.contains(path) == 1).sum())

    def is_at_rest(self) -> bool:
        return self.pool.stats().holds == 0 and not len(self.leases)


class Interrupted(NodesConnector):
    """A reader at whose node something happens between its question and its reads."""

    def between(self) -> None:
        """Do nothing."""

    def _read_round(self, *args: object) -> None:
        self.between()
        super()._read_round(*args)  # type: ignore[arg-type]


@pytest.fixture
def address() -> str:
    return free_address()


@pytest.fixture
def lender(address: str) -> Iterator[Lender]:
    with node(LAYOUT, address=address) as made:
        lender = Lender(made)
        yield lender
        lender.pool.verify()


@pytest.fixture
def reader(address: str) -> Iterator[Node]:
    with node(LAYOUT, listed=(address,)) as made:
        made.connector.__class__ = Interrupted
        yield made


def test_what_is_being_read_stays_though_its_node_evicts_all_it_can(lender: Lender, reader: Node) -> None:
    path = path_of(_MOST_HELD, "leased")
    lender.hold(path)
    reader.connector.between = lender.evict_all_it_can  # type: ignore[attr-defined]
    assert reader.read(path).ok.all()
    assert reader.has_read(path)
    until(lender.is_at_rest, "the lease ends with the read")
    lender.evict_all_it_can()
    assert lender.has(path) == 0


def test_slots_are_not_used_again_though_their_blocks_are_removed(lender: Lender, reader: Node) -> None:
    path = path_of(4, "removed")
    lender.hold(path)

    def remove() -> None:
        lender.pool.drop(path)
        lender.evict_all_it_can()

    reader.connector.between = remove  # type: ignore[attr-defined]
    reader.read(path)
    assert lender.pool.stats().slots == BLOCKS
    until(lender.is_at_rest, "the lease ends with the read")
    assert lender.pool.available == BLOCKS


def test_readers_hold_a_quarter_of_the_slots_and_read_more(lender: Lender, reader: Node) -> None:
    path = path_of(BLOCKS, "large")
    lender.hold(path)
    held = []
    reader.connector.between = lambda: held.append(lender.pool.stats().holds)  # type: ignore[attr-defined]
    assert reader.read(path).ok.all()
    assert set(held) == {_MOST_HELD}
    until(lender.is_at_rest, "the lease ends with the read")


def test_blocks_beyond_the_leases_are_misses_once_they_are_evicted(lender: Lender, reader: Node) -> None:
    path = path_of(BLOCKS, "beyond")
    lender.hold(path)
    reader.connector.between = lender.evict_all_it_can  # type: ignore[attr-defined]
    outcomes = reader.read(path).outcomes.tolist()
    assert outcomes == [Outcome.OK] * _MOST_HELD + [Outcome.MISS] * (BLOCKS - _MOST_HELD)


def test_a_node_without_a_tier_in_its_process_lends_nothing_and_is_read(address: str, reader: Node) -> None:
    with node(LAYOUT, address=address) as made:
        path = path_of(4, "no tier")
        made.hold(path)
        assert reader.read(path).ok.all()


def test_a_tier_that_goes_has_nothing_held(lender: Lender, reader: Node) -> None:
    path = path_of(4, "goes")
    lender.hold(path)
    held = []

    def go() -> None:
        lender.node.connector.lend_from(None)
        held.append(lender.pool.stats().holds)

    reader.connector.between = go  # type: ignore[attr-defined]
    assert reader.read(path).ok.all()
    assert held == [0]
    until(lender.is_at_rest, "the lease ends with the read")


_READ = """
import sys
import time
from fdcache.testing.storage import conformance_layout, path_of
from fdcache.transfer.nodes import connector
from tests.nodes_help import Node
connector._LEASE_SECONDS = 1.0
made = Node(conformance_layout(), {"listed": (sys.argv[1],)})

def stop(*args):
    print("asked", flush=True)
    sys.stdin.read()

made.connector._read_round = stop
made.read(path_of(4, "killed"))
"""


def test_a_reader_that_is_killed_holds_nothing_for_long(address: str, lender: Lender) -> None:
    path = path_of(4, "killed")
    lender.hold(path)
    process = subprocess.Popen(
        [sys.executable, "-c", _READ, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "asked\n"
    finally:
        process.kill()
        process.communicate()
    until(lender.is_at_rest, "the lease is over")
    assert lender.leases.expired == 1
    lender.evict_all_it_can()
    assert lender.has(path) == 0


def test_ends_of_unknown_leases_and_leases_of_unknown_blocks_end_nothing(
    lender: Lender, reader: Node
) -> None:
    path = path_of(4, "unknown")
    lender.hold(path)
    address = lender.node.options["address"]
    links, other = reader.connector._links, path_of(2, "not there")
    assert reader.connector.exists(path, _TIMEOUT).length == 4
    links.tell([(address, EndLease(7))], time.monotonic() + _TIMEOUT)
    reader.connector._ask(other, time.monotonic() + _TIMEOUT, lease=9)
    links.tell([(address, EndLease(9))], time.monotonic() + _TIMEOUT)
    assert reader.read(path).ok.all()
    until(lender.is_at_rest, "nothing is held")


# --- leases alone -----------------------------------------------------------------------------------------------


@pytest.fixture
def alone(lender: Lender) -> tuple[ReadLeases, list[float], Lender]:
    now = [0.0]
    return ReadLeases(lambda: now[0]), now, lender


def grant(leases: ReadLeases, lender: Lender, number: int, path: HashArray, milliseconds: int = 2000) -> None:
    own = lender.node.connector._own
    assert own is not None
    leases.grant(b"reader", number, milliseconds, own, [row.tobytes() for row in path])


def test_a_lease_lasts_from_the_last_message_about_it(alone: tuple[ReadLeases, list[float], Lender]) -> None:
    leases, now, lender = alone
    path = path_of(4, "lasts")
    lender.hold(path)
    grant(leases, lender, 1, path[:2])
    now[0] = 1.5
    grant(leases, lender, 2, path[2:])
    leases.renew(b"reader", 1)
    leases.renew(b"another", 2)
    now[0] = 3.4
    assert leases.expire() == pytest.approx(0.1)
    assert (len(leases), lender.pool.stats().holds) == (2, 4)
    now[0] = 3.5
    assert leases.expire() is None
    assert (len(leases), lender.pool.stats().holds, leases.expired) == (0, 0, 2)


def test_further_questions_of_a_lease_add_to_it(alone: tuple[ReadLeases, list[float], Lender]) -> None:
    leases, _, lender = alone
    path = path_of(4, "adds")
    lender.hold(path)
    grant(leases, lender, 1, path[:2])
    grant(leases, lender, 1, path[2:])
    assert (len(leases), lender.pool.stats().holds) == (1, 4)
    leases.end(b"another", 1)
    leases.end(b"reader", 1)
    leases.end(b"reader", 1)
    assert (len(leases), lender.pool.stats().holds) == (0, 0)


def test_leases_are_bounded(alone: tuple[ReadLeases, list[float], Lender]) -> None:
    leases, _, lender = alone
    path = path_of(1, "bounded")
    lender.hold(path)
    for number in range(MOST_LEASES + 5):
        grant(leases, lender, number, path)
    assert len(leases) == MOST_LEASES
    assert lender.pool.stats().holds == _MOST_HELD
    leases.end_all()
    assert (len(leases), lender.pool.stats().holds) == (0, 0)
