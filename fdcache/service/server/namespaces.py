"""Namespaces: who gets the memory of the arena, and what is recovered from an earlier service."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Set
from pathlib import Path

import numpy as np

from fdcache.errors import LayoutError
from fdcache.hashing import NO_TENANT
from fdcache.layout import KVLayout
from fdcache.metadata import UInt32Array
from fdcache.service.server.arena import Arena
from fdcache.service.server.namespace import READY_HEADER, Namespace
from fdcache.service.server.tenants import Quotas
from fdcache.service.wire.protocol import Recall
from fdcache.settings.cache import Eviction
from fdcache.settings.server import ServerSettings

log = logging.getLogger(__name__)

_HOLD_SECONDS = 2.5
"""Longer than a client waits before it asks again, after it was granted too little or was turned away."""
_RETRY_SECONDS = 10.0
"""Between a reclaim that freed nothing, because copies were in flight, and the next one."""


class Reclaims:
    """Namespaces that shall give up their last extent.

    Their clients are asked to return the slots that they stock there. Until the extent is free, for at most 2.5 s,
    these namespaces are granted no slots.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._hold_until: dict[Namespace, float] = {}
        self._unsent: list[Namespace] = []

    def begin(self, giver: Namespace) -> None:
        """Reclaim the last extent of a namespace, unless that was tried within the last 10 s."""
        now = self._clock()
        self._hold_until = {
            each: until for each, until in self._hold_until.items() if now < until + _RETRY_SECONDS
        }
        if giver not in self._hold_until:
            self._hold_until[giver] = now + _HOLD_SECONDS
            self._unsent.append(giver)

    def is_held(self, namespace: Namespace) -> bool:
        """Return True while no slots may be granted to this namespace."""
        return self._clock() < self._hold_until.get(namespace, 0.0)

    def end(self) -> None:
        """Stop reclaiming: the extent was found."""
        self._hold_until.clear()
        self._unsent.clear()

    def take_new(self) -> Iterable[tuple[Namespace, Recall]]:
        """Return the reclaims that have begun since the last call, to be sent to the clients of each namespace."""
        new, self._unsent = self._unsent, []
        return [(giver, Recall(giver.num_slots - giver.geometry.records_per_extent)) for giver in new]


class Namespaces(dict[bytes, Namespace]):
    """The namespaces by layout fingerprint.

    ``used``, an argument of several methods, has the ids of the namespaces with clients.
    """

    def __init__(self, settings: ServerSettings, arena: Arena, eviction: Eviction) -> None:
        super().__init__()
        self._eviction = eviction
        self.settings = settings
        self.arena = arena
        self.reclaims = Reclaims()
        self._quotas = Quotas.of(settings)

    def open(self, layout: KVLayout) -> Namespace:
        """Return the namespace of a layout; a new one has no memory yet. Raises ``UnsupportedLayoutError``."""
        if layout.fingerprint not in self:
            self[layout.fingerprint] = Namespace(
                self.arena, layout, self.settings, self._quotas, self._eviction
            )
        return self[layout.fingerprint]

    # --- memory -------------------------------------------------------------------------------------------

    def make_room(self, namespace: Namespace, used: Set[str], *, keep_others: bool = False) -> bool:
        """Let a namespace grow, if need be at the cost of one that has more than its share. Return True if it grew.

        Namespaces with clients have equal shares; those without have one share together and give first, the one
        longest without clients before the others. Slots in use stay; slots that clients only stock are reclaimed,
        so that a later call succeeds. With ``keep_others`` no namespace gives anything.
        """
        self.remove_unused(used, keep=namespace)
        if keep_others and self.arena.num_free < namespace.ranks:
            return False
        active = sum(each.id in used or each is namespace for each in self.values())
        others = active < len(self)
        share = self.arena.manifest.extents // (active + others)
        givers = sorted(
            (each for each in self.values() if each is not namespace and each.num_extents),
            key=lambda each: (each.id in used, -each.num_extents * each.ranks),
        )
        is_short = namespace.num_extents * namespace.ranks < share and not namespace.at_quota
        stuck = None
        for giver in givers:
            while (
                is_short
                and self.arena.num_free < namespace.ranks
                and (giver.id not in used or giver.num_extents * giver.ranks > share)
                and giver.num_extents > 1
            ):
                if not giver.shrink():
                    stuck = stuck or giver
                    break
        if is_short or not namespace.num_extents:
            self._remove_coldest(namespace, used)
        if namespace.grow():
            self.reclaims.end()
            return True
        if stuck is not None:
            self.reclaims.begin(stuck)
        return False

    def remove_unused(self, used: Set[str], *, keep: Namespace | None = None) -> None:
        """Return the extents of namespaces without blocks and clients to the arena."""
        for fingerprint, namespace in list(self.items()):
            if namespace.id in used or namespace is keep:
                continue
            while namespace.num_extents and namespace.tier is not None and not namespace.tier.stats().ready:
                if not namespace.shrink():
                    break
            if not namespace.num_extents:
                namespace.close()
                del self[fingerprint]

    def _remove_coldest(self, namespace: Namespace, used: Set[str]) -> None:
        """Remove namespaces without clients until one extent per rank is free."""
        unused = [each for each in self.values() if each is not namespace and each.id not in used]
        for giver in sorted(unused, key=lambda each: each.last_used):
            if self.arena.num_free >= namespace.ranks:
                return
            giver.reset()
            self.remove_unused(used, keep=namespace)

    # --- recovery -----------------------------------------------------------------------------------------

    def recover(self, assigned: list[tuple[str, int, int]]) -> int:
        """Recover the blocks in the extents that ``Arena.adopt`` found. Return how many."""
        by_name: dict[str, set[tuple[int, int]]] = {}
        for name, rank, index in assigned:
            by_name.setdefault(name, set()).add((rank, index))
        return sum(self._recover(name, extents) for name, extents in by_name.items())

    def _recover(self, name: str, extents: set[tuple[int, int]]) -> int:
        path = Path(f"{self.arena.directory}/{self.arena.prefix}-{name}.layout")
        whole, layout = 0, None
        try:
            layout = KVLayout.from_json(path.read_bytes())
            while all((rank, whole) in extents for rank in range(layout.tp_size)):
                whole += 1
        except (LayoutError, FileNotFoundError) as error:
            log.warning("namespace %s: its blocks are lost: %s", name, error)
        prefix = f"{self.arena.directory}/{self.arena.prefix}-{name}"
        torn = [f"{prefix}-r{rank}-{index:05d}" for rank, index in sorted(extents) if index >= whole]
        self.arena.take_back(torn)
        if layout is None or not whole:
            path.unlink(missing_ok=True)
            return 0
        namespace = self.open(layout)
        namespace.adopt(whole)
        return _recover_blocks(namespace)


def _recover_blocks(namespace: Namespace) -> int:
    """Restore every block whose header is valid and equal on all ranks. Return how many.

    Their checksums are verified by the first load. Slots with broken headers become free.
    """
    assert namespace.tier is not None
    slots = np.arange(namespace.num_slots, dtype=np.int32)
    headers = [namespace.memory.headers(rank, slots) for rank in range(namespace.ranks)]
    first = headers[0]
    good = first["state"] == READY_HEADER
    payload = namespace.layout.payload_bytes
    fingerprint = np.frombuffer(namespace.layout.fingerprint[:16], np.uint8)
    for each in headers:
        for name in ("state", "generation"):
            good &= each[name] == first[name]
        for name in ("hash", "parent"):
            good &= (each[name] == first[name]).all(axis=1)
        good &= (each["fingerprint"] == fingerprint).all(axis=1)
        good &= each["payload_bytes"] == payload
    candidates = [
        slot
        for slot in np.flatnonzero(good).tolist()
        if all(table.header(slot).is_valid for table in namespace.memory.tables)
    ]
    newest = max(int(each["generation"].max(initial=0)) for each in headers)
    ordered = _parents_first(candidates, first)
    chosen = first[ordered]
    taken = namespace.tier.restore(
        np.array(ordered, np.int32),
        np.ascontiguousarray(chosen["generation"]),
        np.ascontiguousarray(chosen["hash"]),
        np.ascontiguousarray(chosen["parent"]),
        np.ascontiguousarray(chosen["payload_checksum"]),
        generation=min(newest + 1, 0xFFFFFFFF),
        tenants=_recover_tenants(namespace, chosen),
    )
    kept = np.flatnonzero(taken)
    namespace.set_unverified(np.array(ordered)[kept].tolist(), np.ascontiguousarray(chosen["hash"][kept]))
    namespace.history.totals.recovered = len(kept)
    return len(kept)


def _recover_tenants(namespace: Namespace, headers: np.ndarray) -> UInt32Array:
    """Return the tenant numbers of recovered blocks, from the file that the earlier service wrote."""
    assert namespace.tier is not None
    parents, hashes = np.ascontiguousarray(headers["parent"]), np.ascontiguousarray(headers["hash"])
    owners = namespace.tenants.restore()
    roots = hashes[~parents.any(axis=1)]
    keys = b"".join(owners.get(row.tobytes(), NO_TENANT) for row in roots)
    numbers = namespace.tenants.numbers(namespace.tier, parents, keys, namespace.storable_slots)
    namespace.tenants.note(parents, hashes, keys, np.ones(len(hashes), np.bool_))
    return numbers


def _parents_first(slots: list[int], headers: np.ndarray) -> list[int]:
    """Return the slots that are connected to the root, each after its parent."""
    children: dict[bytes, list[int]] = {}
    for slot in slots:
        children.setdefault(headers[slot]["parent"].tobytes(), []).append(slot)
    ordered: list[int] = []
    level = children.pop(bytes(32), [])
    while level:
        ordered += level
        level = [child for slot in level for child in children.pop(headers[slot]["hash"].tobytes(), [])]
    return ordered
