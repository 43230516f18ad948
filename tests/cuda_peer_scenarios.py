"""Reads from a peer on the stand-in driver: each call refused in its turn, and what stays mapped."""

from __future__ import annotations

import gc

import cupy
import numpy as np

from fdcache.settings.peers import PeerSettings
from fdcache.transfer.connector import ReadOrder, ReadOutcome
from fdcache.transfer.ipc import IpcConnector
from tests.cuda_stand_in import REFUSED, Driver
from tests.gpu.peers import KIB, GpuPeerPlanes, Peer, contents, end_of_read, layout_of

BLOCKS = 12
LAYOUT = layout_of(8 * KIB)
PLACES, SLOTS = tuple(range(8)), np.arange(4, 12, dtype=np.int32)
CALLS = ("cuIpcOpenMemHandle", "cuLaunchKernel", "cuStreamWaitEvent", "cuEventRecord")


def refuse_every_call() -> None:
    """Refuse each call of a connection and a read: the read fails or is whole, and nothing stays mapped."""
    driver = Driver()
    with Peer("planes", 0, 8 * KIB, BLOCKS) as peer:
        mine = GpuPeerPlanes(LAYOUT, BLOCKS)
        refused: set[str] = set()
        before = driver.held()
        for call in CALLS:
            for after in range(3):
                driver.fail(call, after=after, code=REFUSED)
                reason = _connect_and_read(mine, bytes.fromhex(peer.line))
                came = driver.recover() > 0
                gc.collect()
                held = driver.held()
                assert held["opened"] == 0 and held["unknown"] == 0, (call, after, held)
                assert reason is None or (came and call in reason), (call, after, reason)
                if reason is not None:
                    refused.add(call)
        assert refused == set(CALLS) - {"cuEventRecord"}  # where an event is refused, the thread waits
        assert driver.held()["contexts"] == before["contexts"]


def _connect_and_read(mine: GpuPeerPlanes, described: bytes) -> str | None:
    """Return the reason of a refusal; without one compare every byte."""
    connector = IpcConnector(mine.context(PeerSettings(connector="ipc")))
    try:
        if (reason := connector.connect(b"peer", described)) is not None:
            return reason
        gate = mine.device.create_event()
        gate.record(mine.device.as_stream(cupy.cuda.Stream(non_blocking=True)))
        connector.read(ReadOrder(1, b"peer", PLACES, 8, 0, 0, LAYOUT.num_planes, SLOTS, gate))
        end = end_of_read(connector)
        if end.outcome is not ReadOutcome.OK:
            return end.error
        for data, arrived in zip(contents(LAYOUT, BLOCKS, 1), mine.arrays, strict=True):
            assert np.array_equal(arrived[SLOTS], data[list(PLACES)])
        return None
    finally:
        connector.close()


def unmap_after_the_last_read() -> None:
    """Forget a peer whose memory a kernel still reads: it stays mapped until the kernel has ended."""
    driver = Driver()
    with Peer("planes", 0, 8 * KIB, BLOCKS) as peer:
        mine = GpuPeerPlanes(LAYOUT, BLOCKS)
        connector = IpcConnector(mine.context(PeerSettings(connector="ipc")))
        assert connector.connect(b"peer", bytes.fromhex(peer.line)) is None
        planes = driver.held()["opened"]
        assert planes == LAYOUT.num_planes
        gate = mine.device.create_event()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            cupy.RawKernel("", "spin")((1,), (1,), (0,))
        gate.record(mine.device.as_stream(stream))
        connector.read(ReadOrder(1, b"peer", PLACES, 8, 0, 0, LAYOUT.num_planes, SLOTS, gate))
        peer.kill()
        connector.disconnect(b"peer")
        gc.collect()
        assert driver.held()["opened"] == planes
        assert end_of_read(connector).outcome is ReadOutcome.OK
        assert driver.held()["opened"] == 0
        for data, arrived in zip(contents(LAYOUT, BLOCKS, 1), mine.arrays, strict=True):
            assert np.array_equal(arrived[SLOTS], data[list(PLACES)])
        connector.close()
