"""What the manager answers. Failures of the data path are values here, never exceptions."""

from __future__ import annotations

from enum import StrEnum

import msgspec
import numpy as np

from fdcache.metadata import Int32Array

NO_BLOCKS = np.empty(0, np.int32)


class MatchStatus(StrEnum):
    """What became of a look-up."""

    MATCHED = "matched"
    DEFERRED = "deferred"


class MatchResult(msgspec.Struct, frozen=True):
    """The longest cached prefix of a request, in path order: device blocks, then host, then storage.

    DEFERRED: another request is copying the next block, or the manager is paused. Nothing is pinned; ask again
    in a later step.
    """

    request_id: str
    status: MatchStatus
    num_device_blocks: int = 0
    num_host_blocks: int = 0
    num_storage_blocks: int = 0
    num_cached_tokens: int = 0

    @property
    def total_matched_blocks(self) -> int:
        """Blocks of all tiers together."""
        return self.num_device_blocks + self.num_host_blocks + self.num_storage_blocks


class AllocationFailure(StrEnum):
    """Why a request got no blocks."""

    NO_BLOCKS = "no_blocks"
    DEFERRED = "deferred"
    PAUSED = "paused"


class Allocation(msgspec.Struct, frozen=True):
    """The blocks one request got in this step, or why it got none.

    ``block_ids`` are the slots added to its block table since its match or its last allocation: those that others
    brought to the device meanwhile, those to be loaded, then those to be computed.
    NO_BLOCKS leaves the request as it was, ``shortfall`` blocks are missing; DEFERRED undoes its match, which
    must be asked for again in a later step.
    """

    request_id: str
    block_ids: Int32Array = NO_BLOCKS
    failure: AllocationFailure | None = None
    shortfall: int = 0

    @property
    def ok(self) -> bool:
        """Whether the block table now covers what was asked for."""
        return self.failure is None


class LoadStatus(StrEnum):
    """What became of the blocks that a request loads."""

    CONFIRMED = "confirmed"
    FAILED = "failed"
    OVERDUE = "overdue"


class LoadOutcome(msgspec.Struct, frozen=True):
    """The end of one request's load, once every rank has reported it.

    FAILED: discard the tokens of all its steps in flight and compute again from token ``recompute_from``, in the
    same blocks. OVERDUE: a rank may still be writing into them, so preempt the request (``request_finish``);
    matched again it reuses what is on the device and loads nothing.
    """

    request_id: str
    status: LoadStatus
    recompute_from: int
    error_message: str | None = None
