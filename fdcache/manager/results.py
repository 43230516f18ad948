"""Answers of a ``CacheManager``. Failures of the data path are values here, not exceptions."""

from __future__ import annotations

from enum import StrEnum

import msgspec
import numpy as np

from fdcache._core import LoadForms
from fdcache.layout import KVLayout
from fdcache.metadata import Int32Array

NO_BLOCKS = np.empty(0, np.int32)


class MatchStatus(StrEnum):
    """Whether a match is an answer, or has to be asked for again in a later step."""

    MATCHED = "matched"
    DEFERRED = "deferred"


class MatchResult(msgspec.Struct, frozen=True):
    """The longest cached prefix of a request: device blocks, then host blocks, then blocks read from storage.

    ::

        result = manager.match_prefix([request])[0]
        if result.status is MatchStatus.MATCHED:
            num_new_tokens = request.num_tokens - result.num_cached_tokens

    DEFERRED: another request is copying the next block, blocks are being read from storage, or the manager is
    paused. Nothing is pinned; match the request again in a later step. ``num_ahead_blocks`` of the device blocks were
    loaded while the request waited for later blocks; ``num_ahead_from_storage`` of these were read from storage for it,
    the others were on the host.
    """

    request_id: str
    status: MatchStatus
    num_device_blocks: int = 0
    num_host_blocks: int = 0
    num_storage_blocks: int = 0
    num_cached_tokens: int = 0
    num_ahead_blocks: int = 0
    num_ahead_from_storage: int = 0

    @property
    def total_matched_blocks(self) -> int:
        """Number of blocks in all tiers."""
        return self.num_device_blocks + self.num_host_blocks + self.num_storage_blocks


class OffloadMatch(msgspec.Struct, frozen=True):
    """What an ``OffloadManager`` can load for a request beyond the blocks that the engine's device cache has.

    DEFERRED: the next block is on its way to the host tier; ask again in a later step. ``num_tokens``: whole blocks;
    ``from_storage`` of them were read from storage for this request. ``from_peer``: those that a peer hands over, after
    the others; the last of them need not fill a block. ``coming``: tokens beyond the device's that the host tier has
    once the reads in flight for a deferred request have ended, if they end well. ``ended_by``: in a layout with groups,
    the one that has no more, None if no group ended the match.
    """

    request_id: str
    status: MatchStatus
    num_tokens: int = 0
    from_storage: int = 0
    from_peer: int = 0
    coming: int = 0
    ended_by: int | None = None


class AllocationFailure(StrEnum):
    """Reason for an allocation without blocks."""

    NO_BLOCKS = "no_blocks"
    DEFERRED = "deferred"
    PAUSED = "paused"


class Allocation(msgspec.Struct, frozen=True, eq=False):
    """The blocks that one request got in this step, or the reason that it got none.

    ::

        allocation = manager.allocate_device_blocks([(request, request.num_tokens)])[0]
        if allocation.failure is AllocationFailure.NO_BLOCKS:
            preempt_one_request()
        table[request.request_id].extend(allocation.block_ids)

    ``block_ids``: int32 slots, a view of the request's block table, that were added to it since the match or the last
    allocation: blocks that others loaded meanwhile, blocks to be loaded, then blocks to be computed.

    NO_BLOCKS: ``shortfall`` blocks are missing and the request is unchanged. DEFERRED: the match is undone; match the
    request again in a later step. PAUSED: the manager plans nothing until ``wakeup``.
    """

    request_id: str
    block_ids: Int32Array = NO_BLOCKS
    failure: AllocationFailure | None = None
    shortfall: int = 0

    @property
    def ok(self) -> bool:
        """True if the block table covers the tokens that were asked for."""
        return self.failure is None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Allocation):
            return NotImplemented
        mine, its = (
            (self.request_id, self.failure, self.shortfall),
            (other.request_id, other.failure, other.shortfall),
        )
        return mine == its and np.array_equal(self.block_ids, other.block_ids)

    def __hash__(self) -> int:
        return hash((self.request_id, self.failure, self.shortfall, self.block_ids.tobytes()))


class LoadStatus(StrEnum):
    """Status of a request's load at its end."""

    CONFIRMED = "confirmed"
    FAILED = "failed"
    OVERDUE = "overdue"


class LoadOutcome(msgspec.Struct, frozen=True):
    """The end of one request's load, once every rank has reported it or its deadline has passed.

    ::

        for outcome in manager.apply(reports) + manager.expire():
            if outcome.status is LoadStatus.FAILED:
                recompute(outcome.request_id, first_token=outcome.recompute_from)

    FAILED: discard the tokens of all the request's steps in flight and compute again from token ``recompute_from``,
    in the same blocks. OVERDUE: a rank may still write into the blocks, so preempt the request with
    ``finish``; its next match reuses blocks on the device and loads nothing.

    ``load`` is the number that ``load_of`` returned: a request that began anew may load again before its former load
    has ended. An ``OffloadManager`` tells the end of each load; a ``CacheManager``, which holds the device blocks, only
    that of a load that a request waits for. ``unplanned``, of an ``OffloadManager``: the device blocks at the end of
    the load that no plan loads. They are free at once, those that a plan loads once every rank has reported it.
    """

    request_id: str
    status: LoadStatus
    recompute_from: int
    error_message: str | None = None
    unplanned: tuple[int, ...] = ()
    load: int = 0


def load_forms(layout: KVLayout) -> LoadForms:
    """Return how the native side tells of the ends of loads."""
    status = LoadStatus
    return LoadForms(
        LoadOutcome,
        status.CONFIRMED,
        status.FAILED,
        status.OVERDUE,
        layout.block_size,
        max(layout.page_records, 1),
    )
