"""replay(): a workload through the real manager and controllers, one step planned ahead of the ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from fdcache.manager import CacheManager
from fdcache.replay.arrivals import Arrivals
from fdcache.replay.config import ReplayConfig
from fdcache.replay.faults import LoadFaults
from fdcache.replay.items import WorkItem
from fdcache.replay.memory import require_memory
from fdcache.replay.messages import StepOrder
from fdcache.replay.ranks import Ranks, start_ranks
from fdcache.replay.report import Report, build_report
from fdcache.replay.scheduler import Scheduler
from fdcache.replay.settle import Settlement
from fdcache.replay.step import Step
from fdcache.replay.stopwatch import Stopwatch
from fdcache.replay.tally import Tally
from fdcache.replay.timeline import Timeline
from fdcache.replay.worker import WorkerSpec
from fdcache.storage.context import ConnectorContext
from fdcache.storage.factory import open_lookup

STEPS_AHEAD = 2
"""Steps sent and not yet answered, at most: the one being computed and the one planned ahead of it."""

_STALL_SECONDS = 60.0
_DRAIN_SECONDS = 60.0
_IDLE_SECONDS = 0.0005
_LONGEST_SLEEP = 0.05

Progress = Callable[[Tally], None]
"""Called after every step with the counts so far."""


def replay(
    items: Iterator[WorkItem],
    config: ReplayConfig,
    *,
    on_progress: Progress | None = None,
    on_start: Callable[[str, int, int], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Report:
    """Run a workload to its end, or until ``should_stop``; returns the report of what was done by then.

    ``on_start`` is told what a rank does before it begins, how much of it is done, and how much there is.
    Raises ``ReplayOptionError`` when the machine has not the memory, ``ReplayError`` when a rank is lost or
    nothing can make progress, ``TraceError`` for a bad trace line. Ranks and their memory are gone
    afterwards, whatever happens.
    """
    require_memory(config)
    lookup = open_lookup(ConnectorContext(config.layout, None, config.storage, config.mooncake))
    manager = CacheManager(config.cache, config.layout, storage=config.storage, lookup=lookup)
    spec = WorkerSpec(
        layout=config.layout,
        transfer=config.transfer,
        device_blocks=config.cache.device_blocks,
        host=manager.host_cache,
        verify_every=config.verify.every,
        faults=LoadFaults(config.load_failures, config.seed),
        storage=config.storage,
        mooncake=config.mooncake,
        device=config.device,
    )
    with manager:
        ranks = start_ranks(spec, config.layout.tp_size, on_start)
        try:
            run = _Run(items, config, manager, ranks)
            run.restore_storage()
            interrupted = run.work(on_progress, should_stop)
            run.drain()
            return run.report(config, interrupted)
        finally:
            ranks.close()


class _Run:
    """One replay under way."""

    def __init__(
        self, items: Iterator[WorkItem], config: ReplayConfig, manager: CacheManager, ranks: Ranks
    ) -> None:
        self.tally = Tally()
        self.watch = Stopwatch()
        self.timeline = Timeline()
        self._manager = manager
        self._ranks = ranks
        self._num_ranks = config.layout.tp_size
        self._has_storage = config.storage.is_on
        arrivals = Arrivals(items, config.speed, window=64 + 4 * config.concurrency)
        self._arrivals = arrivals
        self._scheduler = Scheduler(config, manager, arrivals, self.tally, self.watch)
        self._settlement = Settlement(
            manager,
            self._scheduler,
            self.tally,
            self.watch,
            keeps_preempted_output=config.scheduling.save_preempted_output,
        )
        self._sent: deque[Step] = deque()
        self._start = time.monotonic()
        self._last_progress = 0.0

    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def work(self, on_progress: Progress | None, should_stop: Callable[[], bool]) -> bool:
        """Plan, send, settle until the workload has ended; returns whether it was stopped before."""
        while not (self._scheduler.done and not self._sent):
            if should_stop():
                return True
            now = self.now()
            sent = self._send_next(now)
            if len(self._sent) >= STEPS_AHEAD or (self._sent and not sent):
                self._settle_oldest()
                if on_progress is not None:
                    on_progress(self.tally)
            elif not sent:
                self._idle(now)
            self.timeline.record(now, self.tally, self._manager)
        return False

    def restore_storage(self) -> None:
        """Take up what the ranks' local storage holds from earlier runs."""
        if not self._has_storage:
            return
        nothing = np.empty((6, 0), dtype=np.int32)
        self._ranks.send(StepOrder([], nothing, nothing[0]))
        scans = [result.scan for result in self._ranks.receive() if result.scan is not None]
        if scans:
            self.tally.storage_restored = self._manager.restore_storage(scans)

    def drain(self) -> None:
        """Settle what was sent, release every request, and wait for all copies."""
        while self._sent:
            self._settle_oldest()
        self._scheduler.abort()
        self._manager.pause()  # no more backups of its own accord
        deadline = self.now() + _DRAIN_SECONDS
        while self._send_next(self.now(), admit=False) or self._settlement.copies_in_flight:
            self._poll()
            if self.now() > deadline:
                break  # what is still held then is reported as leaked
        self.timeline.record(self.now(), self.tally, self._manager, last=True)

    def report(self, config: ReplayConfig, interrupted: bool) -> Report:
        """What was found; to be asked for when drained."""
        return build_report(
            config,
            self._manager,
            self.tally,
            self.watch,
            self.timeline,
            wall_seconds=self.now(),
            interrupted=interrupted,
        )

    def _send_next(self, now: float, *, admit: bool = True) -> bool:
        planned = self._scheduler.plan(now, self._settlement.copies_in_flight, admit=admit)
        if planned is None:
            return False
        self._send(*planned)
        self._last_progress = now
        self.tally.steps += 1
        return True

    def _send(self, step: Step, order: StepOrder) -> None:
        for plan in order.plans:
            for plan_id in plan.plan_ids:
                self._settlement.expect(plan_id, self._num_ranks)
        self._ranks.send(order)
        self._sent.append(step)

    def _settle_oldest(self) -> None:
        step = self._sent.popleft()
        self._settlement.settle(step, self._ranks.receive(), self.now())

    def _poll(self) -> None:
        """Ask the ranks for finished copies without computing anything."""
        if not self._sent:
            nothing = np.empty((6, 0), dtype=np.int32)
            self._send(Step(), StepOrder([], nothing, nothing[0]))
        self._settle_oldest()
        time.sleep(_IDLE_SECONDS)

    def _idle(self, now: float) -> None:
        """Nothing can be planned: wait for copies, for an arrival, or for a deferred request's turn."""
        if self._settlement.copies_in_flight:
            self._poll()
            return
        arrival = self._arrivals.next_arrival()
        if arrival is not None and arrival > now:
            self._last_progress = arrival
            time.sleep(min(arrival - now, _LONGEST_SLEEP))
            return
        self._scheduler.require_progress(now - self._last_progress, _STALL_SECONDS)
        time.sleep(_IDLE_SECONDS)
