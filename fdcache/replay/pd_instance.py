"""One instance of a replay of prefill and decode: its manager, its rank, and the steps that compute its requests."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdcache.errors import FdcacheError
from fdcache.layout import KVLayout
from fdcache.manager import CacheManager, Request
from fdcache.manager.requests import PeerSource
from fdcache.manager.results import AllocationFailure, LoadStatus, MatchStatus
from fdcache.replay.devices import DeviceName
from fdcache.replay.pd_ranks import InstanceRanks
from fdcache.settings.cache import CacheSettings, CopySettings
from fdcache.settings.peers import PeerSettings
from fdcache.tiers.statistics import HandoverCount
from fdcache.transfer.handovers import Handovers, PeerTerms

_IDLE_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """Parameters of an instance; plain data that can be sent to its process. Its ranks take GPUs from ``first_gpu``."""

    layout: KVLayout
    cache: CacheSettings
    transfer: CopySettings
    peers: PeerSettings
    chunk_tokens: int
    wait: float
    shared: Path | None
    shards: int = 1
    device: DeviceName = DeviceName.CPU
    first_gpu: int = 0


@dataclass(frozen=True, slots=True)
class PairWork:
    """A request to compute: with a ``source`` by decode, without by prefill."""

    index: int
    attempt: int
    tokens: NDArray[np.int32]
    transfer: str
    source: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request."""

    index: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget all blocks."""


@dataclass(frozen=True, slots=True)
class Flip:
    """Change a byte of a block that is complete and waits to be read. It is answered with ``Flipped``."""

    index: int
    seed: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the work and answer with ``Left``."""

    seconds: float


Command = PairWork | Abort | Reset | Flip | Stop


@dataclass(frozen=True, slots=True)
class Started:
    """The instance works; peers reach its ranks at these addresses."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NotStarted:
    """The instance cannot work, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A request has ended, or was aborted. ``wrong`` of the ``compared`` blocks that it reused had other bytes."""

    index: int
    attempt: int
    compared: int = 0
    wrong: int = 0
    fetched: int = 0
    computed_tokens: int = 0
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class Flipped:
    """A byte of a request's blocks was changed, or there was none to change."""

    index: int
    done: bool


@dataclass(frozen=True, slots=True)
class Left:
    """What an instance has at its end: blocks that are neither free nor cached, plans, requests, and its counts."""

    blocks_in_use: int
    plans: int
    requests: int
    counts: tuple[HandoverCount, ...]
    errors: tuple[str, ...]


@dataclass(slots=True)
class _Job:
    work: PairWork
    request: Request
    computed: int = 0
    sent_blocks: int = 0
    verify: int = 0
    compared: int = 0
    wrong: int = 0
    fetched: int = 0
    waits: bool = False
    allocated: bool = False
    planned: int = 0
    tokens: int = 0


@dataclass(slots=True)
class _State:
    jobs: dict[int, _Job] = field(default_factory=dict)
    flips: list[Flip] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    stopping: float | None = None


class Instance:
    """Computes requests chunk by chunk, and hands them over or fetches them. One step is planned at a time."""

    def __init__(self, spec: InstanceSpec, answer: Callable[[Any], None]) -> None:
        self._spec, self._answer = spec, answer
        layout = spec.layout
        self._size = layout.block_size
        self.manager = CacheManager(spec.cache, layout)
        self.handovers = Handovers(self.manager, PeerTerms(spec.peers, spec.wait))
        self._ranks = InstanceRanks(
            layout, spec.transfer, self.manager, spec.shards, spec.shared, spec.device, spec.first_gpu
        )
        self._state = _State()
        self._sent: dict[int, Request] = {}
        """Requests that were computed for decode. They are live as long as their blocks are held for it."""
        answer(Started(self._ranks.open_transfer(spec.peers)))

    def close(self) -> None:
        """End all hand-overs and release all memory."""
        self._ranks.close()
        self.manager.close()

    def take(self, command: Command) -> None:
        """Carry out a command of the driver."""
        match command:
            case PairWork():
                self._state.jobs[command.index] = _Job(command, Request(command.transfer, command.tokens))
            case Abort():
                if (job := self._state.jobs.get(command.index)) is not None:
                    self.handovers.end_transfers([job.request])
                    self._end(job, aborted=True)
                elif (sent := self._sent.get(command.index)) is not None:
                    self.handovers.end_transfers([sent])
            case Reset():
                self.manager.reset_cache()
            case Flip():
                self._state.flips.append(command)
            case Stop():
                self._state.stopping = time.monotonic() + command.seconds

    def step(self) -> bool:
        """Do one step; return False once the work is done and the driver has the answer."""
        for job in list(self._state.jobs.values()):
            if not job.allocated:
                self._admit(job)
        busy = self._compute()
        self._apply()
        self._state.flips = [flip for flip in self._state.flips if not self._is_flipped(flip)]
        stopping = self._state.stopping
        if stopping is not None and not self._state.jobs:
            self.manager.check_integrity()
            stats = self.manager.get_stats()
            if (not stats.plans_in_flight and not stats.live_requests) or time.monotonic() > stopping:
                in_use = self.manager.num_device_blocks - stats.device.free - stats.device.ready
                counts = tuple(each for rank in self._ranks.stats() for each in rank.counts)
                errors = tuple(f"{count} x {error}" for error, count in self._state.errors.most_common(5))
                self._answer(Left(in_use, stats.plans_in_flight, stats.live_requests, counts, errors))
                return False
        if not busy:
            time.sleep(_IDLE_SECONDS)
        return True

    # --- requests ---------------------------------------------------------------------------------------------

    def _admit(self, job: _Job) -> None:
        request, work = job.request, job.work
        found = self.manager.match_prefix([request])[0]
        if found.status is MatchStatus.DEFERRED:
            return
        fetched = 0
        if work.source and not request.device_only:
            source = PeerSource(work.transfer, work.source, work.attempt)
            fetched = self.handovers.fetch([(request, source)])[0]
        got = self.manager.allocate_device_blocks([(request, request.num_tokens)])[0]
        if got.failure is AllocationFailure.NO_BLOCKS:
            self.manager.unmatch([request])
        if not got.ok:
            return
        job.allocated, job.fetched = True, fetched
        job.waits = request.is_loading
        if not work.source:
            self.handovers.send([(request, work.transfer)])
        self._begin(job, request.num_cached_tokens)

    def _begin(self, job: _Job, tokens: int) -> None:
        """Compute from this token on; the blocks below are reused and compared."""
        job.computed, job.verify, job.sent_blocks = tokens, tokens // self._size, 0
        self._ranks.begin(job.work.index, job.request.tokens)

    def _end(self, job: _Job, *, aborted: bool = False) -> None:
        del self._state.jobs[job.work.index]
        self.manager.finish([job.request])
        if job.allocated:
            self._ranks.end(job.work.index)
        self._answer(
            Ended(
                job.work.index,
                job.work.attempt,
                job.compared,
                job.wrong,
                job.fetched,
                job.tokens,
                aborted,
            )
        )

    def _apply(self) -> None:
        jobs = {job.work.transfer: job for job in self._state.jobs.values()}
        for outcome in [*self.manager.apply(self._ranks.poll()), *self.manager.expire()]:
            job = jobs.get(outcome.request_id)
            if outcome.error_message:
                self._state.errors[outcome.error_message] += 1
            if job is None:
                continue
            job.waits = False
            if outcome.status is LoadStatus.OVERDUE:
                self.manager.finish([job.request])
                self._ranks.end(job.work.index)
                job.allocated = False
            else:
                self._begin(job, outcome.recompute_from)

    # --- steps ------------------------------------------------------------------------------------------------

    def _compute(self) -> bool:
        """Compute the next chunk of the requests that can be computed."""
        running = [job for job in self._state.jobs.values() if job.allocated and not job.waits]
        columns, blocks, left = [], [], self._spec.chunk_tokens
        stepped: list[tuple[_Job, int]] = []
        for job in running:
            end = min(job.request.num_tokens, job.computed + left)
            if end == job.computed:
                continue
            left -= end - job.computed
            table = job.request.block_table
            fresh = table[job.sent_blocks :]
            columns.append((job.work.index, job.computed, end, job.sent_blocks, len(fresh), job.verify))
            blocks.append(fresh)
            job.sent_blocks = len(table)
            stepped.append((job, end))
        plans = self.manager.take_plans()
        if not stepped and not plans:
            return False
        segments = np.array(columns, np.int32).reshape(-1, 6).T
        table = np.concatenate(blocks) if blocks else np.empty(0, np.int32)
        done = {job.work.transfer: end // self._size for job, end in stepped if not job.work.source}
        wrong = self._ranks.step(plans, np.ascontiguousarray(segments), table.astype(np.int32), done)
        for position, (job, end) in enumerate(stepped):
            job.compared += job.verify
            job.wrong += sum(segment == position for segment, _ in wrong)
            job.tokens += end - job.computed
            job.computed, job.verify = end, 0
        self.manager.commit([(job.request, end) for job, end in stepped])
        for job, end in stepped:
            if end == job.request.num_tokens:
                if not job.work.source:
                    self._sent[job.work.index] = job.request
                self._end(job)
        return True

    def _is_flipped(self, command: Flip) -> bool:
        """Flip a byte of a transfer and answer; return False while the sums of its blocks are not computed."""
        request = self._sent[command.index]
        if request.is_live:
            for rank in self._ranks.stats():
                views = rank.transfers
                if not any(each.complete and each.transfer == request.request_id for each in views):
                    return False
        self._answer(Flipped(command.index, request.is_live and self._flip(command, request)))
        return True

    def _flip(self, command: Flip, request: Request) -> bool:
        """Change a byte of a block of a transfer, and forget the block here, where it is not to be used again."""
        # A block that another transfer shares may be summed after the change, as if it had been computed so.
        others = [each for each in self._sent.values() if each.is_live and each is not request]
        others += [job.request for job in self._state.jobs.values()]
        shared = np.concatenate([np.empty(0, np.int32), *(each.block_table for each in others)])
        slots = np.setdiff1d(request.block_table[: len(request.block_hashes)], shared)
        if not len(slots):
            return False
        random = np.random.default_rng(command.seed)
        self._ranks.flip(random, slots)
        self.manager.reset_cache()
        return True


def run_instance(pipe: Connection, spec: InstanceSpec) -> None:
    """Run an instance in this process until it has stopped, or the driver is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        instance = Instance(spec, pipe.send)
    except FdcacheError as error:
        pipe.send(NotStarted(str(error)))
        return
    try:
        while True:
            while pipe.poll():
                instance.take(pipe.recv())
            if not instance.step():
                return
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the driver is gone
    finally:
        instance.close()
