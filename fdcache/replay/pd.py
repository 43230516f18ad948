"""Replay a workload on a prefill and a decode process, with faults, and compare every byte that was handed over."""

from __future__ import annotations

import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

from fdcache.errors import LayoutError, ReplayError, ReplayOptionError, TransferError
from fdcache.layout import KVLayout
from fdcache.replay.devices import DeviceName
from fdcache.replay.faults import is_count, spread
from fdcache.replay.pd_instance import (
    Abort,
    Ended,
    Flip,
    Flipped,
    InstanceSpec,
    Left,
    PairWork,
    Reset,
    Stop,
)
from fdcache.replay.pd_process import InstanceProcess
from fdcache.replay.workloads import WorkItem
from fdcache.settings.cache import CacheSettings, CopySettings
from fdcache.settings.peers import PeerSettings, TransferRole
from fdcache.tiers.statistics import HandoverCount
from fdcache.transfer.connector import share
from fdcache.transfer.factory import require_connector

_STALL_SECONDS = 120.0
_DRAIN_SECONDS = 30.0
_MOST_STOPPED_SECONDS = 0.6
PREFILL, DECODE = TransferRole.PREFILL, TransferRole.DECODE


class FaultKind(StrEnum):
    """A fault of one process or request."""

    KILL = "kill"
    STOP = "stop"
    ABORT = "abort"
    RESET = "reset"
    FLIP = "flip"


RANDOM_FAULTS = (FaultKind.KILL, FaultKind.STOP, FaultKind.ABORT, FaultKind.RESET)


def parse_ranks(text: str) -> tuple[int, int]:
    """Read ``2:1``, the ranks of prefill and decode. Raises ``ReplayOptionError``."""
    prefill, _, decode = text.partition(":")
    if not (is_count(prefill) and is_count(decode) and int(prefill) and int(decode)):
        raise ReplayOptionError(
            "--pd-ranks", f"{text!r} is none; write the ranks of prefill and decode, as in 2:1"
        )
    return int(prefill), int(decode)


@dataclass(frozen=True, slots=True)
class PdConfig:
    """A replay of prefill and decode. ``ranks``: those of each, by default as many as the layout has.

    On GPUs, the ranks of prefill take the first ones, those of decode the next.
    """

    layout: KVLayout
    cache: CacheSettings
    transfer: CopySettings
    peers: PeerSettings
    concurrency: int = 16
    chunk_tokens: int = 1024
    seed: int = 0
    faults: dict[FaultKind, int] = field(default_factory=dict)
    ranks: tuple[int, int] | None = None
    device: DeviceName = DeviceName.CPU


@dataclass(slots=True)
class PdReport:
    """Counts of a replay of prefill and decode.

    ``wrong_blocks`` of ``compared_blocks`` reused by decode had other bytes. ``left``: blocks, plans and requests that
    an instance still held at the end. ``transfers``: by direction and result. ``rejected`` prompts are too large.
    """

    requests: int = 0
    rejected: int = 0
    finished: int = 0
    aborted: int = 0
    compared_blocks: int = 0
    wrong_blocks: int = 0
    fetched_blocks: int = 0
    prompt_tokens: int = 0
    decode_computed_tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    transfers: Counter[str] = field(default_factory=Counter)
    errors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    wall_seconds: float = 0.0
    interrupted: bool = False

    @property
    def clean(self) -> bool:
        """True if no block was wrong and nothing is left."""
        return not self.wrong_blocks and not +self.left

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        names = [each.name for each in fields(self)]
        values = {name: getattr(self, name) for name in names}
        plain = {name: dict(each) if isinstance(each, dict) else each for name, each in values.items()}
        return {**plain, "clean": self.clean}


@dataclass(slots=True)
class _Request:
    item: WorkItem
    transfer: str
    tokens: np.ndarray
    attempt: int = 1
    prefilled: bool = False
    at_decode: bool = False
    waits_for_prefill: bool = False
    flip: bool = False
    """Change a byte of its blocks once prefill has computed them."""


def replay_pd(
    items: Iterator[WorkItem],
    config: PdConfig,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> PdReport:
    """Run a workload on a prefill and a decode process to its end, and report on it.

    Raises ``ReplayError`` if a process ends by itself or no request makes progress, ``ReplayOptionError`` for more
    flips than requests, or an unknown connector.
    """
    if not config.peers.is_on:
        raise ReplayOptionError(
            "--transfer", f"{config.peers.connector!r} hands nothing over; use ipc or rdma"
        )
    require_connector(config.peers)
    _require_shares(config)
    given = list(items)
    served = [item for item in given if _fits(item, config)]
    with tempfile.TemporaryDirectory(prefix="fdcache-pd-") as folder:
        driver = _Driver(served, config, Path(folder))
        try:
            report = driver.run(should_stop)
        finally:
            driver.close()
    report.rejected = len(given) - len(served)
    return report


def _fits(item: WorkItem, config: PdConfig) -> bool:
    """Return False for a prompt larger than the pool can serve beside another."""
    return -(-item.prompt_length // config.layout.block_size) * 2 <= config.cache.device_blocks


@dataclass(frozen=True, slots=True)
class _Faults:
    """The faults of a run, at admissions that do not depend on how fast it is.

    ``due``: (number of admitted requests, kind) in order. ``flipped``: positions of the requests whose bytes change.
    """

    due: deque[tuple[int, FaultKind]]
    flipped: frozenset[int]

    @classmethod
    def draw(cls, faults: dict[FaultKind, int], requests: int, random: np.random.Generator) -> _Faults:
        """Spread faults over the admissions of ``requests`` requests."""
        flips = faults.get(FaultKind.FLIP, 0)
        if flips > requests:
            raise ReplayOptionError("--faults", f"flip={flips} is more than the {requests} requests that fit")
        due = spread({**faults, FaultKind.FLIP: 0}, requests, random)
        flipped = random.choice(requests, flips, replace=False) if flips else ()
        return cls(due, frozenset(map(int, flipped)))


def _require_shares(config: PdConfig) -> None:
    """Raise ``ReplayOptionError`` for ranks of which one instance cannot read from the other."""
    if config.ranks is not None:
        try:
            share(config.layout.with_tp_size(config.ranks[0]), 0, config.ranks[1])
        except (LayoutError, TransferError) as error:
            raise ReplayOptionError("--pd-ranks", str(error)) from error


class _Driver:
    """The router, and the source of faults."""

    def __init__(self, items: Sequence[WorkItem], config: PdConfig, folder: Path) -> None:
        self._items, self._config = items, config
        self._random = np.random.default_rng(config.seed)
        self._report = PdReport()
        self._requests: dict[int, _Request] = {}
        self._admitted = 0
        self._faults = _Faults.draw(config.faults, len(items), self._random)
        self._stopped: tuple[InstanceProcess, float] | None = None
        self._processes: dict[TransferRole, InstanceProcess] = {}
        for role in (PREFILL, DECODE):
            self._processes[role] = InstanceProcess(role, self._spec(role, folder))

    def _spec(self, role: TransferRole, folder: Path) -> InstanceSpec:
        config = self._config
        prefill, decode = config.ranks or (config.layout.tp_size,) * 2
        own, theirs = (prefill, decode) if role is PREFILL else (decode, prefill)
        peers = config.peers.model_copy(
            update={"role": role, "address": f"ipc://{folder}/{role.value}", "peer_ranks": theirs}
        )
        on_cpu = config.device is DeviceName.CPU
        shared = peers.directory if peers.connector == "ipc" and on_cpu else None
        return InstanceSpec(
            config.layout.with_tp_size(own),
            config.cache,
            config.transfer,
            peers,
            config.chunk_tokens,
            min(
                5 * peers.timeout, _DRAIN_SECONDS / 2
            ),  # a killed decode asks for nothing: it ends before the run
            shared,
            max(own, theirs),
            config.device,
            0 if role is PREFILL else prefill,
        )

    def run(self, should_stop: Callable[[], bool]) -> PdReport:
        """Run to the end."""
        start = last_progress = time.monotonic()
        while self._admitted < len(self._items) or self._requests or self._faults.due:
            if should_stop():
                self._report.interrupted = True
                break
            self._admit()
            self._inject()
            if self._answers():
                last_progress = time.monotonic()
            self._continue_stopped()
            if time.monotonic() - last_progress > _STALL_SECONDS:
                raise ReplayError(f"no request has ended for {_STALL_SECONDS:g} s: {self._requests}")
        self._finish()
        self._report.wall_seconds = time.monotonic() - start
        return self._report

    def close(self) -> None:
        """End both processes."""
        for process in self._processes.values():
            process.close()

    # --- requests ---------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit requests up to the next fault."""
        while (
            len(self._requests) < self._config.concurrency
            and self._admitted < len(self._items)
            and not self._is_fault_due
        ):
            item = self._items[self._admitted]
            tokens = item.tokens(self._config.seed)[: item.prompt_length]
            flip = self._admitted in self._faults.flipped
            request = _Request(item, f"request-{item.index}", tokens, flip=flip)
            self._admitted += 1
            self._requests[item.index] = request
            self._report.requests += 1
            self._report.prompt_tokens += len(tokens)
            order = 0.0 if flip else self._random.random()
            request.waits_for_prefill = order < 0.3
            if order > 0.7:
                self._to_decode(request)
            self._processes[PREFILL].send(PairWork(item.index, 1, tokens, request.transfer))
            if 0.3 <= order <= 0.7:
                self._to_decode(request)

    def _to_decode(self, request: _Request) -> None:
        request.at_decode = True
        source = self._processes[PREFILL].addresses
        self._processes[DECODE].send(
            PairWork(request.item.index, request.attempt, request.tokens, request.transfer, source)
        )

    def _answers(self) -> bool:
        """Take what the instances have answered; return True if a request has ended."""
        pipes = {process.pipe: process for process in self._processes.values()}
        progress = False
        for pipe in wait(list(pipes), timeout=0.005):
            process = pipes[pipe]  # type: ignore[index]
            while (answer := process.receive(0)) is not None:
                progress = True
                if isinstance(answer, Ended):
                    self._ended(process.role, answer)
                elif isinstance(answer, Flipped):
                    self._flipped(answer)
        return progress

    def _ended(self, role: TransferRole, ended: Ended) -> None:
        request = self._requests.get(ended.index)
        if request is None:
            return
        if role is PREFILL:
            request.prefilled = True
            if request.waits_for_prefill and not request.at_decode:
                if request.flip:
                    seed = int(self._random.integers(1 << 30))
                    self._processes[PREFILL].send(Flip(ended.index, seed))
                else:
                    self._to_decode(request)
        elif ended.attempt == request.attempt:
            report = self._report
            report.finished += not ended.aborted
            report.aborted += ended.aborted
            report.compared_blocks += ended.compared
            report.wrong_blocks += ended.wrong
            report.fetched_blocks += ended.fetched
            report.decode_computed_tokens += ended.computed_tokens
            del self._requests[ended.index]

    def _flipped(self, answer: Flipped) -> None:
        request = self._requests.get(answer.index)
        if request is not None and request.flip:
            self._count_flip(request, answer.done)
            self._to_decode(request)

    def _count_flip(self, request: _Request, done: bool) -> None:
        request.flip = False
        self._report.faults["flip" if done else "flip, too late"] += 1

    # --- faults -----------------------------------------------------------------------------------------------

    @property
    def _is_fault_due(self) -> bool:
        return bool(self._faults.due) and self._faults.due[0][0] <= self._admitted

    def _inject(self) -> None:
        if not self._is_fault_due or self._stopped is not None:
            return
        _, kind = self._faults.due.popleft()
        if kind is FaultKind.ABORT and not self._requests:
            self._report.faults["abort, too late"] += 1
            return
        self._report.faults[kind.value] += 1
        process = self._processes[PREFILL if self._random.random() < 0.5 else DECODE]
        if kind is FaultKind.KILL:
            self._kill(process)
        elif kind is FaultKind.STOP:
            process.stop()
            until = time.monotonic() + float(self._random.uniform(0, _MOST_STOPPED_SECONDS))
            self._stopped = process, until
        elif kind is FaultKind.RESET:
            process.send(Reset())
        else:
            self._abort(int(self._random.choice(list(self._requests))))

    def _kill(self, process: InstanceProcess) -> None:
        """Kill a process and start it again at its address; the router repeats what it has lost."""
        process.kill()
        process.start()
        for request in list(self._requests.values()):
            if process.role is PREFILL:
                process.send(PairWork(request.item.index, 1, request.tokens, request.transfer))
            elif request.at_decode:
                request.attempt += 1
                self._to_decode(request)

    def _abort(self, index: int) -> None:
        request = self._requests[index]
        for process in self._processes.values():
            process.send(Abort(index))
        if not request.at_decode:
            if request.flip:
                self._count_flip(request, False)
            self._report.aborted += 1
            del self._requests[index]

    def _continue_stopped(self) -> None:
        if self._stopped is not None and time.monotonic() >= self._stopped[1]:
            self._stopped[0].resume()
            self._stopped = None

    # --- end --------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        if self._stopped is not None:
            self._stopped[0].resume()
            self._stopped = None
        for index in list(self._requests):
            self._abort(index)
        for role, process in self._processes.items():
            process.send(Stop(_DRAIN_SECONDS))
            left = self._left(process)
            found = {"blocks": left.blocks_in_use, "plans": left.plans, "requests": left.requests}
            self._report.left.update(
                {f"{role.value} {what}": count for what, count in found.items() if count}
            )
            self._report.errors[role.value] = left.errors
            self._count(left.counts)

    def _count(self, counts: tuple[HandoverCount, ...]) -> None:
        for each in counts:
            self._report.transfers[f"{each.direction} {each.result}"] += each.transfers

    def _left(self, process: InstanceProcess) -> Left:
        deadline = time.monotonic() + 2 * _DRAIN_SECONDS
        while time.monotonic() < deadline:
            answer = process.receive(1.0)
            if isinstance(answer, Left):
                return answer
            if isinstance(answer, Ended):
                self._ended(process.role, answer)
        raise ReplayError(f"the {process.role.value} process does not stop")
