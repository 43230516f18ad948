"""Requests as the replay's scheduler sees them, and the step that is planned for them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fdcache.manager import Request
from fdcache.metadata import TransferPlan
from fdcache.replay.messages import Int32Array, StepOrder
from fdcache.replay.workloads import WorkItem

NO_TABLE = np.empty(0, np.int32)


class Job:
    """A request between its arrival and its end. Counts are tokens from the start of its prompt.

    Attributes:
        request: the request as the cache manager knows it.
        total: tokens to compute or reuse before the request ends.
        known: tokens that existed at the last match. They are prefilled in chunks; later ones are decoded one per step.
        planned: tokens in the steps sent so far.
        computed: tokens in the steps whose results have arrived.
        epoch: version of the planned tokens; results of an earlier epoch are discarded.
        table: the block table; with groups of layers a row for each page, which is the block of all other counts.
        num_blocks, sent_blocks: length of the block table, and how much of it the ranks know.
        verify_blocks: leading blocks that the next step compares.
        loading: a load is not confirmed yet.
        started: the ranks have the request's tokens.
        counted: the first match is in the statistics.
        deferred_at: since when its matches are deferred, on the monotonic clock.
        differing_blocks: blocks that differed and may belong to a load that is not confirmed yet.
    """

    __slots__ = (
        "block_size",
        "computed",
        "counted",
        "deferred_at",
        "differing_blocks",
        "epoch",
        "item",
        "known",
        "loading",
        "num_blocks",
        "planned",
        "prompt_length",
        "request",
        "sent_blocks",
        "started",
        "table",
        "tokens",
        "total",
        "verify_blocks",
    )

    def __init__(self, item: WorkItem, seed: int, block_size: int) -> None:
        tokens = item.tokens(seed)
        self.item = item
        self.block_size = block_size
        self.prompt_length = item.prompt_length
        self.tokens: NDArray[np.int32] = tokens
        self.request = Request(str(item.index), tokens[: self.prompt_length], hints=item.hints)
        self.total = item.computed_length
        self.known = self.prompt_length
        self.planned = 0
        self.computed = 0
        self.table: Int32Array = NO_TABLE
        self.num_blocks = 0
        self.sent_blocks = 0
        self.verify_blocks = 0
        self.epoch = 0
        self.loading = False
        self.started = False
        self.counted = False
        self.deferred_at: float | None = None
        self.differing_blocks: set[int] = set()

    @property
    def index(self) -> int:
        """Number of the request in the workload; also its sequence number on the ranks."""
        return self.item.index

    @property
    def ended(self) -> bool:
        """True once all tokens are computed and no load is unconfirmed."""
        return self.computed >= self.total and not self.loading

    @property
    def num_accepted(self) -> int:
        """Number of tokens that exist: the prompt, and after it one more than have KV."""
        if self.computed < self.prompt_length:
            return self.prompt_length
        return min(self.computed + 1, len(self.tokens))

    def append_accepted(self) -> None:
        """Append the tokens accepted since the last call to the manager's request."""
        have, accepted = self.request.num_tokens, self.num_accepted
        if accepted > have:
            self.request.append_tokens(self.tokens[have:accepted])

    def admit(self, cached: int, loading: bool) -> None:
        """Start computing after ``cached`` tokens of the prefix."""
        self.known = min(self.request.num_tokens, self.total)
        self.loading = loading
        self._start_from(cached)

    def rewind(self, tokens: int) -> None:
        """Discard everything computed or planned after ``tokens``; the blocks before are compared again."""
        self.epoch += 1
        self.known = min(self.request.num_tokens, self.total)
        self.loading = False
        self.differing_blocks.clear()
        self._start_from(tokens)

    def release(self) -> None:
        """Start over from the next match, without blocks; used when the request is preempted."""
        self.append_accepted()
        self.rewind(0)
        self.table = NO_TABLE
        self.num_blocks = self.sent_blocks = 0

    def _start_from(self, tokens: int) -> None:
        self.planned = self.computed = tokens
        self.verify_blocks = tokens // self.block_size


@dataclass(slots=True)
class Segment:
    """Tokens [start, end) of a job in one step; valid while the job is still in ``epoch``."""

    job: Job
    start: int
    end: int
    epoch: int


@dataclass(slots=True)
class Step:
    """One scheduler step: at most one segment per job, keyed by the job's index."""

    segments: dict[int, Segment] = field(default_factory=dict)

    def add(self, job: Job, end: int) -> None:
        """Plan the job's tokens up to ``end``."""
        self.segments[job.index] = Segment(job, job.planned, end, job.epoch)

    def drop(self, job: Job) -> None:
        """Remove the job from the step, if it is there."""
        self.segments.pop(job.index, None)

    def build_order(self, plans: list[TransferPlan], ended: list[int]) -> StepOrder:
        """Build the order for the ranks, and mark the segments as planned and their blocks as sent."""
        blocks: list[Int32Array] = []
        begins: list[tuple[int, Int32Array]] = []
        columns = []
        for segment in self.segments.values():
            job = segment.job
            if not job.started:
                begins.append((job.index, job.tokens[: job.total]))
                job.started = True
            grow = 0
            if job.sent_blocks < job.num_blocks:
                fresh = job.table[job.sent_blocks :]
                blocks.append(fresh.reshape(-1))
                grow = len(fresh)
            columns.append((job.index, segment.start, segment.end, job.sent_blocks, grow, job.verify_blocks))
            job.sent_blocks += grow
            job.verify_blocks = 0
            job.planned = segment.end
        rows = np.array(columns, dtype=np.int32).reshape(-1, 6).T
        flat = np.concatenate(blocks) if blocks else np.empty(0, dtype=np.int32)
        return StepOrder(plans, np.ascontiguousarray(rows), flat, begins, ended)
