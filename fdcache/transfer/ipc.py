"""The connector ``ipc``: one node, planes of the CPU in shared memory, read in place by native copies."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from fdcache import _core
from fdcache._core import PlaneTable
from fdcache.errors import TransferError
from fdcache.metadata import Int32Array
from fdcache.transfer.connector import (
    ConnectorStats,
    Joint,
    Pieces,
    ReadEnd,
    ReadOrder,
    ReadOutcome,
    TransferContext,
)
from fdcache.transfer.shared_planes import MappedPlanes, PlanesFile, find_shared

_THREADS = 1
"""Threads that read; copies from memory of the same node are limited by its bandwidth."""


@dataclass(frozen=True, slots=True)
class _Peer:
    """Planes of a peer that are copied into own ones of the same sizes."""

    source: PlaneTable
    num_blocks: int
    target: PlaneTable


class IpcConnector:
    """Maps the planes of each peer once, and copies blocks out of them in threads of its own.

    Raises ``TransferError`` for planes that are not in shared memory.
    """

    name = "ipc"
    needs_polling = False

    def __init__(self, context: TransferContext) -> None:
        planes = context.planes
        found = find_shared(planes.addresses, planes.strides)
        if found is None:
            raise TransferError(
                "FDCACHE_TRANSFER=ipc: the planes are in memory that peers cannot map; allocate them with "
                "CacheController.initialize_kv_cache, or register the tensors of fdcache.transfer.shared_planes"
            )
        self.memory = msgspec.msgpack.encode(found)
        self._planes = planes
        self._wake = context.wake
        self._peers: dict[bytes, _Peer] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "fdcache-transfer-read")
        self._ended: deque[ReadEnd] = deque()
        self._reads = self._failed = self._bytes = self._in_flight = 0

    def most_blocks(self, first_plane: int, last_plane: int) -> int:
        """Return the number of blocks: there is no limit."""
        return self._planes.num_blocks

    def publish(
        self, slots: Int32Array, first_plane: int, last_plane: int, pieces: Pieces | None = None
    ) -> tuple[int, ...] | None:
        """Return the slots: peers read the planes in place."""
        return tuple(slots.tolist())

    def withdraw(self, places: tuple[int, ...]) -> None:
        """Do nothing: the slots take no room of the connector."""

    def connect(self, peer: bytes, memory: bytes, joint: Joint | None = None) -> str | None:
        """Map the planes of a peer."""
        if peer in self._peers:
            return None
        try:
            file = msgspec.msgpack.decode(memory, type=PlanesFile)
            mapped = MappedPlanes(file, self._planes.layout if joint is None else joint.layout)
            if joint is None:
                self._peers[peer] = _Peer(mapped.table, mapped.num_blocks, self._planes.table)
            else:
                self._peers[peer] = _Peer(
                    joint.theirs.table(mapped.addresses, file.strides, mapped.table),
                    mapped.num_blocks,
                    joint.own.table(self._planes.addresses, self._planes.strides, self._planes.table),
                )
        except msgspec.DecodeError as error:
            return f"memory: the peer's description cannot be read: {error}"
        except TransferError as error:
            return str(error)
        return None

    def read(self, order: ReadOrder) -> None:
        """Begin a read in a thread of the connector."""
        mapped = self._peers.get(order.peer)
        self._in_flight += 1
        if mapped is None:
            self._end(ReadEnd(order.read_id, ReadOutcome.PEER_GONE, error="the peer is gone"))
            return
        self._threads.submit(partial(self._copy, mapped, order))

    def poll(self) -> list[ReadEnd]:
        """Return the reads that have ended since the last call."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        for each in ended:
            self._in_flight -= 1
            self._reads += 1
            self._bytes += each.moved_bytes
            self._failed += each.outcome is not ReadOutcome.OK
        return ended

    def disconnect(self, peer: bytes) -> None:
        """Forget a peer. Its memory is unmapped once the copies out of it, which end by themselves, have ended."""
        self._peers.pop(peer, None)

    def peers(self) -> list[bytes]:
        """Return the boot ids of the connected peers."""
        return list(self._peers)

    def stats(self) -> ConnectorStats:
        """Return counts."""
        return ConnectorStats(
            name=self.name,
            reads=self._reads,
            reads_failed=self._failed,
            reads_in_flight=self._in_flight,
            read_bytes=self._bytes,
        )

    def close(self) -> None:
        """Wait for the copies in flight and unmap everything."""
        self._threads.shutdown(wait=True)
        self._peers.clear()

    def _copy(self, peer: _Peer, order: ReadOrder) -> None:
        target, start = self._planes, time.perf_counter()
        try:
            places = np.array(order.places[order.skip : order.skip + len(order.slots)], np.int32)
            _core.copy_planes(
                peer.source,
                peer.num_blocks,
                places,
                peer.target,
                target.num_blocks,
                np.ascontiguousarray(order.slots),
                order.first_plane,
                order.last_plane,
            )
        except (IndexError, ValueError, OverflowError) as error:  # a peer's places may be anything
            self._end(
                ReadEnd(order.read_id, ReadOutcome.ERROR, error=f"the places are not the peer's: {error}")
            )
            return
        planes = target.layout.planes[order.first_plane : order.last_plane]
        moved = len(order.slots) * sum(plane.nbytes for plane in planes)
        self._end(ReadEnd(order.read_id, ReadOutcome.OK, moved, time.perf_counter() - start))

    def _end(self, end: ReadEnd) -> None:
        self._ended.append(end)
        self._wake()
