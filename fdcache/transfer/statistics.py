"""State of one rank's hand-overs, and its peers."""

from __future__ import annotations

import msgspec

from fdcache.tiers.statistics import HandoverCount
from fdcache.transfer.connector import ConnectorStats


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
    counts: tuple[HandoverCount, ...] = ()
    sent_blocks_held: int = 0
    fetched_blocks_in_flight: int = 0
    held_blocks: int = 0
    leases_expired: int = 0
    protocol_errors: int = 0
