"""Where blocks are: one by the beginning of its hash, or those of a path one by one."""

from __future__ import annotations

import time
from typing import Any

from fdcache.service.server.arguments import ArgumentError, Arguments, path
from fdcache.service.server.history import Reason
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.selection import fitting_namespaces, only_namespace
from fdcache.service.server.service import Service
from fdcache.service.server.storage_views import stored_keys


def find_block(service: Service, arguments: Arguments) -> list[dict[str, Any]]:
    """Where blocks are whose hash begins with ``hash`` (hexadecimal)."""
    prefix = str(arguments.get("hash", ""))
    if not 4 <= len(prefix) <= 64 or any(letter not in "0123456789abcdef" for letter in prefix.lower()):
        raise ArgumentError("hash: give 4 to 64 hexadecimal digits")
    found = []
    for namespace in fitting_namespaces(service, arguments):
        tier = namespace.tier
        whole = bytes.fromhex(prefix[: len(prefix) // 2 * 2])
        for slot in tier.starting_with(whole).slots.tolist() if tier is not None else ():
            assert tier is not None
            node = tier.node(slot)
            if node.hash.hex().startswith(prefix.lower()):
                found.append(
                    {
                        "namespace": namespace.id,
                        "tenant": namespace.tenants.name_of(node.tenant),
                        "hash": node.hash.hex(),
                        "slot": slot,
                        "generation": node.generation,
                        "depth": node.depth,
                        "children": node.children,
                        "pins": node.pins,
                        "hits": node.hits,
                        "stored_at": time.time() - node.ready_seconds,
                        "idle_seconds": node.idle_seconds,
                        "checksum": f"{node.checksum:016x}",
                        "unverified": slot in namespace.unverified,
                    }
                )
        for key, (when, reason) in namespace.history.departures.known.items():
            if key.hex().startswith(prefix.lower()):
                found.append(
                    {"namespace": namespace.id, "hash": key.hex(), "reason": reason, "left_at": when}
                )
        _say_what_is_stored(service, namespace, found, prefix)
    return found


def _say_what_is_stored(
    service: Service, namespace: Namespace, found: list[dict[str, Any]], prefix: str
) -> None:
    """Storage is asked for whole keys: those that were found, and the one that was given in full."""
    mine = [each for each in found if each["namespace"] == namespace.id]
    if len(prefix) == 64 and not mine:
        mine = [{"namespace": namespace.id, "hash": prefix.lower()}]
    if not mine:
        return
    keys = path({"hashes": [each["hash"] for each in mine]})
    stored = stored_keys(service.storage_of(namespace), keys)
    for each in mine:
        each["stored"] = bytes.fromhex(each["hash"]) in stored
    found += [each for each in mine if each not in found and each["stored"]]


def explain(service: Service, arguments: Arguments) -> dict[str, Any]:
    """Where each block of a path is, and which one broke the run. ``hashes``: hexadecimal, in path order."""
    namespace = only_namespace(service, arguments)
    hashes = path(arguments)
    namespace.collect_events()
    found = namespace.tier.find(hashes) if namespace.tier is not None else None
    there = (
        {row.tobytes(): slot for row, slot in zip(found.hashes, found.slots.tolist(), strict=True)}
        if found
        else {}
    )
    stored = stored_keys(service.storage_of(namespace), hashes)
    blocks = []
    broken = None
    for position, row in enumerate(hashes):
        key = row.tobytes()
        entry: dict[str, Any] = {"position": position, "hash": key.hex(), "tier": None}
        if key in there and namespace.tier is not None:
            node = namespace.tier.node(there[key])
            entry |= {
                "tier": "host",
                "slot": node.slot,
                "stored_at": time.time() - node.ready_seconds,
                "idle_seconds": node.idle_seconds,
                "hits": node.hits,
            }
        elif key in stored:
            when, _ = namespace.history.departures.known.get(key, (None, Reason.NOT_STORED))
            entry |= {"tier": "storage", "left_host_at": when}
        else:
            when, reason = namespace.history.departures.known.get(key, (None, Reason.NOT_STORED))
            entry |= {"reason": reason, "left_at": when}
            broken = position if broken is None else broken
        blocks.append(entry)
    return {"namespace": namespace.id, "blocks": blocks, "broken_at": broken}
