"""The connector ``ipc`` for planes on a GPU: those of a peer are mapped, and a kernel reads them in place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fdcache.devices.cuda_peers import CudaPeerAccess, CudaRead
from fdcache.devices.cuda_planes import CudaPlanes
from fdcache.errors import DeviceError, TransferError
from fdcache.metadata import Int32Array
from fdcache.transfer.connector import (
    ConnectorStats,
    Joint,
    Pieces,
    ReadEnd,
    ReadOrder,
    ReadOutcome,
    TransferContext,
    whole_planes,
)


@dataclass(frozen=True, slots=True)
class _Peer:
    """Planes of a peer that are read into own ones of the same sizes; ``target`` is None for all."""

    source: CudaPlanes
    target: CudaPlanes | None
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Read:
    order: ReadOrder
    begun: CudaRead
    sizes: tuple[int, ...]


class DeviceIpcConnector:
    """Maps the planes of each peer once; one kernel reads all pieces of a part.

    Mapped memory is released once the kernels that read it have ended. Raises ``TransferError`` for memory that other
    processes cannot open.
    """

    name = "ipc"

    def __init__(self, context: TransferContext, access: CudaPeerAccess) -> None:
        self.memory = access.describe()
        self._planes = context.planes
        self._access = access
        self._wake = context.wake
        self._peers: dict[bytes, _Peer] = {}
        self._in_flight: list[_Read] = []
        self._ended: list[ReadEnd] = []
        self._reads = self._failed = self._bytes = 0

    @property
    def needs_polling(self) -> bool:
        """True while kernels run."""
        return bool(self._in_flight)

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
        planes, access = self._planes, self._access
        try:
            mapped = access.open(memory, planes.layout if joint is None else joint.layout)
            theirs = whole_planes(planes.layout) if joint is None else joint.theirs
            source = access.bind(mapped, theirs.table(mapped.addresses, mapped.strides, mapped.owners))
            target = None if joint is None else access.part(joint.own, planes.table_of(joint.own))
            self._peers[peer] = _Peer(source, target, theirs.sizes)
        except (TransferError, DeviceError) as error:
            return str(error)
        return None

    def read(self, order: ReadOrder) -> None:
        """Begin a read: one kernel, after the work of the compute stream that the order names."""
        peer = self._peers.get(order.peer)
        if peer is None:
            self._end(ReadEnd(order.read_id, ReadOutcome.PEER_GONE, error="the peer is gone"))
            return
        try:
            places = np.array(order.places[order.skip : order.skip + len(order.slots)], np.int32)
            begun = self._access.read(
                peer.source,
                places,
                np.ascontiguousarray(order.slots),
                order.first_plane,
                order.last_plane,
                () if order.after is None else (order.after,),
                target=peer.target,
            )
        except (IndexError, ValueError, OverflowError) as error:  # a peer's places may be anything
            reason = f"the places are not the peer's: {error}"
            self._end(ReadEnd(order.read_id, ReadOutcome.ERROR, error=reason))
        except DeviceError as error:
            self._end(ReadEnd(order.read_id, ReadOutcome.ERROR, error=str(error)))
        else:
            self._in_flight.append(_Read(order, begun, peer.sizes))

    def poll(self) -> list[ReadEnd]:
        """Return the reads that have ended since the last call."""
        running = []
        for read in self._in_flight:
            if read.begun.done.query():
                self._ended.append(self._result(read))
            else:
                running.append(read)
        self._in_flight = running
        ended, self._ended = self._ended, []
        for each in ended:
            self._reads += 1
            self._bytes += each.moved_bytes
            self._failed += each.outcome is not ReadOutcome.OK
        return ended

    def disconnect(self, peer: bytes) -> None:
        """Forget a peer. Its memory is unmapped once the kernels that read it have ended."""
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
            reads_in_flight=len(self._in_flight) + len(self._ended),
            read_bytes=self._bytes,
        )

    def close(self) -> None:
        """Wait for the kernels in flight and unmap everything."""
        for read in self._in_flight:
            read.begun.done.wait(None)
            self._ended.append(self._result(read))
        self._in_flight.clear()
        self._peers.clear()

    def _result(self, read: _Read) -> ReadEnd:
        order, error = read.order, read.begun.end() or self._access.lost
        if error is not None:
            return ReadEnd(order.read_id, ReadOutcome.ERROR, error=error)
        sizes = read.sizes[order.first_plane : order.last_plane]
        moved = len(order.slots) * sum(sizes)
        return ReadEnd(order.read_id, ReadOutcome.OK, moved, read.begun.seconds)

    def _end(self, end: ReadEnd) -> None:
        self._ended.append(end)
        self._wake()
