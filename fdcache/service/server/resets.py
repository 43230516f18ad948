"""Reset: forget the blocks of the host, storage and device tiers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from fdcache.hashing import NO_TENANT, TENANT_BYTES
from fdcache.metadata import HashArray
from fdcache.service.server.arguments import ArgumentError, Arguments, choice, number, select_namespaces
from fdcache.service.server.clients import RegisteredClient
from fdcache.service.server.layout_storage import LayoutStorage
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.service import Service
from fdcache.service.wire.views import (
    DeviceResetView,
    HostResetView,
    InFlightView,
    ResetView,
    StorageResetView,
)
from fdcache.tiers.storage_index import LocalIndex

_DRAIN_SECONDS = 2.0
"""Look-ups stay empty that long after each request to drain, so an operator who went away delays nothing."""
_MAX_SECONDS = 1e12
_NO_HASHES: HashArray = np.empty((0, 32), np.uint8)
_ARGUMENTS = frozenset({"tier", "namespace", "tenant", "tenant_name", "older_than", "in_flight", "dry_run"})


class ResetTiers(StrEnum):
    """Tiers that a reset can name."""

    HOST = "host"
    STORAGE = "storage"
    DEVICE = "device"
    ALL = "all"


class InFlight(StrEnum):
    """Treatment of loads in flight: reset anyway, refuse the reset, or drain the loads first."""

    KEEP = "keep"
    REFUSE = "refuse"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class CheckedReset:
    """A checked request to reset. ``tenant`` is a key, ``older_than`` seconds without use, 0 for all blocks.

    Device tiers are reset as a whole only: a partial reset of all tiers leaves them alone.
    """

    tiers: ResetTiers
    namespaces: list[Namespace]
    storages: list[LayoutStorage]
    tenant: bytes | None
    older_than: float
    in_flight: InFlight
    dry_run: bool

    @classmethod
    def of(cls, service: Service, arguments: Arguments) -> CheckedReset:
        """Check the arguments. Raises ``ArgumentError``, also for an unknown one: it may be a misspelt ``dry_run``."""
        if unknown := sorted(arguments.keys() - _ARGUMENTS):
            raise ArgumentError(f"{unknown[0]}: unknown; a reset takes {', '.join(sorted(_ARGUMENTS))}")
        tiers = ResetTiers(choice(arguments, "tier", list(ResetTiers), ResetTiers.ALL))
        older_than = number(arguments, "older_than", 0, 0, _MAX_SECONDS)
        tenant = _tenant(arguments)
        if tiers is ResetTiers.DEVICE and (tenant is not None or older_than):
            raise ArgumentError("tier: a device tier is reset as a whole; leave tenant and older_than out")
        storages = (
            _select_storages(service, arguments) if tiers in {ResetTiers.STORAGE, ResetTiers.ALL} else []
        )
        if tenant == NO_TENANT and storages:
            raise ArgumentError(
                "tenant: stored blocks of no tenant are those of all; reset a whole namespace"
            )
        if tenant is not None and not all(isinstance(each.index, LocalIndex) for each in storages):
            raise ArgumentError(
                "tenant: other services use this storage too, and it does not keep the tenants of its blocks; "
                "reset tier host, or a whole namespace"
            )
        namespaces = select_namespaces(service, arguments, required=not storages)
        is_known = any(each.tenants.knows(tenant) for each in namespaces) if tenant is not None else True
        if tenant is not None and not is_known and not any(each.owners.knows(tenant) for each in storages):
            raise ArgumentError(
                f"tenant: no namespace knows {arguments.get('tenant_name', tenant.hex())!r}; "
                "`fdcache inspect tenants` lists those with blocks in host tiers"
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
        """True if some blocks of a namespace stay."""
        return self.tenant is not None or self.older_than > 0

    @property
    def deletes(self) -> bool:
        """True if no tier is to have these blocks afterwards, nor to get them from an engine's device."""
        return self.tiers is ResetTiers.ALL and not self.older_than and not self.dry_run

    @property
    def has_host(self) -> bool:
        """True if host tiers are reset."""
        return self.tiers in {ResetTiers.HOST, ResetTiers.ALL}

    @property
    def has_devices(self) -> bool:
        """True if device tiers are reset."""
        return self.tiers in {ResetTiers.DEVICE, ResetTiers.ALL} and not self.is_partial


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


def _select_storages(service: Service, arguments: Arguments) -> list[LayoutStorage]:
    """Return the storages whose namespaces begin with ``namespace``, also of those without clients."""
    if service.storage is None:
        if arguments.get("tier") == "storage":
            raise ArgumentError("tier: the service has no storage; FDCACHE_STORAGE or --storage gives it one")
        return []
    wanted = str(arguments.get("namespace") or "").lower()
    return [each for each in service.storage.layouts.values() if each.id.startswith(wanted)]


def reset(service: Service, arguments: Arguments) -> ResetView:
    """Forget blocks, or with ``dry_run`` count them.

    With ``in_flight`` refuse or drain, nothing is forgotten while clients load from a host tier; the answer names them.
    A drain lets look-ups find nothing for 2 s: ask again until no client is left. A device reset is applied by each
    engine at its next step and acknowledged in the view of clients.
    """
    order = CheckedReset.of(service, arguments)
    answer = ResetView(order.dry_run)
    clients = [client for client in service.clients.values() if client.namespace in order.namespaces]
    if order.has_host and order.in_flight is not InFlight.KEEP:
        answer.in_flight = [
            InFlightView(
                client.name, f"{client.session:x}", client.namespace.id, client.live.pid, len(client.runs)
            )
            for client in clients
            if client.runs
        ]
        if order.in_flight is InFlight.DRAIN and not order.dry_run:
            for namespace in order.namespaces:
                namespace.draining_until = time.monotonic() + _DRAIN_SECONDS if answer.in_flight else 0.0
        if answer.in_flight and not order.dry_run:
            return answer
    # The owners of blocks are those of both tiers: what was read from storage has none in the host tier.
    owned = _owned(service, order)
    if order.deletes:
        ids = [*(each.id for each in order.namespaces), *(each.id for each in order.storages)]
        for each in dict.fromkeys(ids):
            is_known = order.tenant not in (None, NO_TENANT)
            service.delete_from_devices(each, owned, order.tenant or b"", everything=not is_known)
    if order.has_host:
        answer.host = [
            _reset_host(service, clients, namespace, order, owned) for namespace in order.namespaces
        ]
    answer.storage = _reset_storages(order, owned)
    if order.tenant is not None and not order.older_than and not order.dry_run:
        feeds = [each.feed for each in order.namespaces] + [each.feed for each in order.storages]
        for feed in feeds:
            if feed is not None:
                feed.notes.forget_tenant(order.tenant)
    if order.has_devices:
        answer.device = [_reset_device(client, order) for client in clients]
    return answer


def _owned(service: Service, order: CheckedReset) -> HashArray:
    """Return the blocks below the root that belong to the tenant of a reset, if there is one."""
    if (key := order.tenant) is None:
        return _NO_HASHES
    below = [service.storage_of(namespace) for namespace in order.namespaces]
    storages = [*order.storages, *(each for each in below if each is not None)]
    roots = [each.owners.rooted(key) for each in storages]
    return np.concatenate([_NO_HASHES, *roots, *(each.tenants.rooted(key) for each in order.namespaces)])


def _reset_storages(order: CheckedReset, owned: HashArray) -> list[StorageResetView]:
    """Forget stored blocks; their files are erased in the background."""
    if order.older_than and not all(isinstance(each.index, LocalIndex) for each in order.storages):
        raise ArgumentError(
            "older_than: a storage that other services use too keeps no ages; leave it out, or reset tier host"
        )
    return [_reset_storage(storage, order, owned) for storage in order.storages]


def _reset_storage(storage: LayoutStorage, order: CheckedReset, owned: HashArray) -> StorageResetView:
    index = storage.index
    if not isinstance(index, LocalIndex):
        if not order.dry_run:
            storage.reset()
        return StorageResetView(storage.id, None, None)
    stored = index.pool.stats()
    if order.tenant is not None:
        blocks = _reset_stored_of_tenant(storage, order, owned)
    elif order.older_than:
        slots = storage.idle_slots(order.older_than)
        blocks = len(slots) + stored.orphans if order.dry_run else storage.forget(slots)
    else:
        blocks = stored.ready + stored.orphans if order.dry_run else storage.reset()
    return StorageResetView(storage.id, blocks, blocks * storage.layout.block_bytes)


def _reset_stored_of_tenant(storage: LayoutStorage, order: CheckedReset, owned: HashArray) -> int:
    """Forget the stored blocks of a tenant, or those unused for long. Return how many."""
    assert isinstance(storage.index, LocalIndex), "checked before"
    slots = storage.index.pool.below(owned)
    if order.older_than:
        slots = slots[np.isin(slots, storage.idle_slots(order.older_than))]
    if order.dry_run:
        return len(slots)
    return storage.forget(slots) if order.older_than else storage.delete(owned)


def _reset_host(
    service: Service,
    clients: Sequence[RegisteredClient],
    namespace: Namespace,
    order: CheckedReset,
    owned: HashArray,
) -> HostResetView:
    stats = namespace.tier.stats() if namespace.tier is not None else None
    if order.is_partial:
        blocks = _reset_part(namespace, order, owned)
    elif order.dry_run:
        blocks = stats.ready if stats else 0
    else:
        blocks = namespace.reset()
        service.has_urgent_events = True  # a client must hear of the reset before it is granted slots again
        for client in clients:
            if client.namespace is namespace:
                client.renew_stock()
    in_use = stats.ready - stats.evictable if stats else 0
    return HostResetView(namespace.id, blocks, blocks * namespace.slot_bytes, in_use)


def _reset_part(namespace: Namespace, order: CheckedReset, owned: HashArray) -> int:
    """Forget the blocks of a tenant, or those unused for long, with their descendants. Return how many."""
    tier = namespace.tier
    if tier is None:
        return 0
    if order.tenant in (None, NO_TENANT):
        hashes = tier.idle(order.older_than, None if order.tenant is None else 0).hashes
    elif order.older_than:
        idle = tier.idle(order.older_than)
        hashes = idle.hashes[np.isin(idle.slots, tier.below(owned))]
    elif order.dry_run:
        return len(tier.below(owned))
    else:
        hashes = owned
    return len(hashes) if order.dry_run else namespace.drop(hashes)


def _reset_device(client: RegisteredClient, order: CheckedReset) -> DeviceResetView:
    client.device_resets += 0 if order.dry_run else 1
    device = client.reported().get("device") or {}
    return DeviceResetView(client.name, f"{client.session:x}", device.get("ready", 0))
