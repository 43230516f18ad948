"""Tiers: pools of blocks over the native core."""

from fdcache.tiers.block_pool import BlockPool
from fdcache.tiers.restoring import restore

__all__ = ["BlockPool", "restore"]
