"""Which ranks hand over to which, and which bytes of a plane, where tensor parallelism differs between instances.

The planes of a rank are split by KV head, and the heads of a rank are one run of bytes in each plane of a block. So a
rank of a smaller instance has the planes of several ranks of a larger one side by side. Latent attention has the same
planes on every rank, and they are read from one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fdcache.errors import LayoutError, TransferError
from fdcache.layout import KVLayout
from fdcache.transfer.connector import Joint, Pieces, whole_planes

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

    @property
    def is_equal(self) -> bool:
        """True if peers have the same tensor parallelism."""
        return all(joint is None for _, joint in self.sources)


def share(layout: KVLayout, rank: int, peer_ranks: int | None) -> Sharing:
    """Return what a rank shares with instances of ``peer_ranks`` ranks, None for as many as its own has.

    Raises ``TransferError`` if neither tensor parallelism is a multiple of the other, or for planes that cannot be
    split by head.
    """
    own = layout.tp_size
    if peer_ranks is None or peer_ranks == own:
        return Sharing(layout, ((rank, None),), (), (None,), rank)
    if own % peer_ranks and peer_ranks % own:
        raise TransferError(
            f"FDCACHE_TRANSFER_PEER_RANKS={peer_ranks}: this instance has {own} ranks; one has to be a multiple of the "
            "other"
        )
    try:
        theirs = layout.with_tp_size(peer_ranks)
    except LayoutError as error:
        raise TransferError(f"FDCACHE_TRANSFER_PEER_RANKS={peer_ranks}: {error}") from error
    if layout.is_latent:
        return _replicated(layout, theirs, rank)
    return _split(layout, theirs, rank)


def _replicated(own: KVLayout, theirs: KVLayout, rank: int) -> Sharing:
    ranks = _facing(own, theirs, rank)
    joint = Joint(theirs, whole_planes(theirs), whole_planes(own))
    readers = len(ranks) if theirs.tp_size > own.tp_size else 1
    return Sharing(theirs, ((ranks[0], joint),), ranks[1:], (None,) * readers, ranks[0])


def _split(own: KVLayout, theirs: KVLayout, rank: int) -> Sharing:
    ranks = _facing(own, theirs, rank)
    if theirs.tp_size > own.tp_size:
        sources = tuple(
            (each, Joint(theirs, whole_planes(theirs), _piece(theirs, own, index, theirs)))
            for index, each in enumerate(ranks)
        )
        readers = tuple(_piece(theirs, own, index, own) for index in range(len(ranks)))
        return Sharing(theirs, sources, (), readers, ranks[0])
    index = rank % (own.tp_size // theirs.tp_size)
    piece = _piece(own, theirs, index, theirs)
    mine = Pieces((0,) * own.num_planes, piece.sizes, piece.positions)
    return Sharing(theirs, ((ranks[0], Joint(theirs, piece, mine)),), (), (None,), ranks[0])


def _facing(own: KVLayout, theirs: KVLayout, rank: int) -> tuple[int, ...]:
    """Return the ranks of the peer that have heads of this rank."""
    times = theirs.tp_size // own.tp_size
    if times:
        return tuple(range(rank * times, (rank + 1) * times))
    return (rank * theirs.tp_size // own.tp_size,)


def _piece(small: KVLayout, large: KVLayout, index: int, prefill: KVLayout) -> Pieces:
    """Return the planes of a small layout within those of a large one, with the positions of prefill's record."""
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
    return Pieces(tuple(starts), tuple(sizes), tuple(positions))
