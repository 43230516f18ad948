"""The connector ``rdma`` for blocks on a GPU: conformance, scattered blocks of another process, heads, hand-overs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdcache.errors import TransferError
from fdcache.layout import KVLayout
from fdcache.manager import Request
from fdcache.manager.requests import PeerSource
from fdcache.manager.results import LoadStatus
from fdcache.settings.peers import PeerSettings
from fdcache.testing.transfer import TransferConformance, transfer_layout
from fdcache.transfer.connector import ReadEnd, ReadOrder, ReadOutcome, share
from fdcache.transfer.rdma import RdmaConnector
from tests.service_help import until
from tests.transfer_help import LAYOUT, prompt_of, require_nixl

cupy = pytest.importorskip("cupy")

from tests.gpu.peers import (  # noqa: E402
    KIB,
    GpuInstance,
    GpuPeerPlanes,
    Peer,
    contents,
    layout_of,
    use_nixl_for_the_stand_in,
)
from tests.gpu.test_cuda_order import spin  # noqa: E402
from tests.gpu.test_transfer_gpu import PLACES, SPIN, compare_parts, second_gpu  # noqa: E402

RDMA = PeerSettings(connector="rdma", ring=16 << 20)
BLOCKS = 96


@pytest.fixture(scope="module", autouse=True)
def nixl() -> None:
    require_nixl()
    use_nixl_for_the_stand_in()


class TestDeviceRdma(TransferConformance):
    @pytest.fixture(params=PLACES)
    def open_peer(self, request: Any) -> Callable[[KVLayout, int], tuple[GpuPeerPlanes, RdmaConnector]]:
        gpus = (0, second_gpu(request.param))
        opened: list[GpuPeerPlanes] = []

        def open_one(layout: KVLayout, num_blocks: int) -> tuple[GpuPeerPlanes, RdmaConnector]:
            planes = GpuPeerPlanes(layout, num_blocks, gpus[len(opened) % 2])
            opened.append(planes)
            return planes, RdmaConnector(planes.context(RDMA))

        return open_one


def ends_of(
    connector: RdmaConnector, others: tuple[RdmaConnector, ...] = (), count: int = 1
) -> list[ReadEnd]:
    ended: list[ReadEnd] = []

    def has_ended() -> bool:
        for each in others:
            each.poll()
        ended.extend(connector.poll())
        return len(ended) >= count

    until(has_ended, "reads end")
    return ended


class Target:
    """Planes on the first GPU, and what a peer has published of its blocks."""

    def __init__(self, peer: Peer, plane_bytes: int) -> None:
        self.layout = layout_of(plane_bytes)
        self.boot, memory, *parts = peer.tell(str(plane_bytes)).split()
        self.parts = [tuple(map(int, each.split(":"))) for each in parts]
        self.planes = GpuPeerPlanes(self.layout, BLOCKS, 0)
        self.connector = RdmaConnector(self.planes.context(RDMA))
        assert self.connector.connect(bytes.fromhex(self.boot), bytes.fromhex(memory)) is None

    def order(self, read_id: int, part: tuple[int, ...], slots: np.ndarray, after: Any = None) -> ReadOrder:
        first, count, *places = part
        mine = slots[first : first + count]
        whole = (0, self.layout.num_planes)
        return ReadOrder(read_id, bytes.fromhex(self.boot), tuple(places), count, 0, *whole, mine, after)


@pytest.fixture(params=PLACES)
def peer(request: Any) -> Iterator[Peer]:
    with Peer("publish", second_gpu(request.param), BLOCKS) as opened:
        yield opened


def test_every_byte_of_scattered_blocks_of_another_process_arrives(peer: Peer) -> None:
    for plane_bytes in (128 * KIB, 64 * KIB, 16 * KIB, 8 * KIB):
        target = Target(peer, plane_bytes)
        slots = np.random.default_rng(2).permutation(BLOCKS)[: BLOCKS - 5].astype(np.int32)
        for read_id, part in enumerate(target.parts):
            target.connector.read(target.order(read_id, part, slots))
        ends = ends_of(target.connector, count=len(target.parts))
        assert {(end.outcome, end.error) for end in ends} == {(ReadOutcome.OK, None)}
        covered = slots[: sum(count for _, count, *_ in target.parts)]
        places = np.random.default_rng(1).permutation(BLOCKS)[: len(covered)]
        for data, arrived in zip(contents(target.layout, BLOCKS, 1), target.planes.arrays, strict=True):
            assert np.array_equal(arrived[covered], data[places])
            others = np.setdiff1d(np.arange(BLOCKS), covered)
            assert not arrived[others].any()
        target.connector.close()
        assert target.connector.stats().places_used == 0


def test_slots_are_written_after_the_work_that_uses_them(peer: Peer) -> None:
    target = Target(peer, 16 * KIB)
    with cupy.cuda.Device(0):
        stream = cupy.cuda.Stream(non_blocking=True)
        spin(stream, SPIN)
        with stream:
            for plane in target.planes.tensors:
                plane[:] = 9
    gate = target.planes.device.create_event()
    gate.record(target.planes.device.as_stream(stream))
    slots = np.arange(BLOCKS, dtype=np.int32)
    target.connector.read(target.order(1, target.parts[0], slots, gate))
    end = ends_of(target.connector)[0]
    assert (end.outcome, gate.query()) == (ReadOutcome.OK, True)
    count = target.parts[0][1]
    places = np.random.default_rng(1).permutation(BLOCKS)[:count]
    for data, arrived in zip(contents(target.layout, BLOCKS, 1), target.planes.arrays, strict=True):
        assert np.array_equal(arrived[:count], data[places])
    target.connector.close()


def test_reads_of_a_killed_peer_end_and_leave_no_memory(peer: Peer) -> None:
    target = Target(peer, 64 * KIB)
    slots = np.arange(BLOCKS, dtype=np.int32)
    peer.kill()
    for read_id, part in enumerate(target.parts):
        target.connector.read(target.order(read_id, part, slots))
    ends_of(target.connector, count=len(target.parts))
    target.connector.disconnect(bytes.fromhex(target.boot))
    until(
        lambda: not target.connector.poll() and not target.connector.stats().places_used, "the memory is free"
    )
    assert target.connector.peers() == [] and target.planes.device.lost is None
    target.connector.close()


@pytest.mark.parametrize("place", PLACES)
def test_heads_of_ranks_of_another_tensor_parallelism_are_read_and_summed(place: str) -> None:
    large = transfer_layout().with_tp_size(1)
    small = large.with_tp_size(2)
    places, slots = np.array([5, 0, 9], np.int32), np.array([2, 3, 1], np.int32)
    mine = GpuPeerPlanes(large, BLOCKS, 0)
    connector, opened = RdmaConnector(mine.context(RDMA)), []
    for index, (_, joint) in enumerate(share(large, 0, 2).sources):
        assert joint is not None
        theirs = GpuPeerPlanes(small, BLOCKS, second_gpu(place))
        theirs.fill(index + 1)
        source = RdmaConnector(theirs.context(RDMA))
        opened.append(source)
        assert connector.connect(theirs.boot, source.memory, joint) is None
        published = source.publish(places, 0, small.num_planes)
        assert published is not None
        TransferConformance.await_packed(source, published)
        connector.read(ReadOrder(1, theirs.boot, published, 3, 0, 0, small.num_planes, slots))
        end = ends_of(connector, (source,))[0]
        assert (end.error, end.moved_bytes) == (None, len(slots) * small.payload_bytes)
        for plane, arrived, sent in zip(small.planes, mine.arrays, theirs.arrays, strict=True):
            heads = slice(index * plane.nbytes, (index + 1) * plane.nbytes)
            assert np.array_equal(arrived[slots, heads], sent[places])
        parts = [theirs.planes.sums(places, None, slice(*each)) for each in ((0, 2), (2, small.num_planes))]
        assert np.array_equal(mine.planes.sums(slots, joint.own), sum(parts))
    connector.close()
    for source in opened:
        source.close()


def test_head_ranges_of_one_rank_are_packed_for_each_of_its_readers() -> None:
    large = transfer_layout().with_tp_size(1)
    small = large.with_tp_size(2)
    theirs = GpuPeerPlanes(large, BLOCKS, 0)
    theirs.fill(1)
    source, places, slots = RdmaConnector(theirs.context(RDMA)), [5, 0, 9], np.array([2, 3, 1], np.int32)
    for rank, pieces in enumerate(share(large, 0, 2).readers):
        mine = GpuPeerPlanes(small, BLOCKS, 0)
        connector = RdmaConnector(mine.context(RDMA))
        ((_, joint),) = share(small, rank, 1).sources
        assert connector.connect(theirs.boot, source.memory, joint) is None
        published = source.publish(np.array(places, np.int32), 0, large.num_planes, pieces)
        assert published is not None
        TransferConformance.await_packed(source, published)
        connector.read(ReadOrder(1, theirs.boot, published, 3, 0, 0, small.num_planes, slots))
        assert ends_of(connector, (source,))[0].error is None
        for plane, arrived, sent in zip(small.planes, mine.arrays, theirs.arrays, strict=True):
            heads = slice(rank * plane.nbytes, (rank + 1) * plane.nbytes)
            assert np.array_equal(arrived[slots], sent[places][:, heads])
        connector.close()
    source.close()


def test_parts_of_states_are_packed_for_each_of_the_readers() -> None:
    large = transfer_layout().with_tp_size(1)
    small, parts = large.with_tp_size(2), (256, 64, 64, 512)
    theirs = GpuPeerPlanes(large, BLOCKS, 0)
    theirs.fill(1)
    source, places, slots = RdmaConnector(theirs.context(RDMA)), [5, 0, 9], np.array([2, 3, 1], np.int32)
    for rank, pieces in enumerate(share(large, 0, 2, parts).readers):
        assert pieces is not None
        mine = GpuPeerPlanes(small, BLOCKS, 0)
        connector = RdmaConnector(mine.context(RDMA))
        ((_, joint),) = share(small, rank, 1, tuple(part // 2 for part in parts)).sources
        assert joint is not None
        assert connector.connect(theirs.boot, source.memory, joint) is None
        found = pieces.of(is_state=True)
        published = source.publish(np.array(places, np.int32), 0, large.num_planes, found)
        assert published is not None
        TransferConformance.await_packed(source, published)
        connector.read(
            ReadOrder(1, theirs.boot, published, 3, 0, 0, small.num_planes, slots, None, is_state=True)
        )
        assert ends_of(connector, (source,))[0].error is None
        for arrived, sent in zip(mine.arrays, theirs.arrays, strict=True):
            compare_parts(sent[places], arrived[slots], parts, rank)
        own = joint.own.of(is_state=True)
        assert np.array_equal(
            mine.planes.sums(slots, own), theirs.planes.sums(np.array(places, np.int32), found)
        )
        connector.close()
    source.close()


def test_packed_memory_that_the_gpu_has_not_is_refused() -> None:
    planes = GpuPeerPlanes(transfer_layout(), 4, 0)
    with pytest.raises(TransferError, match=r"FDCACHE_TRANSFER=rdma: .*could not allocate"):
        RdmaConnector(planes.context(RDMA.model_copy(update={"ring": 1 << 50})))


@pytest.mark.parametrize("place", PLACES)
def test_a_prompt_is_handed_over_between_processes_while_both_gpus_compute(
    place: str, tmp_path: Path
) -> None:
    with (
        Peer("prefill", second_gpu(place), tmp_path, "rdma") as peer,
        GpuInstance("decode", tmp_path, "d", gpu=0, connector="rdma", ring=16 << 20) as decode,
    ):
        for seed, blocks, cycles in ((1, 6, 0), (2, 9, SPIN)):
            request = Request(f"r{seed}", prompt_of(seed, blocks))
            assert decode.fetch(request, PeerSource(f"r{seed}", (peer.line,), 1)) == blocks
            assert peer.tell(f"{seed} {blocks} {cycles}") == "computed"
            decode.until(lambda: decode.outcomes)
            (outcome,) = decode.outcomes
            assert (outcome.status, outcome.error_message) == (LoadStatus.CONFIRMED, None)
            assert decode.wrong_blocks(request, 0, blocks) == []
            decode.outcomes.clear()
            decode.manager.finish([request])
        assert decode.transfers.connector.read_bytes == 15 * LAYOUT.payload_bytes
