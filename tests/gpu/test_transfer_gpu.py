"""Hand-overs of blocks on a GPU: the connector, two processes, and memory that cannot be opened."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdcache import _core
from fdcache.controller.cache_controller import CacheController
from fdcache.devices.topology import visible_gpus
from fdcache.errors import StreamError, TransferError
from fdcache.layout import KVLayout
from fdcache.manager import Request
from fdcache.manager.requests import PeerSource
from fdcache.manager.results import LoadStatus
from fdcache.settings.cache import CopySettings
from fdcache.settings.peers import PeerSettings
from fdcache.testing.transfer import TransferConformance, transfer_layout
from fdcache.transfer.connector import ReadEnd, ReadOrder, ReadOutcome, share
from fdcache.transfer.ipc import IpcConnector
from tests.gpu.test_cuda_device import run_python
from tests.gpu.test_cuda_order import spin
from tests.transfer_help import BLOCK, LAYOUT, prompt_of

cupy = pytest.importorskip("cupy")

from tests.gpu.peers import KIB, GpuInstance, GpuPeerPlanes, Peer, contents, device_of, end_of_read, layout_of  # noqa: E402

IPC = PeerSettings(connector="ipc")
BLOCKS = 96
SPIN = 100_000_000
PLACES = ["same GPU", "other GPU"]


def second_gpu(place: str) -> int:
    """Return the GPU of the peer."""
    if place == "same GPU":
        return 0
    if len(visible_gpus()) < 2:
        pytest.skip("there is one GPU")
    return 1


class TestDeviceIpc(TransferConformance):
    @pytest.fixture(params=PLACES)
    def open_peer(self, request: Any) -> Callable[[KVLayout, int], tuple[GpuPeerPlanes, IpcConnector]]:
        gpus = (0, second_gpu(request.param))
        opened: list[GpuPeerPlanes] = []

        def open_one(layout: KVLayout, num_blocks: int) -> tuple[GpuPeerPlanes, IpcConnector]:
            planes = GpuPeerPlanes(layout, num_blocks, gpus[len(opened) % 2])
            opened.append(planes)
            return planes, IpcConnector(planes.context(IPC))

        return open_one


def read(
    connector: IpcConnector, boot: bytes, places: list[int], slots: list[int], planes: tuple[int, int]
) -> ReadEnd:
    """Read blocks of a peer and return the end."""
    order = ReadOrder(1, boot, tuple(places), len(places), 0, *planes, np.array(slots, np.int32))
    connector.read(order)
    return end_of_read(connector)


def shuffled(seed: int) -> list[int]:
    return [int(each) for each in np.random.default_rng(seed).permutation(BLOCKS)]


@pytest.mark.parametrize("place", PLACES)
def test_every_byte_of_scattered_blocks_of_another_process_arrives(place: str) -> None:
    with Peer("planes", second_gpu(place), 4 * KIB, BLOCKS) as peer:
        for plane_bytes in (128 * KIB, 64 * KIB, 16 * KIB, 8 * KIB):
            compare_every_byte(peer.tell(str(plane_bytes)), plane_bytes)


def compare_every_byte(described: str, plane_bytes: int) -> None:
    layout = layout_of(plane_bytes)
    assert {plane.nbytes for plane in layout.planes} == {plane_bytes}
    mine = GpuPeerPlanes(layout, BLOCKS, 0)
    connector = IpcConnector(mine.context(IPC))
    assert connector.connect(b"peer", bytes.fromhex(described)) is None
    assert connector.connect(b"peer", bytes.fromhex(described)) is None
    places, slots = shuffled(1)[:-5], shuffled(2)[:-5]
    for group in range(layout.num_planes // 2):
        end = read(connector, b"peer", places, slots, (2 * group, 2 * group + 2))
        assert (end.outcome, end.error) == (ReadOutcome.OK, None)
        assert end.moved_bytes == 2 * plane_bytes * len(slots) and end.seconds > 0
    expected = contents(layout, BLOCKS, 1)
    for data, arrived in zip(expected, mine.arrays, strict=True):
        assert np.array_equal(arrived[slots], data[places])
        assert not arrived[shuffled(2)[-5:]].any()
    table = _core.PlaneTable(
        [each.ctypes.data for each in expected], [plane_bytes] * layout.num_planes,
        [plane_bytes] * layout.num_planes, [plane.offset for plane in layout.planes], expected,
    )  # fmt: skip
    on_the_cpu = _core.sum_planes(table, BLOCKS, np.array(places, np.int32), 0, layout.num_planes)
    assert np.array_equal(mine.sums(np.array(slots, np.int32)), on_the_cpu)
    connector.close()


@pytest.mark.parametrize("place", PLACES)
def test_heads_of_ranks_of_another_tensor_parallelism_are_read_and_summed(place: str) -> None:
    large = transfer_layout().with_tp_size(1)
    small = large.with_tp_size(2)
    mine, places, slots = GpuPeerPlanes(large, BLOCKS, 0), [5, 0, 9], [2, 3, 1]
    connector = IpcConnector(mine.context(IPC))
    sharing = share(large, 0, 2)
    for index, (_, joint) in enumerate(sharing.sources):
        assert joint is not None
        theirs = GpuPeerPlanes(small, BLOCKS, second_gpu(place))
        theirs.fill(index + 1)
        assert connector.connect(theirs.boot, theirs.access.describe(), joint) is None
        end = read(connector, theirs.boot, places, slots, (0, large.num_planes))
        assert (end.error, end.moved_bytes) == (None, len(slots) * small.payload_bytes)
        for plane, arrived, sent in zip(small.planes, mine.arrays, theirs.arrays, strict=True):
            heads = slice(index * plane.nbytes, (index + 1) * plane.nbytes)
            assert np.array_equal(arrived[slots, heads], sent[places])
        expected = theirs.planes.sums(np.array(places, np.int32))
        assert np.array_equal(mine.planes.sums(np.array(slots, np.int32), joint.own), expected)
    connector.close()


def test_parts_of_states_of_other_ranks_are_read_and_summed() -> None:
    large = transfer_layout().with_tp_size(1)
    small, parts = large.with_tp_size(2), (256, 64, 64, 512)
    mine, places, slots = GpuPeerPlanes(large, BLOCKS, 0), [5, 0, 9], [2, 3, 1]
    connector = IpcConnector(mine.context(IPC))
    for index, (_, joint) in enumerate(share(large, 0, 2, parts).sources):
        assert joint is not None
        theirs = GpuPeerPlanes(small, BLOCKS, 0)
        theirs.fill(index + 1)
        assert connector.connect(theirs.boot, theirs.access.describe(), joint) is None
        into = np.array(slots, np.int32)
        order = ReadOrder(1, theirs.boot, tuple(places), 3, 0, 0, large.num_planes, into, None, is_state=True)
        connector.read(order)
        end = end_of_read(connector)
        assert (end.error, end.moved_bytes) == (None, 3 * large.num_planes * sum(parts) // 2)
        for arrived, sent in zip(mine.arrays, theirs.arrays, strict=True):
            compare_parts(arrived[slots], sent[places], parts, index)
        pieces = joint.theirs.of(is_state=True), joint.own.of(is_state=True)
        expected = theirs.planes.sums(np.array(places, np.int32), pieces[0])
        assert np.array_equal(mine.planes.sums(into, pieces[1]), expected)
        assert expected.any()
    connector.close()


def compare_parts(large: Any, small: Any, parts: tuple[int, ...], index: int) -> None:
    """Compare the share of one rank of two of each part of a state."""
    begin = 0
    for part in parts:
        share = slice(begin + index * part // 2, begin + (index + 1) * part // 2)
        assert np.array_equal(large[:, share], small[:, begin // 2 : (begin + part) // 2])
        begin += part


def test_memory_of_a_killed_peer_is_released_after_the_reads() -> None:
    layout = layout_of(64 * KIB)
    with Peer("planes", visible_gpus()[-1].ordinal, 64 * KIB, BLOCKS) as peer:
        mine = GpuPeerPlanes(layout, BLOCKS, 0)
        connector = IpcConnector(mine.context(IPC))
        assert connector.connect(b"peer", bytes.fromhex(peer.line)) is None
        with cupy.cuda.Device(0):
            stream = cupy.cuda.Stream(non_blocking=True)
            spin(stream, SPIN)
        gate = mine.device.create_event()
        gate.record(mine.device.as_stream(stream))
        places = tuple(range(BLOCKS))
        order = ReadOrder(1, b"peer", places, BLOCKS, 0, 0, 2, np.arange(BLOCKS, dtype=np.int32), gate)
        connector.read(order)
        assert connector.needs_polling and connector.poll() == []
        peer.kill()
        connector.disconnect(b"peer")
        gc.collect()
        end = end_of_read(connector)
        assert end.outcome is ReadOutcome.OK, end.error
        assert np.array_equal(mine.arrays[0], contents(layout, BLOCKS, 1)[0])
        assert "cannot be opened" in (connector.connect(b"late", bytes.fromhex(peer.line)) or "")
        assert mine.device.lost is None
        assert mine.sums(np.zeros(1, np.int32)) != 0
        connector.close()


def test_peers_that_see_one_gpu_each_read_one_another() -> None:
    mine, theirs = visible_gpus()[0].uuid, visible_gpus()[second_gpu("other GPU")].uuid
    with (
        Peer("planes", 0, 16 * KIB, BLOCKS, CUDA_VISIBLE_DEVICES=theirs) as peer,
        Peer("read", peer.line, 16 * KIB, BLOCKS, CUDA_VISIBLE_DEVICES=mine) as reader,
    ):
        assert reader.line == "read: None"


def test_descriptions_that_do_not_fit_are_refused_by_name() -> None:
    import msgspec

    small, large = (GpuPeerPlanes(layout_of(size), 8) for size in (8 * KIB, 16 * KIB))
    connector = IpcConnector(small.context(IPC))
    assert "is not within the peer's allocation" in (
        connector.connect(b"1", _with(small, num_blocks=9)) or ""
    )
    assert "another machine" in (connector.connect(b"2", _with(small, machine="other")) or "")
    other = layout_of(8 * KIB, num_layers=3)
    assert "planes: the peer has 6" in (
        connector.connect(b"3", GpuPeerPlanes(other, 8).access.describe()) or ""
    )
    foreign = _with(small, process=os.urandom(20))
    assert "cannot be opened" in (connector.connect(b"4", foreign) or "")  # a handle of this process
    described = msgspec.msgpack.decode(large.access.describe())
    assert described[3] == 8 and connector.peers() == []


def _with(planes: GpuPeerPlanes, **fields: Any) -> bytes:
    import msgspec

    from fdcache.devices.cuda_peers import DevicePlaneTable

    table = msgspec.msgpack.decode(planes.access.describe(), type=DevicePlaneTable)
    return msgspec.msgpack.encode(msgspec.structs.replace(table, **fields))


def test_memory_without_a_handle_is_refused_with_the_remedy() -> None:
    layout, device = transfer_layout(), device_of(None)
    pool = getattr(cupy.cuda, "MemoryAsyncPool", None)  # the stand-in's arrays are of a pool anyway
    with cupy.cuda.Device(device.gpu.ordinal):
        if pool is not None:
            with cupy.cuda.using_allocator(pool().malloc):
                tensors = [cupy.zeros((4, *plane.shape), cupy.uint16) for plane in layout.planes]
        else:
            tensors = [cupy.zeros((4, *plane.shape), cupy.uint16) for plane in layout.planes]
    with CacheController(CopySettings(), layout, device=device) as controller:
        controller.register_kv_cache(tensors)
        with pytest.raises(TransferError, match=r"plane key of layer 0 .*initialize_kv_cache"):
            controller.open_transfer(IPC)


def test_expandable_segments_are_refused_with_the_remedy() -> None:
    pytest.importorskip("torch")
    code = """
        import torch
        from fdcache.controller.cache_controller import CacheController
        from fdcache.devices.cuda import CudaDevice
        from fdcache.errors import TransferError
        from fdcache.settings.cache import CopySettings
        from fdcache.settings.peers import PeerSettings
        from fdcache.testing.transfer import transfer_layout
        layout = transfer_layout()
        controller = CacheController(CopySettings(), layout, device=CudaDevice())
        controller.register_kv_cache(
            [torch.zeros((4, *plane.shape), dtype=torch.bfloat16, device="cuda") for plane in layout.planes]
        )
        try:
            print(controller.open_transfer(PeerSettings(connector="ipc")))
        except TransferError as error:
            print("refused", error)
    """
    for setting, begins in (("expandable_segments:True", "refused"), ("expandable_segments:False", "ipc://")):
        done = run_python(code, PYTORCH_CUDA_ALLOC_CONF=setting, PYTORCH_ALLOC_CONF=setting)
        assert done.stdout.startswith(begins), done.stdout + done.stderr
        assert ("expandable_segments" in done.stdout) == (begins == "refused")


def test_connectors_of_the_cpu_are_refused_for_a_gpu() -> None:
    with CacheController(CopySettings(), LAYOUT, device=device_of(None)) as controller:
        controller.initialize_kv_cache(4)
        with pytest.raises(TransferError, match="use ipc"):
            controller.open_transfer(PeerSettings(connector="files"))


@pytest.mark.parametrize("place", PLACES)
def test_a_prompt_is_handed_over_between_processes_while_both_gpus_compute(
    place: str, tmp_path: Path
) -> None:
    with (
        Peer("prefill", second_gpu(place), tmp_path) as peer,
        GpuInstance("decode", tmp_path, "d", gpu=0) as decode,
    ):
        for seed, blocks, cycles in ((1, 6, 0), (2, 9, SPIN), (3, 14, SPIN)):
            request = Request(f"r{seed}", prompt_of(seed, blocks))
            with cupy.cuda.Device(decode.ordinal):
                spin(decode.stream, SPIN)
                with decode.stream:
                    for plane in decode.planes:  # work that still uses the slots
                        plane[:] = 9
            assert decode.fetch(request, PeerSource(f"r{seed}", (peer.line,), 1)) == blocks
            assert peer.tell(f"{seed} {blocks} {cycles}") == "computed"
            decode.until(lambda: decode.outcomes)
            (outcome,) = decode.outcomes
            assert (outcome.status, outcome.error_message) == (LoadStatus.CONFIRMED, None)
            assert decode.wrong_blocks(request, 0, blocks) == []
            decode.outcomes.clear()
            decode.manager.finish([request])
        assert decode.transfers.connector.read_bytes == 29 * LAYOUT.payload_bytes


def test_blocks_of_a_peer_killed_midway_are_computed(tmp_path: Path) -> None:
    with (
        Peer("prefill", second_gpu("same GPU"), tmp_path) as peer,
        GpuInstance("decode", tmp_path, "d", gpu=0) as decode,
    ):
        request = Request("r1", prompt_of(1, 6))
        assert decode.fetch(request, PeerSource("r1", (peer.line,), 1)) == 6
        decode.until(lambda: [each.state for each in decode.transfers.peers] == ["accepted"])
        peer.kill()
        decode.until(lambda: decode.outcomes)
        assert decode.outcomes[0].status is LoadStatus.FAILED
        assert decode.transfers.held_blocks == 0
        decode.compute(request, "none")
        decode.stream.synchronize()
        assert decode.wrong_blocks(request, 0, 6) == []


def test_a_changed_byte_is_found_on_the_device(tmp_path: Path) -> None:
    with (
        GpuInstance("prefill", tmp_path, "p", gpu=0) as prefill,
        GpuInstance("decode", tmp_path, "d", gpu=0) as decode,
    ):
        mine, theirs = Request("r", prompt_of(5, 6)), Request("r", prompt_of(5, 6))
        prefill.start(mine)
        prefill.handovers.send([(mine, "r")])
        prefill.step()
        prefill.compute(mine, "r")
        prefill.until(lambda: [each.complete for each in prefill.transfers.transfers] == [True])
        block = prefill.read(prefill.planes[3], mine.block_table[2])
        block[7] ^= 4
        prefill.write(prefill.planes[3], mine.block_table[2], block)
        prefill.stream.synchronize()
        assert decode.fetch(theirs, prefill.source("r")) == 6
        decode.until(lambda: decode.outcomes)
        outcome = decode.outcomes[0]
        assert (outcome.status, outcome.recompute_from) == (LoadStatus.FAILED, 2 * BLOCK)
        assert "block 2 differ" in (outcome.error_message or "")


def test_hand_overs_without_a_stream_are_refused(tmp_path: Path) -> None:
    with GpuInstance("mixed", tmp_path, "m", gpu=0) as instance:
        with pytest.raises(StreamError, match="orders nothing"):
            instance.controller.layer_computed(0, {"r": 1})
        request = Request("r", prompt_of(1, 4))
        instance.start(request)
        instance.handovers.send([(request, "r")])
        instance.stream = None
        with pytest.raises(StreamError, match="orders nothing"):
            instance.step()
        instance.manager.apply(instance.controller.poll())
