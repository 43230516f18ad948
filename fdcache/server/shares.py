"""Shares: which layout has how much of the arena."""

from __future__ import annotations

import logging
from collections.abc import Set
from pathlib import Path

from fdcache.errors import LayoutError
from fdcache.layout import KVLayout
from fdcache.server.arena import Arena
from fdcache.server.namespace import Namespace
from fdcache.server.recalls import Recalls
from fdcache.server.recovery import recover
from fdcache.server.tenants import Quotas
from fdcache.settings.server import ServerSettings

log = logging.getLogger("fdcache.server")


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
