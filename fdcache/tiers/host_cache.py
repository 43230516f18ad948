"""HostCache: what the scheduler side tells every worker of the host tier."""

from __future__ import annotations

import msgspec


class HostCache(msgspec.Struct, frozen=True):
    """Plain data, to be sent to a worker's process.

    ``server`` is None for an arena of the worker's own, of ``num_blocks``; else the service's address, and
    ``engine`` the scheduler process's live file.
    """

    num_blocks: int = 0
    server: str | None = None
    engine: str = ""
