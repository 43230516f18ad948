"""The connector ``rdma``: conformance, runs, notifications, and peers that are stopped or killed in a read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fdcache.errors import TransferError
from fdcache.layout import KVLayout
from fdcache.settings.peers import PeerSettings
from fdcache.transfer.conformance import OpenPeer, PeerPlanes, TransferConformance, transfer_layout
from fdcache.transfer.connector import ReadEnd, ReadOrder, ReadOutcome
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
"""Blocks of 1 MiB."""

SOURCE = """
import json, pathlib, sys
import numpy as np
from tests.integration.test_transfer_rdma import LARGE, RDMA
from fdcache.transfer.conformance import PeerPlanes
from fdcache.transfer.rdma import RdmaConnector
planes = PeerPlanes(LARGE, 16, pathlib.Path(sys.argv[1]))
planes.fill(1)
connector = RdmaConnector(planes.context(RDMA.model_copy(update={"ring": 32 << 20})))
places = connector.publish(np.arange(8, dtype=np.int32), 0, LARGE.num_planes)
sums = planes.sums(np.arange(8, dtype=np.int32)).tolist()
print(json.dumps([planes.boot.hex(), connector.memory.hex(), places, sums]), flush=True)
sys.stdin.read()
"""


class Source:
    """A process with eight published blocks, reached through TCP, where reads take their time."""

    def __init__(self, directory: Path) -> None:
        root = Path(__file__).parent.parent.parent
        self.process = subprocess.Popen(
            [sys.executable, "-c", SOURCE, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        assert self.process.stdout is not None
        boot, memory, self.places, self.sums = json.loads(self.process.stdout.readline())
        self.boot, self.memory = bytes.fromhex(boot), bytes.fromhex(memory)

    def order(self, read_id: int, count: int = 8) -> ReadOrder:
        slots = np.arange(count, dtype=np.int32)
        return ReadOrder(read_id, self.boot, tuple(self.places), 8, 0, 0, LARGE.num_planes, slots)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    opened = Source(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def target(tmp_path: Path, source: Source) -> Iterator[tuple[PeerPlanes, RdmaConnector]]:
    planes = PeerPlanes(LARGE, 16, tmp_path)
    connector = RdmaConnector(planes.context(RDMA.model_copy(update={"ring": 32 << 20})))
    assert connector.connect(source.boot, source.memory) is None
    yield planes, connector
    connector.close()


def ends_of(connector: RdmaConnector, count: int = 1) -> list[ReadEnd]:
    ended: list[ReadEnd] = []

    def polled() -> bool:
        ended.extend(connector.poll())
        return len(ended) >= count

    until(polled, "reads end")
    return ended


@pytest.mark.slow
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
def test_several_runs_through_tcp_arrive_whole(
    source: Source, target: tuple[PeerPlanes, RdmaConnector]
) -> None:
    planes, connector = target
    connector.read(source.order(1))
    end = ends_of(connector)[0]
    assert (end.outcome, end.moved_bytes) == (ReadOutcome.OK, 8 * LARGE.payload_bytes)
    assert planes.sums(np.arange(8, dtype=np.int32)).tolist() == source.sums


def test_messages_arrive_and_a_full_memory_publishes_nothing(tmp_path: Path) -> None:
    one, two = (PeerPlanes(transfer_layout(), 12, tmp_path) for _ in range(2))
    small = RDMA.model_copy(update={"ring": 1 << 20})
    source, target = (RdmaConnector(each.context(small)) for each in (one, two))
    assert not source.notify(two.boot, b"nobody listens")
    source.listen(two.boot, b"nonsense")
    source.listen(two.boot, target.memory)
    arrived: list[bytes] = []
    assert source.notify(two.boot, b"ready")
    until(lambda: arrived.extend(target.notifications()) or arrived == [b"ready"], "the message arrives")
    most = source.most_blocks(0, one.layout.num_planes)
    slots = np.arange(12, dtype=np.int32)[:most]
    published = []
    while (places := source.publish(slots, 0, one.layout.num_planes)) is not None:
        published.append(places)
    assert len(published) >= 4
    source.withdraw(published[1])
    source.withdraw(published[1])
    assert (again := source.publish(slots, 0, one.layout.num_planes)) is not None
    source.withdraw(published[1])
    assert source.publish(slots, 0, one.layout.num_planes) is None, "the room of another part was freed"
    source.withdraw(again)
    for each in (source, target):
        each.close()
    assert source.stats().name == "rdma"


def test_memory_for_less_than_four_blocks_is_refused(tmp_path: Path) -> None:
    planes = PeerPlanes(LARGE, 1, tmp_path)
    with pytest.raises(TransferError, match="FDCACHE_TRANSFER_RING=3145728.*at least 4194304"):
        RdmaConnector(planes.context(RDMA.model_copy(update={"ring": 3 << 20})))
