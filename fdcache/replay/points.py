"""One point of a sweep: a workload served request by request, in its own order, by the real manager."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from fdcache.errors import IntegrityError, ReplayError
from fdcache.manager import CacheManager, LoadStatus, MatchResult, MatchStatus
from fdcache.metadata import CacheSwapMetadata, TransferPlan, TransferReport, TransferResult
from fdcache.replay.config import ReplayConfig, VerifyBytes, require_machine
from fdcache.replay.devices import LoadFaults
from fdcache.replay.jobs import Job, Step
from fdcache.replay.messages import StepOrder, StepResult
from fdcache.replay.ranks import Ranks, start_ranks
from fdcache.replay.statistics import Tally
from fdcache.replay.worker import WorkerSpec
from fdcache.replay.workloads import WorkItem

_COPY_SECONDS = 60.0
_POLL_SECONDS = 0.0005


class PointResult(msgspec.Struct, frozen=True, kw_only=True):
    """Hits of one run. Requests larger than the device tier are ``rejected`` and not part of any other count."""

    requests: int
    rejected: int
    prompt_tokens: int
    hit_tokens: dict[str, int]
    evictions: int
    host_evictions: int
    verified_blocks: int
    corrupt_blocks: int

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found in a tier."""
        return sum(self.hit_tokens.values()) / self.prompt_tokens if self.prompt_tokens else 0.0


class ImmediateRanks:
    """Ranks that have no bytes to move: they report every plan as executed with the step that brought it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._orders: deque[StepOrder] = deque()

    def send(self, order: StepOrder) -> None:
        """Queue the order."""
        self._orders.append(order)

    def receive(self) -> list[StepResult]:
        """Answer the oldest order for every rank."""
        plans = self._orders.popleft().plans
        return [
            StepResult(0, [], [_executed(plan, rank) for plan in plans], 0) for rank in range(self._count)
        ]

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def _executed(plan: TransferPlan, rank: int) -> TransferReport:
    return TransferReport(
        plan_id=plan.plan_id, rank=rank, results=tuple(_copied(swap) for swap in plan.swaps())
    )


def _copied(swap: CacheSwapMetadata) -> TransferResult:
    return TransferResult(
        purpose=swap.purpose,
        failed=np.empty(0, np.int32),
        checksums=np.zeros(len(swap) if swap.to_host else 0, np.uint64),
        copied_bytes=0,
        seconds=0.0,
    )


def run_point(
    items: Iterable[WorkItem],
    config: ReplayConfig,
    on_progress: Callable[[int], None] = lambda done: None,
) -> PointResult:
    """Serve the requests in the order of ``items`` and count the hits of each request's match.

    Up to ``config.concurrency`` requests hold their blocks at a time; the oldest ends when another one needs its
    place, and any one before its next turn. Copies between tiers end before the next request is matched. With
    ``Verify.OFF`` no byte is computed or copied and the tiers take no memory; otherwise ranks compute and compare
    blocks as in a replay.

    The manager's clock shows the time stamps of the workload. ``on_progress`` receives the number of requests that
    have started; what it raises ends the run. Raises ``ReplayError`` if no request fits the device tier, or if
    anything leaked.
    """
    with Point(config) as point:
        for served, item in enumerate(items, start=1):
            point.serve(item)
            on_progress(served)
        return point.end()


class Point:
    """The manager and the ranks of one run, and the requests in flight."""

    def __init__(self, config: ReplayConfig) -> None:
        self._config = config
        self._seconds = 0.0
        self._running: dict[int, Job] = {}
        self._ended: list[int] = []
        self._missing_reports: dict[int, int] = {}
        self._tally = Tally()
        moves_bytes = config.verify is not VerifyBytes.OFF
        if moves_bytes:
            require_machine(config)
        self._manager = CacheManager(config.cache, config.layout, clock=lambda: self._seconds)
        self._ranks = self._start_ranks() if moves_bytes else ImmediateRanks(config.layout.tp_size)

    def _start_ranks(self) -> Ranks:
        config = self._config
        spec = WorkerSpec(
            layout=config.layout,
            transfer=config.transfer,
            device_blocks=config.cache.device_blocks,
            host=self._manager.host_cache,
            verify_every=config.verify.every,
            faults=LoadFaults(),
            storage=config.storage,
            storage_options=config.storage_options,
        )
        try:
            return start_ranks(spec, config.layout.tp_size)
        except BaseException:
            self._manager.close()
            raise

    def __enter__(self) -> Point:
        return self

    def __exit__(self, *_: object) -> None:
        with self._manager:
            self._ranks.close()

    def serve(self, item: WorkItem) -> int:
        """Match one request, compute what was not found, and leave it in flight. Return the tokens found."""
        self._seconds = max(self._seconds, item.timestamp_ms / 1000)
        self._tally.requests += 1
        if self._config.blocks_for(item.computed_length) > self._config.cache.device_blocks:
            self._tally.rejected += 1
            return 0
        if item.after is not None and item.after in self._running:
            self._finish(item.after)  # a turn follows its answer
        if len(self._running) == self._config.concurrency:
            self._finish_oldest()
        job = Job(item, self._config.seed, self._config.layout.block_size)
        match = self._admit(job)
        self._tally.count_first_match(job, match)
        self._compute(job, match)
        self._running[job.index] = job
        return match.num_cached_tokens

    def end(self) -> PointResult:
        """End the requests in flight, check that nothing is left over, and return the counts."""
        while self._running:
            self._finish_oldest()
        self._manager.pause()  # plan no further backups
        self._settle()
        tally = self._tally
        if tally.rejected and tally.rejected == tally.requests:
            raise ReplayError(
                f"each of the {tally.rejected} requests is larger than the device tier, "
                f"{self._config.cache.device_blocks} blocks of {self._config.layout.block_size} tokens"
            )
        self._require_nothing_left()
        stats = self._manager.get_stats()
        return PointResult(
            requests=tally.requests,
            rejected=tally.rejected,
            prompt_tokens=tally.prompt_tokens,
            hit_tokens={tier: tally.hit_tokens[tier] for tier in ("device", "host")},
            evictions=stats.device.evictions,
            host_evictions=stats.host.evictions if stats.host else 0,
            verified_blocks=tally.verified_blocks,
            corrupt_blocks=tally.corrupt_blocks,
        )

    def _admit(self, job: Job) -> MatchResult:
        """Match a request and allocate all its blocks; older requests end until they fit."""
        while True:
            (match,) = self._manager.match_prefix([job.request])
            if match.status is not MatchStatus.DEFERRED:
                (allocation,) = self._manager.allocate_device_blocks([(job.request, job.total)])
                if allocation.ok:
                    return match
                self._manager.finish([job.request], preempted=True)
            if not self._running:
                raise ReplayError(f"request {job.index} gets no blocks though no other request is in flight")
            self._finish_oldest()

    def _compute(self, job: Job, match: MatchResult) -> None:
        """Compute all tokens of a request in one step and publish its prompt once its load is confirmed."""
        job.table = job.request.block_table
        job.num_blocks = len(job.table)
        job.admit(match.num_cached_tokens, job.request.is_loading)
        step = Step()
        step.add(job, job.total)
        self._step(step)
        self._settle()
        if job.request.is_loading:
            raise ReplayError(f"request {job.index}: its load ended without an outcome")
        job.computed = job.total
        self._manager.commit([(job.request, min(job.prompt_length, job.total))])

    def _finish_oldest(self) -> None:
        self._finish(next(iter(self._running)))

    def _finish(self, index: int) -> None:
        """Publish the output of a request and release its blocks, which stay cached."""
        job = self._running.pop(index)
        job.append_accepted()
        self._manager.commit([(job.request, job.total)])
        self._manager.finish([job.request])
        self._ended.append(job.index)
        self._settle()

    def _step(self, step: Step) -> bool:
        """Send a step with the manager's plans to the ranks and apply their results; False if there was nothing."""
        plans = self._manager.take_plans()
        if not plans and not step.segments and not self._missing_reports:
            return False
        for plan in plans:
            self._missing_reports |= dict.fromkeys(plan.plan_ids, self._config.layout.tp_size)
        ended, self._ended = self._ended, []
        self._ranks.send(step.build_order(plans, ended))
        self._apply(self._ranks.receive())
        return True

    def _apply(self, results: Sequence[StepResult]) -> None:
        tally = self._tally
        tally.verified_blocks += sum(result.verified for result in results)
        tally.corrupt_blocks += len({pair for result in results for pair in result.differing})
        reports = [report for result in results for report in result.reports]
        for report in reports:
            self._missing_reports[report.plan_id] -= 1
            if not self._missing_reports[report.plan_id]:
                del self._missing_reports[report.plan_id]
        if not reports:
            return
        for outcome in self._manager.apply(reports):
            if outcome.status is not LoadStatus.CONFIRMED:
                raise ReplayError(f"a load of request {outcome.request_id} ended as {outcome.status.value}")

    def _settle(self) -> None:
        """Run steps until every copy that the manager wants has been planned and reported."""
        deadline = time.monotonic() + _COPY_SECONDS
        while self._step(Step()):
            if self._missing_reports:
                if time.monotonic() > deadline:
                    raise ReplayError(
                        f"{len(self._missing_reports)} copies did not end within {_COPY_SECONDS:.0f} s"
                    )
                time.sleep(_POLL_SECONDS)

    def _require_nothing_left(self) -> None:
        stats = self._manager.get_stats()
        held = sum(tier.pins + tier.holds + tier.leases for tier in (stats.device, stats.host) if tier)
        if held:
            raise ReplayError(f"{held} pins, holds and leases are left after the last request")
        try:
            self._manager.check_integrity()
        except IntegrityError as error:
            raise ReplayError(f"an invariant of the tiers does not hold: {error}") from error
