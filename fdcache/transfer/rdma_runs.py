"""What a peer lets be read, and the runs that a read of it is split into."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np

from fdcache.transfer.connector import Pieces, ReadOrder, ReadOutcome
from fdcache.transfer.memory_pieces import (
    MemoryPieces,
    Numbers,
    addresses_of,
    plane_ranges,
    sizes_of,
)
from fdcache.transfer.nixl_agent import NixlRead
from fdcache.transfer.packed_memory import Copying, Packing, Region

IN_PLACE = 0
"""Ticket of a part that is read in place."""

IN_PLACE_BYTES = 48 << 10
"""Shortest pieces, on average, that are read out of planes or into them: shorter ones take NIXL longer than copies."""

Rows = tuple[tuple[int, int], ...]


class PeerMemory(msgspec.Struct, frozen=True, array_like=True):
    """What a peer needs: the agent, the packed memory, and the planes that may be read in place."""

    metadata: bytes
    device: int
    address: int
    nbytes: int
    num_blocks: int = 0
    planes: tuple[tuple[int, int], ...] = ()
    """Address and stride of each."""


@dataclass(slots=True)
class Run:
    """Pieces of a part that are read at once: planes of some blocks."""

    read: Read
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
class Read:
    """A read: which of its runs have ended, and whether some may still write into its slots."""

    order: ReadOrder
    slots: Numbers
    """Of the peer, of a part that is read in place."""
    start: int
    """First byte of a packed part."""
    unfinished: int = 0
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
    mine: Pieces
    """The same, all of them spelled out."""
    rows: Rows
    """Address and stride of the own planes, empty if they are not read into in place."""
    waiting: deque[Run] = field(default_factory=deque)
    flying: list[Run] = field(default_factory=list)
    chunks_taken: int = 0

    def locate(self, order: ReadOrder) -> Read | None:
        """Return the read of an order, None if its places are not the peer's: they may be anything."""
        memory, wanted = self.memory, slice(order.skip, order.skip + len(order.slots))
        if order.places[:1] == (IN_PLACE,) and memory.planes:
            slots = order.places[1:][wanted]
            fits = len(slots) == len(order.slots) and min(slots) >= 0 and max(slots) < memory.num_blocks
            return Read(order, np.array(slots, np.int64), 0) if fits else None
        record = Packing(self.theirs.sizes, order.first_plane, order.last_plane).record_bytes
        if len(order.places) != 2 or order.places[1] < 0:
            return None
        if order.places[1] + wanted.stop * record > memory.nbytes:
            return None
        return Read(order, np.empty(0, np.int64), order.places[1] + order.skip * record)

    def split(self, read: Read, most_packed: int, most_in_planes: int) -> list[Run]:
        """Split a read: records by block; planes one after the other, as adjoining blocks are one piece of a plane."""
        order, sizes, size = read.order, self.theirs.sizes, len(read.order.slots)
        ranges, most = [(order.first_plane, order.last_plane)], most_packed
        in_planes = len(read.slots) > 0
        if in_planes:
            most = most_in_planes
            ranges = plane_ranges(sizes, *ranges[0], most // size)
        runs = []
        for first, last in ranges:
            step = max(most // Packing(sizes, first, last).record_bytes, 1)
            for block in range(0, size, step):
                blocks = slice(block, min(block + step, size))
                by_plane = in_planes * (blocks.stop - block)
                runs.append(Run(read, blocks, Packing(sizes, first, last, by_plane=by_plane)))
        return runs

    def pieces_in_place(self, run: Run) -> MemoryPieces | None:
        """Return the pieces of a run that is read into the slots, None if they are too short for that."""
        if not (len(run.read.slots) and self.rows):
            return None
        planes = run.packing.planes
        mine = addresses_of(self.rows[planes], self.mine.starts[planes], run.read.order.slots[run.blocks])
        pieces = self._pieces_to(run, mine)
        return pieces if pieces.mean_bytes >= IN_PLACE_BYTES else None

    def pieces_packed(self, run: Run, start: int) -> MemoryPieces:
        """Return the pieces of a run that is read into packed memory at this address."""
        packing = run.packing
        if not len(run.read.slots):
            theirs = self.memory.address + run.read.start + run.blocks.start * packing.record_bytes
            return MemoryPieces(*np.array([[theirs], [start], [run.count * packing.record_bytes]], np.int64))
        planes = packing.planes
        rows = [(start + at, stride) for at, stride in zip(packing.offsets, packing.strides, strict=True)]
        return self._pieces_to(
            run, addresses_of(rows[planes], (0,) * len(rows[planes]), np.arange(run.count))
        )

    def _pieces_to(self, run: Run, mine: Numbers) -> MemoryPieces:
        planes = run.packing.planes
        theirs = addresses_of(
            self.memory.planes[planes], self.theirs.starts[planes], run.read.slots[run.blocks]
        )
        return MemoryPieces(theirs, mine, sizes_of(self.theirs.sizes[planes], run.count)).merged()
