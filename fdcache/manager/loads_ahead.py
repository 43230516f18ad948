"""LoadsAhead: loads into blocks of a ``CacheManager`` for a request that is not matched yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from fdcache._core import CopyReservation, Load, Loads
from fdcache.layout import KVLayout
from fdcache.manager.copy_out import CopyOut
from fdcache.manager.requests import Request
from fdcache.manager.tiers import Tiers
from fdcache.metadata import HashArray, SwapPurpose
from fdcache.plans.ledger import NO_CHECKSUMS, OpenPlan, parents_of
from fdcache.tiers.host import HostTier, find_only
from fdcache.tiers.pool import PENDING, READY, RESERVED, BlockPool
from fdcache.tiers.statistics import Counters


@dataclass(slots=True)
class _Ahead:
    """Blocks ``first`` to ``stop`` of a request's path that were loaded while it waited for the blocks after them.

    Those from ``read_from`` on were read for it. ``load``: the last load. ``has_ended``: one of the blocks did not come
    or has gone again, and no other is loaded.
    """

    first: int
    stop: int
    read_from: int
    load: Load | None = None
    has_ended: bool = False


MOST_BYTES = 128 << 20
"""Most bytes of one load on all ranks: loads of steps queue behind it."""

_SPARE = 16
"""One of 16 device blocks stays free or evictable, beside those that the request needs."""


class LoadsAhead:
    """Loads of requests that wait for storage: at most one of each request is in flight.

    A block that was loaded ahead is one like any other in the device tier: found once every rank has reported its copy,
    and evictable. The host tier, of this process or a service, keeps it for the request, so that nothing is lost if it
    is evicted. A request waits until its load has ended. Nothing is loaded while ``may_load`` returns False.
    """

    def __init__(
        self,
        layout: KVLayout,
        device: BlockPool,
        host: HostTier,
        copies: CopyOut,
        loads: Loads,
        counters: Counters,
        plan: Callable[[], OpenPlan],
        may_load: Callable[[], bool],
    ) -> None:
        self._block_size = layout.block_size
        self._most = max(MOST_BYTES // (layout.payload_bytes * layout.tp_size), 1)
        self._device = device
        self._host = host
        self._copies = copies
        self._loads = loads
        self._counters = counters
        self._plan = plan
        self._may_load = may_load
        self.requests: dict[str, _Ahead] = {}
        """What is loaded ahead, by request."""

    def load(self, request: Request, path: HashArray, read: range) -> None:
        """Plan to load blocks of a request's ``path``: those up to ``read`` are there, and it waits for others.

        Does nothing while its last load is in flight, or the device has no room for the whole request.
        """
        arrived, ahead = read.stop, self.requests.get(request.request_id)
        if not arrived or (ahead is not None and (ahead.has_ended or arrived <= ahead.stop)):
            return
        presence = self._device.contains(path[:arrived])
        start = int(np.argmin(presence == READY)) if (presence != READY).any() else arrived
        if ahead is not None and start < ahead.stop and presence[start] != PENDING:
            ahead.has_ended = True  # its load has failed, or the device is too busy to keep it
        elif start == arrived:
            self._of(request, start, read).stop = start
        elif presence[start] != PENDING and self._has_room(request, start):
            load = self._load(path, start, min(arrived, start + self._most))
            if load is not None:
                ahead = self._of(request, start, read)
                ahead.stop, ahead.load = load.stop, load
                self._counters.blocks_loaded_ahead += load.stop - start

    def is_loading(self, request: Request) -> bool:
        """Return True while a load of a request is in flight, unless it is overdue."""
        ahead = self.requests.get(request.request_id)
        return (
            ahead is not None and not ahead.has_ended and ahead.load is not None and ahead.load.is_in_flight
        )

    def found(self, request: Request, on_device: int) -> tuple[int, int]:
        """Return how many of the blocks that a match found on the device came from the host and from storage."""
        ahead = self.requests.get(request.request_id)
        if ahead is None:
            return 0, 0
        first, stop = min(ahead.first, on_device), min(ahead.stop, on_device)
        from_storage = max(stop - max(first, ahead.read_from), 0)
        return stop - first - from_storage, from_storage

    def _of(self, request: Request, start: int, read: range) -> _Ahead:
        return self.requests.setdefault(request.request_id, _Ahead(start, start, read.start))

    def forget(self, requests: Iterable[Request]) -> None:
        """Forget requests that have ended."""
        for request in requests:
            self.requests.pop(request.request_id, None)

    def _has_room(self, request: Request, have: int) -> bool:
        if not self._may_load():
            return False
        needed = -(-request.num_tokens // self._block_size) - have
        return self._device.available >= needed + self._device.stats().slots // _SPARE

    def _load(self, path: HashArray, start: int, stop: int) -> Load | None:
        """Plan to load blocks ``start`` to ``stop``, as far as the host has them."""
        host, plan, load = self._host, self._plan(), None
        run = find_only(host, path[:stop], start)
        taken = self._reserve(path, start, start + len(run), plan)
        if taken is not None:
            host.index.begin_load_of(run.run)
            offset = plan.add_run(SwapPurpose.LOAD, run.run, path, start, taken.slots, taken.generations)
            load = self._loads.begin(start, start + len(run))
            self._loads.add(load, load.stop, offset, len(run), is_ahead=True)
        host.index.release(run.lease)
        return load

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
    loads: Loads,
    counters: Counters,
    plan: Callable[[], OpenPlan],
    allowed: Callable[[], bool] | bool,
) -> LoadsAhead | None:
    """Return the loads ahead into ``plan``; None if they are not ``allowed``, or nothing is read from storage."""
    host, copies = tiers.host, tiers.copies
    if not allowed or host is None or tiers.fetches is None or copies is None:
        return None
    may_load = allowed if callable(allowed) else lambda: True
    return LoadsAhead(layout, tiers.own_device, host, copies, loads, counters, plan, may_load)
