"""The engine of a node: a process that runs the requests it is given, and can be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Self

from fdcache.errors import FdcacheError, ReplayError
from fdcache.replay.config import ReplayConfig
from fdcache.replay.engine import replay_requests
from fdcache.replay.nodes.network import enter_namespace
from fdcache.replay.statistics import Tally
from fdcache.replay.workloads import WorkItem

_POLL_SECONDS = 0.005
_END_SECONDS = 10.0


@dataclass(slots=True)
class Totals:
    """Counts of an engine so far. ``storage_tokens`` of the ``hit_tokens`` came from storage."""

    finished: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    storage_tokens: int = 0
    compared_blocks: int = 0
    wrong_blocks: int = 0
    failed_loads: int = 0
    longest_wait: float = 0.0

    @classmethod
    def of(cls, tally: Tally) -> Self:
        """Return those of a replay."""
        return cls(
            tally.finished,
            tally.rejected,
            tally.prompt_tokens,
            sum(tally.hit_tokens.values()),
            tally.hit_tokens["storage"],
            tally.verified_blocks,
            tally.corrupt_blocks,
            tally.failed_loads + tally.overdue_loads,
            tally.longest_deferral,
        )

    def plus(self, other: Totals) -> Totals:
        """Return the sums, and the longer wait."""
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return Totals(**{**sums, "longest_wait": max(self.longest_wait, other.longest_wait)})


@dataclass(frozen=True, slots=True)
class EngineEnded:
    """These requests have ended."""

    indices: tuple[int, ...]
    totals: Totals


@dataclass(frozen=True, slots=True)
class EngineLeft:
    """The engine's end: what it still held, and the invariant that was broken."""

    totals: Totals
    leaked: int
    integrity_error: str | None


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """Why the engine could not go on."""

    reason: str


@dataclass(slots=True)
class Feed:
    """The requests that come through a pipe; None is the last."""

    pipe: Connection
    seconds: float = 0.0
    _waiting: deque[WorkItem] = field(default_factory=deque)
    _ended: list[int] = field(default_factory=list)
    _totals: Totals = field(default_factory=Totals)
    _is_closed: bool = False
    _now: float = 0.0

    @property
    def exhausted(self) -> bool:
        """True once every request has been taken."""
        return self._is_closed and not self._waiting

    def take(self, now: float) -> WorkItem | None:
        """Return the next request that has come, or None."""
        self._now = now
        self._tell()
        while self.pipe.poll():
            item: WorkItem | None = self.pipe.recv()
            if item is None:
                self._is_closed = True
                break
            self._waiting.append(item)
        if not self._waiting:
            return None
        taken = self._waiting.popleft()
        self.seconds = max(self.seconds, taken.timestamp_ms / 1000)
        return taken

    def finish(self, index: int, now: float) -> None:
        """Mark a request as ended; the driver hears of it with the next counts."""
        self._ended.append(index)

    def next_arrival(self) -> float | None:
        """Return when to look again."""
        return None if self._is_closed else self._now + _POLL_SECONDS

    def count(self, tally: Tally) -> None:
        """Take the counts of the step in which requests have ended."""
        self._totals = Totals.of(tally)
        self._tell()

    def _tell(self) -> None:
        if self._ended:
            self.pipe.send(EngineEnded(tuple(self._ended), self._totals))
            self._ended.clear()


def run_engine(pipe: Connection, config: ReplayConfig, namespace: str | None) -> None:
    """Run requests until the last one has come and ended; the main function of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if namespace is not None:
            enter_namespace(namespace)
        feed = Feed(pipe)
        report = replay_requests(lambda: feed, config, on_progress=feed.count)
        leaked = report.leaked_slots + report.leaked_pins
        pipe.send(EngineLeft(Totals.of(report.tally), leaked, report.integrity_error))
    except (EOFError, BrokenPipeError):
        os._exit(1)  # nobody waits for an answer
    except (FdcacheError, OSError) as error:
        pipe.send(EngineFailed(str(error)))


class EngineProcess:
    """The process, and the requests that it has."""

    def __init__(self, config: ReplayConfig, namespace: str | None) -> None:
        self._config, self._namespace = config, namespace
        self._context = multiprocessing.get_context("spawn")
        self.pipe: Connection
        self.process: BaseProcess
        self.has: dict[int, WorkItem] = {}
        self._earlier = Totals()
        self._totals = Totals()
        self.start()

    @property
    def totals(self) -> Totals:
        """The counts of all its processes, those that were killed included."""
        return self._earlier.plus(self._totals)

    def start(self) -> None:
        """Start it, and give it the requests that an earlier one had."""
        self.pipe, theirs = self._context.Pipe()
        self.process = self._context.Process(
            target=run_engine,
            args=(theirs, self._config, self._namespace),
            name="fdcache-engine",
            daemon=True,
        )
        self.process.start()
        theirs.close()
        for item in self.has.values():
            self.pipe.send(item)

    def give(self, item: WorkItem) -> None:
        """Give it a request."""
        self.has[item.index] = item
        self._send(item)

    def end(self) -> None:
        """Tell it to end once its requests have ended."""
        self._send(None)

    def _send(self, item: WorkItem | None) -> None:
        try:
            self.pipe.send(item)
        except OSError as error:
            raise ReplayError("an engine has ended by itself; see its messages above") from error

    def receive(self) -> list[int] | EngineLeft:
        """Return the requests that have ended, or its end. Raises ``ReplayError`` if it has failed."""
        try:
            answer: EngineEnded | EngineLeft | EngineFailed = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise ReplayError("an engine has ended by itself; see its messages above") from error
        if isinstance(answer, EngineFailed):
            raise ReplayError(answer.reason)
        self._totals = answer.totals
        if isinstance(answer, EngineLeft):
            return answer
        return [index for index in answer.indices if self.has.pop(index, None) is not None]

    def kill(self) -> None:
        """End it at once, and start another one in its place."""
        self._stop()
        self._earlier, self._totals = self.totals, Totals()
        self.start()

    def _stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def close(self) -> None:
        """End it."""
        self.process.join(timeout=_END_SECONDS if not self.has else 0.0)
        self._stop()
