"""Runs of one machine that start their engines together, so that none is measured beside a start.

Those on devices of their own then measure at the same time, those that share one take turns.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_PAUSE_S = 0.05
LEFT = "left"
TURN = "turn"


class Meeting:
    """Stages that ``runs`` processes begin together, each by a file in a folder that they share.

    A run that has left is not waited for.
    """

    def __init__(self, folder: Path, runs: int, left_s: Callable[[], float | None]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._runs = runs
        self._left_s = left_s
        self._stage = 0

    def arrive(self) -> None:
        """Begin the next stage once every run is there, or at the latest when this run's time is over."""
        self._stage += 1
        stage = f"{self._stage:03d}"
        self._write(stage)
        while len(self._names(stage) | self._names(LEFT)) < self._runs:
            left = self._left_s()
            if left is not None and left <= 0:
                return
            time.sleep(_PAUSE_S)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Keep other runs from their turns meanwhile; theirs are waited for until this run's time is over."""
        with (self._folder / TURN).open("w") as file:
            while not _is_locked(file):
                left = self._left_s()
                if left is not None and left <= 0:
                    break
                time.sleep(_PAUSE_S)
            yield

    def leave(self) -> None:
        """Let the others go on without this run."""
        self._write(LEFT)

    def _write(self, stage: str) -> None:
        (self._folder / f"{stage}-{os.getpid()}").touch()

    def _names(self, stage: str) -> set[str]:
        return {path.name.rpartition("-")[2] for path in self._folder.glob(f"{stage}-*")}


def _is_locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
