"""The replay's scheduler: plans each step and applies its results, as the scheduler of an engine does."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from fdcache.errors import ReplayError
from fdcache.integrations.fastdeploy.serving_variables import SchedulingSettings
from fdcache.manager import Allocation, LoadOutcome, LoadStatus, MatchResult, MatchStatus, Request
from fdcache.replay.config import ReplayConfig
from fdcache.replay.engine_cache import Cache, EngineCache
from fdcache.replay.jobs import Job, Segment, Step
from fdcache.replay.messages import Int32Array, StepOrder, StepResult
from fdcache.replay.statistics import Stopwatch, Tally
from fdcache.replay.workloads import Requests


class DecodeReserve:
    """Number of free blocks that the admission of a new request must leave for running ones.

    Zero before the first preemption. A preemption sets it to ``prefill_reserve`` blocks per running request; each
    step lowers it by ``prefill_reserve_decay``, down to ``prefill_reserve_minimum``.
    """

    def __init__(self, settings: SchedulingSettings) -> None:
        self._settings = settings
        self._each = 0.0
        self._is_on = False

    @property
    def blocks_each(self) -> int:
        """Blocks per running request."""
        return max(int(self._each), self._settings.prefill_reserve_minimum) if self._is_on else 0

    def note_preemption(self) -> None:
        """Reset to the full reserve."""
        self._is_on = True
        self._each = float(self._settings.prefill_reserve)

    def note_step(self) -> bool:
        """Decay by one step; return True if the reserve became smaller."""
        before = self.blocks_each
        self._each = max(self._each - self._settings.prefill_reserve_decay, 0.0)
        self._is_on &= self.blocks_each > 0
        return self.blocks_each < before


class Scheduler:
    """Scheduler of running and waiting requests.

    ``plan`` fills a step with decodes first, then with prompts in chunks of the remaining ``chunk_tokens``, then with
    new requests. When blocks run out, the newest running request is preempted. ``update`` applies the results of
    steps in the order in which they were planned.
    """

    def __init__(
        self, config: ReplayConfig, manager: Cache, arrivals: Requests, tally: Tally, watch: Stopwatch
    ) -> None:
        self._config = config
        self._block_size = config.layout.block_size
        self._manager = manager
        self._arrivals = arrivals
        self._tally = tally
        self._watch = watch
        self._waiting: deque[Job] = deque()
        self._ended: list[int] = []
        self._missing_reports: dict[int, int] = {}
        self._blocks_may_be_free = True
        self._reserve = DecodeReserve(config.scheduling)
        self.running: list[Job] = []

    @property
    def done(self) -> bool:
        """True once every request of the workload has ended."""
        return not self.running and not self._waiting and self._arrivals.exhausted

    @property
    def copies_in_flight(self) -> bool:
        """True while a rank has not reported a plan yet."""
        return bool(self._missing_reports)

    def plan(self, now: float, *, admit: bool = True) -> tuple[Step, StepOrder] | None:
        """Plan the next step; None if there is nothing to do. Without ``admit`` no new request is started."""
        step = Step()
        preemptions = self._tally.preemptions
        budget = self._schedule_running(step)
        if admit and self._tally.preemptions == preemptions:
            self._admit(step, budget, now)
        since = self._watch.now()
        plans = self._manager.take_plans()
        self._watch.add("plan", since, len(step.segments))
        if not plans and not step.segments and not self._ended:
            return None
        for plan in plans:
            self._missing_reports |= dict.fromkeys(plan.plan_ids, self._config.layout.tp_size)
        self._blocks_may_be_free |= self._reserve.note_step()
        ended, self._ended = self._ended, []
        return step, step.build_order(plans, ended)

    def update(self, step: Step, results: list[StepResult], now: float) -> None:
        """Apply the results of one step, one per rank: confirm loads, accept tokens, finish requests.

        A block that differs counts as corrupt once the load that may have written it is confirmed. If that load
        failed, the request recomputes from there and the block does not count.
        """
        self._tally.count_results(results)
        advanced = self._apply_reports(results)
        segments = list(step.segments.values())
        for position, block in {pair for result in results for pair in result.differing}:
            if segments[position].epoch == segments[position].job.epoch:
                segments[position].job.differing_blocks.add(block)
        advanced += self._accept_tokens(segments)
        ended = [job for job in dict.fromkeys(advanced) if job.ended]
        if ended:
            self._finish(ended, now)

    def preempt(self, job: Job, step: Step | None = None) -> None:
        """Take the blocks of a running request; it starts over from its next match."""
        if step is not None:
            step.drop(job)
        self.running.remove(job)
        self._manager.finish([job.request], preempted=True)
        job.release()
        self._waiting.appendleft(job)
        self._tally.preemptions += 1
        self._reserve.note_preemption()
        self._blocks_may_be_free = True

    def abort(self) -> None:
        """Release every request, running or waiting."""
        self._manager.finish([job.request for job in (*self.running, *self._waiting)])
        self._ended += [job.index for job in self.running]
        for job in self.running:
            job.epoch += 1
        self.running.clear()
        self._waiting.clear()

    def require_progress(self, idle_seconds: float, limit: float) -> None:
        """Raise ``ReplayError`` if requests wait and nothing has happened for more than ``limit`` seconds."""
        if idle_seconds > limit:
            raise ReplayError(
                f"no progress for {limit:.0f} s with {len(self.running)} requests running and "
                f"{len(self._waiting)} waiting; the manager gives no blocks though no copy is in flight"
            )

    # --- running requests ---------------------------------------------------------------------------------

    def _schedule_running(self, step: Step) -> int:
        """Plan decodes and chunks of prompts; return the tokens left for new requests."""
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
            if allocation.ok or job.index not in step.segments:
                continue
            end = step.segments[job.index].end
            # Try without the blocks asked for ahead before another request has to go.
            if asked == end or not self._allocate([(job, end)])[0].ok:
                self._make_room(step, job, end)
        return budget

    def _extend(self, step: Step, job: Job, end: int, grown: list[tuple[Job, int]], ahead: int = 0) -> int:
        """Plan the job up to ``end``, with blocks for ``ahead`` more tokens; return the number of tokens planned."""
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
                job.table = self._table_of(job.request)
                job.num_blocks = len(job.table)
        return allocations

    def _table_of(self, request: Request) -> Int32Array:
        manager = self._manager
        return manager.table_of(request) if isinstance(manager, EngineCache) else request.block_table

    def _make_room(self, step: Step, job: Job, end: int) -> None:
        """Preempt the newest requests until the job has its blocks or is itself the newest."""
        while True:
            victim = self.running[-1]
            if victim is job and len(self.running) == 1 and self.copies_in_flight:
                step.drop(job)  # wait: blocks become free when the copies end
                return
            self.preempt(victim, step)
            if victim is job:
                return
            (allocation,) = self._allocate([(job, end)])
            if allocation.ok:
                return

    # --- new requests -------------------------------------------------------------------------------------

    def _admit(self, step: Step, budget: int, now: float) -> None:
        """Match and start waiting requests while places, tokens and blocks last."""
        if self._config.storage.is_on or self._config.cache.server is not None:
            self._prefetch(now)
        put_back: list[Job] = []
        # Stop after as many deferred requests as may run at once: later ones would be deferred too.
        while (
            budget > 0
            and len(put_back) < self._config.concurrency
            and (self._blocks_may_be_free or not self.running)
        ):
            # Matches pin blocks: with none running, the first request must not compete with others of its batch.
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
        """Take waiting requests that fit the budget even with nothing cached; at least one if any waits."""
        batch: list[Job] = []
        while len(batch) < places and budget > 0:
            job = self._waiting.popleft() if self._waiting else self._next_arrival(now)
            if job is None:
                break
            batch.append(job)
            budget -= job.request.num_tokens
        return batch

    def _prefetch(self, now: float) -> None:
        """Take requests before their turn, so that their blocks are read from storage meanwhile."""
        while len(self._waiting) < self._config.concurrency and (job := self._next_arrival(now)) is not None:
            self._waiting.append(job)
            self._manager.begin([job.request])

    def _next_arrival(self, now: float) -> Job | None:
        """Take the next request that has arrived; reject those that are larger than the device pool."""
        while (item := self._arrivals.take(now)) is not None:
            self._tally.requests += 1
            if self._config.device_blocks_for(item.computed_length) <= self._config.cache.device_blocks:
                return Job(item, self._config.seed, self._block_size)
            self._tally.rejected += 1
            self._arrivals.finish(item.index, now)
        return None

    def _start(
        self, step: Step, batch: list[Job], matches: list[MatchResult], budget: int
    ) -> tuple[int, list[Job]]:
        """Allocate blocks for matched requests; return the remaining budget and the requests that must wait."""
        put_back: list[Job] = []
        demands: list[tuple[Job, int]] = []
        found: list[MatchResult] = []
        for job, match in zip(batch, matches, strict=True):
            if match.status is MatchStatus.DEFERRED:
                self._tally.deferred_matches += 1
                job.deferred_at = job.deferred_at or time.monotonic()
                put_back.append(job)
                continue
            if job.deferred_at is not None:
                self._tally.longest_deferral = max(
                    self._tally.longest_deferral, time.monotonic() - job.deferred_at
                )
                job.deferred_at = None
            missing = self._config.blocks_for(job.request.num_tokens) - match.num_device_blocks
            if budget <= 0 or not self._has_room(missing):
                self._manager.finish([job.request], preempted=True)
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
                self._manager.finish([job.request], preempted=True)
                self._blocks_may_be_free = False
                put_back.append(job)
        return budget, put_back

    def _has_room(self, missing: int) -> bool:
        """Return True if the whole prompt fits beside the reserve, or if no other request is running."""
        reserved = self._reserve.blocks_each * len(self.running)
        if not self.running or self._manager.can_allocate_device_blocks(missing + reserved):
            return True
        self._blocks_may_be_free = False
        return False

    def _enter(self, step: Step, job: Job, match: MatchResult, end: int) -> None:
        if not job.counted:
            self._tally.count_first_match(job, match)
            job.counted = True
        job.admit(match.num_cached_tokens, match.num_host_blocks + match.num_storage_blocks > 0)
        self.running.append(job)
        step.add(job, end)

    # --- results ------------------------------------------------------------------------------------------

    def _apply_reports(self, results: list[StepResult]) -> list[Job]:
        """Apply the ranks' reports; return the jobs whose loads are confirmed."""
        reports = [report for result in results for report in result.reports]
        for report in reports:
            self._missing_reports[report.plan_id] -= 1
            if not self._missing_reports[report.plan_id]:
                del self._missing_reports[report.plan_id]
        outcomes: list[LoadOutcome] = []
        if reports:
            since = self._watch.now()
            outcomes = self._manager.apply(reports)
            self._watch.add("apply", since, len(reports))
        if self._missing_reports:
            outcomes += self._manager.expire()
        return self._apply_outcomes(outcomes) if outcomes else []

    def _apply_outcomes(self, outcomes: Iterable[LoadOutcome]) -> list[Job]:
        jobs = {job.request.request_id: job for job in self.running}
        confirmed = []
        for outcome in outcomes:
            job = jobs.get(outcome.request_id)
            if job is None:
                continue
            if outcome.status is LoadStatus.CONFIRMED:
                job.loading = False
                self._count_corrupt(job)
                confirmed.append(job)
            elif outcome.status is LoadStatus.FAILED:
                self._tally.failed_loads += 1
                self._tally.recomputed_tokens += job.planned - outcome.recompute_from
                if self._config.layout.groups:
                    self.preempt(job)
                else:
                    job.rewind(outcome.recompute_from)
            else:
                self._tally.overdue_loads += 1
                self.preempt(job)
        return confirmed

    def _accept_tokens(self, segments: list[Segment]) -> list[Job]:
        """Accept the tokens of segments that are still valid; return the jobs that advanced.

        Without ``save_preempted_output`` only the prompt is committed until the request has ended.
        """
        keep_output = self._config.scheduling.save_preempted_output
        progress = []
        advanced = []
        for segment in segments:
            job = segment.job
            if segment.epoch != job.epoch:
                continue
            filled_block = segment.end // job.block_size > job.computed // job.block_size
            job.computed = segment.end
            if job.differing_blocks and not job.loading:
                self._count_corrupt(job)
            if filled_block or not keep_output:
                job.append_accepted()
                whole = keep_output or job.ended
                progress.append((job.request, segment.end if whole else min(segment.end, job.prompt_length)))
            advanced.append(job)
        if progress:
            since = self._watch.now()
            self._manager.commit(progress)
            self._watch.add("commit", since, len(progress))
        return advanced

    def _count_corrupt(self, job: Job) -> None:
        self._tally.corrupt_blocks += len(job.differing_blocks)
        job.differing_blocks.clear()

    def _finish(self, jobs: list[Job], now: float) -> None:
        """Release requests that have all their tokens."""
        since = self._watch.now()
        self._manager.finish([job.request for job in jobs])
        self._watch.add("finish", since, len(jobs))
        for job in jobs:
            self.running.remove(job)
            self._ended.append(job.index)
            self._arrivals.finish(job.index, now)
            self._tally.output_tokens += job.item.output_length
        self._tally.finished += len(jobs)
        self._blocks_may_be_free = True
