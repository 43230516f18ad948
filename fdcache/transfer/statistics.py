"""Counts of one rank's hand-overs, by peer and result."""

from __future__ import annotations

import msgspec

from fdcache.transfer.connector import ConnectorStats


class TransferCount(msgspec.Struct):
    """Hand-overs with one peer that ended in one way.

    ``waited_seconds`` from the plan to the first block that could be read, ``moved_seconds`` from there to the end.
    """

    direction: str
    peer: str
    result: str
    transfers: int = 0
    blocks: int = 0
    bytes: int = 0
    waited_seconds: float = 0.0
    moved_seconds: float = 0.0


class PeerView(msgspec.Struct, frozen=True):
    """One peer: ``direction`` is ``fetch`` for one that this rank reads from."""

    direction: str
    address: str
    boot: str
    state: str
    error: str | None = None


class TransferView(msgspec.Struct, frozen=True):
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
    transfers: tuple[TransferView, ...] = ()
    counts: tuple[TransferCount, ...] = ()
    sent_blocks_held: int = 0
    fetched_blocks_in_flight: int = 0
    held_blocks: int = 0
    leases_expired: int = 0
    protocol_errors: int = 0


class TransferTally:
    """Counts by direction, peer and result."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], TransferCount] = {}

    def add(
        self, direction: str, peer: str, result: str, blocks: int, moved: int, waited: float, moving: float
    ) -> None:
        """Count a hand-over that has ended."""
        key = (direction, peer, result)
        count = self._counts.setdefault(key, TransferCount(*key))
        count.transfers += 1
        count.blocks += blocks
        count.bytes += moved
        count.waited_seconds += waited
        count.moved_seconds += moving

    def counts(self) -> tuple[TransferCount, ...]:
        """Return a snapshot."""
        return tuple(msgspec.structs.replace(each) for each in self._counts.values())
