"""Step: one scheduler step while it is put together and until its results are back."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fdcache.metadata import TransferPlan
from fdcache.replay.job import Job
from fdcache.replay.messages import Int32Array, StepOrder


@dataclass(slots=True)
class Segment:
    """Tokens [start, end) of one job, valid as long as the job is still in ``epoch``."""

    job: Job
    start: int
    end: int
    epoch: int


@dataclass(slots=True)
class Step:
    """The segments of one step; a job has at most one."""

    segments: dict[int, Segment] = field(default_factory=dict)

    def add(self, job: Job, end: int) -> None:
        """Plan the job's tokens up to ``end``."""
        self.segments[job.index] = Segment(job, job.planned, end, job.epoch)

    def drop(self, job: Job) -> int:
        """Take the job out again; returns how many tokens that frees."""
        segment = self.segments.pop(job.index, None)
        return 0 if segment is None else segment.end - segment.start

    def order(self, plans: list[TransferPlan], ended: list[int]) -> StepOrder:
        """The order for every rank. Marks the segments as planned and their blocks as sent."""
        count = len(self.segments)
        rows = np.zeros((6, count), dtype=np.int32)
        blocks: list[Int32Array] = []
        begins: list[tuple[int, Int32Array]] = []
        columns = []
        for segment in self.segments.values():
            job = segment.job
            if not job.begun:
                begins.append((job.index, job.tokens[: job.total]))
                job.begun = True
            grow = 0
            if job.sent_blocks < job.num_blocks:
                fresh = job.request.block_table[job.sent_blocks :]
                blocks.append(fresh)
                grow = len(fresh)
            verify = job.verify_blocks
            columns.append((job.index, segment.start, segment.end, job.sent_blocks, grow, verify))
            job.sent_blocks += grow
            job.verify_blocks = 0
            job.planned = segment.end
        if columns:
            rows[:] = np.array(columns, dtype=np.int32).T
        flat = np.concatenate(blocks) if blocks else np.empty(0, dtype=np.int32)
        return StepOrder(plans, rows, flat, begins, ended)
