"""The connector ``rdma``: runs of a peer's memory, read by NIXL.

Prefill lets a part be read in place if its blocks lie in long enough runs of its planes, and packs it otherwise. Decode
reads into its own planes where pieces are long on both sides; the rest goes to memory of its own and is copied into the
slots from there. A read that writes into slots is over only when NIXL says so, whatever has become of the peer.
"""

from __future__ import annotations

import logging
import time
from itertools import count

import msgspec
import numpy as np

from fdcache._core import PlaneTable
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
from fdcache.transfer.nixl import (
    IN_PLACE,
    IN_PLACE_BYTES,
    NixlAgent,
    PackedRead,
    PackedRun,
    Peer,
    PeerMemory,
    Rows,
    extents,
    mean_run_bytes,
)
from fdcache.transfer.packed_memory import (
    CHUNK_BYTES,
    Copying,
    HostPackedMemory,
    PackedMemory,
    Region,
    packing_of,
)

logger = logging.getLogger(__name__)

_PACKED_RUN_BYTES = {"DRAM": 4 << 20, "VRAM": 64 << 20}
"""Bytes of a packed run: few enough that one is packed while another is read, enough to keep a link busy."""
_RUN_BYTES = 64 << 20
"""Bytes of a run of planes. NIXL copies within a node while it is called, and each call has to be prepared."""
_RUNS_PER_POLL = 8
_MOST_RUNS = 16
"""Runs of one peer in flight."""
_CLOSE_SECONDS = 2.0
_SPIN_SECONDS = 0.02
_PEERS_SHARE = 2
_PART_SHARE = 4
_FIRST_SHARE = {"DRAM": 1, "VRAM": 4}
"""Share of a run that the first of a packed memory is: a link that waits for it has nothing else to do."""

_kept: list[object] = []
"""Memory and agents of closed connectors into which a read may still write: it cannot be taken back."""


class RdmaConnector:
    """Reads of one rank through one NIXL agent.

    Raises ``TransferNotFoundError`` without NIXL, ``TransferError`` if the agent or its memory cannot be made.
    """

    name = "rdma"

    def __init__(self, context: TransferContext) -> None:
        self._planes, self._wake = context.planes, context.wake
        self._whole = whole_planes(context.layout)
        packs, reads = context.settings.rings
        size = max(packs, reads)
        least = _PART_SHARE * packing_of(self._whole.sizes, 0, len(self._whole.sizes)).record_bytes
        if size < least:
            raise TransferError(
                f"FDCACHE_TRANSFER=rdma: a block of {least // _PART_SHARE} bytes is more than a part of the {size} "
                "bytes in which blocks are packed; use smaller blocks, or ipc"
            )
        self._out, self._in = _packed_memory(context.planes, packs), _packed_memory(context.planes, reads)
        memory = [(each.address, each.regions.nbytes) for each in (self._out, self._in)]
        self._run_bytes = min(_RUN_BYTES, size // _PART_SHARE)
        self._packed_run_bytes = min(_PACKED_RUN_BYTES[self._out.kind], size // _PART_SHARE)
        planes = context.planes
        self._rows: Rows = (
            tuple(zip(planes.addresses, planes.strides, strict=True)) if planes.gpu is None else ()
        )
        if self._rows:
            memory += extents(planes)
        with self._out.scope():
            self._agent = NixlAgent(context.boot.hex(), memory, self._out.kind, self._out.device)
        self.memory = msgspec.msgpack.encode(
            PeerMemory(self._agent.metadata, self._out.device, *memory[0], planes.num_blocks, self._rows)
        )
        self._tickets = count(IN_PLACE + 1)
        self._published: dict[int, Region] = {}
        self._packing: dict[int, Copying] = {}
        self._peers: dict[bytes, Peer] = {}
        self._lost: list[Peer] = []
        self._ended: list[ReadEnd] = []
        self._unneeded: list[int] = []
        """Reads whose places are not needed any more."""
        self._arrived: list[bytes] = []
        self._last_end = self._last_notice = 0.0
        self._reads = self._failed = self._bytes = self._in_flight = 0
        self._closed = False

    # --- the side that is read ----------------------------------------------------------------------------------

    def most_blocks(self, first_plane: int, last_plane: int) -> int:
        """Return the blocks of one run, so that decode reads one while the next is packed; the first is a short one."""
        sizes = self._whole.sizes
        if self._rows and min(sizes[first_plane:last_plane]) >= IN_PLACE_BYTES:
            return self._planes.num_blocks
        nbytes = (
            self._packed_run_bytes
            if self._published
            else self._packed_run_bytes // _FIRST_SHARE[self._out.kind]
        )
        return max(nbytes // packing_of(sizes, first_plane, last_plane).record_bytes, 1)

    def publish(
        self, slots: Int32Array, first_plane: int, last_plane: int, pieces: Pieces | None = None
    ) -> tuple[int, ...] | None:
        """Return the slots if they may be read in place; else pack them, and return the ticket and the first byte."""
        found = pieces or self._whole
        if self._rows and found.per_plane == 1:
            run = mean_run_bytes(self._planes, found, first_plane, last_plane, slots)
            if run >= IN_PLACE_BYTES:
                return IN_PLACE, *slots.tolist()
        packing = packing_of(found.sizes, *found.range_of(first_plane, last_plane))
        region = self._out.regions.take(len(slots) * packing.record_bytes)
        if region is None:
            return None
        try:
            copying = self._out.pack(slots, pieces, packing, region.start)
        except BaseException:
            self._out.regions.free(region)
            raise
        ticket = next(self._tickets)
        self._published[ticket] = region
        if copying is not None:
            self._packing[ticket] = copying
        return ticket, region.start

    def is_packed(self, places: tuple[int, ...]) -> bool:
        """Return True once a part is packed. Raises ``DeviceError`` if that has failed."""
        copying = self._packing.get(places[0])
        if copying is None:
            return True
        if not copying.has_ended():
            self._wake()
            return False
        del self._packing[places[0]]
        if (error := copying.end()) is not None:
            raise DeviceError(f"blocks cannot be packed: {error}")
        return True

    def withdraw(self, places: tuple[int, ...]) -> None:
        """Free the room of a part, which later parts may use after it is packed. Idempotent."""
        if (copying := self._packing.pop(places[0], None)) is not None:
            copying.wait()
            copying.end()
        region = self._published.pop(places[0], None)
        if region is not None:
            self._out.regions.free(region)

    # --- the side that reads ------------------------------------------------------------------------------------

    def connect(self, peer: bytes, memory: bytes, joint: Joint | None = None) -> str | None:
        """Load the agent of a peer."""
        if peer in self._peers:
            return None
        for lost in [each for each in self._lost if each.boot == peer]:  # its agent is in use
            self._lost.remove(lost)
            self._peers[peer] = lost
            return None
        theirs, own = (self._whole, self._whole) if joint is None else (joint.theirs, joint.own)
        try:
            described = msgspec.msgpack.decode(memory, type=PeerMemory)
            if described.planes and len(described.planes) != len(theirs.sizes):
                return f"planes: the peer has {len(described.planes)}, the layout {len(theirs.sizes)}"
            sources = _tables(theirs, described.planes)
            self._load(peer, described)
        except msgspec.DecodeError as error:
            return f"memory: the peer's description cannot be read: {error}"
        except TransferError as error:
            return f"memory: {error}"
        self._peers[peer] = Peer(
            peer, described, theirs, None if joint is None else own, sources, _tables(own, self._rows)
        )
        return None

    def read(self, order: ReadOrder) -> None:
        """Begin to read a part, as far as there is room for it."""
        self._in_flight += 1
        peer = self._peers.get(order.peer)
        if peer is None:
            self._end(order, ReadOutcome.PEER_GONE, "the peer is gone")
            return
        read = peer.locate(order)
        if read is None:
            self._end(order, ReadOutcome.ERROR, f"the places are not the peer's: {order.places[:4]}")
            return
        runs = peer.split(read, self._packed_run_bytes, self._run_bytes)
        read.unfinished = read.unread = len(runs)
        peer.waiting += runs
        with self._out.scope():  # what has ended waits: NIXL has to have the next read first
            self._begin(peer)
        self._wake()

    def poll(self) -> list[ReadEnd]:
        """Move every read on; return those that have ended."""
        self._take_notifications()
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

    def take_arrived(self) -> list[int]:
        """Return the reads that are still copied into slots, and have arrived since the last call."""
        arrived, self._unneeded = self._unneeded, []
        return arrived

    @property
    def needs_polling(self) -> bool:
        """True while reads have not ended, here or perhaps at a peer, for which this side makes progress as well."""
        sending = time.perf_counter() < self._last_notice + _SPIN_SECONDS
        return self._in_flight > 0 or bool(self._published) or sending or bool(self._lost)

    def disconnect(self, peer: bytes) -> None:
        """End the reads of a peer, those into slots once NIXL has ended them. Its agent stays until then."""
        found = self._peers.pop(peer, None)
        if found is None:
            if not any(each.boot == peer for each in self._lost):
                self._agent.unload(peer)
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
            places_used=self._out.regions.bytes_taken + self._in.regions.bytes_taken,
            places_total=self._out.regions.nbytes + self._in.regions.nbytes,
        )

    def close(self) -> None:
        """End every read; release everything, except what a run in flight may still write into."""
        if self._closed:
            return
        self._closed = True
        for copying in self._packing.values():
            copying.wait()
            copying.end()
        self._packing.clear()
        for peer in list(self._peers):
            self.disconnect(peer)
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self._lost and time.monotonic() < deadline:
            self._agent.notifications()
            for each in list(self._lost):
                self._advance(each)
            self._forget_lost()
        if self._lost:
            logger.warning("a stopped peer may still write into memory of its reads; it is kept")
            _kept.extend((self._agent, self._in, self._planes, self._lost))
            return
        with self._out.scope():
            self._agent.close()

    # --- notifications ------------------------------------------------------------------------------------------

    def listen(self, peer: bytes, memory: bytes) -> None:
        """Make ``notify`` of a peer possible that reads from this rank."""
        try:
            self._load(peer, msgspec.msgpack.decode(memory, type=PeerMemory))
        except (msgspec.DecodeError, TransferError) as error:  # messages go another way then
            logger.info("transfer peer %s takes no notifications: %s", peer.hex()[:8], error)

    def notify(self, peer: bytes, data: bytes) -> bool:
        """Send a message to the agent of a peer; return False if that is not possible."""
        with self._out.scope():
            sent = self._agent.notify(peer, data)
        if sent:
            self._last_notice = time.perf_counter()
        return sent

    def notifications(self) -> list[bytes]:
        """Return the messages that have arrived since the last call."""
        self._take_notifications()
        arrived, self._arrived = self._arrived, []
        return arrived

    def _take_notifications(self) -> None:
        """Advance NIXL, and take what has arrived."""
        if not self._closed:
            with self._out.scope():
                self._arrived += self._agent.notifications()

    # --- agents -------------------------------------------------------------------------------------------------

    def _load(self, peer: bytes, memory: PeerMemory) -> None:
        with self._out.scope():
            self._agent.load(peer, memory.metadata)

    def _forget_lost(self) -> None:
        """Remove the agents of lost peers of which no run is in flight."""
        for peer in [each for each in self._lost if not each.flying]:
            self._lost.remove(peer)
            self._agent.unload(peer.boot)

    # --- runs ---------------------------------------------------------------------------------------------------

    def _advance(self, peer: Peer) -> None:
        """Take the runs of a peer that have ended, and begin others."""
        with self._out.scope():
            for _ in range(_RUNS_PER_POLL):
                self._begin(peer)
                if not [run for run in tuple(peer.flying) if self._has_ended(peer, run)]:
                    break
            self._begin(peer)
        if peer.waiting or (peer.flying and time.perf_counter() < self._last_end + _SPIN_SECONDS):
            self._wake()

    def _begin(self, peer: Peer) -> None:
        """Begin runs as far as there is room."""
        while self._begin_next(peer):
            pass

    def _begin_next(self, peer: Peer) -> bool:
        """Begin the next run if there is room; return True if one was begun."""
        while peer.waiting and peer.waiting[0].read.failure is not None:
            peer.waiting.popleft()
        if not peer.waiting or len(peer.flying) >= _MOST_RUNS:
            return False
        run = peer.waiting[0]
        pieces = peer.pieces_in_place(run)
        run.in_place = pieces is not None
        if pieces is None:
            run.region = self._take_region(peer, run)
            if run.region is None:
                return False
            pieces = peer.pieces_packed(run, self._in.address + run.region.start)
        peer.waiting.popleft()
        peer.flying.append(run)
        run.read.writing += run.in_place
        begun = self._agent.read(peer.boot, peer.memory.device, *pieces)
        if isinstance(begun, str):
            self._take_end(peer, run, begun)
        else:
            run.begun = begun
        return True

    def _take_region(self, peer: Peer, run: PackedRun) -> Region | None:
        """Take room for a run, None if there is none. One peer leaves room for such a run, half of it beside others."""
        regions, nbytes = self._in.regions, run.packing.record_bytes * run.count
        chunks = -(-nbytes // CHUNK_BYTES)
        has_others = any(each.flying for each in (*self._peers.values(), *self._lost) if each is not peer)
        most = regions.num_chunks // _PEERS_SHARE if has_others else regions.num_chunks - chunks
        if peer.chunks_taken and peer.chunks_taken + chunks > most:
            return None
        region = regions.take(nbytes)
        if region is not None:
            peer.chunks_taken += region.chunks
        return region

    def _has_ended(self, peer: Peer, run: PackedRun) -> bool:
        """Take the end of a run, or of the copies out of its region; return True if there was one."""
        if run.copying is not None:
            if not run.copying.has_ended():
                return False
            self._take_copied(peer, run, run.copying.end())
            return True
        if run.begun is None or not run.begun.has_ended():
            return False
        error = run.begun.error
        if (kept := run.begun.release()) is not None:
            logger.warning("a read of NIXL cannot be released, its memory is kept: %s", kept)
            _kept.extend((self._agent, self._in, self._planes, run))
            run.region = None
        self._take_end(peer, run, error or kept)
        return True

    def _take_end(self, peer: Peer, run: PackedRun, error: str | None) -> None:
        """Take the end of a run: copy its blocks into their slots, unless no request waits for them any more."""
        read, self._last_end = run.read, time.perf_counter()
        read.unread -= 1
        if run.in_place:
            read.writing -= 1
        elif error is None and read.failure is None and run.region is not None:
            run.copying, error = self._unpack(peer, run, run.region)
            if run.copying is not None:
                read.writing += 1
                if not read.unread:
                    self._unneeded.append(read.order.read_id)
                return
        self._forget(peer, run, error)

    def _unpack(self, peer: Peer, run: PackedRun, region: Region) -> tuple[Copying | None, str | None]:
        order = run.read.order
        slots = np.ascontiguousarray(order.slots[run.blocks])
        try:
            own = pieces_of(peer.own, is_state=order.is_state)
            return self._in.unpack(slots, own, run.packing, region.start, order.after), None
        except DeviceError as error:
            return None, str(error)

    def _take_copied(self, peer: Peer, run: PackedRun, error: str | None) -> None:
        run.read.writing -= 1
        self._last_end = time.perf_counter()
        self._forget(peer, run, error)

    def _forget(self, peer: Peer, run: PackedRun, error: str | None) -> None:
        """Free the room of a run that has ended, and note what it has read."""
        peer.flying.remove(run)
        if run.region is not None:
            self._in.regions.free(run.region)
            peer.chunks_taken -= run.region.chunks
        read = run.read
        read.unfinished -= 1
        if error is not None:
            self._fail(read, ReadOutcome.ERROR, error)
            return
        read.moved += run.count * sum(run.packing.sizes[run.packing.planes])
        self._finish(read)

    def _fail(self, read: PackedRead, outcome: ReadOutcome, error: str) -> None:
        """Begin no further run of a read."""
        read.failure = read.failure or (outcome, error)
        self._finish(read)

    def _finish(self, read: PackedRead) -> None:
        """Report a read once nothing writes into its slots any more."""
        if read.ended or read.writing or (read.unfinished and read.failure is None):
            return
        read.ended = True
        if read.order.read_id in self._unneeded:
            self._unneeded.remove(read.order.read_id)
        if read.failure is not None:
            self._end(read.order, *read.failure)
            return
        seconds = time.perf_counter() - read.began
        self._ended.append(ReadEnd(read.order.read_id, ReadOutcome.OK, read.moved, seconds))
        self._wake()

    def _end(self, order: ReadOrder, outcome: ReadOutcome, error: str) -> None:
        self._ended.append(ReadEnd(order.read_id, outcome, error=error))
        self._wake()


def _tables(pieces: Pieces, rows: Rows) -> tuple[PlaneTable, ...]:
    """Return pieces of planes at these addresses and strides: those of blocks, and of blocks with states."""
    addresses, strides = [address for address, _ in rows], [stride for _, stride in rows]
    kinds = (False, True) if rows else ()
    return tuple(pieces.of(is_state=each).table(addresses, strides, None) for each in kinds)


def _packed_memory(planes: LocalPlanes, nbytes: int) -> PackedMemory:
    if planes.gpu is None:
        return HostPackedMemory(nbytes, planes)
    from fdcache.transfer.packed_memory import DevicePackedMemory

    try:
        return DevicePackedMemory(nbytes, planes, planes.gpu)
    except DeviceError as error:
        raise TransferError(f"FDCACHE_TRANSFER=rdma: {nbytes} bytes for packed blocks: {error}") from error
