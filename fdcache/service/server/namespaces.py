"""Namespaces: who gets the memory of the arena, and what is recovered from an earlier service."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path

from fdcache.errors import LayoutError
from fdcache.layout import KVLayout
from fdcache.service.server.arena import Arena
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.recovery import recover_blocks, shrink_recovered
from fdcache.service.server.router_feed import RouterFeeds
from fdcache.service.server.tenants import Quotas
from fdcache.service.wire.protocol import Recall
from fdcache.settings.cache import EvictionPolicy
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
        self.unsent: list[Namespace] = []
        """Those that ``take_new`` returns."""

    def begin(self, giver: Namespace) -> None:
        """Reclaim the last extent of a namespace, unless that was tried within the last 10 s."""
        now = self._clock()
        self._hold_until = {
            each: until for each, until in self._hold_until.items() if now < until + _RETRY_SECONDS
        }
        if giver not in self._hold_until:
            self._hold_until[giver] = now + _HOLD_SECONDS
            self.unsent.append(giver)

    def is_held(self, namespace: Namespace) -> bool:
        """Return True while no slots may be granted to this namespace."""
        return self._clock() < self._hold_until.get(namespace, 0.0)

    def end(self) -> None:
        """Stop reclaiming: the extent was found."""
        self._hold_until.clear()
        self.unsent.clear()

    def take_new(self) -> Iterable[tuple[Namespace, Recall]]:
        """Return the reclaims that have begun since the last call, to be sent to the clients of each namespace."""
        new, self.unsent = self.unsent, []
        return [(giver, Recall(giver.num_slots - giver.geometry.records_per_extent)) for giver in new]


class Namespaces(dict[bytes, Namespace]):
    """The namespaces by layout fingerprint.

    ``used``, an argument of several methods, has the ids of the namespaces with clients.
    """

    def __init__(self, settings: ServerSettings, arena: Arena, eviction: EvictionPolicy) -> None:
        super().__init__()
        self._eviction = eviction
        self.settings = settings
        self.arena = arena
        self.reclaims = Reclaims()
        self._quotas = Quotas.of(settings)
        self.feeds: RouterFeeds | None = None

    def open(self, layout: KVLayout) -> Namespace:
        """Return the namespace of a layout; a new one has no memory yet. Raises ``UnsupportedLayoutError``."""
        if layout.fingerprint not in self:
            feed = self.feeds.of(layout) if self.feeds is not None else None
            self[layout.fingerprint] = Namespace(
                self.arena, layout, self.settings, self._quotas, self._eviction, feed
            )
        return self[layout.fingerprint]

    def set_quota(self, key: bytes, name: str, share: float) -> float:
        """Set the share of each namespace that a tenant may have, from its next block on; return the former one."""
        before = self._quotas.set_share(key, name, share)
        for namespace in self.values():
            if namespace.tier is not None:
                namespace.tenants.set_limits(namespace.tier, namespace.storable_slots)
        return before

    # --- memory -------------------------------------------------------------------------------------------

    def make_room(self, namespace: Namespace, used: Set[str], *, keep_others: bool = False) -> bool:
        """Grow a namespace, if need be at the cost of one that has more than its share. Return True if it grew.

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

    def recover(self, assigned: list[tuple[str, int, int]], extents: int, *, has_writers: bool) -> int:
        """Recover the blocks in the extents that ``Arena.adopt`` found. Return how many.

        Of an arena with more than ``extents``, the blocks that would be evicted first are given up. ``has_writers``:
        processes that were granted slots by the earlier service may still be writing.
        """
        by_name: dict[str, set[tuple[int, int]]] = {}
        for name, rank, index in assigned:
            by_name.setdefault(name, set()).add((rank, index))
        recovered = {
            namespace: blocks
            for name, found in by_name.items()
            for namespace, blocks in self._recover(name, found)
        }
        self.arena.shrink(extents)
        for namespace, fitting in self._fitting(extents).items():
            if fitting < namespace.num_extents:
                recovered[namespace] = shrink_recovered(namespace, fitting, has_writers=has_writers)
            if not fitting:
                namespace.close()
                del self[namespace.layout.fingerprint]
        self.arena.shrink(extents)
        return sum(recovered.values())

    def _fitting(self, extents: int) -> dict[Namespace, int]:
        """Return how many extents of each rank every namespace keeps.

        Those with more than their blocks need give first, and the larger ones before others.
        """
        left = {namespace: namespace.num_extents for namespace in self.values()}
        while sum(count * each.ranks for each, count in left.items()) > extents:
            giver = max(left, key=lambda each: (left[each] > each.needed_extents, left[each] * each.ranks))
            left[giver] -= 1
        return left

    def _recover(self, name: str, extents: set[tuple[int, int]]) -> Iterator[tuple[Namespace, int]]:
        """Yield the namespace of these extents and the number of its blocks; nothing if they cannot be recovered."""
        prefix = f"{self.arena.directory}/{self.arena.prefix}-{name}"
        path = Path(f"{prefix}.layout")
        lost: list[tuple[int, int]] = []
        whole, layout = 0, None
        try:
            layout = KVLayout.from_json(path.read_bytes())
            whole, lost = _recoverable(extents, layout.record_ranks, self.arena.num_free)
        except (LayoutError, OSError) as error:
            log.warning("namespace %s: its blocks are lost: %s", name, error)
        torn = [f"{prefix}-r{rank}-{index:05d}" for rank, index in sorted(extents) if index >= whole]
        for extent in torn:
            Path(extent).unlink()  # made anew when needed: their headers would be believed on another rank
        self.arena.take_back(torn)
        if layout is None or not whole:
            if path.is_file():
                path.unlink()
            return
        if lost:
            log.warning("namespace %s: %d extents are missing, and the blocks in them lost", name, len(lost))
            self.arena.assign([f"{prefix}-r{rank}-{index:05d}" for rank, index in lost])
        namespace = self.open(layout)
        namespace.adopt(whole)
        for rank, index in lost:
            namespace.memory.extents(rank)[index].headers(namespace.geometry)[:] = 0
        yield namespace, recover_blocks(namespace, namespace.order.take(namespace.num_slots))


def _recoverable(extents: set[tuple[int, int]], ranks: int, spare: int) -> tuple[int, list[tuple[int, int]]]:
    """Return how many extents of each rank can be recovered, and which of them are missing, at most ``spare``."""
    complete = sorted(
        index
        for first, index in extents
        if not first and all((rank, index) in extents for rank in range(ranks))
    )
    while complete:
        whole = complete.pop() + 1
        missing = whole * ranks - sum(rank < ranks and index < whole for rank, index in extents)
        if missing <= spare:
            every = ((rank, index) for rank in range(ranks) for index in range(whole))
            return whole, [each for each in every if each not in extents]
    return 0, []
