"""Recalls: memory that a layout stocks, asked back for another one that has less than its share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Set
from pathlib import Path

import numpy as np

from fdcache.errors import LayoutError
from fdcache.hashing import NO_TENANT
from fdcache.layout import KVLayout
from fdcache.metadata import UInt32Array
from fdcache.service.server.arena import Arena
from fdcache.service.server.clients import Client
from fdcache.service.server.layout_memory import READY_HEADER
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.tenants import Quotas
from fdcache.service.wire.protocol import Recall
from fdcache.settings.server import ServerSettings

_HELD = 2.5
"""Seconds; longer than a client that was granted too little, or turned away, waits before it asks again."""
_PAUSE = 10.0
"""Seconds between a recall that freed nothing, because a load or a copy went on there, and the next one."""


class Recalls:
    """Layouts whose last extent is wanted. Until it is given away, or 2.5 s have passed, they are granted no slots."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[Namespace, float] = {}
        self._untold: list[Namespace] = []

    def begin(self, giver: Namespace) -> None:
        """Ask for what is stocked in the last extent of a layout, unless that was tried just now."""
        now = self._clock()
        self._until = {each: until for each, until in self._until.items() if now < until + _PAUSE}
        if giver not in self._until:
            self._until[giver] = now + _HELD
            self._untold.append(giver)

    def is_held(self, namespace: Namespace) -> bool:
        """Whether nothing may be granted to this layout now."""
        return self._clock() < self._until.get(namespace, 0.0)

    def end(self) -> None:
        """Who wanted an extent has one."""
        self._until.clear()
        self._untold.clear()

    def tell(self, clients: Collection[Client], tell: Callable[[bytes, Recall], object]) -> None:
        """Let the clients of these layouts know."""
        for giver in self._untold:
            first = giver.num_slots - giver.geometry.records_per_extent
            for client in clients:
                if client.namespace is giver:
                    tell(client.identity, Recall(first))
        self._untold.clear()


def recover(namespace: Namespace) -> int:
    """Take over every block that stands whole in the extents of all ranks; how many.

    Their checksums are verified when they are first read. Slots with broken headers are free.
    """
    assert namespace.tier is not None
    slots = np.arange(namespace.num_slots, dtype=np.int32)
    headers = [namespace.memory.headers(rank, slots) for rank in range(namespace.ranks)]
    first = headers[0]
    good = first["state"] == READY_HEADER
    payload = namespace.layout.payload_bytes
    for each in headers:
        for name in ("state", "generation"):
            good &= each[name] == first[name]
        for name in ("hash", "parent"):
            good &= (each[name] == first[name]).all(axis=1)
        good &= (each["fingerprint"] == np.frombuffer(namespace.layout.fingerprint[:16], np.uint8)).all(
            axis=1
        )
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
        tenants=_tenants(namespace, chosen),
    )
    kept = [slot for slot, was_taken in zip(ordered, taken.tolist(), strict=True) if was_taken]
    namespace.unverified = set(kept)
    namespace.history.counts.recovered = len(kept)
    return len(kept)


def _tenants(namespace: Namespace, headers: np.ndarray) -> UInt32Array:
    """Whose the blocks below the root are, as the earlier service wrote it down."""
    assert namespace.tier is not None
    parents, hashes = np.ascontiguousarray(headers["parent"]), np.ascontiguousarray(headers["hash"])
    owners = namespace.tenants.restore()
    rooted = hashes[~parents.any(axis=1)]
    keys = b"".join(owners.get(row.tobytes(), NO_TENANT) for row in rooted)
    numbers = namespace.tenants.numbers(namespace.tier, parents, keys, namespace.storable_slots)
    namespace.tenants.note(parents, hashes, keys, np.ones(len(hashes), np.bool_))
    return numbers


def _parents_first(slots: list[int], headers: np.ndarray) -> list[int]:
    """Those of ``slots`` that hang together from the root, each after its parent."""
    children: dict[bytes, list[int]] = {}
    for slot in slots:
        children.setdefault(headers[slot]["parent"].tobytes(), []).append(slot)
    ordered: list[int] = []
    level = children.pop(bytes(32), [])
    while level:
        ordered += level
        level = [child for slot in level for child in children.pop(headers[slot]["hash"].tobytes(), [])]
    return ordered


log = logging.getLogger("fdcache.service.server")


class Shares:
    """The namespaces by fingerprint. ``used`` is always the ids of those that have clients."""

    def __init__(self, settings: ServerSettings, arena: Arena) -> None:
        self.settings = settings
        self.arena = arena
        self.namespaces: dict[bytes, Namespace] = {}
        self.recalls = Recalls()
        self._quotas = Quotas.of(settings)

    def open(self, layout: KVLayout) -> Namespace:
        """The namespace of a layout, without extents if it is new. Raises ``UnsupportedLayoutError``."""
        if layout.fingerprint not in self.namespaces:
            self.namespaces[layout.fingerprint] = Namespace(self.arena, layout, self.settings, self._quotas)
        return self.namespaces[layout.fingerprint]

    def recover(self, assigned: list[tuple[str, int, int]]) -> int:
        """Take over the blocks in the extents of an earlier service; how many."""
        by_namespace: dict[str, set[tuple[int, int]]] = {}
        for name, rank, index in assigned:
            by_namespace.setdefault(name, set()).add((rank, index))
        recovered = 0
        for name, extents in by_namespace.items():
            recovered += self._recover_namespace(name, extents)
        return recovered

    def _recover_namespace(self, name: str, extents: set[tuple[int, int]]) -> int:
        path = Path(f"{self.arena.directory}/{self.arena.prefix}-{name}.layout")
        whole, layout = 0, None
        try:
            layout = KVLayout.from_json(path.read_bytes())
            while all((rank, whole) in extents for rank in range(layout.tp_size)):
                whole += 1
        except (LayoutError, FileNotFoundError) as error:
            log.warning("the blocks of layout %s are lost: %s", name, error)
        prefix = f"{self.arena.directory}/{self.arena.prefix}-{name}"
        torn = [f"{prefix}-r{rank}-{index:05d}" for rank, index in sorted(extents) if index >= whole]
        self.arena.take_back(torn)
        if layout is None or not whole:
            path.unlink(missing_ok=True)
            return 0
        namespace = self.open(layout)
        namespace.adopt(whole)
        return recover(namespace)

    def forget_unused(self, used: Set[str], *, spared: Namespace | None = None) -> None:
        """Give back the extents of layouts without blocks and without clients."""
        for fingerprint, namespace in list(self.namespaces.items()):
            if namespace.id in used or namespace is spared:
                continue
            while namespace.num_extents and namespace.tier is not None and not namespace.tier.stats().ready:
                if not namespace.shrink():
                    break
            if not namespace.num_extents:
                namespace.close()
                del self.namespaces[fingerprint]

    def make_room(self, namespace: Namespace, used: Set[str], *, spare_all: bool = False) -> bool:
        """Let a layout grow, at the cost of one that has more than its share; whether it did.

        Layouts with clients have equal shares, those without have one together; they give first, at last all that
        they have, the one longest without clients before the others.
        Slots in use stay where they are; those that clients only stock are asked back, for the next time.
        ``spare_all``: none gives any.
        """
        self.forget_unused(used, spared=namespace)
        if spare_all and self.arena.num_free < namespace.ranks:
            return False
        active = sum(each.id in used or each is namespace for each in self.namespaces.values())
        others = active < len(self.namespaces)
        share = self.arena.manifest.extents // (active + others)
        givers = sorted(
            (each for each in self.namespaces.values() if each is not namespace and each.num_extents),
            key=lambda each: (each.id in used, -each.num_extents * each.ranks),
        )
        is_short = namespace.num_extents * namespace.ranks < share and not namespace.at_quota
        wanted_back = None
        for giver in givers:
            while (
                is_short
                and self.arena.num_free < namespace.ranks
                and (giver.id not in used or giver.num_extents * giver.ranks > share)
                and giver.num_extents > 1
            ):
                if not giver.shrink():
                    wanted_back = wanted_back or giver
                    break
        if is_short or not namespace.num_extents:
            self._forget_coldest(namespace, used)
        if namespace.grow():
            self.recalls.end()
            return True
        if wanted_back is not None:
            self.recalls.begin(wanted_back)
        return False

    def _forget_coldest(self, namespace: Namespace, used: Set[str]) -> None:
        """Take layouts without clients away, until there is room for an extent on each rank."""
        unused = [each for each in self.namespaces.values() if each is not namespace and each.id not in used]
        for giver in sorted(unused, key=lambda each: each.used_until):
            if self.arena.num_free >= namespace.ranks:
                return
            giver.reset()
            self.forget_unused(used, spared=namespace)
