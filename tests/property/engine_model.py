"""A model of an engine and its ranks for the manager's property tests.

Blocks hold values instead of bytes: the whole token prefix that they stand for, and as many of the tokens after it
as the draft layers were fed. Ranks execute what they are sent in order, as a stream does, at moments the test chooses;
before each step they check that every block the step would read holds exactly the tokens it must.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field

import numpy as np

from fdcache import _core
from fdcache.devices.cpu import CpuDevice
from fdcache.layout_planes import Plane
from fdcache.manager import CacheManager, LoadOutcome, LoadStatus, MatchStatus, Request
from fdcache.metadata import CacheSwapMetadata, SwapPurpose, TransferPlan, TransferReport, TransferResult
from fdcache.service.client.shared_arena import SharedHostArena
from tests.property.disk_model import Disk

BLOCK = 4
Prefix = tuple[int, ...]
GARBAGE: Prefix = (-1,)


@dataclass(eq=False)
class Step:
    """Tokens [start, stop) of one request, computed by every rank.

    Draft layers look ``lookahead`` tokens ahead. Earlier steps of the request saw its first ``seen`` tokens, so what
    the draft layers made of the last of them is computed again.
    """

    job: Job
    incarnation: int
    start: int
    stop: int
    seen: int
    lookahead: int
    tokens: Prefix
    table: list[int]
    executed_by: set[int] = field(default_factory=set)
    poisoned: bool = False

    @property
    def is_current(self) -> bool:
        return self.job.incarnation == self.incarnation

    @property
    def sees(self) -> int:
        """Number of tokens that some layer has seen."""
        return min(self.stop + self.lookahead, len(self.tokens))

    @property
    def final(self) -> int:
        """Number of tokens with final KV, in the draft layers too."""
        return max(self.sees - self.lookahead, 0)

    def block(self, index: int, seen: int) -> Prefix:
        """Content of a block after the first ``seen`` tokens."""
        return self.tokens[: min((index + 1) * BLOCK + self.lookahead, seen)]


@dataclass(eq=False)
class Job:
    """A request as the engine sees it; ``incarnation`` changes when its steps in flight become void.

    ``seen``: the ``scheduled`` tokens and those after them that draft layers were fed.
    """

    request: Request
    tokens: Prefix
    scheduled: int = 0
    seen: int = 0
    running: bool = False
    incarnation: int = 0


class Rank:
    """One worker: device and host blocks, and a queue of plans and steps.

    With ``arena`` its host blocks are a service's, of these ``planes``, whose headers it writes as a device would.
    What a block holds on the device may be kept elsewhere than in a dictionary.
    """

    def __init__(
        self, index: int, arena: SharedHostArena | None = None, planes: tuple[Plane, ...] = ()
    ) -> None:
        self.index = index
        self.arena = arena
        self.planes = planes
        self.device: MutableMapping[int, Prefix] = {}
        self.host: dict[int, tuple[int, Prefix]] = {}
        self.disk = Disk()
        self.queue: deque[TransferPlan | Step] = deque()

    def execute_next(self, fails: frozenset[int]) -> list[TransferReport]:
        """Run the oldest plan or step; copies at the positions ``fails`` (modulo the size) fail."""
        work = self.queue.popleft()
        if isinstance(work, Step):
            self.compute(work)
            return []
        return [self._copy(work, fails), *self.disk.submit(self.index, work)]

    def refuse_next(self) -> list[TransferReport]:
        """The oldest plan never gets to the worker; a step is computed."""
        work = self.queue.popleft()
        if isinstance(work, Step):
            self.compute(work)
            return []
        if work.loads is not None:
            self.device.update(dict.fromkeys(work.loads.dst_block_ids.tolist(), GARBAGE))
        return [TransferReport.refusal(work, self.index, "refused")]

    def execute_storage(self, purpose: SwapPurpose, fails: frozenset[int]) -> list[TransferReport]:
        """Carry out the oldest read from storage, or the oldest write to it."""
        return self.disk.execute_next(self.index, purpose, self.host, fails)

    def close(self) -> None:
        """The process ends."""
        if self.arena is not None:
            self.arena.close()

    def _copy(self, work: TransferPlan, fails: frozenset[int]) -> TransferReport:
        results = []
        refused = self.arena is not None and (self.arena.attach(work) or self.arena.prepare(work)) is not None
        for swap in work.swaps():
            if refused:
                fails = frozenset(range(len(swap)))
            failed = sorted({position % len(swap) for position in fails})
            for i in range(len(swap)):
                source, target = int(swap.src_block_ids[i]), int(swap.dst_block_ids[i])
                if swap.purpose is SwapPurpose.LOAD:
                    generation, value = self.host.get(source, (-1, GARBAGE))
                    if generation != int(swap.src_generations[i]):
                        failed = sorted({*failed, i})
                    self.device[target] = GARBAGE if i in failed else value
                else:
                    value = GARBAGE if i in failed else self.device.get(source, GARBAGE)
                    self.host[target] = (int(swap.dst_generations[i]), value)
                    if self.arena is not None and i not in failed:
                        self._stamp(self.arena, swap, i)
            results.append(
                TransferResult(
                    purpose=swap.purpose,
                    failed=np.array(failed, np.int32),
                    checksums=np.empty(0, np.uint64),
                    copied_bytes=0,
                    seconds=0.0,
                    error_message="injected" if failed else None,
                )
            )
        return TransferReport(plan_id=work.plan_id, rank=self.index, results=tuple(results))

    def _stamp(self, arena: SharedHostArena, swap: CacheSwapMetadata, i: int) -> None:
        slot, generation = int(swap.dst_block_ids[i]), int(swap.dst_generations[i])
        if arena.table.header(slot).generation != generation:
            raise AssertionError(f"slot {slot} was given to others while rank {self.index} writes it")
        record = arena.table.record(slot)
        offsets, sizes = [plane.offset for plane in self.planes], [plane.nbytes for plane in self.planes]
        checksum = _core.record_checksum(record, offsets, sizes)
        hashes = (swap.hash_values[i].tobytes(), swap.parent_hashes[i].tobytes())
        header = _core.SlotHeader(2, generation, *hashes, arena.fingerprint, sum(sizes), checksum)
        arena.table.set_header(slot, header)

    def compute(self, step: Step) -> None:
        """Check what the step reads, write what it computes."""
        for block in range(-(-step.start // BLOCK)):
            must_hold = step.block(block, step.seen)
            holds = self.device.get(step.table[block], GARBAGE)
            if holds == GARBAGE:
                step.poisoned = True
            elif step.is_current and not step.poisoned:
                assert holds == must_hold, f"rank {self.index} reads {holds} instead of {must_hold}"
        for block in range(max(step.seen - step.lookahead, 0) // BLOCK, -(-step.stop // BLOCK)):
            self.device[step.table[block]] = GARBAGE if step.poisoned else step.block(block, step.sees)
        step.executed_by.add(self.index)


def model_rank(manager: CacheManager, index: int) -> Rank:
    """A rank whose copies are assignments."""
    host = manager.host_cache
    if host.server is None:
        return Rank(index)
    layout = manager.layout
    return Rank(index, SharedHostArena(host, layout, index, CpuDevice()), layout.planes)


class Engine:
    """Schedules jobs against a manager and its ranks, any number of steps ahead of them."""

    def __init__(
        self,
        manager: CacheManager,
        num_ranks: int,
        make_rank: Callable[[CacheManager, int], Rank] | None = None,
    ) -> None:
        self.manager = manager
        self._make_rank = make_rank or model_rank
        self.ranks = [self._make_rank(manager, index) for index in range(num_ranks)]
        self.jobs: list[Job] = []
        self.steps: deque[Step] = deque()
        self.reports: list[TransferReport] = []
        self.grid = 1
        self._named = 0

    def close(self) -> None:
        """Release the service; nothing may be in flight."""
        for rank in self.ranks:
            rank.close()
        self.manager.close()

    def submit(self, tokens: Prefix, use_cache: bool = True) -> None:
        self._named += 1
        request = Request(f"r{self._named}", list(tokens), use_cache=use_cache)
        self.jobs.append(Job(request, tokens))

    def schedule(self, jobs: list[Job], chunk: int) -> None:
        """One scheduler step for these jobs."""
        steps = []
        for job in jobs:
            if not job.running:
                result = self.manager.match_prefix([job.request])[0]
                if result.status is MatchStatus.DEFERRED:
                    continue
                assert result.num_cached_tokens < len(job.tokens)
                assert result.num_cached_tokens == result.total_matched_blocks * BLOCK
                assert result.total_matched_blocks % self.grid == 0
                assert len(job.request.block_table) == result.num_device_blocks
                if job.request.device_only:
                    assert result.total_matched_blocks == result.num_device_blocks
                job.scheduled = result.num_cached_tokens
                job.seen = job.scheduled and job.scheduled + self.manager.settings.lookahead_tokens
            stop = min(len(job.tokens), job.scheduled + chunk)
            allocation = self.manager.allocate_device_blocks([(job.request, stop)])[0]
            if not allocation.ok:
                if not job.running:
                    self.manager.finish([job.request])
                continue
            job.running = True
            if stop > job.scheduled:
                table = job.request.block_table.tolist()
                span = (job.scheduled, stop, job.seen, self.manager.settings.lookahead_tokens)
                steps.append(Step(job, job.incarnation, *span, job.tokens, table))
                job.scheduled, job.seen = stop, steps[-1].sees
        plans = self.manager.take_plans()
        for rank in self.ranks:
            rank.queue.extend(plans)
            rank.queue.extend(steps)
        self.steps.extend(steps)

    def generate(self, job: Job, token: int) -> None:
        """The model sampled a token for a job whose tokens are all scheduled."""
        job.request.append_tokens([token])
        job.tokens = (*job.tokens, token)

    def execute(self, rank: Rank, fails: frozenset[int]) -> None:
        self.reports += rank.execute_next(fails)

    def refuse(self, rank: Rank) -> None:
        self.reports += rank.refuse_next()

    def execute_storage(self, rank: Rank, purpose: SwapPurpose, fails: frozenset[int]) -> None:
        self.reports += rank.execute_storage(purpose, fails)

    def deliver(self, index: int) -> None:
        self.handle(self.manager.apply([self.reports.pop(index % len(self.reports))]))

    def handle(self, outcomes: list[LoadOutcome]) -> None:
        for outcome in outcomes:
            job = next(job for job in self.jobs if job.request.request_id == outcome.request_id)
            assert job.running
            if outcome.status is LoadStatus.CONFIRMED:
                waiting = [step for step in self.steps if step.job is job and step.is_current]
                assert not any(step.poisoned for step in waiting), "a confirmed load left garbage behind"
            elif outcome.status is LoadStatus.FAILED:
                job.incarnation += 1
                job.scheduled = outcome.recompute_from
                job.seen = job.scheduled and job.scheduled + self.manager.settings.lookahead_tokens
            else:
                self.stop(job)

    def accept_oldest(self) -> None:
        """Take the results of the oldest step that every rank has executed."""
        step = self.steps[0]
        if len(step.executed_by) < len(self.ranks):
            return
        self.steps.popleft()
        if step.is_current and step.job.running:
            self.manager.commit([(step.job.request, step.final)])

    def stop(self, job: Job) -> None:
        """Preempt: what the job holds goes back; it can be scheduled again from the start."""
        self.manager.finish([job.request])
        job.running = False
        job.scheduled = job.seen = 0
        job.incarnation += 1

    def finish(self, job: Job) -> None:
        self.stop(job)
        self.jobs.remove(job)

    def lose(self, rank: Rank) -> None:
        """The rank's process dies; the engine starts another and every job over."""
        outcomes = self.manager.worker_lost(rank.index)
        rank.close()
        self.ranks[rank.index] = self._make_rank(self.manager, rank.index)
        self.ranks[rank.index].disk = rank.disk.reopened()
        if rank.arena is not None:
            self.ranks[rank.index].host = rank.host  # a service's memory outlives its workers
        self.reports = [report for report in self.reports if report.rank != rank.index]
        for step in self.steps:
            step.executed_by.add(rank.index)
        self.handle(outcomes)
        for job in self.jobs:
            self.stop(job)

    def drain(self) -> None:
        """Run everything in flight to its end."""
        for rank in self.ranks:
            while rank.queue:
                self.execute(rank, frozenset())
            while rank.disk.is_busy:
                for purpose in (SwapPurpose.STORE, SwapPurpose.PREFETCH):
                    self.execute_storage(rank, purpose, frozenset())
        while self.reports:
            self.deliver(0)
        for _ in range(len(self.steps)):
            self.accept_oldest()
        assert not self.steps
