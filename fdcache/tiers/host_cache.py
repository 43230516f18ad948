"""HostCache: the host tier that every worker of an engine has to make or to map."""

from __future__ import annotations

import msgspec

from fdcache.errors import ConfigurationError
from fdcache.layout import KVLayout
from fdcache.metadata import SLOT_HEADER_BYTES
from fdcache.settings.cache import CacheSettings


class HostCache(msgspec.Struct, frozen=True):
    """Plain data, to be sent to a worker's process.

    ``server`` is None for an arena of the worker's own, of ``num_blocks``; else the service's address.
    """

    num_blocks: int = 0
    server: str | None = None

    @classmethod
    def of(cls, settings: CacheSettings, layout: KVLayout) -> HostCache:
        """Return the host tier that the settings describe: host memory in bytes becomes blocks here and nowhere else.

        Every rank keeps its part of a block. Raises ``ConfigurationError`` for host memory that holds not one block.
        """
        if settings.server is not None:
            return cls(server=settings.server)
        memory, block_bytes = settings.host_memory, host_block_bytes(layout)
        if memory and memory < block_bytes:
            raise ConfigurationError(
                f"host_memory: {memory} bytes hold not one block of {block_bytes} bytes; give at least that, or 0"
            )
        return cls(memory // block_bytes)


def host_block_bytes(layout: KVLayout) -> int:
    """Return the host memory of one block: its record and slot header on every rank."""
    return layout.tp_size * (layout.record_bytes + SLOT_HEADER_BYTES)
