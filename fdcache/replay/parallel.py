"""Independent tasks in processes of their own: progress, failures with their reason, and an early end."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from fdcache.errors import FdcacheError

_REPORT_SECONDS = 0.1
_END_SECONDS = 10.0
"""Time for a stopped task to release what it holds before its process is killed."""

Advance = Callable[[int], None]
"""Reports how much of a task is done. It raises ``TaskStoppedError`` once the task shall end."""


class TaskStoppedError(Exception):
    """The task was asked to end early."""


class Task(Protocol):
    """Work that can be sent to another process."""

    def run(self, data: Any, advance: Advance) -> Any:
        """Do the work on the data of all tasks and return its result, which can be pickled."""


@dataclass(frozen=True, slots=True)
class PointFailure:
    """A task that has no result, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Progress:
    done: int


@dataclass(frozen=True, slots=True)
class _Result:
    value: Any


Results = Generator[tuple[int, Any], None, None]


def run_tasks(
    tasks: Sequence[Task],
    data: Any,
    jobs: int,
    *,
    on_progress: Callable[[int, int], None] = lambda task, done: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Results:
    """Run tasks, at most ``jobs`` at a time; yield position and value, or the ``PointFailure``, of each that ends.

        with closing(run_tasks(tasks, data, jobs=4)) as ended:
            for position, result in ended:
                ...

    One job runs in this process, more in spawned ones, each of which gets ``data`` once. ``on_progress`` receives the
    position of a task and how much of it is done. Once ``should_stop`` returns True the tasks end without a result. No
    process is left when the generator has ended or is closed.
    """
    jobs = min(jobs, len(tasks))
    if jobs <= 1:
        return _run_here(tasks, data, on_progress, should_stop)
    return _run_in_processes(tasks, data, jobs, on_progress, should_stop)


def _run_here(
    tasks: Sequence[Task],
    data: Any,
    on_progress: Callable[[int, int], None],
    should_stop: Callable[[], bool],
) -> Results:
    for position, task in enumerate(tasks):

        def advance(done: int, position: int = position) -> None:
            if should_stop():
                raise TaskStoppedError
            on_progress(position, done)

        try:
            result = _attempt(task, data, advance)
        except TaskStoppedError:
            return
        yield position, result


def _attempt(task: Task, data: Any, advance: Advance) -> Any:
    try:
        return task.run(data, advance)
    except (FdcacheError, OSError, MemoryError) as error:
        return PointFailure(str(error) or type(error).__name__)


def _run_in_processes(
    tasks: Sequence[Task],
    data: Any,
    jobs: int,
    on_progress: Callable[[int, int], None],
    should_stop: Callable[[], bool],
) -> Results:
    waiting = deque(enumerate(tasks))
    idle: list[_Worker] = []
    busy: dict[Connection, _Worker] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < jobs and not should_stop():
                worker = idle.pop() if idle else _Worker(data)
                busy[worker.pipe] = worker
                worker.give(*waiting.popleft())
            if should_stop():
                return
            for pipe in wait(list(busy), timeout=_REPORT_SECONDS):
                assert isinstance(pipe, Connection)
                worker = busy[pipe]
                message = worker.receive()
                if isinstance(message, _Progress):
                    on_progress(worker.position, message.done)
                    continue
                del busy[pipe]
                if message is None:
                    message = worker.failure()
                    worker.end()
                else:
                    idle.append(worker)
                yield worker.position, message.value if isinstance(message, _Result) else message
    finally:
        workers = [*busy.values(), *idle]
        for worker in workers:
            worker.pipe.close()  # which ends its task
        for worker in workers:
            worker.end()


class _Worker:
    """A process that runs one task after the other, and the pipe to it."""

    def __init__(self, data: Any) -> None:
        self.position = -1
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, data), name="fdcache-task")
        with theirs, _without_interrupts():
            self._process.start()

    def give(self, position: int, task: Task) -> None:
        """Start a task. A process that has died is noticed by ``receive``."""
        self.position = position
        with suppress(BrokenPipeError):
            self.pipe.send(task)

    def receive(self) -> _Progress | _Result | PointFailure | None:
        """Return the next message, or None if the process has ended."""
        try:
            message: _Progress | _Result | PointFailure = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return None
        return message

    def failure(self) -> PointFailure:
        """Return how the process ended."""
        self._process.join(timeout=_END_SECONDS)
        code = self._process.exitcode
        if code is not None and code < 0:
            return PointFailure(
                f"its process was ended by signal {-code}; after signal 9, check the free memory"
            )
        return PointFailure(f"its process ended with status {code}")

    def end(self) -> None:
        """Wait for the end of the process, and kill it if it takes too long."""
        self.pipe.close()
        self._process.join(timeout=_END_SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._process.close()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Start processes that ignore Ctrl-C, which a terminal sends to all: the parent ends them."""
    resource_tracker.ensure_running()  # which would unblock the signal when the first process starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, data: Any) -> None:
    """Run tasks in a process of their own until the parent closes the pipe."""
    due = 0.0

    def advance(done: int) -> None:
        nonlocal due
        if (now := time.monotonic()) < due:
            return
        due = now + _REPORT_SECONDS
        if pipe.poll():  # during a task the parent sends nothing: it has closed its end, or is gone
            raise TaskStoppedError
        pipe.send(_Progress(done))

    try:
        while True:
            result = _attempt(pipe.recv(), data, advance)
            pipe.send(result if isinstance(result, PointFailure) else _Result(result))
    except (EOFError, ConnectionResetError, BrokenPipeError, TaskStoppedError):
        return
