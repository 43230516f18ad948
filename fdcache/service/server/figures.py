"""Namespaces and clients as plain values."""

from __future__ import annotations

from typing import Any

import msgspec

from fdcache.service.server.clients import Client
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.service import Service
from fdcache.service.server.storage_views import layout_figures

_TENANTS_SHOWN = 20
"""Of each layout in figures and metrics: names may be without number."""


def namespace_figures(namespace: Namespace, service: Service) -> dict[str, Any]:
    """One layout: what it is, what it has, what was done with it."""
    figures = namespace.tier.stats() if namespace.tier is not None else None
    names = ("slots", "free", "writing", "ready", "evictable", "pins", "leases", "epoch", "evictions")
    return {
        "namespace": namespace.id,
        "model": namespace.layout.model,
        "revision": namespace.layout.revision,
        "ranks": namespace.ranks,
        "block_size": namespace.layout.block_size,
        "record_bytes": namespace.layout.record_bytes,
        "extents": namespace.num_extents * namespace.ranks,
        "bytes": namespace.memory.nbytes,
        "clients": len(service.sessions.of(namespace)),
        "unverified": len(namespace.unverified),
        "tier": {name: getattr(figures, name) for name in names} if figures else {},
        "tenants": tenant_figures(namespace, _TENANTS_SHOWN),
        "totals": msgspec.to_builtins(namespace.history.counts),
        "storage": layout_figures(storage) if (storage := service.storage_of(namespace)) else None,
    }


def tenant_figures(namespace: Namespace, most: int) -> list[dict[str, Any]]:
    """Its tenants with the most blocks, by their names where a quota names them, else by the beginning of a key."""
    if namespace.tier is None:
        return []
    tenants = namespace.tenants
    blocks = sorted(tenants.blocks(namespace.tier).items(), key=lambda each: -each[1])[:most]
    return [
        {
            "tenant": tenants.quotas.name(key),
            "blocks": count,
            "bytes": count * namespace.slot_bytes,
            "quota": tenants.quotas.share(key),
            "most_blocks": min(tenants.most_blocks(key), namespace.most_slots),
        }
        for key, count in blocks
    ]


def client_figures(client: Client) -> dict[str, Any]:
    """What a client says of itself; nothing if it says nothing that makes sense."""
    try:
        figures = msgspec.json.decode(client.figures, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    sections = (figures.get("counters"), figures.get("device"))
    return figures if all(each is None or isinstance(each, dict) for each in sections) else {}
