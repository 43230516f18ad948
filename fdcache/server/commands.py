"""What tools may do to a service's blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from fdcache.server.arguments import ArgumentError, Arguments, number
from fdcache.server.namespace import Namespace
from fdcache.server.service import Service
from fdcache.server.storage_reset import fitting_storages, reset_storages


def fitting_namespaces(service: Service, arguments: Arguments, *, required: bool = True) -> list[Namespace]:
    """The layouts that ``namespace``, the beginning of a name, fits; all without it.

    Raises ``ArgumentError`` when none is ``required`` to and does.
    """
    wanted = arguments.get("namespace")
    if wanted is None:
        return list(service.namespaces.values())
    fitting = [each for each in service.namespaces.values() if each.id.startswith(str(wanted).lower())]
    if not fitting and required:
        raise ArgumentError(f"namespace: none is called {wanted!r}; see `fdcache inspect namespaces`")
    return fitting


def reset(service: Service, arguments: Arguments) -> dict[str, Any]:
    """Forget blocks: ``tier`` host, storage, device or all; of one ``namespace`` or all; ``older_than`` seconds.

    ``dry_run`` only says what would go. A device reset is told to every engine and counted by client.
    """
    tier = str(arguments.get("tier", "all"))
    if tier not in {"host", "storage", "device", "all"}:
        raise ArgumentError(f"tier: {tier!r} is not host, storage, device or all")
    older = number(arguments, "older_than", 0, 0, 1e12)
    dry = bool(arguments.get("dry_run"))
    answer: dict[str, Any] = {"dry_run": dry, "host": [], "storage": [], "device": []}
    stored = fitting_storages(service, arguments) if tier in {"storage", "all"} else []
    chosen = fitting_namespaces(service, arguments, required=not stored)
    answer["storage"] = reset_storages(stored, older, dry_run=dry)
    if tier in {"host", "all"}:
        answer["host"] = [_reset_host(service, namespace, older, dry) for namespace in chosen]
    if tier in {"device", "all"}:
        for client in service.clients.values():
            if client.namespace not in chosen:
                continue
            client.device_resets += 0 if dry else 1
            answer["device"].append({"client": client.name, "session": f"{client.session:x}"})
    return answer


def _reset_host(service: Service, namespace: Namespace, older: float, dry: bool) -> dict[str, Any]:
    tier = namespace.tier
    figures = tier.stats() if tier is not None else None
    pinned = figures.ready - figures.evictable if figures else 0
    if tier is None or figures is None:
        blocks = 0
    elif older:
        old = [
            node.hash
            for slot in range(namespace.num_slots)
            if (node := tier.node(slot)).findable and node.idle_seconds >= older
        ]
        rows = np.frombuffer(b"".join(old), np.uint8).reshape(-1, 32)
        blocks = len(old) if dry else namespace.drop(rows)
    else:
        blocks = figures.ready if dry else namespace.reset()
        if not dry:
            for client in service.clients.values():
                if client.namespace is namespace:
                    client.renew_stock()
    return {
        "namespace": namespace.id,
        "blocks": blocks,
        "bytes": blocks * namespace.layout.record_bytes * namespace.ranks,
        "in_use": pinned,
    }
