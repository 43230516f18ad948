"""KeyedTiers: tiers below the host records of an engine that keeps these itself and names each of them by a key.

    tiers = KeyedTiers(layout, settings, rows)      # rows: uint8 [records, record_bytes]
    tiers.store(1, keys, rows=np.array([4, 7]))
    for ended in tiers.take_ended():
        ...

To the ``OffloadManager`` the engine's rows are the blocks of a device. Below them is a file, behind a little memory of
this process, or the service of the node. The blocks have no parents: each is found, evicted and lost by itself.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from fdcache.errors import ConfigurationError, FdcacheError, TransferTimeoutError
from fdcache.integrations.opening import open_tiers
from fdcache.layout import KVLayout
from fdcache.manager.keyed import KeyedRequest
from fdcache.manager.results import LoadOutcome, LoadStatus, MatchStatus
from fdcache.metadata import HashArray, Int32Array, TransferPlan, TransferReport
from fdcache.plans.ledger import Mask
from fdcache.settings import Candidate, Settings, Source
from fdcache.settings.cache import EvictionPolicy, LoadOrRecompute, PrefetchPolicy, WritePolicy
from fdcache.storage.connector import StorageState, StorageStats
from fdcache.tiers.events import CacheEvent
from fdcache.tiers.host import host_block_bytes
from fdcache.tiers.statistics import TierUsage

logger = logging.getLogger(__name__)

_LOOK_AGAIN = 0.005
"""Seconds between two looks at what others do, such as the service."""

_STAGING_BYTES = 256 << 20
_FEWEST_STAGED = 4


@dataclass(frozen=True, slots=True)
class EndedJob:
    """End of one store or load: which of its blocks were moved, in the order of its keys; ``nbytes`` were copied."""

    number: int
    moved: Mask
    seconds: float
    nbytes: int


@dataclass(eq=False, slots=True)
class _Job:
    """A store or load. ``open``: its blocks that have not ended, by their positions; ``begun``: those at work."""

    number: int
    keys: HashArray
    rows: Int32Array
    is_store: bool
    moved: Mask
    began: float
    requests: list[KeyedRequest]
    open: set[int]
    begun: set[int] = field(default_factory=set)
    copied: int = 0


_Block = tuple[_Job, int]
"""One block of a job, by its position."""


class KeyedTiers:
    """The blocks of the tiers below under keys of 32 bytes, copied to and from ``rows``, uint8 [records, record bytes].

    All methods are called by one thread. A look-up waits ``FDCACHE_RPC_TIMEOUT`` at most, others for nothing but
    ``drain`` and ``close``. A job ends ``FDCACHE_STORAGE_TIMEOUT`` after it began, with a service
    ``FDCACHE_PLAN_TIMEOUT``, without the blocks that are missing; copies in memory that have begun by then end first,
    since the rows are the engine's afterwards. Nothing is found and nothing is stored for a while then, nor before what
    is overdue has ended, nor where a tier does not give what it says that it has: vLLM would ask again at once. Without
    the service nothing is found and nothing is stored.

    With a file a block is stored once the file has it. Raises ``ConfigurationError`` for a storage without slots of its
    own and for rows of another size, and ``StorageError`` when the file cannot be opened.
    """

    def __init__(
        self,
        layout: KVLayout,
        settings: Settings,
        rows: NDArray[np.uint8],
        *,
        events: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if rows.shape[1:] != (layout.record_bytes,):
            raise ConfigurationError(f"rows of {rows.shape[1:]} bytes: records have {layout.record_bytes}")
        self._has_file = settings.cache.server is None
        settings = _decided(settings, layout, len(rows), events)
        self._block_size = layout.block_size
        self._timeout = settings.cache.plan_timeout
        self._grace = 0.0 if self._has_file else settings.cache.rpc_timeout
        self._retry_after = settings.storage_tier.retry_after
        self._clock = clock
        self._finds_after = self._looked_at = 0.0
        self._jobs: dict[int, _Job] = {}
        self._ended: list[EndedJob] = []
        self._queued: dict[bool, deque[_Block]] = {True: deque(), False: deque()}
        self._waiting: list[_Block] = []
        self._loading: dict[str, _Block] = {}
        self._storing: dict[int, _Block] = {}
        self._writing: list[_Block] = []
        self._in_flight: dict[int, set[int]] = {}
        self._num_overdue = 0
        self._most_stored = max(len(rows) // 2, 1)
        self._manager, self._controller = open_tiers(layout, settings, [rows])
        self._most_begun = max(self._manager.num_host_blocks // 2, 1) if self._has_file else len(rows)

    # --- look-ups -------------------------------------------------------------------------------------------

    def contains(self, key: bytes) -> bool:
        """Return True if the block under this key is there, or comes; in a file it counts as used now."""
        return not self._is_out_of_order() and bool(self._manager.touch(_row(key))[0])

    @property
    def usage(self) -> TierUsage:
        """State of the file's slots, or of the service's host tier as of its last heartbeat."""
        stats = self._manager.get_stats()
        return (stats.storage if self._has_file else stats.host) or TierUsage()

    @property
    def stats(self) -> StorageStats:
        """Counts and state of the file, or this engine's at the service: OFF without a session.

        ``timeouts`` are the blocks that their jobs have ended without, also while the disk does not answer.
        """
        if (of_file := self._controller.storage_stats()) is not None:
            return replace(of_file, timeouts=self._num_overdue)
        counters = self._manager.get_stats().counters
        return StorageStats(
            name="service",
            state=StorageState.READY if self._manager.has_session else StorageState.OFF,
            hits=counters.blocks_loaded,
            stored=counters.blocks_backed_up,
            corrupt=counters.blocks_corrupt_in_host,
            errors=counters.copies_failed,
            timeouts=self._num_overdue,
            no_room=counters.backups_dropped,
        )

    @property
    def is_idle(self) -> bool:
        """True without a job that has not been told as ended."""
        return not self._jobs and not self._ended

    def take_events(self) -> list[CacheEvent]:
        """Return what entered and left the tiers of this process since the last call, as far as ``events`` are kept."""
        return self._manager.take_events()

    # --- jobs -----------------------------------------------------------------------------------------------

    def store(self, number: int, keys: HashArray, rows: Int32Array) -> None:
        """Begin to store rows under their keys. Those that are stored, or on their way, count as moved."""
        storing = sum(len(job.open) for job in self._jobs.values() if job.is_store)
        job = self._begin(number, keys, rows, is_store=True)
        if self._is_out_of_order() or storing + len(keys) > self._most_stored:
            job.open.clear()
        elif self._has_file:
            job.moved = self._manager.storage_has(keys)
            job.open.difference_update(np.flatnonzero(job.moved).tolist())
        self._queue(job)

    def load(self, number: int, keys: HashArray, rows: Int32Array) -> None:
        """Begin to load blocks into rows. A row is written only while its job has not ended."""
        job = self._begin(number, keys, rows, is_store=False)
        if self._is_out_of_order():
            job.open.clear()
        self._queue(job)

    def take_ended(self) -> list[EndedJob]:
        """Return the jobs that have ended since the last call."""
        self._advance()
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Wait until every job has ended; each does so within its deadline."""
        while self._jobs:
            reports = self._controller.wait_reports(_LOOK_AGAIN)
            self._advance(reports)
            if self._jobs and not reports:
                time.sleep(_LOOK_AGAIN / 5)

    def close(self) -> None:
        """End every job, keep the engine's memory no longer, and close the file or leave the service."""
        for job in self._jobs.values():
            job.began = -self._timeout
        self.drain()
        try:
            self._controller.shutdown()
        except TransferTimeoutError as error:
            logger.warning("%s: it ends with the process", error)
        self._manager.close()

    # --- turns ----------------------------------------------------------------------------------------------

    def _begin(self, number: int, keys: HashArray, rows: Int32Array, *, is_store: bool) -> _Job:
        requests = [
            KeyedRequest(f"{number}/{position}", keys[position : position + 1], self._block_size)
            for position in range(len(keys))
        ]
        moved = np.zeros(len(keys), np.bool_)
        blocks = set(range(len(keys)))
        job = _Job(number, keys, rows, is_store, moved, self._clock(), requests, blocks)
        self._jobs[number] = job
        return job

    def _queue(self, job: _Job) -> None:
        self._queued[job.is_store] += [(job, position) for position in sorted(job.open)]
        self._advance()

    def _advance(self, reports: Sequence[TransferReport] = ()) -> None:
        reports = [*reports, *self._controller.poll()]
        for report in reports:
            self._in_flight.pop(report.plan_id, None)
        outcomes = self._manager.apply(reports) if reports else []
        for outcome in (*outcomes, *self._manager.expire()):
            self._loaded(outcome)
        self._begin_blocks()
        self._plan_loads(has_news=bool(reports))
        self._submit()
        for end in self._manager.take_offer_ends():
            if end.number in self._storing:
                self._offered(*self._storing.pop(end.number), is_there=end.is_whole, is_new=end.stored > 0)
        self._end_writes()
        self._end_jobs()

    def _begin_blocks(self) -> None:
        """Begin blocks as far as the memory between rows and file holds them: half of it each way."""
        for job, position in self._take_queued(is_store=True):
            row = job.rows[position : position + 1]
            offer = self._manager.offer(job.requests[position], self._block_size, row, tells_end=True)
            self._storing[offer] = job, position
        if blocks := self._take_queued(is_store=False):
            self._waiting += blocks
            self._looked_at = 0.0

    def _take_queued(self, *, is_store: bool) -> list[_Block]:
        queued, taken = self._queued[is_store], list[_Block]()
        begun = sum(len(job.begun) for job in self._jobs.values() if job.is_store is is_store)
        while queued and begun + len(taken) < self._most_begun:
            job, position = queued.popleft()
            if position in job.open:
                job.begun.add(position)
                taken.append((job, position))
        return taken

    def _plan_loads(self, *, has_news: bool) -> None:
        """Plan to load what is there; what is still being read from storage is asked for later.

        So is what a service does not have now: a block that this engine has just stored is not findable for a moment.
        """
        now = self._clock()
        if not has_news and self._looked_at and now - self._looked_at < _LOOK_AGAIN:
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

    def _offered(self, job: _Job, position: int, *, is_there: bool, is_new: bool) -> None:
        """Take the end of an offer: a block that came to the host tier is written to the file, if there is one."""
        if not is_there or not self._has_file:
            self._block_ended(job, position, moved=is_there, is_new=is_new)
            return
        if not is_new:  # it was not written when it came
            self._manager.write(job.keys[position : position + 1])
        self._writing.append((job, position))

    def _end_writes(self) -> None:
        """Take the ends of writes to the file."""
        if not self._writing:
            return
        keys = np.stack([job.keys[position] for job, position in self._writing])
        ended, stored = self._manager.writes_ended(keys)
        for (job, position), has_ended, moved in zip(self._writing, ended, stored, strict=True):
            if has_ended:
                self._block_ended(job, position, moved=bool(moved))
        self._writing = [
            block for block, has_ended in zip(self._writing, ended, strict=True) if not has_ended
        ]

    def _block_ended(self, job: _Job, position: int, *, moved: bool, is_new: bool = True) -> None:
        job.begun.discard(position)
        if position in job.open:
            job.open.remove(position)
            job.moved[position] = moved
            job.copied += moved and is_new

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
        self._num_overdue += len(job.open)
        job.open.clear()
        job.begun.clear()
        self._finds_after = self._clock() + self._retry_after
        self._waiting = [(other, position) for other, position in self._waiting if other is not job]
        self._writing = [(other, position) for other, position in self._writing if other is not job]
        for request in job.requests:
            self._loading.pop(request.request_id, None)
            self._manager.cancel_load(request)

    def _end(self, job: _Job) -> None:
        del self._jobs[job.number]
        self._manager.finish(job.requests)
        if job.is_store:
            self._manager.forget(job.rows)
        nbytes = job.copied * self._manager.layout.record_bytes
        self._ended.append(EndedJob(job.number, job.moved, self._clock() - job.began, nbytes))

    def _is_out_of_order(self) -> bool:
        return self._clock() < self._finds_after or self._manager.has_overdue


def _row(key: bytes) -> HashArray:
    return np.frombuffer(key, np.uint8).reshape(1, 32)


def _rows_of(plan: TransferPlan) -> set[int]:
    """Return the engine's rows that a plan writes or reads."""
    used = set[int]()
    if plan.loads is not None:
        used.update(plan.loads.dst_block_ids.tolist())
    for swap in (plan.backups, plan.evictions):
        if swap is not None:
            used.update(swap.src_block_ids.tolist())
    return used


def _decided(settings: Settings, layout: KVLayout, rows: int, events: int) -> Settings:
    """Return the settings with what the engine has decided. Raises ``ConfigurationError`` for another storage."""
    decided = {
        "FDCACHE_RANKS": 1,
        "FDCACHE_BLOCK_SIZE": layout.block_size,
        "FDCACHE_WRITE_POLICY": WritePolicy.WRITE_THROUGH,
        "FDCACHE_LOAD_OR_RECOMPUTE": LoadOrRecompute.ALWAYS,
        "FDCACHE_PREFETCH_POLICY": PrefetchPolicy.WAIT_COMPLETE,
        "FDCACHE_LOOKAHEAD_TOKENS": 0,
        "FDCACHE_EVENT_BUFFER": events,
    }
    if settings.cache.server is None:
        storage = settings.storage_tier
        if storage.connector != "local":
            raise ConfigurationError(
                f"FDCACHE_STORAGE={storage.connector}: blocks under keys are kept by FDCACHE_STORAGE=local alone; "
                "set it, and FDCACHE_STORAGE_DIR"
            )
        block = host_block_bytes(layout)
        staged = max(min(_STAGING_BYTES // block, rows), _FEWEST_STAGED) * block
        decided |= {
            "FDCACHE_EVICTION": EvictionPolicy.LRU,
            "FDCACHE_HOST_MEMORY": settings.cache.host_memory or staged,
            "FDCACHE_PLAN_TIMEOUT": storage.timeout,
            "FDCACHE_SWAP_DRAIN_TIMEOUT": storage.timeout,
        }
    return settings.with_derived(
        {
            name: (Candidate(Source.DERIVED, name, "vLLM decides", value), value)
            for name, value in decided.items()
        }
    )
