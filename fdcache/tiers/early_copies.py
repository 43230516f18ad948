"""EarlyCopies: copies to the host tier that end before those of the blocks above them.

A tier takes a block below a parent that it has. A copy that was planned below one in flight, on another stream, may be
reported first: it waits here, block by block, so that neither order of the reports costs a block.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from fdcache._core import HostIndex, SwapInFlight
from fdcache.plans.ledger import Mask
from fdcache.tiers.pool import PENDING


class EarlyCopies:
    """The blocks that were reported and wait for the end of a copy above them.

    ::

        for ended in (early.admit(result), *early.take()):
            complete_copies(ended, None, host, counters)
    """

    def __init__(self, host: HostIndex) -> None:
        self._host = host
        self._waiting: list[SwapInFlight] = []

    @property
    def has_work(self) -> bool:
        """True while blocks wait."""
        return bool(self._waiting)

    def admit(self, result: SwapInFlight) -> SwapInFlight:
        """Return the part of a transfer to the host that may end now; the rest waits."""
        may_end = self._may_end(result)
        if may_end.all():
            return result
        self._waiting.append(_part(result, ~may_end))
        return _part(result, may_end)

    def take(self) -> list[SwapInFlight]:
        """Return parts that wait for nothing any more. Ask again once they have ended, until there are none."""
        if not self._waiting:
            return []
        waiting, self._waiting = self._waiting, []
        return [ended for result in waiting if len((ended := self.admit(result)).swap)]

    def _may_end(self, result: SwapInFlight) -> Mask:
        """Return a mask of the blocks that are not below a copy in flight of another transfer."""
        hashes, parents = result.swap.hash_values, result.swap.parent_hashes
        may_end = np.ones(len(hashes), np.bool_)
        heads = may_end.copy()
        heads[1:] = (parents[1:] != hashes[:-1]).any(axis=1)
        if not (self._host.contains(parents[heads]) == PENDING).any():
            return may_end
        own, held = {row.tobytes() for row in hashes}, set()
        is_pending = (self._host.contains(parents) == PENDING).tolist()
        for i, (block, parent) in enumerate(zip(hashes, parents, strict=True)):
            above = parent.tobytes()
            if is_pending[i] and (above not in own or above in held):
                held.add(block.tobytes())
                may_end[i] = False
        return may_end


def _part(result: SwapInFlight, chosen: Mask) -> SwapInFlight:
    """Return the transfer of the chosen blocks alone."""
    swap = result.swap
    part = SwapInFlight(
        replace(
            swap,
            src_block_ids=swap.src_block_ids[chosen],
            src_generations=swap.src_generations[chosen],
            dst_block_ids=swap.dst_block_ids[chosen],
            dst_generations=swap.dst_generations[chosen],
            hash_values=swap.hash_values[chosen],
            parent_hashes=swap.parent_hashes[chosen],
        )
    )
    part.settle(result.flags[chosen])
    part.checksums = result.checksums[chosen] if len(result.checksums) else result.checksums
    return part
