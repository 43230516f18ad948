"""What the manager tells a service of its requests' blocks, so that the service can tell routers of them."""

from __future__ import annotations

from fdcache.manager.keyed import OffloadRequest
from fdcache.manager.requests import Request
from fdcache.tiers.host import HostService


def describe(service: HostService | None, request: OffloadRequest) -> None:
    """Describe the full blocks of a request, unless nobody asks for that. Requests with keys alone have no tokens."""
    notes = service.notes if service is not None else None
    if notes is not None and notes.is_wanted and isinstance(request, Request):
        notes.describe(request.block_hashes, request.tokens, request.note)
