"""Forgetting what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fdcache.manager.storage_index import LocalIndex
from fdcache.server.arguments import ArgumentError, Arguments
from fdcache.server.layout_storage import LayoutStorage
from fdcache.server.service import Service


def fitting_storages(service: Service, arguments: Arguments) -> list[LayoutStorage]:
    """The storages of the layouts whose names begin with ``namespace``, of all without it; also without clients.

    Raises ``ArgumentError`` for the tier storage of a service that has none.
    """
    if service.storage is None:
        if arguments.get("tier") == "storage":
            raise ArgumentError("tier: the service has no storage; FDCACHE_STORAGE or --storage gives it one")
        return []
    wanted = str(arguments.get("namespace") or "").lower()
    return [each for each in service.storage.layouts.values() if each.id.startswith(wanted)]


def reset_storages(chosen: Sequence[LayoutStorage], older: float, *, dry_run: bool) -> list[dict[str, Any]]:
    """Forget what is stored, or only what nobody has used for ``older`` seconds; what that frees, by layout.

    ``blocks`` are None where others store too and nobody here knows how many there are. The files follow in the
    background. Raises ``ArgumentError`` where there are no ages, before anything is forgotten.
    """
    if older and not all(isinstance(each.index, LocalIndex) for each in chosen):
        raise ArgumentError(
            "older_than: a storage that others use too keeps no ages; leave it out, or reset the host tier alone"
        )
    return [_reset(storage, older, dry_run) for storage in chosen]


def _reset(storage: LayoutStorage, older: float, dry_run: bool) -> dict[str, Any]:
    index = storage.index
    if not isinstance(index, LocalIndex):
        blocks = None
        if not dry_run:
            storage.reset()
    elif older:
        slots = storage.idle_slots(older)
        blocks = len(slots) if dry_run else storage.forget(slots)
    else:
        blocks = index.pool.stats().ready if dry_run else storage.reset()
    layout = storage.layout
    return {
        "namespace": storage.id,
        "blocks": blocks,
        "bytes": None if blocks is None else blocks * layout.record_bytes * layout.tp_size,
    }
