"""Settlement: what a step's results change: loads confirmed or failed, tokens accepted, requests ended."""

from __future__ import annotations

from collections.abc import Iterable

from fdcache.manager import CacheManager, LoadOutcome, LoadStatus
from fdcache.replay.job import Job
from fdcache.replay.messages import StepResult
from fdcache.replay.scheduler import Scheduler
from fdcache.replay.step import Segment, Step
from fdcache.replay.stopwatch import Stopwatch
from fdcache.replay.tally import Tally


class Settlement:
    """Applies results in the order of their steps.

    A block that differs counts as corrupt only once the load it may have come by is confirmed: after a failed
    load it is known to be bad, and the tokens computed above it are void. Where preempted requests leave no outputs
    behind, outputs are published when their request has ended.
    """

    def __init__(
        self,
        manager: CacheManager,
        scheduler: Scheduler,
        tally: Tally,
        watch: Stopwatch,
        *,
        keeps_preempted_output: bool = True,
    ) -> None:
        self._keeps_preempted_output = keeps_preempted_output
        self._manager = manager
        self._scheduler = scheduler
        self._tally = tally
        self._watch = watch
        self._plans: dict[int, int] = {}

    @property
    def copies_in_flight(self) -> bool:
        """Whether some rank has yet to report a plan."""
        return bool(self._plans)

    def expect(self, plan_id: int, ranks: int) -> None:
        """A plan was sent to so many ranks."""
        self._plans[plan_id] = ranks

    def settle(self, step: Step, results: list[StepResult], now: float) -> None:
        """Apply one step's results, one of each rank."""
        self._tally.count_results(results)
        advanced = self._settle_loads(results)
        segments = list(step.segments.values())
        for position, block in {pair for result in results for pair in result.differing}:
            if segments[position].epoch == segments[position].job.epoch:
                segments[position].job.suspects.add(block)
        advanced += self._settle_tokens(segments)
        ended = [job for job in dict.fromkeys(advanced) if job.ended]
        if ended:
            self._scheduler.finish(ended, now)

    def _settle_loads(self, results: list[StepResult]) -> list[Job]:
        """Carry the reports to the manager; returns the jobs whose loads are confirmed."""
        reports = [report for result in results for report in result.reports]
        for report in reports:
            self._plans[report.plan_id] -= 1
            if not self._plans[report.plan_id]:
                del self._plans[report.plan_id]
        outcomes: list[LoadOutcome] = []
        if reports:
            since = self._watch.now()
            outcomes = self._manager.apply(reports)
            self._watch.add("apply", since, len(reports))
        if self._plans:
            outcomes += self._manager.expire()
        return self._follow(outcomes) if outcomes else []

    def _follow(self, outcomes: Iterable[LoadOutcome]) -> list[Job]:
        jobs = {job.request.request_id: job for job in self._scheduler.running}
        confirmed = []
        for outcome in outcomes:
            job = jobs.get(outcome.request_id)
            if job is None:
                continue
            if outcome.status is LoadStatus.CONFIRMED:
                job.loading = False
                self._judge(job)
                confirmed.append(job)
            elif outcome.status is LoadStatus.FAILED:
                self._tally.failed_loads += 1
                self._tally.recomputed_tokens += job.planned - outcome.recompute_from
                job.rewind(outcome.recompute_from)
            else:
                self._tally.overdue_loads += 1
                self._scheduler.preempt(job)
        return confirmed

    def _settle_tokens(self, segments: list[Segment]) -> list[Job]:
        """Accept the tokens that are still wanted; returns the jobs that got some."""
        progress = []
        advanced = []
        for segment in segments:
            job = segment.job
            if segment.epoch != job.epoch:
                continue
            filled_block = segment.end // job.block_size > job.computed // job.block_size
            job.computed = segment.end
            if job.suspects and not job.loading:
                self._judge(job)
            is_whole = self._keeps_preempted_output or job.ended
            if filled_block or not self._keeps_preempted_output:
                job.append_accepted()
                progress.append(
                    (job.request, segment.end if is_whole else min(segment.end, job.prompt_length))
                )
            advanced.append(job)
        if progress:
            since = self._watch.now()
            self._manager.commit(progress)
            self._watch.add("commit", since, len(progress))
        return advanced

    def _judge(self, job: Job) -> None:
        self._tally.corrupt_blocks += len(job.suspects)
        job.suspects.clear()
