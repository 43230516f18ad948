"""PageClient: look-ups, loads and stores of pages in an engine's own host memory, each with a deadline."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np

from fdcache.devices.cpu import CpuDevice
from fdcache.errors import FdcacheError
from fdcache.integrations.opening import open_tiers
from fdcache.layout import KVLayout
from fdcache.manager.keyed import KeyedRequest
from fdcache.manager.offload import OffloadManager
from fdcache.manager.results import LoadOutcome, MatchStatus, OffloadMatch
from fdcache.metadata import HashArray, Int32Array, TransferPlan
from fdcache.plans.ledger import ROOT
from fdcache.settings import Settings
from fdcache.tiers.statistics import CacheStats

logger = logging.getLogger(__name__)

_LOOK_AGAIN = 0.005
"""Seconds between two look-ups for what is being read or copied."""

_MOST_COPY_THREADS = 8

_IDLE = 0.5
"""Seconds between two looks at what others do, such as the service, while nothing is to be copied."""


class PageClient:
    """Loads and stores pages of ``planes``, in which the engine says which slots to use.

    ::

        client = PageClient(layout, settings, planes)
        found = client.lookup(keys)                      # leading pages that a load can have
        loaded = client.load(keys[:found], slots)        # leading pages that are in their slots now
        stored = client.store(keys, slots, above)        # leading pages that are there now

    ``keys`` are a run of pages, uint8 of shape (pages, 32). It may begin anywhere in a prompt. Keys that contradict
    those stored find nothing, and are counted in ``stats``.

    Threads may share a client: no call waits for another one's copies or reads, except that stores take turns. A call
    ends ``timeout`` seconds after it began; a copy in memory that has begun by then is waited for, since its slots
    belong to the caller afterwards. Failures count as nothing found, loaded or stored. Without the service nothing is
    found and nothing stored. Raises the errors of ``OffloadManager`` and ``CacheController`` when it is made.

    ``ranks``: those of the engine, which load at the same time. Each has its part of half of the CPUs for it.
    """

    def __init__(self, layout: KVLayout, settings: Settings, planes: Sequence[Any], ranks: int = 1) -> None:
        self.layout = layout
        self._timeout = settings.cache.plan_timeout
        self._names = count(1)
        self._outcomes: dict[str, LoadOutcome | None] = {}
        self._in_flight: dict[int, TransferPlan] = {}
        self._changed = threading.Condition()
        self._work = threading.Event()
        self._stepping = threading.Lock()
        self._storing = threading.Lock()
        self._closing = False
        threads = copy_threads(ranks)
        self._manager, self._controller = open_tiers(
            layout,
            settings,
            planes,
            lambda copies: CpuDevice.of(copies.model_copy(update={"copy_threads": threads})),
        )
        self._thread = threading.Thread(target=self._run, name="fdcache-pages", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> CacheStats:
        """The figures of the tiers, and what was copied."""
        return self._manager.get_stats()

    @property
    def manager(self) -> OffloadManager:
        """The manager of its tiers."""
        return self._manager

    @property
    def room(self) -> int:
        """Pages that can be stored now: 0 until a service has granted some."""
        return self._manager.store_room

    # --- calls ----------------------------------------------------------------------------------------------

    def lookup(self, keys: HashArray) -> int:
        """Return how many leading pages are there, or are read from storage for loads to come."""
        deadline = time.monotonic() + self._timeout
        with self._reading(keys, keeps_reads=True) as asked:
            while asked.is_deferred and not asked.match.coming and self._pause(deadline):
                asked.again()
            return self._pages(asked.match.num_tokens + asked.match.coming)

    def load(self, keys: HashArray, slots: Int32Array) -> int:
        """Copy pages into their slots; return how many leading ones are there. The other slots hold garbage."""
        deadline = time.monotonic() + self._timeout
        with self._reading(keys) as asked:
            while asked.is_deferred and self._pause(deadline):
                asked.again()
            if asked.is_deferred:
                asked.take_what_is_there()
            return self._loaded(asked, slots, deadline)

    def store(self, keys: HashArray, slots: Int32Array, above: HashArray) -> int:
        """Copy pages out of their slots; return how many leading ones are there now, whoever stored them.

        ``above``: the keys of all pages before them, none for the beginning of a prompt. Pages whose beginning is not
        there any more are joined to it once it is.
        """
        deadline = time.monotonic() + self._timeout
        if not self._storing.acquire(timeout=self._timeout):
            return 0
        try:
            parent = above[-1].tobytes() if len(above) else ROOT
            if len(above) and not self._manager.host_has(above[-1:])[0]:
                parent = None
            self._copy_out(keys, slots, parent, deadline)
            return self._there(keys, deadline)
        finally:
            self._storing.release()

    def clear(self) -> int:
        """Forget the pages of this layout, in all tiers and for all its engines, and no others; return how many."""
        forgotten = self._manager.reset_cache()
        self._step()
        return forgotten

    def weights_changed(self, version: str | None) -> None:
        """Find and store pages of other weights from now on; those of former ones are forgotten, but for a service."""
        self._manager.weights_changed(version)
        self._step()

    def close(self) -> None:
        """End the copies in flight, free the host memory, and leave the service. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._work.set()
        self._thread.join()
        self._controller.shutdown()
        self._manager.close()

    # --- parts of calls -------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self, keys: HashArray, *, keeps_reads: bool = False) -> Iterator[_Asked]:
        """Look a run up, and end that afterwards."""
        asked = _Asked(self._manager, self._names, keys)
        try:
            asked.again()
            self._step()  # what is to be read from storage is in the next plan
            yield asked
        finally:
            if keeps_reads:
                self._manager.leave_reads(asked.request)
            self._manager.finish([asked.request])

    def _loaded(self, asked: _Asked, slots: Int32Array, deadline: float) -> int:
        """Load what was found; return how many leading pages are in their slots."""
        found = self._pages(asked.match.num_tokens)
        name, slots = asked.request.request_id, np.ascontiguousarray(slots[:found], np.int32)
        with self._changed:
            self._outcomes[name] = None
        try:
            if not found or not self._manager.load(asked.request, slots):
                return 0
            self._step()
            self._await(lambda: self._outcomes[name] is not None and not self._uses(slots), slots, deadline)
            outcome = self._outcomes[name]
            return 0 if outcome is None else self._pages(outcome.recompute_from)
        finally:
            with self._changed:
                del self._outcomes[name]

    def _copy_out(self, keys: HashArray, slots: Int32Array, parent: bytes | None, deadline: float) -> None:
        """Copy pages until all are there or dropped; their slots are not read any more afterwards."""
        name = f"pages {next(self._names)}"
        request = KeyedRequest(name, keys, self.layout.block_size, parent=parent)
        slots = np.ascontiguousarray(slots, np.int32)
        try:
            self._manager.offer(request, request.num_tokens, slots)
            self._step()
            self._await(lambda: not self._uses(slots) and not self._waits_for_room(), slots, deadline)
        finally:
            self._manager.finish([request])
            self._manager.forget(slots)

    def _there(self, keys: HashArray, deadline: float) -> int:
        """Return how many leading pages can be found, once a service has made those findable that it takes."""
        with self._reading(keys) as asked:
            while self._pages(asked.match.num_tokens) < self._manager.num_copied(keys):
                if not self._pause(deadline):
                    break
                asked.again()
            return self._pages(asked.match.num_tokens)

    def _waits_for_room(self) -> bool:
        """Return True while pages wait for slots that a service may still grant."""
        return self._manager.num_host_blocks > 0 and self._manager.get_stats().queued_backups > 0

    def _await(self, is_done: Callable[[], bool], slots: Int32Array, deadline: float) -> None:
        """Wait until the copies of a call have ended. After the deadline, wait for those alone that have begun."""
        with self._changed:
            while not is_done():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, _LOOK_AGAIN))
        self._cancel(slots)
        with self._changed:
            while self._uses(slots):
                self._changed.wait(_LOOK_AGAIN)

    def _pause(self, deadline: float) -> bool:
        """Wait a moment for copies and reads; return False after the deadline."""
        with self._changed:
            left = deadline - time.monotonic()
            if left > 0:
                self._changed.wait(min(left, _LOOK_AGAIN))
        self._step()
        return left > 0 and not self._closing

    def _pages(self, tokens: int) -> int:
        return tokens // self.layout.block_size

    # --- plans ----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Submit what is planned."""
        with self._stepping:
            plans = self._manager.take_plans()
            with self._changed:
                self._in_flight.update((plan.plan_id, plan) for plan in plans)
            for plan in plans:
                try:
                    self._controller.submit_swap_tasks(plan)
                except FdcacheError as error:  # the controller reports such a plan as failed
                    logger.warning("plan %d is not executed: %s", plan.plan_id, error)
        if plans:
            self._work.set()

    def _uses(self, slots: Int32Array) -> bool:
        """Return True while a plan in flight may read or write these slots."""
        return any(
            np.isin(slots, used).any() for plan in self._in_flight.values() for used in _slots_of(plan)
        )

    def _cancel(self, slots: Int32Array) -> None:
        """Take back the copies of these slots that have not begun."""
        with self._changed:
            flights = [
                plan.plan_id
                for plan in self._in_flight.values()
                if any(np.isin(slots, used).any() for used in _slots_of(plan))
            ]
        for plan_id in flights:
            try:
                self._controller.handler(plan_id).cancel()
            except FdcacheError:
                continue  # it has ended meanwhile

    def _run(self) -> None:
        while not self._closing or self._in_flight:
            try:
                self._turn()
            except Exception:  # it serves all calls
                logger.exception("pages are not copied")
                time.sleep(_IDLE)

    def _turn(self) -> None:
        """Take the reports of plans that have ended, and submit what follows from them."""
        reports = self._controller.wait_reports(_IDLE)
        outcomes = self._manager.apply(reports) + self._manager.expire()
        with self._changed:
            for report in reports:
                self._in_flight.pop(report.plan_id, None)
            for outcome in outcomes:
                if outcome.request_id in self._outcomes:
                    self._outcomes[outcome.request_id] = outcome
            self._changed.notify_all()
        self._step()
        if not reports and not self._in_flight:
            self._work.wait(_LOOK_AGAIN if self._manager.has_pending_work else _IDLE)
            self._work.clear()


class _Asked:
    """A run of pages that is looked up, with what was found last."""

    def __init__(self, manager: OffloadManager, names: Iterator[int], keys: HashArray) -> None:
        self._manager = manager
        self._names = names
        self._keys = keys
        self.request = self._request(keys)
        self.match = OffloadMatch(self.request.request_id, MatchStatus.MATCHED)

    @property
    def is_deferred(self) -> bool:
        """True while the next page is on its way to the host tier."""
        return self.match.status is MatchStatus.DEFERRED

    def again(self) -> None:
        """Look again, and begin to read what is stored of the run."""
        self._manager.unmatch([self.request])  # its last answer would be kept
        self.match = self._manager.match(self.request, 0)

    def take_what_is_there(self) -> None:
        """Give up what is being read; what the host tier has is found."""
        self._manager.leave_reads(self.request)
        self._manager.finish([self.request])
        there = self._manager.host_has(self._keys)
        self.request = self._request(self._keys[: len(there) if there.all() else int(there.argmin())])
        self.again()

    def _request(self, keys: HashArray) -> KeyedRequest:
        return KeyedRequest(f"pages {next(self._names)}", keys, self._manager.layout.block_size, parent=None)


def copy_threads(ranks: int) -> int:
    """Return how many threads copy the loads of one of several ranks: one alone is far slower than memory is."""
    return max(min(len(os.sched_getaffinity(0)) // (2 * ranks), _MOST_COPY_THREADS), 1)


def _slots_of(plan: TransferPlan) -> Iterator[Int32Array]:
    """Yield the engine's slots that a plan writes or reads."""
    if plan.loads is not None:
        yield plan.loads.dst_block_ids
    for swap in (plan.backups, plan.evictions):
        if swap is not None:
            yield swap.src_block_ids
