"""How much of a cached prefix may be reused: whole cells of the engine's grid."""

from __future__ import annotations

from fdcache.errors import ConfigurationError
from fdcache.settings.cache import CacheSettings


class ReuseLimit:
    """Cuts what a look-up found.

    An engine that computes on a fixed grid gives the same bits for a hit and a miss only if the hit ends on that
    grid. Raises ``ConfigurationError`` for a grid that neither divides the block size nor is a multiple of it.
    """

    def __init__(self, settings: CacheSettings, block_size: int) -> None:
        grid = settings.reuse_grid or block_size
        if grid % block_size and block_size % grid:
            raise ConfigurationError(
                f"reuse_grid: {grid} tokens neither divide the block size {block_size} nor are a multiple of it"
            )
        self._cell = max(grid // block_size, 1)

    @property
    def is_on(self) -> bool:
        """Whether it ever cuts anything."""
        return self._cell > 1

    def allowed(self, blocks: int) -> int:
        """How many of so many leading blocks may be reused."""
        return blocks // self._cell * self._cell
