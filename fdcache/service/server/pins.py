"""Pins: prefixes that stay in the host tier for a time, within a budget."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from fdcache.errors import RefusedError
from fdcache.metadata import Int32Array
from fdcache.service.server.arguments import ArgumentError, Arguments, number, whole
from fdcache.service.server.host_pool import HostPool
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.prefixes import StoredPrefix
from fdcache.service.server.service import Service
from fdcache.service.wire.control_views import PinView, UnpinView
from fdcache.tiers.pool import READY

PIN_SHARE = 0.5
"""Share of a namespace's blocks, and of a tenant's quota, that pins may hold."""
MOST_PINS = 4096
LONGEST_SECONDS = 1e9
_CHECK_SECONDS = 1.0
"""Between two looks for pins whose blocks a reset has removed."""


@dataclass(slots=True)
class _Pin:
    """The first ``blocks`` of a prefix, and the states after the last that has some, stay until ``due``.

    ``slots`` are those of all these records.
    """

    prefix: StoredPrefix
    tier: HostPool
    lease: int
    blocks: int
    slots: Int32Array
    tenant: int
    due: float
    over_budget: int

    @property
    def holders(self) -> tuple[HostPool, tuple[HostPool, int]]:
        """Whose budgets it counts for: the tier's, and that of a tenant there."""
        return self.tier, (self.tier, self.tenant)

    @property
    def is_there(self) -> bool:
        """True unless the pinned blocks have been removed."""
        end = self.blocks * self.prefix.records
        last = self.prefix.keys[end - 1 : end]
        return self.prefix.namespace.tier is self.tier and bool(self.tier.contains(last)[0] == READY)

    def view(self, pin: int, now: float) -> PinView:
        """Return what is told of it."""
        prefix, on_host = self.prefix, self.prefix.on_host
        return PinView(
            namespace=prefix.namespace.id,
            blocks=len(prefix),
            host=on_host,
            usable=prefix.usable_of(on_host),
            pin=pin,
            last=prefix.last.hex(),
            pinned=self.blocks,
            over_budget=self.over_budget,
            seconds=max(self.due - now, 0.0),
        )


class _PinnedSlots:
    """How many pins have each slot, and the number of slots that some have."""

    def __init__(self) -> None:
        self._counts = np.zeros(0, np.int32)
        self.distinct = 0

    def add(self, slots: Int32Array, change: int) -> None:
        """Count a pin of these slots, 1 for one that begins and -1 for one that ends."""
        self._cover(slots)
        before = np.count_nonzero(self._counts[slots])
        self._counts[slots] += np.int32(change)
        self.distinct += int(np.count_nonzero(self._counts[slots]) - before)

    def fitting(self, slots: Int32Array, room: int) -> int:
        """Return how many leading ones of these slots fit into ``room`` beside those that are pinned."""
        self._cover(slots)
        taken = np.cumsum(self._counts[slots] == 0) + self.distinct
        return int(np.searchsorted(taken, room, side="right"))

    def _cover(self, slots: Int32Array) -> None:
        if len(slots) and (most := int(slots.max()) + 1) > len(self._counts):
            self._counts = np.concatenate((self._counts, np.zeros(2 * most - len(self._counts), np.int32)))


class PinnedPrefixes:
    """The pins in force. It runs in the service's thread; ``tick`` is called regularly."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._numbers = count(int(time.time()))  # a number that an earlier service gave is no pin of this one
        self._pins: dict[int, _Pin] = {}
        self._held: defaultdict[HostPool | tuple[HostPool, int], _PinnedSlots] = defaultdict(_PinnedSlots)
        self._check_at = 0.0

    def pin(self, arguments: Arguments) -> PinView:
        """Pin the leading blocks of a prefix that are in the host tier, as many as the budget allows.

        No hit is counted: nobody uses them now.
        """
        seconds = number(arguments, "seconds", 300, 0, LONGEST_SECONDS)
        if not seconds:
            raise ArgumentError("seconds: give more than 0")
        most = whole(arguments, "most_blocks", 2**31 - 1, 1, 2**31 - 1)
        prefix = StoredPrefix.of(self._service, arguments)
        if len(self._pins) >= MOST_PINS:
            raise RefusedError("busy", f"{MOST_PINS} pins are held; end some with unpin")
        now, on_host = time.monotonic(), prefix.on_host
        wanted = min(on_host, most)
        if wanted and (made := self._made(prefix, wanted, now + seconds)) is not None:
            number_of_it = next(self._numbers)
            self._pins[number_of_it] = made
            for key in made.holders:
                self._held[key].add(made.slots, 1)
            return made.view(number_of_it, now)
        return PinView(
            namespace=prefix.namespace.id,
            blocks=len(prefix),
            host=on_host,
            usable=prefix.usable_of(on_host),
            pin=None,
            last=prefix.last.hex(),
            pinned=0,
            over_budget=wanted,
        )

    def _made(self, prefix: StoredPrefix, wanted: int, due: float) -> _Pin | None:
        """Return a pin of at most ``wanted`` blocks; None if the budget allows none."""
        tier = prefix.namespace.tier
        assert tier is not None, "it has the blocks"
        tenant = tier.node(int(tier.find(prefix.keys[:1]).slots[0])).tenant
        blocks, end, slots = wanted, 0, np.empty(0, np.int32)
        while blocks:
            end = prefix.usable_of(blocks) if prefix.states else 0
            states = tier.find(prefix.states_at(end)).slots if end else slots[:0]
            slots = np.concatenate((states, tier.find(prefix.keys[: blocks * prefix.records]).slots))
            allowed = (self._within_budget(prefix.namespace, tenant, slots) - len(states)) // prefix.records
            if allowed >= blocks:
                break
            blocks = max(allowed, 0)
        if not blocks:
            return None
        lease, keys = tier.open_lease(), prefix.keys[: blocks * prefix.records]
        tier.match(lease, keys, 0, len(keys))
        if end:
            path = prefix.path_to(end)
            tier.match(lease, path, end * prefix.records, len(path))
        return _Pin(prefix, tier, lease, blocks, slots, tenant, due, wanted - blocks)

    def _within_budget(self, namespace: Namespace, tenant: int, slots: Int32Array) -> int:
        """Return how many leading ones of these slots may be pinned; those that are pinned already need no room."""
        assert namespace.tier is not None
        allowed = self._held_of(namespace.tier).fitting(slots, int(PIN_SHARE * namespace.storable_slots))
        limit = namespace.tenants.limit(tenant)
        if limit is not None:
            own = self._held_of((namespace.tier, tenant))
            allowed = min(allowed, own.fitting(slots, int(PIN_SHARE * limit[1])))
        return allowed

    def _held_of(self, holder: HostPool | tuple[HostPool, int]) -> _PinnedSlots:
        """Return what pins hold of a budget, without an entry for one that has none."""
        return self._held.get(holder) or _PinnedSlots()

    def unpin(self, arguments: Arguments) -> UnpinView:
        """End the pin with a number, or those of exactly this prefix."""
        if arguments.get("pin") is not None:
            if arguments.get("hashes") is not None:
                raise ArgumentError("pin: give a pin or a prefix, not both")
            ended = [whole(arguments, "pin", 0, 1, 2**53)]
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
        for key in pin.holders:
            self._held[key].add(pin.slots, -1)
            if not self._held[key].distinct:
                del self._held[key]
        return pin.blocks

    def count(self, namespace: Namespace) -> int:
        """Return the number of pins of a namespace's blocks."""
        return sum(each.tier is namespace.tier for each in self._pins.values())

    def views(self) -> Iterator[PinView]:
        """Yield the pins in force; some may end meanwhile."""
        for each, pin in list(self._pins.items()):
            if each in self._pins:
                yield pin.view(each, time.monotonic())

    def end_removed(self) -> None:
        """End the pins whose blocks have been removed."""
        self._check_at = 0.0
        self.tick(time.monotonic())

    def tick(self, now: float) -> None:
        """End pins whose time is over, and from time to time those whose blocks have been removed."""
        if not self._pins:
            return
        is_due = now >= self._check_at
        if is_due:
            self._check_at = now + _CHECK_SECONDS
        for each, pin in list(self._pins.items()):
            if now >= pin.due or (is_due and not pin.is_there):
                self._unpin(each)
