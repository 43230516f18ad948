"""Tasks in processes of their own: results, failures with their reason, and an early end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fdcache.errors import ReplayError
from fdcache.replay.parallel import Advance, PointFailure, TaskStoppedError, run_tasks


@dataclass(frozen=True)
class Multiply:
    factor: int

    def run(self, data: int, advance: Advance) -> int:
        advance(1)
        return data * self.factor


@dataclass(frozen=True)
class Fail:
    def run(self, data: int, advance: Advance) -> int:
        raise ReplayError(f"no result for {data}")


@dataclass(frozen=True)
class Die:
    def run(self, data: int, advance: Advance) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return data


@dataclass(frozen=True)
class Exit:
    def run(self, data: int, advance: Advance) -> int:
        os._exit(3)


@dataclass(frozen=True)
class Wait:
    """Runs until it is stopped, then leaves a file."""

    file: str

    def run(self, data: int, advance: Advance) -> int:
        try:
            while True:
                advance(data)
                time.sleep(0.01)
        except TaskStoppedError:
            Path(self.file).write_text("stopped")
            raise


def results(tasks: list[Any], jobs: int, **options: Any) -> dict[int, Any]:
    with closing(run_tasks(tasks, 5, jobs, **options)) as ended:
        return dict(ended)


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_task_has_a_result_or_a_reason(jobs: int) -> None:
    found = results([Multiply(2), Fail(), Multiply(3), Multiply(4)], jobs)
    assert found == {0: 10, 1: PointFailure("no result for 5"), 2: 15, 3: 20}


def test_a_process_that_dies_costs_its_own_task() -> None:
    found = results([Multiply(1), Die(), Exit(), Multiply(2), Multiply(3)], jobs=2)
    assert {position: found[position] for position in (0, 3, 4)} == {0: 5, 3: 10, 4: 15}
    assert "signal 9" in found[1].reason
    assert found[2] == PointFailure("its process ended with status 3")
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_stopped_tasks_end_by_themselves(jobs: int, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one", "two")]
    progress: list[tuple[int, int]] = []
    started = {0} if jobs == 1 else {0, 1}
    found = results(
        [*(Wait(str(file)) for file in files), Multiply(1)],
        jobs,
        on_progress=lambda *seen: progress.append(seen),
        should_stop=lambda: {task for task, _ in progress} == started,
    )
    assert found == {}
    assert {task for task, _ in progress} == started
    assert {at for at, file in enumerate(files) if file.exists()} == started
    assert multiprocessing.active_children() == []


def test_an_error_of_the_caller_ends_the_processes(tmp_path: Path) -> None:
    def fail(_task: int, _done: int) -> None:
        raise RuntimeError("progress")

    with pytest.raises(RuntimeError, match="progress"):
        results([Wait(str(tmp_path / "one")), Wait(str(tmp_path / "two"))], 2, on_progress=fail)
    assert multiprocessing.active_children() == []


def test_a_terminal_s_interrupt_does_not_reach_the_tasks(tmp_path: Path) -> None:
    interrupted = threading.Event()

    def interrupt(_task: int, _done: int) -> None:
        if not interrupted.is_set():
            interrupted.set()
            for child in multiprocessing.active_children():
                assert child.pid
                os.kill(child.pid, signal.SIGINT)

    start = [time.monotonic()]
    found = results(
        [Wait(str(tmp_path / "one")), Wait(str(tmp_path / "two"))],
        2,
        on_progress=interrupt,
        should_stop=lambda: interrupted.is_set() and time.monotonic() > start[0] + 1,
    )
    assert found == {}
    assert (tmp_path / "one").read_text() == "stopped"
