"""How much of a cached prefix may be reused: whole cells of the engine's grid, less what looks ahead."""

from __future__ import annotations

import numpy as np

from fdcache.errors import ConfigurationError
from fdcache.metadata import HashArray
from fdcache.settings.cache import CacheSettings
from fdcache.tiers import BlockPool, HostTier

_ABSENT = 0


class ReuseLimit:
    """Cuts a look-up before anything is pinned.

    An engine that computes on a fixed grid gives the same bits for a hit and a miss only if the hit ends on that
    grid. And a block whose KV depends on tokens after it, as a draft layer's does, fits only a request that goes on
    with the same tokens, which is known of every block of a match but the last.

    Raises ``ConfigurationError`` for a grid that neither divides the block size nor is a multiple of it.
    """

    def __init__(
        self, settings: CacheSettings, block_size: int, device: BlockPool, host: HostTier | None
    ) -> None:
        grid = settings.reuse_grid or block_size
        if grid % block_size and block_size % grid:
            raise ConfigurationError(
                f"reuse_grid: {grid} tokens neither divide the block size {block_size} nor are a multiple of it"
            )
        self._cell = max(grid // block_size, 1)
        self._lookahead = -(-settings.lookahead_tokens // block_size)
        self._tiers: list[BlockPool | HostTier] = [device] if host is None else [device, host]

    def cut(self, hashes: HashArray) -> HashArray:
        """The leading hashes that a match may go through."""
        if self._cell == 1 and not self._lookahead:
            return hashes
        known = np.zeros(len(hashes), np.bool_)
        for tier in self._tiers:
            known |= tier.contains(hashes) != _ABSENT
        run = len(known) if known.all() else int(np.argmin(known))
        return hashes[: max(run - self._lookahead, 0) // self._cell * self._cell]
