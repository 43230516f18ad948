"""Tiers: pools of blocks over the native core, and the host tier of a service as this process sees it."""

from fdcache.tiers.block_pool import HOST_SPARE, BlockPool
from fdcache.tiers.host_cache import HostCache, host_block_bytes
from fdcache.tiers.host_tier import HostMatch, HostTier, LocalHostTier
from fdcache.tiers.restoring import restore
from fdcache.tiers.storage_pool import StoragePool

__all__ = [
    "HOST_SPARE",
    "BlockPool",
    "HostCache",
    "HostMatch",
    "HostTier",
    "LocalHostTier",
    "StoragePool",
    "host_block_bytes",
    "restore",
]
