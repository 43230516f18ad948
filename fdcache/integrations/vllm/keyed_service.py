"""KeyedService: the tiers of a node's service for an engine that keeps host records itself and names them by keys.

    service = KeyedService(layout, settings, rows)      # rows: uint8 [records, record_bytes]
    service.store(1, keys, rows=np.array([4, 7]))
    for ended in service.take_ended():
        ...

To the ``OffloadManager`` the engine's rows are the blocks of a device. As in ``KeyedStorage`` the blocks have no
parents, and each is found, evicted and lost by itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fdcache.errors import FdcacheError
from fdcache.integrations.opening import open_tiers
from fdcache.integrations.vllm.keyed_storage import EndedJob
from fdcache.layout import KVLayout
from fdcache.manager.keyed import KeyedRequest
from fdcache.manager.results import LoadOutcome, LoadStatus, MatchStatus
from fdcache.metadata import HashArray, Int32Array, TransferPlan, TransferReport
from fdcache.plans.ledger import Mask
from fdcache.settings import Settings
from fdcache.storage.connector import StorageState, StorageStats
from fdcache.tiers.statistics import TierUsage

logger = logging.getLogger(__name__)

_LOOK_AGAIN = 0.005
"""Seconds between two looks at what others do, such as the service."""

_NO_EVENTS = (np.empty(0, np.uint8), np.empty((0, 32), np.uint8), np.empty((0, 32), np.uint8))


@dataclass(eq=False, slots=True)
class _Job:
    """A store or load. ``open``: its blocks that have not ended, by their positions."""

    number: int
    rows: Int32Array
    is_store: bool
    moved: Mask
    began: float
    requests: list[KeyedRequest]
    open: set[int] = field(default_factory=set)


class KeyedService:
    """The blocks of a service under keys of 32 bytes, copied to and from ``rows``, uint8 [records, record bytes].

    All methods are called by one thread. A look-up waits ``FDCACHE_RPC_TIMEOUT`` at most, others for nothing but
    ``drain`` and ``close``. A job ends ``FDCACHE_PLAN_TIMEOUT`` after it began, without the blocks that are missing;
    copies in memory that have begun by then end first, since the rows are the engine's afterwards. Nothing is found for
    a while then, nor where the service does not give what it says that it has: vLLM would ask again at once. Without
    the service nothing is found and nothing is stored.
    """

    def __init__(
        self,
        layout: KVLayout,
        settings: Settings,
        rows: NDArray[np.uint8],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._block_size = layout.block_size
        self._timeout = settings.cache.plan_timeout
        self._grace = settings.cache.rpc_timeout
        self._retry_after = settings.storage_tier.retry_after
        self._clock = clock
        self._finds_after = self._looked_at = 0.0
        self._jobs: dict[int, _Job] = {}
        self._ended: list[EndedJob] = []
        self._waiting: list[tuple[_Job, int]] = []
        self._loading: dict[str, tuple[_Job, int]] = {}
        self._storing: dict[int, tuple[_Job, int]] = {}
        self._in_flight: dict[int, set[int]] = {}
        self._manager, self._controller = open_tiers(layout, settings, [rows])

    # --- look-ups -------------------------------------------------------------------------------------------

    def contains(self, key: bytes) -> bool:
        """Return True if the service has the block under this key, or gets it."""
        if self._clock() < self._finds_after:
            return False
        return bool(self._manager.has(np.frombuffer(key, np.uint8).reshape(1, 32))[0])

    @property
    def usage(self) -> TierUsage:
        """State of the service's host tier, as of its last heartbeat."""
        return self._manager.get_stats().host or TierUsage()

    @property
    def stats(self) -> StorageStats:
        """Counts of this engine's blocks; the state is OFF without a session at the service."""
        counters = self._manager.get_stats().counters
        return StorageStats(
            name="service",
            state=StorageState.READY if self._manager.has_session else StorageState.OFF,
            hits=counters.blocks_loaded,
            stored=counters.blocks_backed_up,
            corrupt=counters.blocks_corrupt_in_host,
            errors=counters.copies_failed,
            timeouts=counters.loads_overdue,
            no_room=counters.backups_dropped,
        )

    @property
    def is_idle(self) -> bool:
        """True without a job that has not been told as ended."""
        return not self._jobs and not self._ended

    def record_events(self, capacity: int) -> None:
        """Keep nothing: the service itself tells routers of its blocks."""

    def take_events(self) -> tuple[NDArray[np.uint8], HashArray, HashArray]:
        """Return no events."""
        return _NO_EVENTS

    # --- jobs -----------------------------------------------------------------------------------------------

    def store(self, number: int, keys: HashArray, rows: Int32Array) -> None:
        """Begin to store rows under their keys. Those that are stored count as moved."""
        job = self._begin(number, keys, rows, is_store=True)
        for position, request in enumerate(job.requests):
            row = rows[position : position + 1]
            offer = self._manager.offer(request, self._block_size, row, tells_end=True)
            self._storing[offer] = job, position
        self._advance()

    def load(self, number: int, keys: HashArray, rows: Int32Array) -> None:
        """Begin to load blocks into rows. A row is written only while its job has not ended."""
        job = self._begin(number, keys, rows, is_store=False)
        self._manager.begin(job.requests, whole_prompt=True)
        self._waiting += [(job, position) for position in range(len(keys))]
        self._advance()

    def take_ended(self) -> list[EndedJob]:
        """Return the jobs that have ended since the last call."""
        self._advance()
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Wait until every job has ended; each does so within its deadline."""
        while self._jobs:
            self._advance(self._controller.wait_reports(_LOOK_AGAIN))

    def close(self) -> None:
        """End every job, keep the engine's memory no longer, and leave the service."""
        for job in self._jobs.values():
            job.began = -self._timeout
        self.drain()
        self._controller.shutdown()
        self._manager.close()

    # --- turns ----------------------------------------------------------------------------------------------

    def _begin(self, number: int, keys: HashArray, rows: Int32Array, *, is_store: bool) -> _Job:
        requests = [
            KeyedRequest(f"{number}/{position}", keys[position : position + 1], self._block_size)
            for position in range(len(keys))
        ]
        moved = np.zeros(len(keys), np.bool_)
        job = _Job(number, rows, is_store, moved, self._clock(), requests, set(range(len(keys))))
        self._jobs[number] = job
        return job

    def _advance(self, reports: Sequence[TransferReport] = ()) -> None:
        reports = [*reports, *self._controller.poll()]
        for report in reports:
            self._in_flight.pop(report.plan_id, None)
        outcomes = self._manager.apply(reports) if reports else []
        for outcome in (*outcomes, *self._manager.expire()):
            self._loaded(outcome)
        self._plan_loads()
        self._submit()
        for end in self._manager.take_offer_ends():
            if end.number in self._storing:
                self._block_ended(*self._storing.pop(end.number), moved=end.is_whole)
        self._end_jobs()

    def _plan_loads(self) -> None:
        """Plan to load what the service has; what it is still reading from its storage is asked for later.

        So is what it does not have now: a block that this engine has just stored is not findable for a moment.
        """
        now = self._clock()
        if self._looked_at and now - self._looked_at < _LOOK_AGAIN:
            return
        waiting, self._waiting = self._waiting, []
        for job, position in waiting:
            request = job.requests[position]
            self._manager.unmatch([request])
            match = self._manager.match(request, 0, whole_prompt=True)
            if match.status is MatchStatus.DEFERRED:
                self._waiting.append((job, position))
            elif match.num_tokens and self._manager.load(request, job.rows[position : position + 1]):
                self._loading[request.request_id] = job, position
            elif now < job.began + self._grace:
                self._waiting.append((job, position))
            else:
                self._block_ended(job, position, moved=False)
                if self._manager.has(request.block_hashes).any():
                    self._finds_after = now + self._retry_after
        self._looked_at = now if self._waiting else 0.0

    def _submit(self) -> None:
        for plan in self._manager.take_plans():
            self._in_flight[plan.plan_id] = _rows_of(plan)
            try:
                self._controller.submit_swap_tasks(plan)
            except FdcacheError as error:  # the controller reports such a plan as failed
                logger.warning("plan %d is not executed: %s", plan.plan_id, error)

    def _loaded(self, outcome: LoadOutcome) -> None:
        if outcome.request_id in self._loading:
            job, position = self._loading.pop(outcome.request_id)
            if outcome.error_message:
                logger.warning("a block is not loaded: %s", outcome.error_message)
            self._block_ended(job, position, moved=outcome.status is LoadStatus.CONFIRMED)

    def _block_ended(self, job: _Job, position: int, *, moved: bool) -> None:
        if position in job.open:
            job.open.remove(position)
            job.moved[position] = moved

    # --- ends -----------------------------------------------------------------------------------------------

    def _end_jobs(self) -> None:
        used = set().union(*self._in_flight.values())
        for job in list(self._jobs.values()):
            if job.open and self._clock() >= job.began + self._timeout:
                self._give_up(job)
            if not job.open and used.isdisjoint(job.rows.tolist()):
                self._end(job)

    def _give_up(self, job: _Job) -> None:
        """End the blocks of an overdue job that have not ended."""
        logger.warning(
            "%d of %d blocks have not ended after %g s", len(job.open), len(job.moved), self._timeout
        )
        job.open.clear()
        self._finds_after = self._clock() + self._retry_after
        self._waiting = [(other, position) for other, position in self._waiting if other is not job]
        for request in job.requests:
            self._loading.pop(request.request_id, None)
            self._manager.cancel_load(request)

    def _end(self, job: _Job) -> None:
        del self._jobs[job.number]
        self._manager.finish(job.requests)
        if job.is_store:
            self._manager.forget(job.rows)
        nbytes = int(np.count_nonzero(job.moved)) * self._manager.layout.record_bytes
        self._ended.append(EndedJob(job.number, job.moved, self._clock() - job.began, nbytes))


def _rows_of(plan: TransferPlan) -> set[int]:
    """Return the engine's rows that a plan writes or reads."""
    used = set[int]()
    if plan.loads is not None:
        used.update(plan.loads.dst_block_ids.tolist())
    for swap in (plan.backups, plan.evictions):
        if swap is not None:
            used.update(swap.src_block_ids.tolist())
    return used
