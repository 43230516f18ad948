"""Control: commands about single prefixes and tenants. Pins, reads and moves that take time go on with each tick."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from fdcache.errors import RefusedError, StorageError
from fdcache.hashing import tenant_key
from fdcache.metadata import HashArray
from fdcache.service.server.arguments import ArgumentError, Arguments, number, whole
from fdcache.service.server.layout_storage import LayoutStorage
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.pins import PinnedPrefixes
from fdcache.service.server.prefixes import StoredPrefix
from fdcache.service.server.service import Service
from fdcache.service.server.slices import in_batches, json_list
from fdcache.service.wire.control_views import DeleteView, MoveView, PrefetchView, QuotaView
from fdcache.service.wire.views import MissReason
from fdcache.settings.kinds import NO_TENANT_NAME
from fdcache.tiers.pool import ABSENT
from fdcache.tiers.storage_index import LocalIndex
from fdcache.tiers.storage_reads import StorageReads
from fdcache.tiers.waiting_fetches import Fetch

MOST_JOBS = 64
"""Reads, and moves, that are under way."""
PINS_A_SLICE = 16
JOB_SECONDS = 300.0
"""A read or move that takes longer is given up."""


@dataclass(slots=True)
class _Prefetch:
    """Reads of a prefix from storage: its blocks, and the way to the last states that are stored."""

    prefix: StoredPrefix
    reads: StorageReads
    fetches: list[Fetch]
    due: float

    @property
    def done(self) -> bool:
        """True if nothing is left to read."""
        return all(each.done for each in self.fetches)


@dataclass(slots=True)
class _Move:
    """The first ``blocks`` of a prefix and their states, which leave the host tier once storage has them."""

    prefix: StoredPrefix
    blocks: int
    due: float
    freed: int = 0
    kept: int = 0
    done: bool = False

    @property
    def keys(self) -> HashArray:
        """Of all records that are to be stored."""
        records = self.prefix.keys[: self.blocks * self.prefix.records]
        if not self.prefix.states:
            return records
        return np.concatenate((records, self.prefix.host_states(self.blocks)))


class ControlCommands:
    """Commands about prefixes and quotas. It runs in the service's thread; ``tick`` is called regularly."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._pins = PinnedPrefixes(service)
        self._prefetches: dict[tuple[str, bytes], _Prefetch] = {}
        self._moves: dict[tuple[str, bytes], _Move] = {}
        self.answers = {
            "pin": self._pins.pin,
            "unpin": self._pins.unpin,
            "pins": lambda arguments: json_list(in_batches(self._pins.views(), PINS_A_SLICE)),
            "prefetch": self.prefetch,
            "delete": self.delete,
            "move": self.move,
            "quota": self.set_quota,
        }

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
        end = prefix.usable_with(storage.reads)
        if under_way is None and end is not None and (prefix.on_host < len(prefix) or prefix.usable < end):
            under_way = self._begin_prefetch(key, prefix, storage, end)
        self._end_prefetches(time.monotonic())
        on_host = prefix.on_host
        done = end is not None and (under_way is None or under_way.done)
        return PrefetchView(
            namespace=prefix.namespace.id,
            blocks=len(prefix),
            host=on_host,
            usable=prefix.usable_of(on_host),
            reading=_still_reading(storage, prefix, on_host) if under_way is not None else 0,
            done=done,
            source=source,
            refused=_why_refused(storage, source) if source and done and on_host < len(prefix) else None,
        )

    def _begin_prefetch(
        self, key: tuple[str, bytes], prefix: StoredPrefix, storage: LayoutStorage, end: int
    ) -> _Prefetch:
        if not self._service.grants_slots:
            raise RefusedError("busy", f"the service is {self._service.state}; nothing is read now")
        if len(self._prefetches) >= MOST_JOBS:
            raise RefusedError("busy", f"{MOST_JOBS} prefixes are being read; try again later")
        reads = storage.reads
        if reads is None or not reads.is_open:
            raise RefusedError("busy", "the storage of this namespace is being opened; try again later")
        paths = [prefix.keys, *([prefix.path_to(end)] if prefix.states and end else [])]
        fetches = [
            reads.begin(path, _nothing_on_device, budget=JOB_SECONDS, bandwidth=float("inf"))
            for path in paths
        ]
        storage.send()
        begun = _Prefetch(prefix, reads, fetches, time.monotonic() + JOB_SECONDS)
        self._prefetches[key] = begun
        return begun

    def _end_prefetches(self, now: float) -> None:
        for key, each in list(self._prefetches.items()):
            storage = self._service.storage_of(each.prefix.namespace)
            if storage is None or storage.reads is not each.reads:  # its host tier is gone
                del self._prefetches[key]
            elif each.done or now >= each.due:
                for fetch in each.fetches:
                    each.reads.cancel(fetch)
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
                raise RefusedError("busy", f"{MOST_JOBS} prefixes are being moved; try again later")
            under_way = _Move(prefix, prefix.on_host, time.monotonic() + JOB_SECONDS)
            storage.store(under_way.keys)
            self._moves[key] = under_way
            self._go_on(under_way, storage, time.monotonic())
        if under_way.done:
            del self._moves[key]
        stored = prefix.are_there(~storage.index.is_absent(prefix.keys))
        on_host = prefix.on_host
        return MoveView(
            namespace=prefix.namespace.id,
            blocks=len(prefix),
            host=on_host,
            usable=prefix.usable_of(on_host),
            stored=int(stored.sum()),
            waiting=int((~stored[:on_host]).sum()),
            freed=under_way.freed,
            kept=under_way.kept,
            done=under_way.done,
        )

    def _go_on(self, move: _Move, storage: LayoutStorage, now: float) -> None:
        """Remove the moved blocks from the host tier, if all of them and their states are stored."""
        prefix, tier = move.prefix, move.prefix.namespace.tier
        is_stored = not move.blocks or storage.has_stored(move.keys)
        if tier is not None and is_stored and not move.done:
            self._service.clients.take_runs(prefix.namespace)
            there = min(move.blocks, prefix.on_host)
            move.kept = prefix.removable_from(tier, there)
            move.freed = there - move.kept
            if move.freed:
                first = move.kept * prefix.records
                prefix.namespace.drop(prefix.keys[first : first + 1], MissReason.MOVED)
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
        start = whole(arguments, "start", 0, 0, 2**31 - 1)
        keys, is_dry = prefix.keys[start * prefix.records :], bool(arguments.get("dry_run"))
        if storage is not None and not isinstance(storage.index, LocalIndex) and len(keys):
            raise RefusedError(
                "unknown", "storage: other services use it too, and none of them can delete its blocks"
            )
        if is_dry:
            host = max(prefix.on_host - start, 0)
            stored = _stored_blocks(storage, prefix, keys)
        else:
            self._service.delete_from_devices(namespace.id, keys[:1])
            with namespace.deleting(keys):
                host = self._delete_from_host(prefix, keys)
                stored = self._delete_from_storage(prefix, storage, keys)
            self._pins.end_removed()
        on_host = prefix.on_host
        return DeleteView(
            namespace=namespace.id,
            blocks=len(prefix),
            host=on_host,
            usable=prefix.usable_of(on_host),
            dry_run=is_dry,
            deleted_host=host,
            deleted_storage=stored,
        )

    @staticmethod
    def _delete_from_host(prefix: StoredPrefix, keys: HashArray) -> int:
        tier = prefix.namespace.tier
        if tier is None or not len(keys):
            return 0
        first = keys[tier.contains(keys) != ABSENT][:1]
        blocks = prefix.blocks_below(tier, first)
        prefix.namespace.drop(first, MissReason.DELETED)
        return blocks

    @staticmethod
    def _delete_from_storage(prefix: StoredPrefix, storage: LayoutStorage | None, keys: HashArray) -> int:
        if storage is None or not len(keys):
            return 0
        assert isinstance(storage.index, LocalIndex)
        blocks = prefix.blocks_below(storage.index.pool, keys)
        prefix.namespace.history.count_deleted(keys[~storage.index.is_absent(keys)])
        storage.delete(keys)
        return blocks

    # --- quotas ---------------------------------------------------------------------------------------------

    def set_quota(self, arguments: Arguments) -> QuotaView:
        """Set the share of a tenant until the service ends. Blocks beyond it go with the tenant's next ones."""
        name = arguments.get("tenant")
        if not isinstance(name, str) or not name:
            raise ArgumentError("tenant: give the name of a tenant")
        if name == NO_TENANT_NAME:
            raise ArgumentError(f"tenant: {name} stands for blocks without a tenant, which have no quota")
        share = number(arguments, "share", -1, 0, 1)
        if not share > 0:
            raise ArgumentError("share: give a number above 0 and up to 1")
        before = self._service.namespaces.set_quota(tenant_key(name), name, share)
        return QuotaView(name, share, before)

    # --- the rest -------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """End pins whose time is over, and go on with reads and moves."""
        now = time.monotonic()
        self._pins.tick(now)
        if self._prefetches:
            self._end_prefetches(now)
        if self._moves:
            self._drive_moves(now)

    def leases(self, namespace: Namespace) -> int:
        """Return how many leases commands hold in a host tier: pins, and reads that have brought blocks."""
        reads = [each for each in self._prefetches.values() if each.prefix.namespace is namespace]
        return self._pins.count(namespace) + sum(fetch.lease != 0 for each in reads for fetch in each.fetches)

    def _storage_of(self, namespace: Namespace) -> LayoutStorage:
        storage = self._service.storage_of(namespace)
        if storage is None:
            if self._service.storage is None:
                raise RefusedError(
                    "unknown", "storage: the service has none; FDCACHE_STORAGE or --storage gives it one"
                )
            raise RefusedError("busy", "the storage of this namespace is not open; try again later")
        return storage


def _nothing_on_device(hashes: HashArray) -> int:
    return 0


def _still_reading(storage: LayoutStorage, prefix: StoredPrefix, on_host: int) -> int | None:
    """Return how many blocks behind the first ``on_host`` are stored."""
    run = storage.index.run(prefix.keys, on_host * prefix.records)
    return None if run is None else run // prefix.records


def _stored_blocks(storage: LayoutStorage | None, prefix: StoredPrefix, keys: HashArray) -> int:
    """Return how many of these blocks are stored."""
    return 0 if storage is None else int(prefix.are_there(~storage.index.is_absent(keys)).sum())


def _name_source(storage: LayoutStorage, prefix: StoredPrefix, source: object) -> None:
    """Ask a node first for the blocks that the host tier lacks. Raises ``ArgumentError``."""
    if not isinstance(source, str):
        raise ArgumentError("source: give the address of a node, tcp://host:port")
    try:
        storage.name_source(prefix.keys[prefix.on_host * prefix.records :], source)
    except StorageError as error:
        raise ArgumentError(f"source: {error}") from error


def _why_refused(storage: LayoutStorage, source: str) -> str:
    """Return why a node has not given all blocks."""
    failures = {each.address: each.failure for each in storage.nodes()}
    return failures.get(source) or f"{source}: does not have the next of these blocks"
