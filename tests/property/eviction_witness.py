"""Checks after every call to a tier that it evicts in exact leaf-first order of last use.

A use is a pin, or a copy into the tier; a copy out is none. The witness knows of the tier only what ``node`` tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fdcache import _core
from fdcache.tiers.pool import ABSENT
from tests.tier_help import hash_list, hashes

_CHANGES = (
    "release",
    "match",
    "reserve",
    "reserve_copies",
    "commit",
    "publish",
    "complete",
    "hold",
    "unhold",
)
_WHOLE = ("discard", "drop", "restore", "reset", "resize")
_STEP = ("commit", "take_outcomes", "release", "finish", "wait_for_reads")


class Before(NamedTuple):
    """A tier before a call: the order of eviction, the blocks that only copies keep from it, and parents."""

    order: list[bytes]
    copied: set[bytes]
    parents: dict[bytes, bytes | None]


class EvictionWitness:
    """A proxy of one tier that checks each call."""

    def __init__(self, tier: _core.Tier) -> None:
        self.tier = tier
        self.calls = 0
        self.evicted = 0
        self.passed_over = 0
        self.used_until: dict[tuple[bytes, int], int] = {}
        self.parents: dict[bytes, bytes | None] = {}
        self.order: list[bytes] = []
        self.copied: set[bytes] = set()
        for name in _CHANGES + _WHOLE:
            setattr(tier, name, self._watched(getattr(tier, name)))
        self._observe()

    def of_requests(self, blocks: _core.BlockManager, host: EvictionWitness) -> Any:
        """Return a proxy of the native side of a manager's requests, whose device tier this is; it checks each call."""
        return _WatchedBlocks(blocks, self, host)

    def of_reports(self, reports: _core.PlanReports, host: EvictionWitness) -> Any:
        """Return a proxy of the native side of reports, whose device tier this is; it checks each report."""
        return _WatchedReports(reports, self, host)

    def of_backups(self, planner: _core.BackupPlanner, device: EvictionWitness) -> Any:
        """Return a proxy of the native planner of backups from ``device`` to this tier; it checks each call."""
        return _WatchedPlanner(planner, device, self)

    def check_displaced(self, gone: list[bytes], order: list[bytes]) -> None:
        """Check the blocks that left the tier for copies against the order before them.

        Only blocks that the copies keep, the ancestors of what was reserved, are passed over.
        """
        assert gone == [block for block in order if block in gone]
        last = order.index(gone[-1]) if gone else 0
        assert not {block for block in order[:last] if block not in gone} & set(self.order)
        self.evicted += len(gone)

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            try:
                result = call(*args, **options)
            except BaseException:
                self._observe()
                raise
            if isinstance(result, _core.Reservation | _core.CopyReservation):
                self._check_evicted(result, args)
            self._observe()
            return result

        return watched

    def check_allocation(self, gone: list[bytes], before: Before, kept: set[bytes]) -> None:
        """Check the blocks that an allocation evicted against those before it; it has pinned ``kept`` first.

        If those in the order are too few, blocks follow that only copies have kept, each before its parent.
        """
        free = [block for block in before.order if block not in kept]
        assert gone[: len(free)] == free[: len(gone)]
        copied = gone[len(free) :]
        assert set(copied) <= before.copied - kept
        place = {block: position for position, block in enumerate(copied)}
        assert all(place.get(before.parents[block] or b"", len(gone)) > place[block] for block in copied)
        self.evicted += len(gone)

    def hits(self) -> dict[bytes, int]:
        """Return the hits of the blocks that can be found, or are on their way."""
        return {node.hash: node.hits for node in self.nodes()}

    def nodes(self) -> list[_core.NodeView]:
        """Return the blocks that can be found, or are on their way."""
        nodes = (self.tier.node(slot) for slot in range(self.tier.stats().slots))
        return [node for node in nodes if node.findable]

    def ready_run(self, path: list[bytes]) -> list[bytes]:
        """Return the leading blocks of a path that the tier had at the last observation."""
        return path[: next((i for i, block in enumerate(path) if block not in self.parents), len(path))]

    def used_meanwhile(self, blocks: list[bytes]) -> None:
        """Note that a call has pinned and released these blocks, before it is observed."""
        self.used_until = {key: until for key, until in self.used_until.items() if key[0] not in blocks}

    def _check_evicted(self, taken: Any, args: tuple[Any, ...]) -> None:
        kept: set[bytes | None] = set()
        if isinstance(taken, _core.CopyReservation):
            for named in [*hash_list(args[1]), *hash_list(args[2])]:
                above: bytes | None = named
                while above in self.parents and above not in kept:
                    kept.add(above)
                    above = self.parents[above]
        gone = hash_list(taken.evicted.hashes)
        assert gone == [block for block in self.order if block not in kept][: len(gone)]
        self.evicted += len(gone)

    def _observe(self) -> None:
        self.calls += 1
        nodes = {slot: self.tier.node(slot) for slot in range(self.tier.stats().slots)}
        found = {slot: node for slot, node in nodes.items() if node.findable}
        used = self._with_ancestors(found, lambda node: node.pins > 0 or node.state != _core.SLOT_READY)
        busy = used | self._with_ancestors(found, lambda node: node.holds > 0)
        until: dict[tuple[bytes, int], int] = {}
        for node in sorted(found.values(), key=lambda each: -each.depth):
            if node.slot in used:
                continue
            key = (node.hash, node.generation)
            # What hangs below a block was used with it.
            below = [until[c.hash, c.generation] for c in found.values() if c.parent == node.slot]
            until[key] = max([self.used_until.get(key, self.calls), *below])
        self.used_until = until
        self.parents = {
            node.hash: None if node.parent is None else nodes[node.parent].hash
            for node in found.values()
            if node.state == _core.SLOT_READY
        }
        self.passed_over += len(busy - used)
        self.copied = {found[slot].hash for slot in busy - used}
        listed = self.tier.coldest(len(nodes)).slots.tolist()
        assert sorted(listed) == sorted(found.keys() - busy)
        ages = [until[found[slot].hash, found[slot].generation] for slot in listed]
        assert ages == sorted(ages), "a block that was used later is evicted earlier"
        place = {slot: position for position, slot in enumerate(listed)}
        assert all(place[slot] < place.get(found[slot].parent, len(listed)) for slot in listed)
        self.order = [found[slot].hash for slot in listed]

    @staticmethod
    def _with_ancestors(found: dict[int, Any], begins: Callable[[Any], bool]) -> set[int]:
        reached: set[int] = set()
        for slot, node in found.items():
            at: int | None = slot if begins(node) else None
            while at is not None and at in found and at not in reached:
                reached.add(at)
                at = found[at].parent
        return reached


class _WatchedBlocks:
    """A ``BlockManager`` that tells the witnesses of both tiers of each request's part of a call."""

    def __init__(self, blocks: _core.BlockManager, device: EvictionWitness, host: EvictionWitness) -> None:
        self._blocks = blocks
        self._device = device
        self._host = host
        self._allocations: list[tuple[Before, set[bytes], int]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._blocks, name)
        return self._watched(found) if name in _STEP else found

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return self._host._watched(self._device._watched(call))

    def match(self, requests: list[_core.RequestState], *args: Any) -> list[Any]:
        *same, uses = args
        found: list[Any] = []
        self._blocks.check_match(requests, args[0])
        for i, request in enumerate(requests):
            found += self._watched(self._match)(request, *same, uses and [uses[i]])
        return found

    def _match(
        self, request: _core.RequestState, live: Any, forms: _core.MatchForms, *args: Any
    ) -> list[Any]:
        """Match; whether or not they stay pinned, the blocks that were found have been used."""
        path = hash_list(request.block_hashes)[: self._blocks.matchable(request)]
        path = path if request.use_cache else []
        states = self._device.tier.contains(hashes(path)).tolist()
        hits = self._host.hits()
        found = self._blocks.match([request], live, forms, *args)
        on_host = [block for block, count in self._host.hits().items() if count > hits.get(block, count)]
        on_device = self._device.ready_run(path)
        if forms.cell > 1:
            known = states.index(ABSENT) if ABSENT in states else len(states)
            on_device = on_device[: min(known, (known + len(on_host)) // forms.cell * forms.cell)]
        self._device.used_meanwhile(on_device)
        if on_host:
            self._host.used_meanwhile(self._host.ready_run(path)[: path.index(on_host[-1]) + 1])
        return found

    def allocate(self, demands: list[tuple[_core.RequestState, int]], *args: Any) -> list[Any]:
        given: list[Any] = []
        for demand in demands:
            given += self._watched(self._allocate)(demand, *args)
        return given

    def _allocate(self, demand: tuple[_core.RequestState, int], *args: Any) -> list[Any]:
        """Allocate; a request that was deferred has pinned what was ready meanwhile, and released it."""
        request = demand[0]
        path = hash_list(request.block_hashes)
        publishes = self._blocks.publishes(request)
        before = Before(self._device.order, self._device.copied, self._device.parents)
        given = self._blocks.allocate([demand], *args)
        if not request.is_live and publishes:
            self._device.used_meanwhile(self._device.ready_run(path))
        after = {node.hash: node.pins for node in self._device.nodes()}
        kept = {block for block in path if after.get(block)}
        self._allocations.append((before, kept, len(before.parents.keys() - after.keys())))
        return given

    def finish(self, requests: list[_core.RequestState], live: Any) -> None:
        for request in requests:
            self._watched(self._blocks.finish)([request], live)

    def take_followed(self) -> Any:
        followed = self._blocks.take_followed()
        gone = [] if followed[0] is None else hash_list(followed[0].hashes)
        for before, kept, count in self._allocations:
            self._device.check_allocation(gone[:count], before, kept)
            gone = gone[count:]
        self._allocations.clear()
        return followed


class _WatchedReports:
    """A ``PlanReports`` that tells the witnesses of both tiers of each report."""

    def __init__(self, reports: _core.PlanReports, device: EvictionWitness, host: EvictionWitness) -> None:
        self._reports = reports
        self._device = device
        self._host = host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reports, name)

    def count(self, reports: list[Any]) -> Any:
        return self._host._watched(self._device._watched(self._reports.count))(reports)


class _WatchedPlanner:
    """A ``BackupPlanner`` that tells the witnesses of both tiers of each call."""

    def __init__(self, planner: _core.BackupPlanner, device: EvictionWitness, host: EvictionWitness) -> None:
        self._planner = planner
        self._device = device
        self._host = host

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._planner, name)
        return self._watched(found) if name in ("flush", "clean", "evict") else found

    def _watched(self, call: Callable[..., _core.PlannedBackups]) -> Callable[..., _core.PlannedBackups]:
        def watched(*args: Any) -> _core.PlannedBackups:
            before = self._host.order
            planned: _core.PlannedBackups = self._host._watched(self._device._watched(call))(*args)
            self._host.check_displaced(hash_list(planned.displaced.hashes), before)
            return planned

        return watched
