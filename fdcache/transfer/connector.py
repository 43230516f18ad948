"""The interface of a transfer connector: how one rank reads blocks out of the memory of a peer's rank.

    def connect(context: TransferContext) -> TransferConnector:
        return MyConnector(context.layout, context.planes)

Only the reader moves bytes, and only into its own memory. A read that was begun cannot be taken back: its slots are in
use until ``poll`` returns its end. All calls of a connector come from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from fdcache import _core
from fdcache._core import PlaneTable
from fdcache.devices.cuda_peers import CudaPeerAccess
from fdcache.errors import LayoutError, TransferError
from fdcache.layout import KVLayout
from fdcache.metadata import Int32Array, UInt64Array
from fdcache.settings.peers import PeerSettings
from fdcache.tasks import Event
from fdcache.tiers.statistics import HandoverCount


@dataclass(frozen=True, slots=True)
class LocalPlanes:
    """The planes of this rank: a plane's block b lies at its ``addresses`` entry plus b times its ``strides`` entry.

    ``gpu`` is set if they are in the memory of a GPU.
    """

    layout: KVLayout
    table: PlaneTable
    num_blocks: int
    addresses: tuple[int, ...]
    strides: tuple[int, ...]
    gpu: CudaPeerAccess | None = None

    def sums(
        self, slots: Int32Array, pieces: Pieces | None = None, planes: slice | None = None
    ) -> UInt64Array:
        """Return the sum of each block, or of pieces of its planes; those of ranges of planes add up.

        Raises ``DeviceError``.
        """
        table, blocks = self.table_of(pieces), np.ascontiguousarray(slots)
        first, last, _ = (planes or slice(None)).indices(self.layout.num_planes)
        if pieces is not None:
            first, last = pieces.range_of(first, last)
        if self.gpu is not None:
            part = None if pieces is None else self.gpu.part(pieces, table)
            return self.gpu.sums(blocks, part, first, last)
        return _core.sum_planes(table, self.num_blocks, blocks, first, last)

    def table_of(self, pieces: Pieces | None) -> PlaneTable:
        """Return the table of pieces of the planes, None for all."""
        return self.table if pieces is None else pieces.table(self.addresses, self.strides, self.table)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Runs of bytes in each plane of a block: where each starts, its size, and its position in the record for sums.

    ``per_plane``: how many there are of each plane. ``states``: those of blocks with states, if they are others.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    positions: tuple[int, ...]
    per_plane: int = 1
    states: Pieces | None = None

    def of(self, *, is_state: bool) -> Pieces:
        """Return the pieces of blocks of a kind."""
        return self.states if is_state and self.states is not None else self

    def range_of(self, first_plane: int, last_plane: int) -> tuple[int, int]:
        """Return the numbers of the pieces of a range of planes."""
        return first_plane * self.per_plane, last_plane * self.per_plane

    def table(self, addresses: Sequence[int], strides: Sequence[int], owner: object) -> PlaneTable:
        """Return the pieces of planes at these addresses as planes of their own; ``owner`` keeps them alive."""
        planes = [number // self.per_plane for number in range(len(self.starts))]
        begins = [addresses[plane] + start for plane, start in zip(planes, self.starts, strict=True)]
        rows = [strides[plane] for plane in planes]
        return PlaneTable(begins, rows, list(self.sizes), list(self.positions), owner)


def pieces_of(pieces: Pieces | None, *, is_state: bool) -> Pieces | None:
    """Return the pieces of blocks of a kind, None for whole planes."""
    return None if pieces is None else pieces.of(is_state=is_state)


def whole_planes(layout: KVLayout) -> Pieces:
    """Return one piece for each plane: what a reader with the same layout reads."""
    planes = layout.planes
    return Pieces(
        (0,) * len(planes), tuple(each.nbytes for each in planes), tuple(each.offset for each in planes)
    )


@dataclass(frozen=True, slots=True)
class Joint:
    """How the planes of a peer of another tensor parallelism meet the own ones: ``theirs`` are read into ``own``."""

    layout: KVLayout
    """That of the peer."""
    theirs: Pieces
    own: Pieces


@dataclass(frozen=True, slots=True)
class TransferContext:
    """Everything a connector is made from. It may call ``wake`` from any thread when a read has ended."""

    planes: LocalPlanes
    settings: PeerSettings
    boot: bytes
    wake: Callable[[], None]

    @property
    def layout(self) -> KVLayout:
        """The layout of both sides."""
        return self.planes.layout


class ReadOutcome(StrEnum):
    """Result of a read."""

    OK = "ok"
    ERROR = "error"
    PEER_GONE = "peer_gone"


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """Read planes of ``len(slots)`` blocks of a published part into ``slots``.

    ``places`` and ``count`` describe the part; its first ``skip`` blocks are left out. On a GPU the slots may be
    written ``after`` that event, if there is one. ``is_state``: the blocks hold states, and not tokens.
    """

    read_id: int
    peer: bytes
    places: tuple[int, ...]
    count: int
    skip: int
    first_plane: int
    last_plane: int
    slots: Int32Array
    after: Event | None = None
    is_state: bool = False


@dataclass(frozen=True, slots=True)
class ReadEnd:
    """End of a read: nothing writes into its slots any more."""

    read_id: int
    outcome: ReadOutcome
    moved_bytes: int = 0
    seconds: float = 0.0
    error: str | None = None


class ConnectorStats(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of a connector. ``places_used`` bytes of ``places_total`` for published parts and reads are taken."""

    name: str
    reads: int = 0
    reads_failed: int = 0
    reads_in_flight: int = 0
    read_bytes: int = 0
    places_used: int = 0
    places_total: int = 0


@runtime_checkable
class Notifier(Protocol):
    """Part of a connector that also carries messages from the rank that is read to the ranks that read from it.

    A message may be lost. ``notifications`` is called often while a read is expected.
    """

    def listen(self, peer: bytes, memory: bytes) -> None:
        """Prepare messages to the peer of this boot id."""

    def notify(self, peer: bytes, data: bytes) -> bool:
        """Send a message; return False if it has to go another way."""

    def notifications(self) -> list[bytes]:
        """Return the messages that have arrived since the last call."""


@runtime_checkable
class Packer(Protocol):
    """Part of a connector that may still copy a part when ``publish`` has returned."""

    def is_packed(self, places: tuple[int, ...]) -> bool:
        """Return True once peers may read a part; wake the thread until then. Raises ``DeviceError``."""


@runtime_checkable
class Stager(Protocol):
    """Part of a connector that may still copy into slots when it needs the places of the peer no more."""

    def take_arrived(self) -> list[int]:
        """Return the reads in flight, by their ids, of whose places that became true since the last call."""


@runtime_checkable
class TransferConnector(Protocol):
    """Reads of one rank out of its peers. No method blocks for longer than a copy takes."""

    @property
    def name(self) -> str:
        """The connector in one word."""

    @property
    def memory(self) -> bytes:
        """What a peer needs to reach the planes, for its ``connect``."""

    @property
    def needs_polling(self) -> bool:
        """True while reads are in flight whose end ``wake`` does not announce."""

    def most_blocks(self, first_plane: int, last_plane: int) -> int:
        """Return the most blocks of a part that ``publish`` takes."""

    def publish(
        self, slots: Int32Array, first_plane: int, last_plane: int, pieces: Pieces | None = None
    ) -> tuple[int, ...] | None:
        """Make planes of these blocks, or pieces of them, readable; return their places, None while there is no room.

        The blocks are computed, and stay unchanged until ``withdraw``.
        """

    def withdraw(self, places: tuple[int, ...]) -> None:
        """Free places: a read of them from now on may find other bytes."""

    def connect(self, peer: bytes, memory: bytes, joint: Joint | None = None) -> str | None:
        """Prepare reads from the peer of this boot id; return why that is not possible, None if it is.

        With a ``joint`` pieces of the planes are read. It and ``pieces`` are None between equal tensor parallelisms.
        """

    def read(self, order: ReadOrder) -> None:
        """Begin a read. ``poll`` returns its end, also if it cannot be begun."""

    def poll(self) -> list[ReadEnd]:
        """Return the reads that have ended since the last call."""

    def disconnect(self, peer: bytes) -> None:
        """Forget a peer whose process is gone or replaced. Its reads end, and its memory is unmapped."""

    def peers(self) -> list[bytes]:
        """Return the boot ids of the connected peers."""

    def stats(self) -> ConnectorStats:
        """Return counts; never blocks."""

    def close(self) -> None:
        """Wait for the reads in flight that end by themselves, and release everything. Idempotent."""


class PeerView(msgspec.Struct, frozen=True):
    """One peer: ``direction`` is ``fetch`` for one that this rank reads from."""

    direction: str
    address: str
    boot: str
    state: str
    error: str | None = None


class HandoverView(msgspec.Struct, frozen=True):
    """One hand-over that has not ended. ``complete``: a send all of whose blocks are computed."""

    plan_id: int
    direction: str
    transfer: str
    peer: str
    blocks: int
    seconds: float
    complete: bool = False


class TransferStats(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of one rank's hand-overs.

    ``held_blocks``: slots of fetches that have ended and wait for reads in flight. ``leases_expired``: sends that
    ended because no peer asked, or renewed its lease, in time.
    """

    rank: int
    role: str
    address: str
    connector: ConnectorStats
    peers: tuple[PeerView, ...] = ()
    transfers: tuple[HandoverView, ...] = ()
    counts: tuple[HandoverCount, ...] = ()
    sent_blocks_held: int = 0
    fetched_blocks_in_flight: int = 0
    held_blocks: int = 0
    leases_expired: int = 0
    protocol_errors: int = 0


_WORD = 8


@dataclass(frozen=True)
class Sharing:
    """The ranks of peers that a rank meets.

    ``sources``: the prefill ranks that it reads from, and how their planes meet its own; None if they are equal.
    ``declined``: prefill ranks that have the same planes as a source. ``readers``: the pieces of its planes that each
    decode rank reads from it, the first of which has rank ``first_reader``; None for all.
    """

    layout: KVLayout
    sources: tuple[tuple[int, Joint | None], ...]
    declined: tuple[int, ...]
    readers: tuple[Pieces | None, ...]
    first_reader: int

    @cached_property
    def joints(self) -> dict[int, Joint | None]:
        """How the planes of each source meet the own ones."""
        return dict(self.sources)


def share(layout: KVLayout, rank: int, peer_ranks: int | None, state_parts: tuple[int, ...] = ()) -> Sharing:
    """Return what a rank shares with instances of ``peer_ranks`` ranks, None for as many as its own has.

    ``state_parts``: bytes of the parts that a state has in a plane, one after the other, each of which the ranks share
    evenly. Raises ``TransferError`` if neither tensor parallelism is a multiple of the other, or for planes that cannot
    be split by head, or states.
    """
    theirs = layout_of_peer(layout, peer_ranks)
    if theirs is layout:
        return Sharing(layout, ((rank, None),), (), (None,), rank)
    if layout.num_states and (layout.is_latent or not state_parts):
        why = (
            "states beside latents, of which ranks have different shares"
            if layout.is_latent
            else "states, and it is not known which part of one each rank has (state_parts of open_transfer)"
        )
        raise TransferError(
            f"FDCACHE_TRANSFER_PEER_RANKS={peer_ranks}: the layout has {why}; give all instances {layout.tp_size} ranks"
        )
    if layout.is_latent:
        return _replicated(layout, theirs, rank)
    return _split(layout, theirs, rank, _parts_of_smaller(layout, theirs, state_parts))


def agreed_fingerprint(layout: KVLayout) -> bytes:
    """Return what instances know a layout by: how many ranks keep latents once on the host is a matter of each."""
    return (replace(layout, replicas=layout.tp_size) if layout.is_latent else layout).fingerprint


def layout_of_peer(layout: KVLayout, peer_ranks: int | None) -> KVLayout:
    """Return the layout of instances of ``peer_ranks`` ranks, None for as many as the own has. Raises as ``share``."""
    own = layout.tp_size
    if peer_ranks is None or peer_ranks == own:
        return layout
    if own % peer_ranks and peer_ranks % own:
        raise TransferError(
            f"FDCACHE_TRANSFER_PEER_RANKS={peer_ranks}: this instance has {own} ranks; one has to be a multiple of the "
            "other"
        )
    try:
        return layout.with_tp_size(peer_ranks)
    except LayoutError as error:
        raise TransferError(f"FDCACHE_TRANSFER_PEER_RANKS={peer_ranks}: {error}") from error


def _parts_of_smaller(own: KVLayout, theirs: KVLayout, parts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the parts of a state on a rank of the instance with more ranks. Raises ``TransferError``."""
    times = max(theirs.tp_size // own.tp_size, 1)
    if any(part % (times * _WORD) for part in parts):
        raise TransferError(
            f"FDCACHE_TRANSFER_PEER_RANKS={theirs.tp_size}: the parts of a state, {', '.join(map(str, parts))} bytes, "
            f"cannot be divided among {times} ranks in multiples of {_WORD} bytes"
        )
    return tuple(part // times for part in parts)


def _replicated(own: KVLayout, theirs: KVLayout, rank: int) -> Sharing:
    ranks = _facing(own, theirs, rank)
    joint = Joint(theirs, whole_planes(theirs), whole_planes(own))
    readers = len(ranks) if theirs.tp_size > own.tp_size else 1
    return Sharing(theirs, ((ranks[0], joint),), ranks[1:], (None,) * readers, ranks[0])


def _split(own: KVLayout, theirs: KVLayout, rank: int, parts: tuple[int, ...]) -> Sharing:
    ranks = _facing(own, theirs, rank)
    if theirs.tp_size > own.tp_size:
        whole = _whole_with_states(theirs, parts)
        sources = tuple(
            (each, Joint(theirs, whole, _piece(theirs, own, index, theirs, parts)))
            for index, each in enumerate(ranks)
        )
        readers = tuple(_piece(theirs, own, index, own, parts) for index in range(len(ranks)))
        return Sharing(theirs, sources, (), readers, ranks[0])
    index = rank % (own.tp_size // theirs.tp_size)
    piece = _piece(own, theirs, index, theirs, parts)
    mine = _at(_whole_with_states(own, parts), piece)
    reader = _whole_with_states(own, parts) if parts else None
    return Sharing(theirs, ((ranks[0], Joint(theirs, piece, mine)),), (), (reader,), ranks[0])


def _at(pieces: Pieces, others: Pieces) -> Pieces:
    """Return pieces with the positions of others of the same sizes."""
    states = None
    if pieces.states is not None and others.states is not None:
        states = _at(pieces.states, others.states)
    return replace(pieces, positions=others.positions, states=states)


def _facing(own: KVLayout, theirs: KVLayout, rank: int) -> tuple[int, ...]:
    """Return the ranks of the peer that have heads of this rank."""
    times = theirs.tp_size // own.tp_size
    if times:
        return tuple(range(rank * times, (rank + 1) * times))
    return (rank * theirs.tp_size // own.tp_size,)


def _whole_with_states(layout: KVLayout, parts: tuple[int, ...]) -> Pieces:
    """Return one piece for each plane, and those of the states in it."""
    pieces = whole_planes(layout)
    return replace(pieces, states=_states(layout, parts, layout, 1, 0)) if parts else pieces


def _piece(small: KVLayout, large: KVLayout, index: int, prefill: KVLayout, parts: tuple[int, ...]) -> Pieces:
    """Return the planes of a small layout within those of a large one, with the positions of prefill's record.

    ``parts``: those of a state in a plane of the small layout.
    """
    starts, sizes, positions = [], [], []
    for part, whole, record in zip(small.planes, large.planes, prefill.planes, strict=True):
        if part.nbytes % _WORD:
            raise TransferError(
                f"FDCACHE_TRANSFER_PEER_RANKS: plane {part.kind.value} has {part.nbytes} bytes of a rank's heads, "
                f"which are no multiple of {_WORD}"
            )
        start = index * part.nbytes
        assert start + part.nbytes <= whole.nbytes
        starts.append(start)
        sizes.append(part.nbytes)
        positions.append(record.offset + (start if prefill is large else 0))
    states = _states(prefill, parts, large, large.planes[0].nbytes // small.planes[0].nbytes, index)
    return Pieces(tuple(starts), tuple(sizes), tuple(positions), states=states if parts else None)


def _states(prefill: KVLayout, parts: tuple[int, ...], large: KVLayout, times: int, index: int) -> Pieces:
    """Return the parts of a rank's states in the planes of a layout that has those of ``times`` ranks."""
    befores = tuple(accumulate(parts, initial=0))[:-1]
    starts = tuple(times * before + index * part for before, part in zip(befores, parts, strict=True))
    at = starts if prefill is large else befores
    planes = prefill.num_planes
    positions = tuple(plane.offset + each for plane in prefill.planes for each in at)
    return Pieces(starts * planes, parts * planes, positions, per_plane=len(parts))
