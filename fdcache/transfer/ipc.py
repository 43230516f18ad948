"""The connector ``ipc``: one node, planes of peers that are mapped and read in place.

Planes of the CPU lie in shared memory, and threads copy out of them. Planes on a GPU are opened by CUDA's handles, and
a kernel reads them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np

from fdcache import _core
from fdcache._core import PlaneTable
from fdcache.devices.cuda_peers import CudaPeerAccess, CudaRead
from fdcache.devices.cuda_planes import CudaPlanes
from fdcache.devices.shared_planes import MappedPlanes, PlanesFile, find_shared
from fdcache.errors import DeviceError, TransferError
from fdcache.metadata import Int32Array
from fdcache.transfer.connector import (
    ConnectorStats,
    Joint,
    LocalPlanes,
    Pieces,
    ReadEnd,
    ReadOrder,
    ReadOutcome,
    TransferContext,
    pieces_of,
    whole_planes,
)

_THREADS = 1
"""Threads that read; copies from memory of the same node are limited by its bandwidth."""


class IpcConnector:
    """Maps the planes of each peer once, and reads blocks out of them.

    Mapped memory is released once the reads out of it have ended. Raises ``TransferError`` for planes that other
    processes cannot open.
    """

    name = "ipc"

    def __init__(self, context: TransferContext) -> None:
        gpu, self._planes, self._wake = context.planes.gpu, context.planes, context.wake
        self._reads: _Reads = (
            _ThreadReads(self._planes, self._end) if gpu is None else _KernelReads(self._planes, gpu)
        )
        self.memory = self._reads.describe()
        self._peers: dict[bytes, Any] = {}
        self._ended: deque[ReadEnd] = deque()
        self._done = self._failed = self._bytes = self._in_flight = 0

    @property
    def needs_polling(self) -> bool:
        """True while reads run that wake nobody when they end."""
        return self._reads.needs_polling

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
        if peer not in self._peers:
            try:
                self._peers[peer] = self._reads.open(memory, joint)
            except msgspec.DecodeError as error:
                return f"memory: the peer's description cannot be read: {error}"
            except (TransferError, DeviceError) as error:
                return str(error)
        return None

    def read(self, order: ReadOrder) -> None:
        """Begin a read, after the work of the compute stream that the order names."""
        self._in_flight += 1
        peer = self._peers.get(order.peer)
        if peer is None:
            self._end(ReadEnd(order.read_id, ReadOutcome.PEER_GONE, error="the peer is gone"))
        elif (end := self._reads.begin(peer, order)) is not None:
            self._end(end)

    def poll(self) -> list[ReadEnd]:
        """Return the reads that have ended since the last call."""
        self._ended.extend(self._reads.look())
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        for each in ended:
            self._in_flight -= 1
            self._done += 1
            self._bytes += each.moved_bytes
            self._failed += each.outcome is not ReadOutcome.OK
        return ended

    def disconnect(self, peer: bytes) -> None:
        """Forget a peer. Its memory is unmapped once the reads out of it, which end by themselves, have ended."""
        self._peers.pop(peer, None)

    def peers(self) -> list[bytes]:
        """Return the boot ids of the connected peers."""
        return list(self._peers)

    def stats(self) -> ConnectorStats:
        """Return counts."""
        return ConnectorStats(
            name=self.name,
            reads=self._done,
            reads_failed=self._failed,
            reads_in_flight=self._in_flight,
            read_bytes=self._bytes,
        )

    def close(self) -> None:
        """Wait for the reads in flight and unmap everything."""
        self._ended.extend(self._reads.close())
        self._peers.clear()

    def _end(self, end: ReadEnd) -> None:
        self._ended.append(end)
        self._wake()


class _Reads(Protocol):
    """Reads into the planes of this rank. Each ends once: in ``begin``, a callback, ``look`` or ``close``."""

    @property
    def needs_polling(self) -> bool: ...

    def describe(self) -> bytes:
        """Return what a peer opens the planes with."""

    def open(self, memory: bytes, joint: Joint | None) -> Any:
        """Map what a peer has described. Raises ``DecodeError``, ``TransferError`` or ``DeviceError``."""

    def begin(self, peer: Any, order: ReadOrder) -> ReadEnd | None:
        """Begin a read from what ``open`` has returned; return its end if it cannot begin."""

    def look(self) -> list[ReadEnd]:
        """Return the reads that have ended without a callback."""

    def close(self) -> list[ReadEnd]:
        """Wait for all reads; return those that ended without a callback."""


def _places(order: ReadOrder) -> Int32Array:
    return np.array(order.places[order.skip : order.skip + len(order.slots)], np.int32)


def _wrong_places(order: ReadOrder, error: Exception) -> ReadEnd:
    return ReadEnd(order.read_id, ReadOutcome.ERROR, error=f"the places are not the peer's: {error}")


# --- planes of the CPU --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _HostPeer:
    """Pieces of a peer's planes that are copied into own ones of the same sizes, by whether they are of states."""

    num_blocks: int
    theirs: Pieces
    tables: tuple[tuple[PlaneTable, PlaneTable], ...]
    """Source and target of blocks with tokens, then of those with states."""


class _ThreadReads:
    """Copies out of shared memory, in threads of the connector."""

    needs_polling = False

    def __init__(self, planes: LocalPlanes, end: Callable[[ReadEnd], None]) -> None:
        self._planes, self._end = planes, end
        self._threads = ThreadPoolExecutor(_THREADS, "fdcache-transfer-read")

    def describe(self) -> bytes:
        found = find_shared(self._planes.addresses, self._planes.strides)
        if found is None:
            raise TransferError(
                "FDCACHE_TRANSFER=ipc: the planes are in memory that peers cannot map; allocate them with "
                "CacheController.initialize_kv_cache, or register the tensors of fdcache.devices.shared_planes"
            )
        return msgspec.msgpack.encode(found)

    def open(self, memory: bytes, joint: Joint | None) -> _HostPeer:
        file, planes = msgspec.msgpack.decode(memory, type=PlanesFile), self._planes
        mapped = MappedPlanes(file, planes.layout if joint is None else joint.layout)
        if joint is None:
            whole = (mapped.table, planes.table)
            return _HostPeer(mapped.num_blocks, whole_planes(planes.layout), (whole, whole))
        kinds = [(joint.theirs.of(is_state=each), joint.own.of(is_state=each)) for each in (False, True)]
        tables = tuple(
            (theirs.table(mapped.addresses, file.strides, mapped.table), planes.table_of(own))
            for theirs, own in kinds
        )
        return _HostPeer(mapped.num_blocks, joint.theirs, tables)

    def begin(self, peer: _HostPeer, order: ReadOrder) -> ReadEnd | None:
        self._threads.submit(partial(self.copy, peer, order))
        return None

    def copy(self, peer: _HostPeer, order: ReadOrder) -> None:
        """Make the copies of a read, in a thread."""
        planes, start = self._planes, time.perf_counter()
        source, target = peer.tables[order.is_state]
        pieces = peer.theirs.of(is_state=order.is_state)
        first, last = pieces.range_of(order.first_plane, order.last_plane)
        slots = np.ascontiguousarray(order.slots)
        try:
            _core.copy_planes(
                source, peer.num_blocks, _places(order), target, planes.num_blocks, slots, first, last
            )
        except (IndexError, ValueError, OverflowError) as error:  # a peer's places may be anything
            self._end(_wrong_places(order, error))
            return
        moved = len(order.slots) * sum(pieces.sizes[first:last])
        self._end(ReadEnd(order.read_id, ReadOutcome.OK, moved, time.perf_counter() - start))

    def look(self) -> list[ReadEnd]:
        return []

    def close(self) -> list[ReadEnd]:
        self._threads.shutdown(wait=True)
        return []


# --- planes on a GPU ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _GpuPeer:
    """Pieces of a peer's planes that are read into own ones of the same sizes, by whether they are of states."""

    theirs: Pieces
    planes: tuple[tuple[CudaPlanes, CudaPlanes | None], ...]
    """Source and target, None for all planes, of blocks with tokens, then of those with states."""


@dataclass(frozen=True, slots=True, eq=False)
class _KernelRead:
    order: ReadOrder
    begun: CudaRead
    nbytes: int


class _KernelReads:
    """Reads by one kernel for all pieces of a part."""

    def __init__(self, planes: LocalPlanes, access: CudaPeerAccess) -> None:
        self._planes, self._access = planes, access
        self._running: list[_KernelRead] = []

    @property
    def needs_polling(self) -> bool:
        return bool(self._running)

    def describe(self) -> bytes:
        return self._access.describe()

    def open(self, memory: bytes, joint: Joint | None) -> _GpuPeer:
        planes, access = self._planes, self._access
        mapped = access.open(memory, planes.layout if joint is None else joint.layout)
        whole = whole_planes(planes.layout) if joint is None else joint.theirs

        def bound(theirs: Pieces, own: Pieces | None) -> tuple[CudaPlanes, CudaPlanes | None]:
            source = access.bind(mapped, theirs.table(mapped.addresses, mapped.strides, mapped.owners))
            return source, None if own is None else access.part(own, planes.table_of(own))

        own = None if joint is None else joint.own
        tokens = bound(whole, own)
        if whole.states is None:
            return _GpuPeer(whole, (tokens, tokens))
        return _GpuPeer(whole, (tokens, bound(whole.states, pieces_of(own, is_state=True))))

    def begin(self, peer: _GpuPeer, order: ReadOrder) -> ReadEnd | None:
        source, target = peer.planes[order.is_state]
        pieces = peer.theirs.of(is_state=order.is_state)
        first, last = pieces.range_of(order.first_plane, order.last_plane)
        try:
            begun = self._access.read(
                source,
                _places(order),
                np.ascontiguousarray(order.slots),
                first,
                last,
                () if order.after is None else (order.after,),
                target=target,
            )
        except (IndexError, ValueError, OverflowError) as error:  # a peer's places may be anything
            return _wrong_places(order, error)
        except DeviceError as error:
            return ReadEnd(order.read_id, ReadOutcome.ERROR, error=str(error))
        moved = len(order.slots) * sum(pieces.sizes[first:last])
        self._running.append(_KernelRead(order, begun, moved))
        return None

    def look(self) -> list[ReadEnd]:
        ended = [read for read in self._running if read.begun.done.query()]
        self._running = [read for read in self._running if read not in ended]
        return [self._result(read) for read in ended]

    def close(self) -> list[ReadEnd]:
        for read in self._running:
            read.begun.done.wait(None)
        return self.look()

    def _result(self, read: _KernelRead) -> ReadEnd:
        order, error = read.order, read.begun.end() or self._access.lost
        if error is not None:
            return ReadEnd(order.read_id, ReadOutcome.ERROR, error=error)
        return ReadEnd(order.read_id, ReadOutcome.OK, read.nbytes, read.begun.seconds)
