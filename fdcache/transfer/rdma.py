"""The connector ``rdma``: packed blocks in registered memory, read as runs by NIXL.

Prefill packs a part into memory that its agent has registered; decode reads the run into memory of its own, and copies
the blocks into their slots once NIXL says that the read is done. So only registered memory is written by the network,
and a late byte never reaches a slot.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import numpy as np

from fdcache._core import PlaneTable
from fdcache.errors import TransferError, TransferNotFoundError
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
from fdcache.transfer.packed_memory import CHUNK_BYTES, PackedMemory, Packing, Region

logger = logging.getLogger(__name__)

_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
_RUN_BYTES = 4 << 20
_RUNS_PER_POLL = 8
_CLOSE_SECONDS = 2.0
_PEERS_SHARE = 2
_PART_SHARE = 4

_kept: list[object] = []
"""Memory and agents of closed connectors into which a read may still write: it cannot be taken back."""


def find_nixl() -> Any:
    """Import and return the installed NIXL package. Raises ``TransferNotFoundError`` if there is none."""
    for name in _PACKAGES:
        try:
            package = importlib.import_module(name)
        except ImportError as error:
            if error.name not in _PACKAGES:
                raise TransferNotFoundError(
                    f"FDCACHE_TRANSFER=rdma: the package {name} cannot be loaded: {error}"
                ) from error
            continue
        theirs = logging.getLogger("nixl")  # it has a handler that prints to the standard output
        theirs.handlers.clear()
        theirs.propagate = True
        return package
    raise TransferNotFoundError(
        "FDCACHE_TRANSFER=rdma: NIXL is not installed; pip install 'fdcache[nixl]', or use FDCACHE_TRANSFER=ipc on one "
        "node"
    )


class _Memory(msgspec.Struct, frozen=True, array_like=True):
    """What a peer needs: the agent, and the memory from which it reads."""

    metadata: bytes
    address: int
    chunks: int


@dataclass(slots=True)
class _Run:
    """Adjoining bytes of a part that are read at once, into a region of our own."""

    read: _Read
    first_block: int
    last_block: int
    region: Region | None = None
    handle: Any = None
    started: float = 0.0


@dataclass(slots=True, eq=False)
class _Read:
    order: ReadOrder
    packing: Packing
    start: int
    """First byte of the part in the peer's memory."""
    unfinished: int
    moved: int = 0
    began: float = field(default_factory=time.perf_counter)
    ended: bool = False


@dataclass(slots=True, eq=False)
class _Peer:
    """A peer that is read from."""

    name: str
    memory: _Memory
    chunks: Any
    sizes: Sequence[int]
    target: PlaneTable
    """Planes, or pieces of them, into which it is read."""
    waiting: deque[_Run] = field(default_factory=deque)
    flying: list[_Run] = field(default_factory=list)
    chunks_flying: int = 0


class RdmaConnector:
    """Reads of one rank through one NIXL agent.

    Raises ``TransferNotFoundError`` without NIXL, ``TransferError`` if the agent or its memory cannot be made.
    """

    name = "rdma"

    def __init__(self, context: TransferContext) -> None:
        nixl = find_nixl()
        self._planes, self._wake = context.planes, context.wake
        self._sizes = [plane.nbytes for plane in context.layout.planes]
        size = context.settings.ring
        least = _PART_SHARE * Packing(self._sizes, 0, len(self._sizes)).record_bytes
        if size < least:
            raise TransferError(
                f"FDCACHE_TRANSFER_RING={size}: a block has {least // _PART_SHARE} bytes; use at least {least}"
            )
        self._out, self._in = PackedMemory(size), PackedMemory(size)
        try:
            self._agent = nixl.nixl_agent(
                context.boot.hex(), nixl.nixl_agent_config(backends=["UCX"], num_threads=0)
            )
            self._registered = self._agent.register_memory(
                [(each.address, each.nbytes, 0, "") for each in (self._out, self._in)], "DRAM"
            )
            self._mine = self._chunks("NIXL_INIT_AGENT", self._in.address, self._in.num_chunks)
            metadata = self._agent.get_agent_metadata()
        except Exception as error:
            raise TransferError(
                f"FDCACHE_TRANSFER=rdma: the NIXL agent cannot be made: {type(error).__name__}: {error}; if UCX_TLS is "
                "set, it has to allow tcp"
            ) from error
        self.memory = msgspec.msgpack.encode(_Memory(metadata, self._out.address, self._out.num_chunks))
        self._tickets = count(1)
        self._published: dict[int, Region] = {}
        self._peers: dict[bytes, _Peer] = {}
        self._lost: list[_Peer] = []
        self._loaded: dict[bytes, str] = {}
        """Agents of peers that read from this rank or are read from, each loaded once: twice would end its reads."""
        self._ended: list[ReadEnd] = []
        self._reads = self._failed = self._bytes = self._in_flight = 0
        self._closed = False

    # --- the side that is read ----------------------------------------------------------------------------------

    def most_blocks(self, first_plane: int, last_plane: int) -> int:
        """Return the blocks of a quarter of the memory."""
        record = Packing(self._sizes, first_plane, last_plane).record_bytes
        return max(self._out.nbytes // _PART_SHARE // record, 1)

    def publish(
        self, slots: Int32Array, first_plane: int, last_plane: int, pieces: Pieces | None = None
    ) -> tuple[int, ...] | None:
        """Pack the blocks; return the ticket and the first chunk, None while there is no room."""
        sizes, planes = self._sizes if pieces is None else pieces.sizes, self._planes
        packing = Packing(sizes, first_plane, last_plane)
        region = self._out.take(len(slots) * packing.record_bytes)
        if region is None:
            return None
        packing.pack(
            planes.table_of(pieces),
            planes.num_blocks,
            np.ascontiguousarray(slots),
            self._out,
            region.first * CHUNK_BYTES,
        )
        ticket = next(self._tickets)
        self._published[ticket] = region
        return ticket, region.first

    def withdraw(self, places: tuple[int, ...]) -> None:
        """Free the room of a part. Idempotent."""
        region = self._published.pop(places[0], None)
        if region is not None:
            self._out.free(region)

    # --- the side that reads ------------------------------------------------------------------------------------

    def connect(self, peer: bytes, memory: bytes, joint: Joint | None = None) -> str | None:
        """Load the agent of a peer, and describe the chunks of its memory in one row."""
        if peer in self._peers:
            return None
        for lost in [each for each in self._lost if each.name == peer.hex()]:  # its agent is in use
            self._lost.remove(lost)
            self._peers[peer] = lost
            return None
        try:
            described = msgspec.msgpack.decode(memory, type=_Memory)
            name = self._load(peer, described)
            chunks = self._chunks(name, described.address, described.chunks)
        except msgspec.DecodeError as error:
            return f"memory: the peer's description cannot be read: {error}"
        except Exception as error:  # noqa: BLE001 - NIXL has no common base of its errors
            return f"memory: NIXL cannot reach the peer: {type(error).__name__}: {error}"
        own = None if joint is None else joint.own
        sizes = self._sizes if own is None else own.sizes
        self._peers[peer] = _Peer(name, described, chunks, sizes, self._planes.table_of(own))
        return None

    def read(self, order: ReadOrder) -> None:
        """Begin to read the runs of a part, as far as there is room for them."""
        self._in_flight += 1
        peer = self._peers.get(order.peer)
        if peer is None:
            self._end(order, ReadOutcome.PEER_GONE, "the peer is gone")
            return
        packing = Packing(peer.sizes, order.first_plane, order.last_plane)
        record, size = packing.record_bytes, len(order.slots)
        first = order.places[1] if len(order.places) == 2 else peer.memory.chunks
        start = first * CHUNK_BYTES
        if start + (order.skip + size) * record > peer.memory.chunks * CHUNK_BYTES:
            self._end(order, ReadOutcome.ERROR, f"the places are not the peer's: {order.places[:4]}")
            return
        step = max(min(_RUN_BYTES, self._in.nbytes // _PART_SHARE) // record, 1)
        read = _Read(order, packing, start, unfinished=-(-size // step))
        peer.waiting += [_Run(read, first, min(first + step, size)) for first in range(0, size, step)]
        self._advance(peer)

    def poll(self) -> list[ReadEnd]:
        """Move every read on; return those that have ended."""
        for peer in (*self._peers.values(), *self._lost):
            self._advance(peer)
        self._forget_lost()
        ended, self._ended = self._ended, []
        for each in ended:
            self._in_flight -= 1
            self._reads += 1
            self._bytes += each.moved_bytes
            self._failed += each.outcome is not ReadOutcome.OK
        return ended

    @property
    def needs_polling(self) -> bool:
        """True while reads have not ended."""
        return self._in_flight > 0

    def disconnect(self, peer: bytes) -> None:
        """End the reads of a peer. Its agent is removed once NIXL has ended the runs in flight: until then they write."""
        name = self._loaded.get(peer)
        found = self._peers.pop(peer, None)
        if found is None:
            if name is not None:
                self._unload(name)
            return
        for run in (*found.waiting, *found.flying):
            self._fail(run.read, ReadOutcome.PEER_GONE, "the peer is gone")
        found.waiting.clear()
        self._lost.append(found)
        self._forget_lost()

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
            places_used=self._out.bytes_taken + self._in.bytes_taken,
            places_total=self._out.nbytes + self._in.nbytes,
        )

    def close(self) -> None:
        """End every read; release everything, except what a run in flight may still write into."""
        if self._closed:
            return
        self._closed = True
        for peer in list(self._peers):
            self.disconnect(peer)
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self._lost and time.monotonic() < deadline:
            for each in list(self._lost):
                self._advance(each)
            self._forget_lost()
        if self._lost:
            logger.warning("a stopped peer may still write into %d bytes; they are kept", self._in.nbytes)
            _kept.extend((self._agent, self._in, self._lost))
            return
        self._mine.release()
        self._agent.deregister_memory(self._registered)

    # --- notifications ------------------------------------------------------------------------------------------

    def listen(self, peer: bytes, memory: bytes) -> None:
        """Make ``notify`` of a peer possible that reads from this rank."""
        try:
            self._load(peer, msgspec.msgpack.decode(memory, type=_Memory))
        except Exception as error:  # noqa: BLE001 - messages go another way then
            logger.info("transfer peer %s takes no notifications: %s", peer.hex()[:8], error)

    def notify(self, peer: bytes, data: bytes) -> bool:
        """Send a message to the agent of a peer; return False if that is not possible."""
        name = self._loaded.get(peer)
        if name is None:
            return False
        try:
            self._agent.send_notif(name, data)
        except Exception as error:  # noqa: BLE001 - the peer may be gone; the message goes another way
            logger.info("transfer peer %s takes no notifications: %s", peer.hex()[:8], error)
            return False
        return True

    def notifications(self) -> list[bytes]:
        """Return the messages that have arrived since the last call."""
        try:
            arrived = self._agent.get_new_notifs()
        except Exception as error:  # noqa: BLE001 - NIXL has no common base of its errors
            logger.info("no notifications: %s", error)
            return []
        return [message for messages in arrived.values() for message in messages]

    # --- agents -------------------------------------------------------------------------------------------------

    def _load(self, peer: bytes, memory: _Memory) -> str:
        if peer not in self._loaded:
            name = self._agent.add_remote_agent(memory.metadata)
            self._loaded[peer] = name.decode() if isinstance(name, bytes) else name
        return self._loaded[peer]

    def _unload(self, name: str) -> None:
        self._loaded = {peer: loaded for peer, loaded in self._loaded.items() if loaded != name}
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:  # noqa: BLE001 - NIXL has no common base of its errors
            logger.info("the agent %s cannot be removed: %s", name, error)

    def _forget_lost(self) -> None:
        """Remove the agents of lost peers of which no run is in flight."""
        for peer in [each for each in self._lost if not each.flying]:
            self._lost.remove(peer)
            peer.chunks.release()
            self._unload(peer.name)

    # --- runs ---------------------------------------------------------------------------------------------------

    def _chunks(self, agent: str, address: int, chunks: int) -> Any:
        row = np.array([[address, CHUNK_BYTES, 0, CHUNK_BYTES, chunks]], np.uint64)
        return self._agent.prep_xfer_dlist(agent, row, "DRAM")

    def _advance(self, peer: _Peer) -> None:
        """Take the runs of a peer that have ended, and begin others."""
        for _ in range(_RUNS_PER_POLL):
            ended = [run for run in tuple(peer.flying) if self._has_ended(peer, run)]
            if not (self._begin_next(peer) or ended):
                return
        if peer.waiting:
            self._wake()

    def _begin_next(self, peer: _Peer) -> bool:
        """Begin the next run if there is room; return True if one was begun. One peer takes half of the memory."""
        while peer.waiting and peer.waiting[0].read.ended:
            peer.waiting.popleft()
        if not peer.waiting:
            return False
        run = peer.waiting[0]
        read, record = run.read, run.read.packing.record_bytes
        start = read.start + (read.order.skip + run.first_block) * record
        stop = start + (run.last_block - run.first_block) * record
        first, last = start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)
        if peer.chunks_flying and peer.chunks_flying + last - first > self._in.num_chunks // _PEERS_SHARE:
            return False
        region = self._in.take((last - first) * CHUNK_BYTES)
        if region is None:
            return False
        peer.waiting.popleft()
        run.region = region
        peer.flying.append(run)
        peer.chunks_flying += region.count
        try:
            run.handle = self._agent.make_prepped_xfer(
                "READ",
                self._mine,
                np.arange(region.first, region.first + region.count, dtype=np.int32),
                peer.chunks,
                np.arange(first, last, dtype=np.int32),
            )
            state = self._agent.transfer(run.handle)
        except Exception as error:  # noqa: BLE001 - NIXL has no common base of its errors
            self._take_end(peer, run, f"{type(error).__name__}: {error}")
        else:
            if state != "PROC":
                self._take_end(peer, run, None if state == "DONE" else "NIXL: the read has failed")
        return True

    def _has_ended(self, peer: _Peer, run: _Run) -> bool:
        try:
            state = self._agent.check_xfer_state(run.handle)
        except Exception as error:  # noqa: BLE001 - NIXL raises the error that has ended a transfer
            self._take_end(peer, run, f"{type(error).__name__}: {error}")
            return True
        if state == "PROC":
            return False
        self._take_end(peer, run, None if state == "DONE" else "NIXL: the read has failed")
        return True

    def _take_end(self, peer: _Peer, run: _Run, error: str | None) -> None:
        """Take the end of a run: copy its blocks into their slots, unless nobody wants them any more."""
        peer.flying.remove(run)
        assert run.region is not None
        peer.chunks_flying -= run.region.count
        read = run.read
        try:
            if run.handle is not None:
                run.handle.release()
        except Exception as failure:  # noqa: BLE001 - NIXL has no common base of its errors
            logger.warning("a read of NIXL cannot be released, its memory is kept: %s", failure)
            _kept.append((self._agent, self._in, run))
            self._fail(read, ReadOutcome.ERROR, f"{type(failure).__name__}: {failure}")
            return
        if error is not None:
            self._fail(read, ReadOutcome.ERROR, error)
        elif not read.ended:
            self._unpack(peer, run, run.region)
        self._in.free(run.region)

    def _unpack(self, peer: _Peer, run: _Run, region: Region) -> None:
        read = run.read
        order, record = read.order, read.packing.record_bytes
        inside = (read.start + (order.skip + run.first_block) * record) % CHUNK_BYTES
        slots = np.ascontiguousarray(order.slots[run.first_block : run.last_block])
        start = region.first * CHUNK_BYTES + inside
        read.packing.unpack(self._in, start, peer.target, self._planes.num_blocks, slots)
        read.moved += len(slots) * sum(peer.sizes[order.first_plane : order.last_plane])
        read.unfinished -= 1
        if not read.unfinished:
            read.ended = True
            seconds = time.perf_counter() - read.began
            self._ended.append(ReadEnd(order.read_id, ReadOutcome.OK, read.moved, seconds))
            self._wake()

    def _fail(self, read: _Read, outcome: ReadOutcome, error: str) -> None:
        if not read.ended:
            read.ended = True
            self._end(read.order, outcome, error)

    def _end(self, order: ReadOrder, outcome: ReadOutcome, error: str) -> None:
        self._ended.append(ReadEnd(order.read_id, outcome, error=error))
        self._wake()
