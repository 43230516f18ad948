"""Run a workload through the real manager and controllers, one step planned ahead of the ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from fdcache.replay.config import ReplayConfig, require_machine
from fdcache.replay.devices import LoadFaults
from fdcache.replay.engine_cache import Cache, make_cache
from fdcache.replay.jobs import Step
from fdcache.replay.messages import StepOrder
from fdcache.replay.ranks import Ranks, start_ranks
from fdcache.replay.report import Report, build_report
from fdcache.replay.scheduler import Scheduler
from fdcache.replay.statistics import Stopwatch, Tally, Timeline
from fdcache.replay.worker import StartProgress, WorkerSpec
from fdcache.replay.workloads import Arrivals, Requests, WorkItem
from fdcache.service.server.known_blocks import KnownBlocks
from fdcache.storage.connector import ConnectorContext
from fdcache.storage.factory import open_lookup

STEPS_AHEAD = 2
"""Maximum number of steps in flight: the one being computed and the one planned ahead of it."""

_STALL_SECONDS = 60.0
_DRAIN_SECONDS = 60.0
_IDLE_SECONDS = 0.0005
_LONGEST_SLEEP = 0.05

Progress = Callable[[Tally], None]
"""Callback after every step, with the counts so far."""


def replay(
    items: Iterator[WorkItem],
    config: ReplayConfig,
    *,
    on_progress: Progress | None = None,
    on_start: StartProgress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Report:
    """Run a workload to its end, or until ``should_stop`` returns True, and report on it.

        report = replay(generate(WorkloadName.CHAT, requests=100, seed=0), config)
        assert report.clean

    ``on_start`` receives the progress of each rank's start: an activity, the amount done, the total. Ranks and their
    memory are released in any case. Raises ``ReplayOptionError`` if memory is lacking, or there are too many ranks,
    ``ReplayError`` if a rank is lost or no progress is possible, ``TraceError`` for an invalid trace line.
    """

    def arrivals() -> Requests:
        return Arrivals(items, config.speed, window=64 + 4 * config.concurrency)

    return replay_requests(arrivals, config, on_progress, on_start, should_stop)


def replay_requests(
    open_requests: Callable[[], Requests],
    config: ReplayConfig,
    on_progress: Progress | None = None,
    on_start: StartProgress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Report:
    """Run requests as they come, as ``replay`` does; ``open_requests`` is called once the machine is known to do."""
    require_machine(config)
    lookup = open_lookup(ConnectorContext(config.layout, None, config.storage, config.storage_options))
    arrivals = open_requests()
    manager = make_cache(
        config.cache,
        config.layout,
        config.storage,
        lookup,
        None if config.speed == 1 else lambda: arrivals.seconds,
    )
    spec = WorkerSpec(
        layout=config.layout,
        transfer=config.transfer,
        device_blocks=config.cache.device_blocks,
        host=manager.host_cache,
        verify_every=config.verify.every,
        faults=LoadFaults(config.load_failures, config.seed),
        storage=config.storage,
        storage_options=config.storage_options,
        device=config.device,
    )
    with manager:
        ranks = start_ranks(spec, config.layout.tp_size, on_start)
        try:
            run = ReplayRun(arrivals, config, manager, ranks)
            run.restore_storage()
            interrupted = run.work(on_progress, should_stop)
            run.drain()
            return run.report(interrupted)
        finally:
            ranks.close()


class ReplayRun:
    """One replay from its first step to its report."""

    def __init__(self, arrivals: Requests, config: ReplayConfig, manager: Cache, ranks: Ranks) -> None:
        self.manager = manager
        self.ranks = ranks
        self.tally = Tally(known=KnownBlocks())
        self._config = config
        self._watch = Stopwatch()
        self._timeline = Timeline()
        self._arrivals = arrivals
        self._scheduler = Scheduler(config, manager, self._arrivals, self.tally, self._watch)
        self._in_flight: deque[Step] = deque()
        self._start = time.monotonic()
        self._last_progress = 0.0

    def restore_storage(self) -> None:
        """Restore the blocks that earlier runs left in the ranks' local storage."""
        if not self._config.storage.is_on:
            return
        self.ranks.send(_empty_order())
        scans = [result.scan for result in self.ranks.receive() if result.scan is not None]
        if scans:
            self.tally.storage_restored = self.manager.restore_storage(scans)

    def work(self, on_progress: Progress | None, should_stop: Callable[[], bool]) -> bool:
        """Run steps until the workload has ended; return True if ``should_stop`` ended it earlier."""
        while not (self._scheduler.done and not self._in_flight):
            if should_stop():
                return True
            now = self._now()
            sent = self._send_next(now)
            if len(self._in_flight) >= STEPS_AHEAD or (self._in_flight and not sent):
                self._receive_oldest()
                if on_progress is not None:
                    on_progress(self.tally)
            elif not sent:
                self._idle(now)
            self._timeline.record(now, self.tally, self.manager)
        return False

    def drain(self) -> None:
        """Wait for the steps in flight, release every request, and wait for all copies."""
        while self._in_flight:
            self._receive_oldest()
        self._scheduler.abort()
        self.manager.pause()  # plan no further backups
        deadline = self._now() + _DRAIN_SECONDS
        while self._send_next(self._now(), admit=False) or self._scheduler.copies_in_flight:
            self._poll()
            if self._now() > deadline:
                break  # the report counts slots that are still held as leaked
        self._timeline.record(self._now(), self.tally, self.manager, last=True)

    def report(self, interrupted: bool) -> Report:
        """Build the report; call it after ``drain``."""
        return build_report(
            self._config,
            self.manager,
            self.tally,
            self._watch,
            self._timeline,
            wall_seconds=self._now(),
            interrupted=interrupted,
        )

    def _now(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._start

    def _send_next(self, now: float, *, admit: bool = True) -> bool:
        planned = self._scheduler.plan(now, admit=admit)
        if planned is None:
            return False
        self._send(*planned)
        self._last_progress = now
        self.tally.steps += 1
        return True

    def _send(self, step: Step, order: StepOrder) -> None:
        self.ranks.send(order)
        self._in_flight.append(step)

    def _receive_oldest(self) -> None:
        step = self._in_flight.popleft()
        self._scheduler.update(step, self.ranks.receive(), self._now())

    def _poll(self) -> None:
        """Collect finished copies from the ranks, with an empty step if none is in flight."""
        if not self._in_flight:
            self._send(Step(), _empty_order())
        self._receive_oldest()
        time.sleep(_IDLE_SECONDS)

    def _idle(self, now: float) -> None:
        """Wait for copies, for an arrival, or for the retry of a deferred match."""
        if self._scheduler.copies_in_flight:
            self._poll()
            return
        arrival = self._arrivals.next_arrival()
        if arrival is not None and arrival > now:
            self._last_progress = arrival
            time.sleep(min(arrival - now, _LONGEST_SLEEP))
            return
        self._scheduler.require_progress(now - self._last_progress, _STALL_SECONDS)
        time.sleep(_IDLE_SECONDS)


def _empty_order() -> StepOrder:
    return Step().build_order([], [])
