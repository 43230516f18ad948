"""Scheduler: decides what each step computes, as an engine's scheduler does."""

from __future__ import annotations

from collections import deque

from fdcache.errors import ReplayError
from fdcache.manager import Allocation, CacheManager, MatchResult, MatchStatus
from fdcache.replay.admission import DecodeReserve
from fdcache.replay.arrivals import Arrivals
from fdcache.replay.config import ReplayConfig
from fdcache.replay.job import Job
from fdcache.replay.messages import StepOrder
from fdcache.replay.step import Step
from fdcache.replay.stopwatch import Stopwatch
from fdcache.replay.tally import Tally


class Scheduler:
    """Running requests in the order of their admission, the requests that wait, and the step being planned.

    Decodes come first, then prompts in chunks of what is left of ``chunk_tokens``, then new requests. When
    blocks run out the newest running request is preempted, and new requests leave the running ones a reserve for
    a while.
    """

    def __init__(
        self, config: ReplayConfig, manager: CacheManager, arrivals: Arrivals, tally: Tally, watch: Stopwatch
    ) -> None:
        self._config = config
        self._block_size = config.layout.block_size
        self._manager = manager
        self._arrivals = arrivals
        self._tally = tally
        self._watch = watch
        self._waiting: deque[Job] = deque()
        self._ended: list[int] = []
        self._room_may_have_come = True
        self._reserve = DecodeReserve(config.scheduling)
        self.running: list[Job] = []

    @property
    def done(self) -> bool:
        """Whether every request of the workload has ended."""
        return not self.running and not self._waiting and self._arrivals.exhausted

    def plan(
        self, now: float, copies_in_flight: bool, *, admit: bool = True
    ) -> tuple[Step, StepOrder] | None:
        """The next step, without new requests unless ``admit``; None when there is nothing to do."""
        step = Step()
        preemptions = self._tally.preemptions
        budget = self._schedule_running(step, copies_in_flight)
        if admit and self._tally.preemptions == preemptions:
            self._admit(step, budget, now)
        since = self._watch.now()
        plans = self._manager.take_plans()
        self._watch.add("plan", since, len(step.segments))
        if not plans and not step.segments and not self._ended:
            return None
        self._room_may_have_come |= self._reserve.note_step()
        ended, self._ended = self._ended, []
        return step, step.order(plans, ended)

    def preempt(self, job: Job, step: Step | None = None) -> None:
        """Take a running request's blocks; it starts again from its next match."""
        if step is not None:
            step.drop(job)
        self.running.remove(job)
        self._manager.request_finish([job.request])
        job.release()
        self._waiting.appendleft(job)
        self._tally.preemptions += 1
        self._reserve.note_preemption()
        self._room_may_have_come = True

    def finish(self, jobs: list[Job], now: float) -> None:
        """Release requests that have all their tokens."""
        since = self._watch.now()
        self._manager.request_finish([job.request for job in jobs])
        self._watch.add("finish", since, len(jobs))
        for job in jobs:
            self.running.remove(job)
            self._ended.append(job.index)
            self._arrivals.ended(job.index, now)
            self._tally.output_tokens += job.item.output_length
        self._tally.finished += len(jobs)
        self._room_may_have_come = True

    def abort(self) -> None:
        """Release every request, wherever it is."""
        self._manager.request_finish([job.request for job in (*self.running, *self._waiting)])
        self._ended += [job.index for job in self.running]
        for job in self.running:
            job.epoch += 1
        self.running.clear()
        self._waiting.clear()

    def _schedule_running(self, step: Step, copies_in_flight: bool) -> int:
        budget = self._config.chunk_tokens
        ahead = max(self._config.scheduling.decode_blocks - 1, 0) * self._block_size
        prefills = []
        grown: list[tuple[Job, int]] = []
        for job in self.running:
            if job.planned < job.known:
                prefills.append(job)
            elif job.planned < job.total:
                budget -= self._extend(step, job, job.planned + 1, grown, ahead)
        for job in prefills:
            if budget <= 0:
                break
            budget -= self._extend(step, job, min(job.known, job.total, job.planned + budget), grown)
        for (job, asked), allocation in zip(grown, self._allocate(grown), strict=True):
            if not allocation.ok and job.index in step.segments:
                self._settle_for(step, job, asked, copies_in_flight)
        return budget

    def _settle_for(self, step: Step, job: Job, asked: int, copies_in_flight: bool) -> None:
        """Get the job the blocks that it needs now, where those asked for ahead were too many."""
        end = step.segments[job.index].end
        if asked == end or not self._allocate([(job, end)])[0].ok:
            self._make_room(step, job, end, copies_in_flight)

    def _extend(self, step: Step, job: Job, end: int, grown: list[tuple[Job, int]], ahead: int = 0) -> int:
        """Plan the job up to ``end``, with blocks for ``ahead`` more tokens; returns the tokens that takes."""
        if end > job.num_blocks * self._block_size:
            grown.append((job, max(end, min(end + ahead, job.total))))
        step.add(job, end)
        return end - job.planned

    def _allocate(self, demands: list[tuple[Job, int]]) -> list[Allocation]:
        if not demands:
            return []
        since = self._watch.now()
        allocations = self._manager.allocate_device_blocks([(job.request, end) for job, end in demands])
        self._watch.add("allocate", since, len(demands))
        for (job, _), allocation in zip(demands, allocations, strict=True):
            if allocation.ok:
                job.num_blocks = len(job.request.block_table)
        return allocations

    def _make_room(self, step: Step, job: Job, end: int, copies_in_flight: bool) -> None:
        """Preempt the newest requests until the job has its blocks, or is the newest itself."""
        while True:
            victim = self.running[-1]
            if victim is job and len(self.running) == 1 and copies_in_flight:
                step.drop(job)  # blocks being copied come free without it: wait for them
                return
            self.preempt(victim, step)
            if victim is job:
                return
            (allocation,) = self._allocate([(job, end)])
            if allocation.ok:
                return

    def _admit(self, step: Step, budget: int, now: float) -> None:
        """Match and start waiting requests while there are places, tokens and blocks for them."""
        if self._config.storage.is_on or self._config.cache.server is not None:
            self._look_ahead(now)
        put_back: list[Job] = []
        # No further than the requests that may run at once: those beyond would only be deferred as well.
        while (
            budget > 0
            and len(put_back) < self._config.concurrency
            and (self._room_may_have_come or not self.running)
        ):
            # Matches pin blocks: the first request must not be kept out by what its fellows in the batch pin.
            places = self._config.concurrency - len(self.running) if self.running else 1
            batch = self._next_jobs(budget, places, now)
            if not batch:
                break
            since = self._watch.now()
            matches = self._manager.match_prefix([job.request for job in batch])
            self._watch.add("match", since, len(batch))
            budget, refused = self._start(step, batch, matches, budget)
            put_back += refused
        self._waiting.extendleft(reversed(put_back))

    def _next_jobs(self, budget: int, places: int, now: float) -> list[Job]:
        """Requests in order whose tokens fit the budget if nothing is cached; at least one if any waits."""
        batch: list[Job] = []
        while len(batch) < places and budget > 0:
            job = self._waiting.popleft() if self._waiting else self._arrive(now)
            if job is None:
                break
            batch.append(job)
            budget -= job.request.num_tokens
        return batch

    def _look_ahead(self, now: float) -> None:
        """Let requests arrive before their turn, so that their blocks come from storage meanwhile."""
        while len(self._waiting) < self._config.concurrency and (job := self._arrive(now)) is not None:
            self._waiting.append(job)
            self._manager.prefetch([job.request])

    def _arrive(self, now: float) -> Job | None:
        """The next request that the pool can hold at all."""
        while (item := self._arrivals.take(now)) is not None:
            self._tally.requests += 1
            if self._config.blocks_for(item.computed_length) <= self._config.cache.device_blocks:
                return Job(item, self._config.seed, self._block_size)
            self._tally.rejected += 1
            self._arrivals.ended(item.index, now)
        return None

    def _start(
        self, step: Step, batch: list[Job], matches: list[MatchResult], budget: int
    ) -> tuple[int, list[Job]]:
        """Allocate for the matched; returns the budget left and the jobs that must wait."""
        put_back: list[Job] = []
        demands: list[tuple[Job, int]] = []
        found: list[MatchResult] = []
        for job, match in zip(batch, matches, strict=True):
            if match.status is MatchStatus.DEFERRED:
                self._tally.deferred_matches += 1
                put_back.append(job)
                continue
            missing = self._config.blocks_for(job.request.num_tokens) - match.num_device_blocks
            if budget <= 0 or not self._has_room(missing):
                self._manager.request_finish([job.request])
                put_back.append(job)
                continue
            cached = match.num_cached_tokens
            end = min(job.request.num_tokens, job.total, cached + budget)
            budget -= end - cached
            demands.append((job, end))
            found.append(match)
        for (job, end), match, allocation in zip(demands, found, self._allocate(demands), strict=True):
            if allocation.ok:
                self._enter(step, job, match, end)
            else:
                self._manager.request_finish([job.request])
                self._room_may_have_come = False
                put_back.append(job)
        return budget, put_back

    def _has_room(self, missing: int) -> bool:
        """Whether a whole prompt can be held now; a lone request is let in regardless."""
        reserved = self._reserve.blocks_each * len(self.running)
        if not self.running or self._manager.can_allocate_device_blocks(missing + reserved):
            return True
        self._room_may_have_come = False
        return False

    def _enter(self, step: Step, job: Job, match: MatchResult, end: int) -> None:
        if not job.counted:
            self._tally.count_first_match(job, match)
            job.counted = True
        job.admit(match.num_cached_tokens, match.num_host_blocks + match.num_storage_blocks > 0)
        self.running.append(job)
        step.add(job, end)

    def require_progress(self, idle_seconds: float, limit: float) -> None:
        """Raise ``ReplayError`` when requests wait and nothing has happened for too long."""
        if idle_seconds > limit:
            raise ReplayError(
                f"no progress for {limit:.0f} s with {len(self.running)} requests running and "
                f"{len(self._waiting)} waiting; the manager gives no blocks though no copy is in flight"
            )
