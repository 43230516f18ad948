"""RecordFaults: tells records that the medium has lost from a medium that fails as a whole."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass

IN_A_ROW = 4
"""Distinct records that fail, none moved well between them, until the medium counts as failing."""
MOST_BAD = 16
"""Distinct bad records within ``WINDOW`` seconds until the medium counts as failing, whatever moved well."""
WINDOW = 60.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Slots that are ``bad`` for good; ``medium_fails``: the file is to be left alone for a while."""

    bad: frozenset[int]
    medium_fails: bool


class RecordFaults:
    """Judges batches in which records failed. Reads and writes are told apart, for a medium may fail at one only.

    A record that fails is bad, unless ``IN_A_ROW`` have failed in a row: then the medium fails, and nothing is
    held against these records before they have failed again on a medium that answered meanwhile.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rows: dict[bool, set[int]] = {False: set(), True: set()}
        self._suspects: dict[bool, set[int]] = {False: set(), True: set()}
        self._bad: deque[tuple[float, int]] = deque()

    def judge(self, failed: Set[int], *, moved: bool, writing: bool) -> Verdict:
        """Count a batch: the slots whose records failed, and whether any other record of it was moved."""
        with self._lock:
            row, suspects = self._rows[writing], self._suspects[writing]
            fresh = failed - suspects
            if moved:
                row.clear()
            else:
                row |= fresh
            in_a_row = len(row) >= IN_A_ROW
            bad = frozenset(failed & suspects if in_a_row else failed)
            if in_a_row:
                suspects |= fresh
            suspects -= bad
            too_many = self._note(bad)
            return Verdict(bad, in_a_row or too_many)

    def moved(self, *, writing: bool) -> None:
        """A batch went well."""
        with self._lock:
            self._rows[writing].clear()

    def answered(self) -> None:
        """The medium was left alone, and now answers again."""
        with self._lock:
            self._rows = {False: set(), True: set()}
            self._bad.clear()

    def _note(self, bad: Set[int]) -> bool:
        """Whether there have been too many bad records lately, with these."""
        now = self._clock()
        self._bad.extend((now, slot) for slot in bad)
        while self._bad and now - self._bad[0][0] > WINDOW:
            self._bad.popleft()
        return len({slot for _, slot in self._bad}) >= MOST_BAD
