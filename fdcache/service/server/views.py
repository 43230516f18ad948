"""What must hold of a service at every moment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from fdcache import __version__
from fdcache.service.server.arguments import ArgumentError, Arguments, number
from fdcache.service.server.block_views import explain, find_block
from fdcache.service.server.figures import client_figures, namespace_figures, tenant_figures
from fdcache.service.server.resets import reset
from fdcache.service.server.selection import fitting_namespaces, only_namespace
from fdcache.service.server.service import Service
from fdcache.service.server.storage_views import storage_figures
from fdcache.service.wire.protocol import Answer, Ask, Refused, Told
from fdcache.settings.effective import EffectiveValue


def check_integrity(service: Service) -> list[str]:
    """Every invariant that does not hold, in words."""
    broken = [
        f"layout {namespace.id}: {text}"
        for namespace in service.namespaces.values()
        if namespace.tier is not None
        for text in namespace.tier.check_integrity()
    ]
    for namespace in service.namespaces.values():
        if namespace.tier is None:
            continue
        clients = service.sessions.of(namespace)
        figures = namespace.tier.stats()
        stocked = sum(len(client.stock) for client in clients)
        leases = sum(
            1 + len(client.runs) + len(client.former) + client.fetches.num_leases for client in clients
        )
        if figures.writing < stocked:
            broken.append(f"layout {namespace.id}: {figures.writing} slots are written, {stocked} granted")
        if figures.leases != leases:
            broken.append(f"layout {namespace.id}: {figures.leases} leases, {leases} known")
    return broken


MOST_TREE = 1000
MOST_TENANTS = 100_000


class Views:
    """Answers tools. It runs in the service's thread and looks at its state directly."""

    def __init__(self, service: Service, config: Mapping[str, EffectiveValue], fingerprint: str) -> None:
        self._service = service
        self._config = config
        self._fingerprint = fingerprint
        self._answers: dict[str, Callable[[Arguments], Any]] = {
            "stats": self.stats,
            "tiers": self.tiers,
            "storage": lambda arguments: storage_figures(self._service.storage),
            "namespaces": self.namespaces,
            "clients": self.clients,
            "tenants": self.tenants,
            "transfers": self.transfers,
            "tree": self.tree,
            "block": lambda arguments: find_block(self._service, arguments),
            "explain": lambda arguments: explain(self._service, arguments),
            "layout": self.layout,
            "config": self.config,
            "reset": lambda arguments: reset(self._service, arguments),
            "pause": lambda arguments: self._pause(True),
            "resume": lambda arguments: self._pause(False),
            "integrity": lambda arguments: check_integrity(self._service),
        }

    def answer(self, ask: Ask) -> Answer:
        """Carry out one question or command."""
        if ask.what not in self._answers:
            return Refused("unknown", f"{ask.what!r} is none of {', '.join(self._answers)}")
        try:
            return Told(msgspec.json.encode(self._answers[ask.what](ask.arguments)))
        except ArgumentError as error:
            return Refused("malformed", str(error))

    # --- views --------------------------------------------------------------------------------------------

    def state(self) -> str:
        """What the service is doing, in a word."""
        if self._service.draining:
            return "draining"
        if self._service.is_loading:
            return "loading"
        if self._service.paused:
            return "paused"
        return "recovering" if self._service.sessions.earlier else "ready"

    def stats(self, arguments: Arguments) -> dict[str, Any]:
        """The whole service in figures."""
        service = self._service
        arena = service.arena
        namespaces = [namespace_figures(each, service) for each in service.namespaces.values()]
        totals = msgspec.to_builtins(service.totals)
        return {
            "version": __version__,
            "state": self.state(),
            "uptime_seconds": time.time() - service.started,
            "config_fingerprint": self._fingerprint,
            "waiting_for_earlier": len(service.sessions.earlier),
            "totals": totals,
            "tiers": {
                "host": {
                    "bytes": arena.total_bytes,
                    "extent_bytes": arena.manifest.extent_bytes,
                    "extents": arena.manifest.extents,
                    "free_extents": arena.num_free,
                    **{
                        name: sum(each["tier"].get(name, 0) for each in namespaces)
                        for name in (
                            "slots",
                            "free",
                            "writing",
                            "ready",
                            "evictable",
                            "pins",
                            "leases",
                            "evictions",
                        )
                    },
                },
                "device": [
                    {**device, "client": client.name}
                    for client in service.clients.values()
                    if (device := client_figures(client).get("device"))
                ],
            },
            "storage": storage_figures(service.storage),
            "namespaces": namespaces,
            "clients": self.clients(arguments),
        }

    def config(self, arguments: Arguments) -> dict[str, Any]:
        """The settings in force by name, each with everything that was given for it; secrets are masked."""
        return {
            "version": __version__,
            "pid": os.getpid(),
            "fingerprint": self._fingerprint,
            "settings": msgspec.to_builtins(self._config),
        }

    def tiers(self, arguments: Arguments) -> dict[str, Any]:
        """Host, device and storage tier in figures."""
        stats = self.stats(arguments)
        return {**stats["tiers"], "storage": stats["storage"]}

    def namespaces(self, arguments: Arguments) -> list[dict[str, Any]]:
        """One entry for each layout."""
        return [namespace_figures(each, self._service) for each in self._service.namespaces.values()]

    def tenants(self, arguments: Arguments) -> list[dict[str, Any]]:
        """The tenants with the most blocks, by layout."""
        limit = int(number(arguments, "limit", 100, 1, MOST_TENANTS))
        return [
            {"namespace": namespace.id, **each}
            for namespace in fitting_namespaces(self._service, arguments)
            for each in tenant_figures(namespace, limit)
        ]

    def clients(self, arguments: Arguments) -> list[dict[str, Any]]:
        """One entry for each client; ``figures`` are its own, as of its last sign of life."""
        now = time.monotonic()
        return [
            {
                "session": f"{client.session:x}",
                "name": client.name,
                "namespace": client.namespace.id,
                "pid": client.live.pid,
                "ranks": sorted(client.ranks.values()),
                "connected_seconds": time.time() - client.since,
                "silent_seconds": now - client.seen,
                "silent": client.silent,
                "stock": len(client.stock),
                "stock_bytes": len(client.stock) * client.namespace.slot_bytes,
                "runs": len(client.runs),
                "lookups": client.lookups,
                "stored": client.stored,
                "device_resets": client.device_resets,
                "device_resets_applied": client.device_resets_applied,
                "figures": client_figures(client),
            }
            for client in self._service.clients.values()
        ]

    def transfers(self, arguments: Arguments) -> list[dict[str, Any]]:
        """What is under way, by client: slots granted to copy into, runs pinned to be read, its own plans.

        ``copied`` are bytes and seconds by direction since it registered.
        """
        return [
            {
                "client": client.name,
                "writable_slots": len(client.stock),
                "pinned_runs": len(client.runs),
                "plans_in_flight": client_figures(client).get("plans_in_flight", 0),
                "queued_backups": client_figures(client).get("queued_backups", 0),
                "copied": {
                    direction: {"bytes": copied.bytes, "seconds": copied.durations.total}
                    for direction, copied in client.traffic.copied.items()
                },
            }
            for client in self._service.clients.values()
        ]

    def layout(self, arguments: Arguments) -> Any:
        """The layout of a namespace, as JSON."""
        return msgspec.json.decode(only_namespace(self._service, arguments).layout.to_json())

    def tree(self, arguments: Arguments) -> list[dict[str, Any]]:
        """The hottest blocks, each with its ancestors, parents first."""
        limit = int(number(arguments, "limit", 30, 1, MOST_TREE))
        found = []
        for namespace in fitting_namespaces(self._service, arguments):
            tier = namespace.tier
            if tier is None:
                continue
            shown = tier.ancestry(tier.hottest(limit).slots)
            for slot, parent in zip(shown.slots.tolist(), shown.parents, strict=True):
                node = tier.node(slot)
                found.append(
                    {
                        "namespace": namespace.id,
                        "hash": node.hash.hex(),
                        "parent": parent.tobytes().hex() if parent.any() else None,
                        "depth": node.depth,
                        "hits": node.hits,
                        "children": node.children,
                        "pins": node.pins,
                        "idle_seconds": node.idle_seconds,
                    }
                )
        return found

    def _pause(self, paused: bool) -> dict[str, Any]:
        self._service.paused = paused
        return {"state": self.state()}
