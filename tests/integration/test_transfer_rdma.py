"""The connector ``rdma``: conformance, runs, notifications, and peers that are stopped or killed in a read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fdcache.errors import TransferError
from fdcache.layout import KVLayout
from fdcache.settings.peers import PeerSettings, TransferRole
from fdcache.testing.transfer import OpenPeer, PeerPlanes, TransferConformance, transfer_layout
from fdcache.transfer.connector import ReadEnd, ReadOrder, ReadOutcome
from fdcache.transfer.nixl import NixlAgent, NixlRead
from fdcache.transfer.packed_memory import CHUNK_BYTES, HostPackedMemory
from fdcache.transfer.rdma import RdmaConnector
from tests.service_help import until
from tests.transfer_help import require_nixl

RDMA = PeerSettings(connector="rdma", ring=4 << 20)


@pytest.fixture(scope="module", autouse=True)
def nixl() -> None:
    require_nixl()


class TestRdma(TransferConformance):
    @pytest.fixture
    def open_peer(self, tmp_path: Path) -> OpenPeer:
        def open_one(layout: KVLayout, num_blocks: int) -> tuple[PeerPlanes, RdmaConnector]:
            planes = PeerPlanes(layout, num_blocks, tmp_path)
            return planes, RdmaConnector(planes.context(RDMA))

        return open_one


LARGE = KVLayout.uniform(
    model="m", revision="1", num_layers=4, block_size=64, kv_heads=8, head_dim=128, dtype="bfloat16"
)
SMALL = KVLayout.uniform(
    model="m", revision="1", num_layers=64, block_size=4, kv_heads=8, head_dim=128, dtype="bfloat16"
)
LAYOUTS = {"in place": LARGE, "packed": SMALL}
"""Blocks of 1 MiB, with planes of 128 KiB that are read in place, and of 8 KiB that are packed."""

SCATTERED = np.arange(0, 16, 2, dtype=np.int32)

SOURCE = """
import json, pathlib, select, sys
import numpy as np
from tests.integration.test_transfer_rdma import LAYOUTS, RDMA, SCATTERED
from fdcache.testing.transfer import PeerPlanes
from fdcache.transfer.rdma import RdmaConnector
layout = LAYOUTS[sys.argv[2]]
planes = PeerPlanes(layout, 16, pathlib.Path(sys.argv[1]))
planes.fill(1)
connector = RdmaConnector(planes.context(RDMA.model_copy(update={"ring": 32 << 20})))
places = connector.publish(SCATTERED, 0, layout.num_planes)
sums = planes.sums(SCATTERED).tolist()
print(json.dumps([planes.boot.hex(), connector.memory.hex(), places, sums]), flush=True)
while not select.select([sys.stdin], [], [], 0.001)[0]:
    connector.poll()
"""


class Source:
    """A process with eight published blocks, reached through TCP, where reads take their time."""

    def __init__(self, directory: Path, way: str) -> None:
        self.layout = LAYOUTS[way]
        root = Path(__file__).parent.parent.parent
        self.process = subprocess.Popen(
            [sys.executable, "-c", SOURCE, str(directory), way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        assert self.process.stdout is not None
        boot, memory, self.places, self.sums = json.loads(self.process.stdout.readline())
        self.boot, self.memory = bytes.fromhex(boot), bytes.fromhex(memory)

    def order(self, read_id: int, count: int = 8, skip: int = 0) -> ReadOrder:
        slots = np.arange(skip, skip + count, dtype=np.int32)
        return ReadOrder(read_id, self.boot, tuple(self.places), 8, skip, 0, self.layout.num_planes, slots)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def way() -> str:
    """How blocks are read, unless a test says otherwise."""
    return "in place"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> Iterator[Source]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    opened = Source(tmp_path, way)
    yield opened
    opened.close()


@pytest.fixture
def target(tmp_path: Path, source: Source) -> Iterator[tuple[PeerPlanes, RdmaConnector]]:
    planes = PeerPlanes(source.layout, 16, tmp_path)
    connector = RdmaConnector(planes.context(RDMA.model_copy(update={"ring": 32 << 20})))
    assert connector.connect(source.boot, source.memory) is None
    yield planes, connector
    connector.close()


def ends_of(connector: RdmaConnector, count: int = 1, *others: RdmaConnector) -> list[ReadEnd]:
    """Wait for ends of reads. Connectors ``others`` of this process make progress meanwhile, as NIXL needs of both."""
    ended: list[ReadEnd] = []

    def polled() -> bool:
        for each in others:
            each.poll()
        ended.extend(connector.poll())
        return len(ended) >= count

    until(polled, "reads end")
    return ended


@pytest.mark.slow
def test_a_read_of_a_stopped_peer_into_slots_ends_when_nothing_arrives_any_more(
    source: Source, target: tuple[PeerPlanes, RdmaConnector]
) -> None:
    planes, connector = target
    source.process.send_signal(signal.SIGSTOP)
    connector.read(source.order(1))
    assert [connector.poll() for _ in range(50)] == [[]] * 50
    connector.disconnect(source.boot)
    assert [connector.poll() for _ in range(50)] == [[]] * 50, "its slots are free while bytes may arrive"
    assert connector.needs_polling and connector.stats().reads_in_flight == 1
    source.process.send_signal(signal.SIGCONT)
    end = ends_of(connector)[0]
    assert end.outcome is ReadOutcome.PEER_GONE
    assert any(each.any() for each in planes.arrays), "bytes arrive late, or this test sees nothing"
    arrived = [each.copy() for each in planes.arrays]
    assert [connector.poll() for _ in range(200)] == [[]] * 200
    assert all((each == before).all() for each, before in zip(planes.arrays, arrived, strict=True))
    assert not connector.needs_polling


@pytest.mark.slow
@pytest.mark.parametrize("way", ["packed"])
def test_bytes_of_a_stopped_peer_arrive_late_and_in_no_slot(
    source: Source, target: tuple[PeerPlanes, RdmaConnector]
) -> None:
    planes, connector = target
    source.process.send_signal(signal.SIGSTOP)
    connector.read(source.order(1))
    assert [connector.poll() for _ in range(50)] == [[]] * 50
    assert connector.stats().places_used > 0
    connector.disconnect(source.boot)
    assert ends_of(connector)[0].outcome is ReadOutcome.PEER_GONE
    assert connector.stats().places_used > 0, "its memory is free while bytes may arrive"
    assert connector.connect(source.boot, source.memory) is None
    connector.disconnect(source.boot)
    assert connector.stats().places_used > 0, "its memory is free while bytes may arrive"
    source.process.send_signal(signal.SIGCONT)
    until(lambda: not connector.poll() and connector.stats().places_used == 0, "the late reads end")
    assert not any(each.any() for each in planes.arrays)


@pytest.mark.slow
@pytest.mark.parametrize("way", LAYOUTS)
def test_reads_of_a_killed_peer_end_and_leave_no_memory(
    source: Source, target: tuple[PeerPlanes, RdmaConnector]
) -> None:
    _, connector = target
    source.process.send_signal(signal.SIGSTOP)
    connector.read(source.order(1))
    connector.read(source.order(2, count=3))
    source.process.kill()
    assert {end.outcome for end in ends_of(connector, 2)} == {ReadOutcome.ERROR}
    until(lambda: not connector.poll() and connector.stats().places_used == 0, "the memory is free")
    connector.disconnect(source.boot)
    assert connector.peers() == []
    connector.read(source.order(3))
    assert connector.poll()[0].outcome is ReadOutcome.PEER_GONE


@pytest.mark.slow
@pytest.mark.parametrize("way", LAYOUTS)
def test_the_next_read_begins_before_the_last_has_ended_and_all_arrive_whole(
    source: Source, target: tuple[PeerPlanes, RdmaConnector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL has them all while not a byte comes: within a node it copies in the call that begins a read."""
    planes, connector = target
    begun: list[NixlRead] = []
    read = NixlAgent.read

    def noted(*arguments: Any) -> NixlRead | str:
        made = read(*arguments)
        assert isinstance(made, NixlRead)
        begun.append(made)
        return made

    monkeypatch.setattr(NixlAgent, "read", noted)
    source.process.send_signal(signal.SIGSTOP)
    known = []
    for order in (source.order(1, count=3), source.order(2, count=5, skip=3)):
        connector.read(order)
        known.append(len(begun))
    assert [connector.poll() for _ in range(50)] == [[]] * 50
    assert 0 < known[0] < known[1] and not any(each.has_ended() for each in begun)
    source.process.send_signal(signal.SIGCONT)
    ends = {each.read_id: each for each in ends_of(connector, 2)}
    sizes = [ends[read_id].moved_bytes // source.layout.payload_bytes for read_id in (1, 2)]
    assert {each.outcome for each in ends.values()} == {ReadOutcome.OK} and sizes == [3, 5]
    assert planes.sums(np.arange(8, dtype=np.int32)).tolist() == source.sums


def open_two(layout: KVLayout, tmp_path: Path) -> list[tuple[PeerPlanes, RdmaConnector]]:
    ring = RDMA.model_copy(update={"ring": 8 << 20})
    planes = [PeerPlanes(layout, 64, tmp_path) for _ in range(2)]
    opened = [(each, RdmaConnector(each.context(ring))) for each in planes]
    opened[0][0].fill(1)
    assert opened[1][1].connect(planes[0].boot, opened[0][1].memory) is None
    return opened


PIECES = {
    "long planes": (LARGE, [5, 1, 9, 30], [2, 8, 0, 61], True),
    "adjoining blocks on both sides": (SMALL, list(range(4, 20)), list(range(30, 46)), True),
    "adjoining blocks at the source": (SMALL, list(range(4, 20)), list(range(63, 31, -2)), True),
    "scattered short planes": (SMALL, list(range(0, 32, 2)), list(range(16)), False),
}


@pytest.mark.parametrize("case", PIECES)
def test_long_runs_are_read_in_place_and_others_packed(case: str, tmp_path: Path) -> None:
    layout, places, slots, in_place = PIECES[case]
    (theirs, source), (mine, target) = open_two(layout, tmp_path)
    before = [each.copy() for each in mine.arrays]
    first, last = 2, 7
    published = source.publish(np.array(places, np.int32), first, last)
    assert published is not None
    assert (source.stats().places_used == 0) == in_place == (published[1:] == tuple(places))
    skip = 1
    order = ReadOrder(
        1, theirs.boot, published, len(places), skip, first, last, np.array(slots[skip:], np.int32)
    )
    target.read(order)
    end = ends_of(target, 1, source)[0]
    sizes = sum(plane.nbytes for plane in layout.planes[first:last])
    assert (end.outcome, end.moved_bytes) == (ReadOutcome.OK, (len(slots) - skip) * sizes)
    for index, (arrived, sent, old) in enumerate(zip(mine.arrays, theirs.arrays, before, strict=True)):
        expected = old
        if first <= index < last:
            expected[slots[skip:]] = sent[places[skip:]]
        assert np.array_equal(arrived, expected)
    source.withdraw(published)
    assert source.stats().places_used == target.stats().places_used == 0
    for each in (source, target):
        each.close()


class LateCopying:
    """A copy that is made when it is waited for, as one on a GPU that has other work."""

    def __init__(self, copy: Callable[[], object]) -> None:
        self._copy = copy
        self.may_end = False

    def has_ended(self) -> bool:
        if self.may_end:
            self._copy()
        return self.may_end

    def wait(self) -> None:
        self._copy()

    def end(self) -> str | None:
        return None


def test_places_are_free_when_their_bytes_have_arrived_and_before_they_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[LateCopying] = []
    unpack = HostPackedMemory.unpack

    def unpack_late(*arguments: Any) -> LateCopying:
        copies.append(LateCopying(lambda: unpack(*arguments)))
        return copies[-1]

    monkeypatch.setattr(HostPackedMemory, "unpack", unpack_late)
    (theirs, source), (mine, target) = open_two(SMALL, tmp_path)
    places, slots = np.arange(0, 8, 2, dtype=np.int32), np.arange(4, dtype=np.int32)
    published = [source.publish(each, 0, SMALL.num_planes) for each in (places[:1], places[1:])]
    for read_id, (part, into) in enumerate(zip(published, (slots[:1], slots[1:]), strict=True)):
        assert part is not None
        target.read(ReadOrder(read_id, theirs.boot, part, len(into), 0, 0, SMALL.num_planes, into))
    arrived: list[int] = []
    ended: list[ReadEnd] = []

    def polled() -> int:
        source.poll()
        ended.extend(target.poll())
        arrived.extend(target.take_arrived())
        return len(arrived)

    until(lambda: polled() == 2, "the bytes are there")
    assert (sorted(arrived), ended, mine.arrays[0].any()) == ([0, 1], [], False)
    for part in published:
        assert part is not None
        source.withdraw(part)
    again = source.publish(np.arange(1, 9, 2, dtype=np.int32), 0, SMALL.num_planes)  # over the same bytes
    assert again is not None and again[1] == min(part[1] for part in published if part)
    for each in copies:
        each.may_end = True
    until(lambda: polled() and len(ended) == 2, "the copies end")
    assert {end.outcome for end in ended} == {ReadOutcome.OK} and sorted(arrived) == [0, 1]
    assert (mine.sums(slots) == theirs.sums(places)).all()
    for connector in (source, target):
        connector.close()


def test_a_role_has_the_memory_of_both_sides(tmp_path: Path) -> None:
    """Prefill packs into twice the ring and decode reads into it; each takes as much memory as one that does both."""
    totals = {}
    for role in TransferRole:
        planes = PeerPlanes(SMALL, 16, tmp_path)
        connector = RdmaConnector(planes.context(RDMA.model_copy(update={"role": role})))
        totals[role] = connector.stats().places_total
        slots, published = SCATTERED[:1], 0
        while connector.publish(slots, 0, SMALL.num_planes) is not None:
            published += 1
        assert published == {"mixed": 4, "prefill": 8, "decode": 0}[role]
        connector.close()
    assert max(totals.values()) - min(totals.values()) == CHUNK_BYTES


def test_places_that_the_planes_have_not_are_an_error(tmp_path: Path) -> None:
    (theirs, source), (mine, target) = open_two(LARGE, tmp_path)
    slots = np.arange(2, dtype=np.int32)
    for read_id, places in enumerate([(0, 1, 64), (0, -1, 1), (0, 1), (0,), (0, 1, 2**63), (-1, -(2**40))]):
        target.read(ReadOrder(read_id, theirs.boot, places, 2, 0, 0, LARGE.num_planes, slots))
        assert ends_of(target, 1, source)[0].outcome is ReadOutcome.ERROR
    assert not any(each.any() for each in mine.arrays)
    for each in (source, target):
        each.close()


@pytest.mark.parametrize(("place", "number"), [(2, 1 << 63), (2, -1), (3, 1 << 63), (4, 1 << 40)])
def test_a_description_with_numbers_of_no_memory_is_refused(place: int, number: int, tmp_path: Path) -> None:
    """Address, bytes and blocks: what they are added to has to fit 64 bits, and a slot 32."""
    planes = PeerPlanes(LARGE, 16, tmp_path)
    connector = RdmaConnector(planes.context(RDMA))
    try:
        described = msgspec.msgpack.decode(connector.memory)
        described[place] = number
        reason = connector.connect(b"p" * 16, msgspec.msgpack.encode(described))
        assert reason is not None and reason.startswith("memory: the peer's description cannot be read")
        assert connector.peers() == []
    finally:
        connector.close()


def test_messages_arrive_and_a_full_memory_publishes_nothing(tmp_path: Path) -> None:
    one, two = (PeerPlanes(transfer_layout(), 12, tmp_path) for _ in range(2))
    small = RDMA.model_copy(update={"ring": 1 << 20})
    source, target = (RdmaConnector(each.context(small)) for each in (one, two))
    assert not source.notify(two.boot, b"nobody listens")
    source.listen(two.boot, b"nonsense")
    source.listen(two.boot, target.memory)
    arrived: list[bytes] = []
    assert source.notify(two.boot, b"ready")

    def has_arrived() -> bool:
        source.poll()
        arrived.extend(target.notifications())
        return arrived == [b"ready"]

    until(has_arrived, "the message arrives")
    most = source.most_blocks(0, one.layout.num_planes)
    slots = np.arange(12, dtype=np.int32)[:most]
    slots = slots * 2 % 12  # no runs, which would be read in place
    published = []
    while (places := source.publish(slots, 0, one.layout.num_planes)) is not None:
        published.append(places)
    assert len(published) >= 4
    source.withdraw(published[1])
    source.withdraw(published[1])
    again = source.publish(slots, 0, one.layout.num_planes)
    assert again is not None
    source.withdraw(published[1])
    assert source.publish(slots, 0, one.layout.num_planes) is None, "the room of another part was freed"
    source.withdraw(again)
    for each in (source, target):
        each.close()
    assert source.stats().name == "rdma"


def test_memory_for_less_than_four_blocks_is_refused(tmp_path: Path) -> None:
    planes = PeerPlanes(LARGE, 1, tmp_path)
    with pytest.raises(
        TransferError, match=r"FDCACHE_TRANSFER=rdma: a block of 1048576 bytes .* 3145728 bytes"
    ):
        RdmaConnector(planes.context(RDMA.model_copy(update={"ring": 3 << 20})))
