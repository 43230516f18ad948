"""Reads through NIXL: pieces of memory, the agent that reads them, and runs of packed blocks."""

from __future__ import annotations

import importlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache._core import PlaneTable
from fdcache.errors import TransferError, TransferNotFoundError
from fdcache.metadata import Int32Array
from fdcache.transfer.connector import LocalPlanes, Pieces, ReadOrder, ReadOutcome
from fdcache.transfer.packed_memory import Copying, Packing, Region, packing_of

Numbers = NDArray[np.uint64]


class MemoryPieces(NamedTuple):
    """Pieces of a peer's memory, where they go in the own one, and their bytes."""

    theirs: Numbers
    mine: Numbers
    sizes: Numbers

    @property
    def mean_bytes(self) -> float:
        """Bytes of a piece on average."""
        return float(self.sizes.mean())


def mean_run_bytes(
    planes: LocalPlanes, pieces: Pieces, first: int, last: int, slots: NDArray[np.integer]
) -> float:
    """Return the bytes of a run on average: blocks whose pieces adjoin in a plane."""
    sizes = pieces.sizes[first:last]
    runs = 1 + np.count_nonzero(np.diff(slots) != 1)
    count = sum(
        runs if stride == size else len(slots)
        for stride, size in zip(planes.strides[first:last], sizes, strict=True)
    )
    return len(slots) * sum(sizes) / count


def extents(planes: LocalPlanes) -> list[tuple[int, int]]:
    """Return the address and the bytes of each plane."""
    last = planes.num_blocks - 1
    return [
        (address, last * stride + plane.nbytes)
        for address, stride, plane in zip(planes.addresses, planes.strides, planes.layout.planes, strict=True)
    ]


def plane_ranges(sizes: Sequence[int], first: int, last: int, most: int) -> list[tuple[int, int]]:
    """Split planes [first, last) into ranges of at most ``most`` bytes of a block, or one plane."""
    ranges: list[tuple[int, int]] = []
    while first < last:
        until = first + 1
        while until < last and sum(sizes[first : until + 1]) <= most:
            until += 1
        ranges.append((first, until))
        first = until
    return ranges


logger = logging.getLogger(__name__)

_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")


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


class NixlRead:
    """A read in flight. Until ``has_ended`` its bytes may arrive; it cannot be taken back."""

    def __init__(self, agent: Any, handle: Any, state: str) -> None:
        self._agent, self._handle, self._state = agent, handle, state
        self.error: str | None = None
        """Why it has failed."""

    def has_ended(self) -> bool:
        """Return True once nothing arrives any more."""
        if self._state == "PROC":
            try:
                self._state = self._agent.check_xfer_state(self._handle)
            except Exception as error:  # noqa: BLE001 - raised for the error that has ended a transfer
                self._state, self.error = "ERR", _words(error)
        if self._state not in ("PROC", "DONE"):
            self.error = self.error or "NIXL: the read has failed"
        return self._state != "PROC"

    def release(self) -> str | None:
        """Release a read that has ended; return why that is not possible."""
        try:
            self._handle.release()
        except Exception as error:  # noqa: BLE001
            return _words(error)
        return None


class NixlAgent:
    """An agent with UCX alone, and ``memory`` of addresses and bytes, registered.

    ``kind``: DRAM, or VRAM of the GPU with the number ``device``. Raises ``TransferNotFoundError`` without NIXL,
    ``TransferError`` if the agent cannot be made.
    """

    def __init__(
        self, name: str, memory: Sequence[tuple[int, int]], kind: str = "DRAM", device: int = 0
    ) -> None:
        nixl = find_nixl()
        self._kind, self._device = kind, device
        try:
            # A progress thread of NIXL takes a core for ever; calls of `notifications` make progress instead.
            options = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent = nixl.nixl_agent(name, options)
            described = [(address, nbytes, device, "") for address, nbytes in memory]
            self._registered = self._agent.register_memory(described, kind)
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            raise TransferError(
                f"FDCACHE_TRANSFER=rdma: the NIXL agent cannot be made: {_words(error)}; if UCX_TLS is set, it has to "
                "allow tcp"
            ) from error
        self._names: dict[bytes, str] = {}
        """Agents of peers, each loaded once: twice would end its reads."""

    def load(self, peer: bytes, metadata: bytes) -> str:
        """Load the agent of a peer once; return its name. Raises ``TransferError`` if it cannot be reached."""
        if peer not in self._names:
            try:
                name = self._agent.add_remote_agent(metadata)
            except Exception as error:
                raise TransferError(f"NIXL cannot reach the peer: {_words(error)}") from error
            self._names[peer] = name.decode() if isinstance(name, bytes) else name
        return self._names[peer]

    def unload(self, peer: bytes) -> None:
        """Remove the agent of a peer of which no read is in flight. Idempotent."""
        if (name := self._names.pop(peer, None)) is None:
            return
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:  # noqa: BLE001
            logger.info("the agent %s cannot be removed: %s", name, error)

    def read(
        self, peer: bytes, device: int, theirs: Numbers, mine: Numbers, sizes: Numbers
    ) -> NixlRead | str:
        """Begin to read pieces of a peer's memory, of its GPU ``device``; return why that is not possible."""
        try:
            handle = self._agent.initialize_xfer(
                "READ",
                self._described(mine, sizes, self._device),
                self._described(theirs, sizes, device),
                self._names[peer],
            )
        except Exception as error:  # noqa: BLE001
            return _words(error)
        try:
            state = self._agent.transfer(handle)
        except Exception as error:  # noqa: BLE001
            failed = NixlRead(self._agent, handle, "ERR")
            failed.error = _words(error)
            return failed
        return NixlRead(self._agent, handle, state)

    def _described(self, addresses: Numbers, sizes: Numbers, device: int) -> Any:
        rows = np.empty((len(addresses), 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = addresses, sizes, device
        return self._agent.get_xfer_descs(rows, self._kind)

    def notify(self, peer: bytes, data: bytes) -> bool:
        """Send a message to a loaded agent; return False if that is not possible."""
        name = self._names.get(peer)
        if name is None:
            return False
        try:
            self._agent.send_notif(name, data)
        except Exception as error:  # noqa: BLE001 - the peer may be gone
            logger.info("transfer peer %s takes no notifications: %s", peer.hex()[:8], error)
            return False
        return True

    def notifications(self) -> list[bytes]:
        """Advance NIXL, and return the messages that have arrived."""
        try:
            arrived = self._agent.get_new_notifs()
        except Exception as error:  # noqa: BLE001
            logger.info("no notifications: %s", error)
            return []
        return [message for messages in arrived.values() for message in messages]

    def close(self) -> None:
        """Release the memory and the agent. No read is in flight."""
        self._agent.deregister_memory(self._registered)
        self._names.clear()
        del self._agent  # now, and not with the interpreter, when NIXL's libraries are being unloaded


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


IN_PLACE = 0
"""Ticket of a part that is read in place."""

IN_PLACE_BYTES = 48 << 10
"""Shortest pieces, on average, that are read out of planes or into them: shorter ones take NIXL longer than copies."""

Place = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""Bytes, so few that sums of them are numbers of 64 bits."""
Rows = tuple[tuple[Place, Place], ...]
"""Address and stride of each plane."""


class PeerMemory(msgspec.Struct, frozen=True, array_like=True):
    """What a peer needs: the agent, the packed memory, and the planes that may be read in place."""

    metadata: bytes
    device: int
    address: Place
    nbytes: Place
    num_blocks: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    planes: Rows = ()


@dataclass(slots=True)
class PackedRun:
    """Pieces of a part that are read at once: planes of some blocks."""

    read: PackedRead
    blocks: slice[int, int, None]
    packing: Packing
    """Where they go in a region; its planes are those of the run."""
    in_place: bool = False
    """Read into the slots."""
    region: Region | None = None
    begun: NixlRead | None = None
    copying: Copying | None = None

    @property
    def count(self) -> int:
        """Number of its blocks."""
        return self.blocks.stop - self.blocks.start


@dataclass(slots=True, eq=False)
class PackedRead:
    """A read: which of its runs have ended, and whether some may still write into its slots."""

    order: ReadOrder
    slots: Int32Array
    """Of the peer, of a part that is read in place."""
    start: int
    """First byte of a packed part."""
    unfinished: int = 0
    unread: int = 0
    """Runs that NIXL has not read to their end."""
    writing: int = 0
    """Runs that write into the slots."""
    moved: int = 0
    began: float = field(default_factory=time.perf_counter)
    failure: tuple[ReadOutcome, str] | None = None
    ended: bool = False


@dataclass(slots=True, eq=False)
class Peer:
    """A peer that is read from."""

    boot: bytes
    memory: PeerMemory
    theirs: Pieces
    own: Pieces | None
    """Pieces of the own planes that it is read into, None for all."""
    sources: tuple[PlaneTable, ...]
    """Planes of the peer that may be read in place: pieces of blocks, and of those with states."""
    targets: tuple[PlaneTable, ...]
    """The same of the own planes."""
    waiting: deque[PackedRun] = field(default_factory=deque)
    flying: list[PackedRun] = field(default_factory=list)
    chunks_taken: int = 0

    def locate(self, order: ReadOrder) -> PackedRead | None:
        """Return the read of an order, None if its places are not the peer's: they may be anything."""
        memory, wanted = self.memory, slice(order.skip, order.skip + len(order.slots))
        theirs = self.theirs.of(is_state=order.is_state)
        if order.places[:1] == (IN_PLACE,) and self.sources and theirs.per_plane == 1:
            slots = order.places[1:][wanted]
            fits = len(slots) == len(order.slots) and min(slots) >= 0 and max(slots) < memory.num_blocks
            return PackedRead(order, np.array(slots, np.int32), 0) if fits else None
        pieces = theirs.range_of(order.first_plane, order.last_plane)
        record = packing_of(theirs.sizes, *pieces).record_bytes
        if len(order.places) != 2 or order.places[1] < 0:
            return None
        if order.places[1] + wanted.stop * record > memory.nbytes:
            return None
        return PackedRead(order, np.empty(0, np.int32), order.places[1] + order.skip * record)

    def split(self, read: PackedRead, most_packed: int, most_in_planes: int) -> list[PackedRun]:
        """Split a read: records by block; planes one after the other, as adjoining blocks are one piece of a plane."""
        order, size = read.order, len(read.order.slots)
        theirs = self.theirs.of(is_state=order.is_state)
        sizes, ranges, most = (
            theirs.sizes,
            [theirs.range_of(order.first_plane, order.last_plane)],
            most_packed,
        )
        in_planes = len(read.slots) > 0
        if in_planes:
            most = most_in_planes
            ranges = plane_ranges(sizes, *ranges[0], most // size)
        runs = []
        for first, last in ranges:
            step = max(most // packing_of(sizes, first, last).record_bytes, 1)
            for block in range(0, size, step):
                blocks = slice(block, min(block + step, size))
                by_plane = in_planes * (blocks.stop - block)
                runs.append(PackedRun(read, blocks, packing_of(sizes, first, last, by_plane)))
        return runs

    def pieces_in_place(self, run: PackedRun) -> MemoryPieces | None:
        """Return the pieces of a run that is read into the slots, None if they are too short for that."""
        if not (len(run.read.slots) and self.targets):
            return None
        target = self.targets[run.read.order.is_state]
        pieces = self._pieces_to(run, target, run.read.order.slots[run.blocks])
        return pieces if pieces.mean_bytes >= IN_PLACE_BYTES else None

    def pieces_packed(self, run: PackedRun, start: int) -> MemoryPieces:
        """Return the pieces of a run that is read into packed memory at this address."""
        packing = run.packing
        if not len(run.read.slots):
            theirs = self.memory.address + run.read.start + run.blocks.start * packing.record_bytes
            return MemoryPieces(*np.array([[theirs], [start], [run.count * packing.record_bytes]], np.uint64))
        return self._pieces_to(run, packing.table(start, None), np.arange(run.count, dtype=np.int32))

    def _pieces_to(self, run: PackedRun, target: PlaneTable, slots: Int32Array) -> MemoryPieces:
        """Return the pieces of a run into ``slots`` of these planes, as few as there are."""
        source, planes = self.sources[run.read.order.is_state], run.packing
        theirs = run.read.slots[run.blocks]
        return MemoryPieces(*_core.plane_runs(source, theirs, target, slots, planes.first, planes.last))
