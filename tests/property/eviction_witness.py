"""Checks after every call to a tier that it evicts in exact leaf-first order of last use.

A use is a pin, or a copy into the tier; a copy out is none. The witness knows of the tier only what ``node`` tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fdcache import _core
from tests.tier_help import hash_list

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
_STEP = (
    "match",
    "match_all",
    "match_more",
    "shorten",
    "allocate",
    "reserve_copies",
    "commit",
    "end_load",
    "release",
    "finish",
)


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
        for name in _CHANGES + _WHOLE:
            setattr(tier, name, self._watched(getattr(tier, name)))
        self._observe()

    def of_requests(self, blocks: _core.BlockManager) -> Any:
        """Return a proxy of the native side of a manager's requests, whose tier this is; it checks each call."""
        return _WatchedBlocks(blocks, self)

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

    def check_allocation(self, gone: list[bytes], order: list[bytes]) -> None:
        """Check the blocks that an allocation evicted against the order before it."""
        assert gone == order[: len(gone)]
        self.evicted += len(gone)

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
    """A ``BlockManager`` that tells a witness of each call, and of the blocks that an allocation evicted."""

    def __init__(self, blocks: _core.BlockManager, witness: EvictionWitness) -> None:
        self._blocks = blocks
        self._witness = witness
        self._before: list[bytes] | None = None
        self._evicted_for_copies = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._blocks, name)
        return self._witness._watched(found) if name in _STEP else found

    def allocate(self, request: _core.RequestState, num_tokens: int) -> int:
        self._before = self._witness.order
        return int(self._witness._watched(self._blocks.allocate)(request, num_tokens))

    def reserve_copies(self, *args: Any) -> _core.CopyReservation:
        taken: _core.CopyReservation = self._witness._watched(self._blocks.reserve_copies)(*args)
        self._evicted_for_copies = len(taken.evicted)
        return taken

    def take_followed(self) -> Any:
        followed = self._blocks.take_followed()
        if self._before is not None:
            gone = [] if followed[2] is None else hash_list(followed[2].hashes)
            self._witness.check_allocation(gone[self._evicted_for_copies :], self._before)
        self._before, self._evicted_for_copies = None, 0
        return followed


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
