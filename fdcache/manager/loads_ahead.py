"""Loads ahead: blocks that were read from storage go on to the device while the blocks after them are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

import numpy as np

from fdcache._core import CopyReservation
from fdcache.layout import KVLayout
from fdcache.manager.copy_out import CopyOut
from fdcache.manager.requests import Request
from fdcache.manager.tiers import Tiers
from fdcache.metadata import HashArray, SwapPurpose
from fdcache.plans.blocks import parents_of
from fdcache.plans.ledger import NO_CHECKSUMS, OpenPlan
from fdcache.tiers.host import HostTier
from fdcache.tiers.pool import PENDING, READY, RESERVED, BlockPool
from fdcache.tiers.statistics import Counters


@dataclass(slots=True)
class _Ahead:
    """Blocks ``first`` to ``stop`` of a request's path that were loaded while it waited for the blocks after them.

    Those from ``read_from`` on were read for it. The last load is waited for until ``deadline``. ``has_ended``: one of
    the blocks did not come or has gone again, and no other is loaded.
    """

    first: int
    stop: int
    read_from: int
    deadline: float = -inf
    has_ended: bool = False


MOST_BYTES = 128 << 20
"""Most bytes of one load on all ranks: loads of steps queue behind it."""

_SPARE = 16
"""One of so many device blocks stays free or evictable, beside those that the request needs."""


class LoadsAhead:
    """Loads of requests that wait for storage: at most one of each request is in flight.

    A block that was loaded ahead is one like any other in the device tier: found once every rank has reported its copy,
    and evictable. The host tier, of this process or a service, keeps it for the request, so that nothing is lost if it
    is evicted. A request waits for its load up to ``timeout`` seconds. Nothing is loaded while ``may_load`` returns
    False.
    """

    def __init__(
        self,
        layout: KVLayout,
        device: BlockPool,
        host: HostTier,
        copies: CopyOut,
        counters: Counters,
        plan: Callable[[], OpenPlan],
        clock: Callable[[], float],
        timeout: float,
        may_load: Callable[[], bool],
    ) -> None:
        self._block_size = layout.block_size
        self._most = max(MOST_BYTES // (layout.payload_bytes * layout.tp_size), 1)
        self._device = device
        self._host = host
        self._copies = copies
        self._counters = counters
        self._plan = plan
        self._clock = clock
        self._timeout = timeout
        self._may_load = may_load
        self._ahead: dict[str, _Ahead] = {}

    def load(self, request: Request, path: HashArray, read: range) -> None:
        """Plan to load blocks of a request's ``path``: those up to ``read`` are there, and it waits for others.

        Does nothing while its last load is in flight, or the device has no room for the whole request.
        """
        arrived, ahead = read.stop, self._ahead.get(request.request_id)
        if not arrived or (ahead is not None and (ahead.has_ended or arrived <= ahead.stop)):
            return
        presence = self._device.contains(path[:arrived])
        start = int(np.argmin(presence == READY)) if (presence != READY).any() else arrived
        if ahead is not None and start < ahead.stop and presence[start] != PENDING:
            ahead.has_ended = True  # its load has failed, or the device is too busy to keep it
        elif start == arrived:
            self._of(request, start, read).stop = start
        elif presence[start] != PENDING and self._has_room(request, start):
            loaded = self._load(path, start, min(arrived, start + self._most))
            if loaded:
                ahead = self._of(request, start, read)
                ahead.stop, ahead.deadline = start + loaded, self._clock() + self._timeout
                self._counters.blocks_loaded_ahead += loaded

    def is_loading(self, request: Request, path: HashArray) -> bool:
        """Return True while a load of a request is in flight, unless it is overdue."""
        ahead = self._ahead.get(request.request_id)
        if ahead is None or ahead.has_ended or self._clock() > ahead.deadline:
            return False
        last = self._device.contains(path[ahead.stop - 1 : ahead.stop])
        return PENDING in last

    def found(self, request: Request, on_device: int) -> tuple[int, int]:
        """Return how many of the blocks that a match found on the device came from the host and from storage."""
        ahead = self._ahead.get(request.request_id)
        if ahead is None:
            return 0, 0
        first, stop = min(ahead.first, on_device), min(ahead.stop, on_device)
        from_storage = max(stop - max(first, ahead.read_from), 0)
        return stop - first - from_storage, from_storage

    def _of(self, request: Request, start: int, read: range) -> _Ahead:
        return self._ahead.setdefault(request.request_id, _Ahead(start, start, read.start))

    def forget(self, requests: Iterable[Request]) -> None:
        """Forget requests that have ended."""
        if self._ahead:
            for request in requests:
                self._ahead.pop(request.request_id, None)

    def _has_room(self, request: Request, have: int) -> bool:
        if not self._may_load():
            return False
        needed = -(-request.num_tokens // self._block_size) - have
        return self._device.available >= needed + self._device.stats().slots // _SPARE

    def _load(self, path: HashArray, start: int, stop: int) -> int:
        """Plan to load blocks ``start`` to ``stop``, as far as the host has them; return how many."""
        host, plan = self._host, self._plan()
        (run,) = host.match_paths([(path[:stop], start)])
        taken = self._reserve(path, start, start + len(run), plan)
        if taken is not None:
            host.begin_load(run.lease, run.blocks.slots)
            plan.add(SwapPurpose.LOAD, run.blocks, taken.slots, taken.generations)
        host.release(run.lease)
        return len(run) if taken is not None else 0

    def _reserve(self, path: HashArray, start: int, stop: int, plan: OpenPlan) -> CopyReservation | None:
        """Reserve device blocks; what has to leave them is copied to the host first. None unless all are reserved."""
        if stop == start:
            return None
        taken = self._device.reserve_copies(0, parents_of(path, start, stop), path[start:stop])
        self._copies.evict(taken.evicted, plan)
        if taken.missing:
            return None
        if not (taken.status == RESERVED).all():
            self._device.complete(taken.slots, np.zeros(len(taken.slots), np.uint8), NO_CHECKSUMS)
            return None
        return taken


def make_loads_ahead(
    layout: KVLayout,
    tiers: Tiers,
    counters: Counters,
    plan: Callable[[], OpenPlan],
    clock: Callable[[], float],
    timeout: float,
    allowed: Callable[[], bool] | bool,
) -> LoadsAhead | None:
    """Return the loads ahead into ``plan``; None if they are not ``allowed``, or nothing is read from storage."""
    host, copies = tiers.host, tiers.copies
    if not allowed or host is None or tiers.fetches is None or copies is None:
        return None
    may_load = allowed if callable(allowed) else lambda: True
    return LoadsAhead(layout, tiers.device, host, copies, counters, plan, clock, timeout, may_load)
