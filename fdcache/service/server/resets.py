"""Forgetting what is stored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fdcache.hashing import TENANT_BYTES
from fdcache.service.server.arguments import ArgumentError, Arguments, choice, number
from fdcache.service.server.clients import Client
from fdcache.service.server.figures import client_figures
from fdcache.service.server.layout_storage import LayoutStorage
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.selection import fitting_namespaces
from fdcache.service.server.service import Service
from fdcache.tiers.storage_index import LocalIndex


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


_HOLD_SECONDS = 2.0  # after the last order to drain; an operator who went away holds nobody up
_MOST_SECONDS = 1e12


class Tiers(StrEnum):
    """What can be reset."""

    HOST = "host"
    STORAGE = "storage"
    DEVICE = "device"
    ALL = "all"


class InFlight(StrEnum):
    """What to do about runs that clients are loading, or are about to."""

    KEEP = "keep"
    REFUSE = "refuse"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class ResetOrder:
    """What to forget; ``tenant`` is a key, ``older_than`` seconds without use, 0 for all.

    Device tiers forget everything or nothing: a reset of some blocks of all tiers leaves them alone.
    """

    tiers: Tiers
    namespaces: list[Namespace]
    storages: list[LayoutStorage]
    tenant: bytes | None
    older_than: float
    in_flight: InFlight
    dry_run: bool

    @classmethod
    def of(cls, service: Service, arguments: Arguments) -> ResetOrder:
        """Check the arguments. Raises ``ArgumentError``."""
        tiers = Tiers(choice(arguments, "tier", list(Tiers), Tiers.ALL))
        older_than = number(arguments, "older_than", 0, 0, _MOST_SECONDS)
        tenant = _tenant(arguments)
        if tiers is Tiers.DEVICE and (tenant is not None or older_than):
            raise ArgumentError(
                "tier: a device tier forgets everything or nothing; leave tenant and older_than out"
            )
        storages = fitting_storages(service, arguments) if tiers in {Tiers.STORAGE, Tiers.ALL} else []
        if storages and tenant is not None:
            raise ArgumentError(
                "tenant: storage does not know whose blocks are; reset its host blocks, or a whole layout"
            )
        namespaces = fitting_namespaces(service, arguments, required=not storages)
        if tenant is not None and not any(each.tenants.knows(tenant) for each in namespaces):
            raise ArgumentError(
                f"tenant: no layout knows {arguments.get('tenant_name', tenant.hex())!r}; "
                "`fdcache inspect tenants` lists those with blocks"
            )
        return cls(
            tiers,
            namespaces,
            storages,
            tenant,
            older_than,
            InFlight(choice(arguments, "in_flight", list(InFlight), InFlight.KEEP)),
            bool(arguments.get("dry_run")),
        )

    @property
    def is_partial(self) -> bool:
        """Whether some of a layout's blocks stay."""
        return self.tenant is not None or self.older_than > 0

    @property
    def has_host(self) -> bool:
        """Whether host tiers are reset."""
        return self.tiers in {Tiers.HOST, Tiers.ALL}

    @property
    def has_devices(self) -> bool:
        """Whether device tiers are reset."""
        return self.tiers in {Tiers.DEVICE, Tiers.ALL} and not self.is_partial


def _tenant(arguments: Arguments) -> bytes | None:
    text = arguments.get("tenant")
    if text is None:
        return None
    try:
        key = bytes.fromhex(str(text))
    except ValueError:
        key = b""
    if len(key) != TENANT_BYTES:
        raise ArgumentError(f"tenant: give the key of a tenant, {2 * TENANT_BYTES} hexadecimal digits")
    return key


def reset(service: Service, arguments: Arguments) -> dict[str, Any]:
    """Forget what the arguments say, and report it by tier; ``in_flight`` names what stands against it, if any does.

    A drain keeps new look-ups from finding anything in these layouts while it is asked for again and again. A device
    reset is told to every engine and counted by client.
    """
    order = ResetOrder.of(service, arguments)
    answer: dict[str, Any] = {"dry_run": order.dry_run, "in_flight": []}
    answer |= {"host": [], "storage": [], "device": []}
    clients = [client for client in service.clients.values() if client.namespace in order.namespaces]
    if order.has_host and order.in_flight is not InFlight.KEEP:
        answer["in_flight"] = [_in_flight(client) for client in clients if client.runs]
        if order.in_flight is InFlight.DRAIN and not order.dry_run:
            for namespace in order.namespaces:
                namespace.held_until = time.monotonic() + _HOLD_SECONDS if answer["in_flight"] else 0.0
        if answer["in_flight"] and not order.dry_run:
            return answer
    answer["storage"] = reset_storages(order.storages, order.older_than, dry_run=order.dry_run)
    if order.has_host:
        answer["host"] = [_reset_host(service, clients, namespace, order) for namespace in order.namespaces]
    if order.has_devices:
        answer["device"] = [_reset_device(client, order) for client in clients]
    return answer


def _in_flight(client: Client) -> dict[str, Any]:
    return {
        "client": client.name,
        "session": f"{client.session:x}",
        "namespace": client.namespace.id,
        "pid": client.live.pid,
        "pinned_runs": len(client.runs),
    }


def _reset_host(
    service: Service, clients: list[Client], namespace: Namespace, order: ResetOrder
) -> dict[str, Any]:
    figures = namespace.tier.stats() if namespace.tier is not None else None
    if order.is_partial:
        blocks = _reset_part(namespace, order)
    elif order.dry_run:
        blocks = figures.ready if figures else 0
    else:
        blocks = namespace.reset()
        service.has_news = True  # what a client is granted from now on outlives what it is told of the reset
        for client in clients:
            if client.namespace is namespace:
                client.renew_stock()
    return {
        "namespace": namespace.id,
        "blocks": blocks,
        "bytes": blocks * namespace.slot_bytes,
        "in_use": figures.ready - figures.evictable if figures else 0,
    }


def _reset_part(namespace: Namespace, order: ResetOrder) -> int:
    """Blocks of one tenant or unused for long, and all below them; how many."""
    tier, tenants = namespace.tier, namespace.tenants
    owner = tenants.number(order.tenant) if order.tenant is not None else None
    if tier is None or (order.tenant is not None and owner is None):
        return 0
    if order.older_than or not owner:
        hashes = tier.idle(order.older_than, owner).hashes
    else:
        hashes = tenants.rooted(order.tenant or b"")
    if order.dry_run:
        return len(hashes) if order.older_than or owner is None else int(tier.tenant_entries()[owner])
    return namespace.drop(hashes)


def _reset_device(client: Client, order: ResetOrder) -> dict[str, Any]:
    client.device_resets += 0 if order.dry_run else 1
    device = client_figures(client).get("device")
    return {
        "client": client.name,
        "session": f"{client.session:x}",
        "blocks": device.get("ready", 0) if isinstance(device, dict) else 0,
    }
