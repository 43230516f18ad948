"""``rdma`` between GPUs, for ``python -m benchmarks.pd gpu``: packed, read by NIXL and spread.

Source and reader each drive a connector in a thread, as the threads of hand-overs do: the reader asks for blocks, the
source packs parts and announces them, the reader acknowledges what it has read. All of it are notifications of NIXL.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
import numpy as np

from fdcache.devices.cuda_planes import CudaPlanes
from fdcache.layout import KVLayout
from fdcache.settings.peers import PeerSettings, TransferRole
from fdcache.transfer.connector import LocalPlanes, ReadOrder, ReadOutcome, TransferContext
from fdcache.transfer.nixl import MemoryPieces
from fdcache.transfer.rdma import RdmaConnector

RING = 256 << 20
GROUP_PLANES = 8
_REPEATS = 5
_RUN = 32 << 20
_PATIENCE = 20.0
_SPIN_SECONDS = 0.02
"""Seconds for which a source asks without a pause after a message, as the thread of hand-overs does."""


class RankPlanes(Protocol):
    """Planes of one rank on a GPU."""

    layout: KVLayout
    blocks: int
    address: int
    planes: CudaPlanes
    access: Any


class _Asked(msgspec.Struct, tag=True):
    slots: list[int]


class _Announced(msgspec.Struct, tag=True):
    places: list[int]
    first: int
    count: int
    first_plane: int


class _Read(msgspec.Struct, tag=True):
    places: list[int]


_DECODER = msgspec.msgpack.Decoder(_Asked | _Announced | _Read)


class End:
    """One side: its connector, and the other side."""

    def __init__(self, rank: RankPlanes, role: TransferRole) -> None:
        self.boot = os.urandom(16)
        planes = rank.layout.planes
        addresses, at = [], rank.address
        for plane in planes:
            addresses.append(at)
            at += rank.blocks * plane.nbytes
        strides = tuple(plane.nbytes for plane in planes)
        local = LocalPlanes(
            rank.layout, rank.planes.table, rank.blocks, tuple(addresses), strides, rank.access
        )
        settings = PeerSettings(connector="rdma", role=role, ring=RING)
        self.connector = RdmaConnector(TransferContext(local, settings, self.boot, lambda: None))
        self.layout = rank.layout
        self.peer = b""

    @property
    def description(self) -> str:
        """What the other side needs."""
        return f"{self.boot.hex()}:{self.connector.memory.hex()}"

    def join(self, description: str, *, reads: bool) -> None:
        """Connect to the other side."""
        boot, memory = map(bytes.fromhex, description.split(":"))
        self.peer = boot
        if reads and (problem := self.connector.connect(boot, memory)) is not None:
            raise RuntimeError(problem)
        self.connector.listen(boot, memory)

    def tell(self, message: Any) -> None:
        """Send a message."""
        if not self.connector.notify(self.peer, msgspec.msgpack.encode(message)):
            raise RuntimeError("the other side takes no notifications")

    def messages(self) -> list[Any]:
        """Return what the other side has sent."""
        return [_DECODER.decode(each) for each in self.connector.notifications()]


class SourceEnd(End):
    """The side that packs, in a thread of its own."""

    def __init__(self, rank: RankPlanes, reader: str) -> None:
        super().__init__(rank, TransferRole.PREFILL)
        self.join(reader, reads=False)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join()
        self.connector.close()

    def _run(self) -> None:
        waiting: deque[tuple[np.ndarray[Any, Any], int, int]] = deque()
        packing: deque[_Announced] = deque()
        busy = time.perf_counter()
        while not self._end.is_set():
            for message in self.messages():
                busy = time.perf_counter()
                if isinstance(message, _Asked):
                    slots = np.array(message.slots, np.int32)
                    for plane in range(0, self.layout.num_planes, GROUP_PLANES):
                        waiting.append((slots, 0, plane))
                else:
                    self.connector.withdraw(tuple(message.places))
            while packing and self.connector.is_packed(tuple(packing[0].places)):
                self.tell(packing.popleft())
            if waiting:
                slots, first, plane = waiting[0]
                part = slots[first : first + self.connector.most_blocks(plane, plane + GROUP_PLANES)]
                places = self.connector.publish(part, plane, plane + GROUP_PLANES)
                if places is not None:
                    waiting.popleft()
                    if first + len(part) < len(slots):
                        waiting.appendleft((slots, first + len(part), plane))
                    packing.append(_Announced(list(places), first, len(part), plane))
            elif not packing and time.perf_counter() > busy + _SPIN_SECONDS:
                time.sleep(0.0002)


class ReaderEnd(End):
    """The side that reads."""

    def __init__(self, rank: RankPlanes) -> None:
        super().__init__(rank, TransferRole.DECODE)

    def seconds(self, places: np.ndarray[Any, Any], slots: np.ndarray[Any, Any]) -> float:
        """Read blocks; return the seconds from asking to the end of the last copy."""
        start = time.perf_counter()
        self.tell(_Asked(places.tolist()))
        left = len(places) * (self.layout.num_planes // GROUP_PLANES)
        parts: dict[int, _Announced] = {}
        told: set[int] = set()
        while left:
            for part in self.messages():
                order = (part.first_plane, part.first_plane + GROUP_PLANES)
                mine = slots[part.first : part.first + part.count]
                read_id = len(parts)
                parts[read_id] = part
                self.connector.read(
                    ReadOrder(read_id, self.peer, tuple(part.places), part.count, 0, *order, mine)
                )
            ends = self.connector.poll()
            for read_id in self.connector.take_arrived():
                self.tell(_Read(parts[read_id].places))
                told.add(read_id)
            for end in ends:
                if end.outcome is not ReadOutcome.OK:
                    raise RuntimeError(f"a read has failed: {end.error}")
                if end.read_id not in told:
                    self.tell(_Read(parts[end.read_id].places))
                left -= parts[end.read_id].count
            if time.perf_counter() > start + _PATIENCE:
                raise TimeoutError(f"{left} blocks do not arrive: {self.connector.stats()}")
        return time.perf_counter() - start

    def median_seconds(self, places: np.ndarray[Any, Any], slots: np.ndarray[Any, Any]) -> float:
        """Return the median seconds of a read."""
        return statistics.median([self.seconds(places, slots) for _ in range(_REPEATS + 1)][1:])

    def run_rate(self, at_once: int) -> float:
        """Return the bytes per second of NIXL's own reads of runs, so many in flight."""
        connector = self.connector
        memory = connector._peers[self.peer].memory
        target, source = connector._in.address, memory.address
        found = []
        for _ in range(_REPEATS + 1):
            with connector._in.scope():
                start = time.perf_counter()
                reads = []
                for index in range(at_once):
                    at = index * _RUN
                    pieces = np.array([[source + at], [target + at], [_RUN]], np.int64)
                    reads.append(connector._agent.read(self.peer, memory.device, *MemoryPieces(*pieces)))
                for each in reads:
                    if isinstance(each, str):
                        raise RuntimeError(each)
                    while not each.has_ended():
                        connector._take_notifications()
                    if each.error:
                        raise RuntimeError(each.error)
                found.append(time.perf_counter() - start)
                for each in reads:
                    assert not isinstance(each, str)
                    each.release()
        return at_once * _RUN / statistics.median(found[1:])

    @contextmanager
    def reading(
        self, places: np.ndarray[Any, Any], slots: np.ndarray[Any, Any], moved: list[float]
    ) -> Iterator[None]:
        """Read without a pause meanwhile; append the bytes per second."""
        end = threading.Event()

        def run() -> None:
            start, count = time.perf_counter(), 0
            while not end.is_set():
                self.seconds(places, slots)
                count += 1
            took = time.perf_counter() - start
            moved.append(count * len(slots) * self.layout.payload_bytes / took)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()
