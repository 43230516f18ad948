"""Control: commands about single prefixes and tenants. Pins, reads and moves that take time go on with each tick."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from fdcache.errors import StorageError
from fdcache.groups import record_keys
from fdcache.hashing import tenant_key
from fdcache.metadata import HashArray, Int32Array
from fdcache.plans.ledger import ROOT, UNKNOWN
from fdcache.service.server.arguments import (
    ArgumentError,
    Arguments,
    check_path,
    hashes_of_path,
    number,
    select_namespace,
)
from fdcache.service.server.host_pool import HostPool
from fdcache.service.server.layout_storage import LayoutStorage
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.service import Service
from fdcache.service.wire.control_views import (
    DeleteView,
    MoveView,
    PinView,
    PrefetchView,
    QuotaView,
    UnpinView,
)
from fdcache.service.wire.protocol import RefusalError
from fdcache.tiers.pool import ABSENT, READY, BlockPool
from fdcache.tiers.storage_index import LocalIndex
from fdcache.tiers.storage_reads import StorageReads
from fdcache.tiers.waiting_fetches import Fetch

PIN_SHARE = 0.5
"""Share of a namespace's blocks, and of a tenant's quota, that pins may hold."""
MOST_PINS = 4096
MOST_JOBS = 64
"""Reads, and moves, that are under way."""
JOB_SECONDS = 300.0
"""A read or move that takes longer is given up."""
LONGEST_SECONDS = 1e9
_CHECK_SECONDS = 1.0
"""Between two looks for pins whose blocks a reset has removed."""


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The records of a path in one namespace."""

    namespace: Namespace
    hashes: HashArray

    @classmethod
    def of(cls, service: Service, arguments: Arguments) -> StoredPrefix:
        """Read ``namespace`` and ``hashes``.

        Raises ``ArgumentError``, also if a block that is there continues another one than that before it in the list.
        """
        namespace = select_namespace(service, arguments)
        if not namespace.layout.page_records:
            raise ArgumentError(
                "namespace: its model keeps states alone, of which no prefix has its own; use `fdcache reset`"
            )
        hashes = hashes_of_path(check_path(arguments.get("hashes")))
        if not len(hashes):
            raise ArgumentError("hashes: give at least one full block; only full blocks are kept")
        keys = record_keys(hashes, namespace.layout.page_records)
        storage = service.storage_of(namespace)
        stored = storage.index.pool if storage and isinstance(storage.index, LocalIndex) else None
        for pool in (namespace.tier, stored):
            if pool is not None:
                _require_path(pool, keys)
        return cls(namespace, keys)

    @property
    def last(self) -> bytes:
        """Hash of the last block."""
        return bytes(self.hashes[-1].tobytes())

    @property
    def on_host(self) -> int:
        """Number of leading blocks in the host tier."""
        tier = self.namespace.tier
        return 0 if tier is None else leading(tier.contains(self.hashes) == READY)

    def __len__(self) -> int:
        return len(self.hashes)


def _require_path(pool: BlockPool, keys: HashArray) -> None:
    """Raise ``ArgumentError`` unless each of these blocks that is there continues the one before it."""
    there = pool.find(keys)
    places = {row.tobytes(): place for place, row in enumerate(keys)}
    if len(places) < len(keys):
        raise ArgumentError(
            "hashes: one is given twice; give all blocks of one prompt in order, from the first on"
        )
    for found, parent in zip(there.hashes, there.parents, strict=True):
        place = places[found.tobytes()]
        before = keys[place - 1].tobytes() if place else ROOT
        if parent.tobytes() not in ({before} if place else {ROOT, UNKNOWN}):
            raise ArgumentError(
                f"hashes: {found.tobytes().hex()[:16]}... does not continue "
                f"{'the hash before it' if place else 'from a beginning'}; give all blocks of one prompt in order, "
                "from the first on"
            )


@dataclass(slots=True)
class _Pin:
    """Blocks that stay in the host tier until ``due``."""

    prefix: StoredPrefix
    tier: HostPool
    lease: int
    slots: Int32Array
    tenant: int
    due: float


@dataclass(slots=True)
class _Prefetch:
    """A read of a prefix from storage."""

    prefix: StoredPrefix
    reads: StorageReads
    fetch: Fetch
    due: float


@dataclass(slots=True)
class _Move:
    """A prefix that leaves the host tier once storage has it."""

    prefix: StoredPrefix
    blocks: int
    due: float
    freed: int = 0
    kept: int = 0
    done: bool = False


class ControlCommands:
    """Commands about prefixes and quotas. It runs in the service's thread; ``tick`` is called regularly."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._numbers = count(int(time.time()))  # a number that an earlier service gave is no pin of this one
        self._pins: dict[int, _Pin] = {}
        self._prefetches: dict[tuple[str, bytes], _Prefetch] = {}
        self._moves: dict[tuple[str, bytes], _Move] = {}
        self._check_at = 0.0
        self.answers = {
            "pin": self.pin,
            "unpin": self.unpin,
            "pins": lambda arguments: list(self.pins()),
            "prefetch": self.prefetch,
            "delete": self.delete,
            "move": self.move,
            "quota": self.set_quota,
        }

    # --- pins -----------------------------------------------------------------------------------------------

    def pin(self, arguments: Arguments) -> PinView:
        """Pin the leading blocks of a prefix that are in the host tier, as many as the budget allows."""
        seconds = number(arguments, "seconds", 300, 0, LONGEST_SECONDS)
        most = int(number(arguments, "most_blocks", 2**31 - 1, 1, 2**31 - 1))
        prefix = StoredPrefix.of(self._service, arguments)
        if len(self._pins) >= MOST_PINS:
            raise RefusalError("busy", f"{MOST_PINS} pins are held; end some with unpin")
        tier, on_host = prefix.namespace.tier, prefix.on_host
        pinned, pin, wanted = 0, None, min(on_host, most)
        if tier is not None and wanted:
            found = tier.find(prefix.hashes[:wanted]).slots
            tenant = tier.node(int(found[0])).tenant
            pinned = self._within_budget(prefix.namespace, tenant, found)
        if tier is not None and pinned:
            lease, pin = tier.open_lease(), next(self._numbers)
            tier.match(lease, prefix.hashes[:pinned], 0)
            self._pins[pin] = _Pin(prefix, tier, lease, found[:pinned], tenant, time.monotonic() + seconds)
        return PinView(
            namespace=prefix.namespace.id,
            blocks=len(prefix),
            host=on_host,
            pin=pin,
            last=prefix.last.hex(),
            pinned=pinned,
            over_budget=wanted - pinned,
            seconds=seconds if pinned else 0.0,
        )

    def _within_budget(self, namespace: Namespace, tenant: int, slots: Int32Array) -> int:
        """Return how many leading ones of these slots may be pinned; those that are pinned already need no room."""
        pins = [each for each in self._pins.values() if each.tier is namespace.tier]
        allowed = _first_new(pins, slots, int(PIN_SHARE * namespace.storable_slots))
        limit = namespace.tenants.limit(tenant)
        if limit is not None:
            own = [each for each in pins if each.tenant == tenant]
            allowed = min(allowed, _first_new(own, slots, int(PIN_SHARE * limit[1])))
        return allowed

    def unpin(self, arguments: Arguments) -> UnpinView:
        """End the pin with a number, or those of exactly this prefix."""
        chosen = arguments.get("pin")
        if chosen is not None:
            ended = [int(number(arguments, "pin", 0, 1, 2**53))]
        else:
            prefix = StoredPrefix.of(self._service, arguments)
            ended = [
                each
                for each, pin in self._pins.items()
                if pin.prefix.namespace is prefix.namespace and pin.prefix.last == prefix.last
            ]
        pins = [self._unpin(each) for each in ended if each in self._pins]
        return UnpinView(len(pins), sum(pins))

    def _unpin(self, number: int) -> int:
        pin = self._pins.pop(number)
        pin.tier.release(pin.lease)
        return len(pin.slots)

    def pins(self) -> Iterator[PinView]:
        """Yield the pins in force."""
        now = time.monotonic()
        for each, pin in self._pins.items():
            yield PinView(
                namespace=pin.prefix.namespace.id,
                blocks=len(pin.prefix),
                host=len(pin.slots),
                pin=each,
                last=pin.prefix.last.hex(),
                pinned=len(pin.slots),
                seconds=max(pin.due - now, 0.0),
            )

    def _end_pins(self, now: float) -> None:
        is_due = now >= self._check_at
        if is_due:
            self._check_at = now + _CHECK_SECONDS
        for each, pin in list(self._pins.items()):
            if now >= pin.due or (is_due and not _is_there(pin)):
                self._unpin(each)

    # --- reads from storage ---------------------------------------------------------------------------------

    def prefetch(self, arguments: Arguments) -> PrefetchView:
        """Begin to read the stored blocks of a prefix into the host tier, or tell how far that is.

        ``source``: address of the node that is asked first for them.
        """
        prefix = StoredPrefix.of(self._service, arguments)
        storage = self._storage_of(prefix.namespace)
        source = arguments.get("source")
        if source is not None:
            _name_source(storage, prefix, source)
        key = prefix.namespace.id, prefix.last
        under_way = self._prefetches.get(key)
        if under_way is None and prefix.on_host < len(prefix):
            under_way = self._begin_prefetch(key, prefix, storage)
        on_host, done = prefix.on_host, under_way is None or under_way.fetch.done
        return PrefetchView(
            namespace=prefix.namespace.id,
            blocks=len(prefix),
            host=on_host,
            reading=_still_reading(storage, prefix, on_host) if under_way is not None else 0,
            done=done,
            source=source,
            refused=_why_refused(storage, source) if source and done and on_host < len(prefix) else None,
        )

    def _begin_prefetch(
        self, key: tuple[str, bytes], prefix: StoredPrefix, storage: LayoutStorage
    ) -> _Prefetch | None:
        if not self._service.grants_slots:
            raise RefusalError("busy", f"the service is {self._service.state}; nothing is read now")
        if len(self._prefetches) >= MOST_JOBS:
            raise RefusalError("busy", f"{MOST_JOBS} prefixes are being read; try again later")
        reads = storage.reads
        if reads is None or not reads.is_open:
            raise RefusalError("busy", "the storage of this namespace is being opened; try again later")
        fetch = reads.begin(prefix.hashes, _nothing_on_device, budget=JOB_SECONDS, bandwidth=float("inf"))
        storage.send()
        begun = _Prefetch(prefix, reads, fetch, time.monotonic() + JOB_SECONDS)
        self._prefetches[key] = begun
        self._end_prefetches(time.monotonic())
        return self._prefetches.get(key)

    def _end_prefetches(self, now: float) -> None:
        for key, each in list(self._prefetches.items()):
            storage = self._service.storage_of(each.prefix.namespace)
            if storage is None or storage.reads is not each.reads:  # its host tier is gone
                del self._prefetches[key]
            elif each.fetch.done or now >= each.due:
                each.reads.cancel(each.fetch)
                del self._prefetches[key]

    # --- moves to storage -----------------------------------------------------------------------------------

    def move(self, arguments: Arguments) -> MoveView:
        """Begin to move a prefix to storage, or tell how far that is. Blocks leave the host once all are stored."""
        prefix = StoredPrefix.of(self._service, arguments)
        storage = self._storage_of(prefix.namespace)
        if storage.reads_from_nodes:
            raise ArgumentError(
                "hashes: FDCACHE_STORAGE=nodes keeps blocks in host tiers alone; what leaves this one would be lost"
            )
        key = prefix.namespace.id, prefix.last
        if (under_way := self._moves.get(key)) is None:
            if len(self._moves) >= MOST_JOBS:
                raise RefusalError("busy", f"{MOST_JOBS} prefixes are being moved; try again later")
            under_way = _Move(prefix, prefix.on_host, time.monotonic() + JOB_SECONDS)
            storage.store(prefix.hashes[: under_way.blocks])
            self._moves[key] = under_way
            self._go_on(under_way, storage, time.monotonic())
        if under_way.done:
            del self._moves[key]
        stored = ~storage.index.is_absent(prefix.hashes)
        return MoveView(
            namespace=prefix.namespace.id,
            blocks=len(prefix),
            host=prefix.on_host,
            stored=int(stored.sum()),
            waiting=int((~stored[: prefix.on_host]).sum()),
            freed=under_way.freed,
            kept=under_way.kept,
            done=under_way.done,
        )

    def _go_on(self, move: _Move, storage: LayoutStorage, now: float) -> None:
        """Remove the moved blocks from the host tier, if all of them are stored."""
        hashes, tier = move.prefix.hashes[: move.blocks], move.prefix.namespace.tier
        is_stored = not len(hashes) or storage.has_stored(hashes)
        if tier is not None and is_stored and not move.done:
            self._service.clients.take_runs(move.prefix.namespace)
            slots = tier.find(hashes).slots
            first = _first_free(tier, slots)
            if first < len(slots):
                move.freed = move.prefix.namespace.drop(hashes[first : first + 1])
            move.kept = first
        move.done = move.done or is_stored or tier is None or now >= move.due

    def _drive_moves(self, now: float) -> None:
        for key, each in list(self._moves.items()):
            storage = self._service.storage_of(each.prefix.namespace)
            if storage is None or now >= each.due + JOB_SECONDS:  # nobody asks for the outcome any more
                del self._moves[key]
            elif not each.done:
                self._go_on(each, storage, now)

    # --- deletions ------------------------------------------------------------------------------------------

    def delete(self, arguments: Arguments) -> DeleteView:
        """Delete the blocks of a prefix from block ``start`` on, and all that continue them, from host and storage.

        Blocks in use stay with their users until these end, and are found by nobody else.
        """
        prefix = StoredPrefix.of(self._service, arguments)
        namespace, storage = prefix.namespace, self._service.storage_of(prefix.namespace)
        first = int(number(arguments, "start", 0, 0, 2**31 - 1)) * namespace.layout.page_records
        is_dry, hashes = bool(arguments.get("dry_run")), prefix.hashes[first:]
        on_host, host, stored = prefix.on_host, 0, 0
        if storage is not None and not isinstance(storage.index, LocalIndex) and len(hashes):
            raise RefusalError(
                "malformed",
                "hashes: other services use this storage too, and none of them can delete its blocks",
            )
        if is_dry:
            host = max(on_host - first, 0)
            stored = 0 if storage is None else int((~storage.index.is_absent(hashes)).sum())
        else:
            with namespace.deleting(hashes):
                if namespace.tier is not None and len(hashes):
                    there = hashes[namespace.tier.contains(hashes) != ABSENT]
                    host = namespace.drop(there[:1])
                stored = storage.delete(hashes) if storage is not None else 0
            self._check_at = 0.0
            self._end_pins(time.monotonic())
        return DeleteView(
            namespace=namespace.id,
            blocks=len(prefix),
            host=prefix.on_host,
            dry_run=is_dry,
            deleted_host=host,
            deleted_storage=stored,
        )

    # --- quotas ---------------------------------------------------------------------------------------------

    def set_quota(self, arguments: Arguments) -> QuotaView:
        """Set the share of a tenant until the service ends. Blocks beyond it go with the tenant's next ones."""
        name = arguments.get("tenant")
        if not isinstance(name, str) or not name:
            raise ArgumentError("tenant: give the name of a tenant")
        share = number(arguments, "share", -1, 0, 1)
        if not share > 0:
            raise ArgumentError("share: give a number above 0 and up to 1")
        before = self._service.namespaces.set_quota(tenant_key(name), name, share)
        return QuotaView(name, share, before)

    # --- the rest -------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """End pins whose time is over, and go on with reads and moves."""
        now = time.monotonic()
        if self._pins:
            self._end_pins(now)
        if self._prefetches:
            self._end_prefetches(now)
        if self._moves:
            self._drive_moves(now)

    def _storage_of(self, namespace: Namespace) -> LayoutStorage:
        storage = self._service.storage_of(namespace)
        if storage is None:
            if self._service.storage is None:
                raise ArgumentError(
                    "hashes: the service has no storage; FDCACHE_STORAGE or --storage gives it one"
                )
            raise RefusalError("busy", "the storage of this namespace is not open; try again later")
        return storage


def leading(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """Return how many leading values are true."""
    gaps = np.flatnonzero(~mask)
    return int(gaps[0]) if len(gaps) else len(mask)


def _first_new(pins: list[_Pin], slots: Int32Array, room: int) -> int:
    """Return how many leading ones of these slots fit into ``room`` beside those that are pinned."""
    held = np.unique(np.concatenate([each.slots for each in pins])) if pins else slots[:0]
    taken = np.cumsum(~np.isin(slots, held)) + len(held)
    return int(np.searchsorted(taken, room, side="right"))


def _is_there(pin: _Pin) -> bool:
    """Return True unless the pinned blocks have been removed."""
    tier, last = pin.prefix.namespace.tier, pin.prefix.hashes[len(pin.slots) - 1 : len(pin.slots)]
    return tier is pin.tier and bool(pin.tier.contains(last)[0] == READY)


def _nothing_on_device(hashes: HashArray) -> int:
    return 0


def _still_reading(storage: LayoutStorage, prefix: StoredPrefix, on_host: int) -> int | None:
    """Return how many blocks behind the first ``on_host`` are stored."""
    return storage.index.run(prefix.hashes, on_host)


def _first_free(tier: HostPool, slots: Int32Array) -> int:
    """Return the first of the blocks of a path from which on nothing uses them, and nothing else continues them."""
    first, below = len(slots), 0
    for slot in slots[::-1].tolist():
        node = tier.node(slot)
        if node.pins or node.holds or node.children > below:
            break
        first, below = first - 1, 1
    return first


def _name_source(storage: LayoutStorage, prefix: StoredPrefix, source: object) -> None:
    """Ask a node first for the blocks that the host tier lacks. Raises ``ArgumentError``."""
    if not isinstance(source, str):
        raise ArgumentError("source: give the address of a node, tcp://host:port")
    try:
        storage.name_source(prefix.hashes[prefix.on_host :], source)
    except StorageError as error:
        raise ArgumentError(f"source: {error}") from error


def _why_refused(storage: LayoutStorage, source: str) -> str:
    """Return why a node has not given all blocks."""
    failures = {each.address: each.failure for each in storage.nodes()}
    return failures.get(source) or f"{source}: does not have the next of these blocks"
