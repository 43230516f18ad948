"""Tiers: pools of blocks over the native core."""

from fdcache.tiers.block_pool import BlockPool

__all__ = ["BlockPool"]
