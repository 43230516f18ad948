"""Reads of a batch: ranges of objects into host records, and once more what was not as expected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdcache._core import CancelFlag
from fdcache.storage.connector import Outcome
from fdcache.storage.objects.backend import DamagedObjectError, ObjectMissingError
from fdcache.storage.objects.calls import CallPool, Gate
from fdcache.storage.objects.catalogue import Pack
from fdcache.storage.objects.locator import Locator
from fdcache.storage.objects.outcomes import BatchInObjects

_MOST_READ = 4 << 20
"""Bytes of neighbouring records in one request: more requests at once are faster than longer ones."""


@dataclass(slots=True)
class _Run:
    """Neighbouring records of an object, each with the index of its block in the batch."""

    pack: Pack
    first: int
    blocks: list[int]


class BatchRead(BatchInObjects):
    """One batch on its way to the host.

    What is missing or wrong is looked for and read once more: what was known of the object may be old, and bytes may
    have been changed on their way. ``corrupt`` holds what is still wrong then.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.corrupt: list[tuple[str, int]] = []
        self._gate = Gate()

    def run(self, pool: CallPool, locator: Locator, deadline: float, cancel: CancelFlag | None) -> None:
        """Read the batch until the deadline."""
        batch = self._batch
        for i in range(len(batch)):
            self._check.stamp_writing(batch, i)
        hashes = self._hashes
        wanted = list(range(len(batch)))
        try:
            for is_last in (False, True):
                runs = self._locate(wanted, hashes, locator, deadline, cancel)
                calls = [partial(self._read, run) for run in runs]
                answers = pool.results(calls, deadline, cancel)
                wanted = []
                for run, answer in zip(runs, answers, strict=True):
                    wanted += self._settle(run, answer, is_last=is_last)
                if not wanted:
                    return
                locator.catalogue.doubt(hashes[i] for i in wanted)
        finally:
            self._gate.close()

    def _locate(
        self,
        wanted: Sequence[int],
        hashes: Sequence[bytes],
        locator: Locator,
        deadline: float,
        cancel: CancelFlag | None,
    ) -> list[_Run]:
        found = locator.find([hashes[i] for i in wanted], deadline, cancel)
        places = []
        for at, i in enumerate(wanted):
            if (place := found.places.get(at)) is not None:
                places.append((place[0].name, place[1], i, place[0]))
            elif (error := found.failed.get(at)) is not None:
                self._failed(i, error)
            else:
                self.outcomes[i] = Outcome.MISS
        places.sort(key=lambda each: each[:3])
        most = max(_MOST_READ // self._objects.record_bytes, 1)
        runs: list[_Run] = []
        for _, position, i, pack in places:
            last = runs[-1] if runs else None
            follows = last is not None and last.pack is pack and position == last.first + len(last.blocks)
            if last is not None and follows and len(last.blocks) < most:
                last.blocks.append(i)
            else:
                runs.append(_Run(pack, position, [i]))
        return runs

    def _read(self, run: _Run) -> list[bool]:
        """Read a run into its host records; return which of them are intact."""
        size = self._objects.record_bytes
        data = self._backend.read(run.pack.name, self._objects.offset(run.first), len(run.blocks) * size)
        whole = np.frombuffer(data, np.uint8)
        with self._gate.passage():
            return [
                self._deliver(i, run.pack.headers[run.first + at].payload_checksum, run, at, whole)
                for at, i in enumerate(run.blocks)
            ]

    def _deliver(self, i: int, checksum: int, run: _Run, at: int, data: NDArray[np.uint8]) -> bool:
        size = self._objects.record_bytes
        if len(data) < (at + 1) * size:
            return False
        batch = self._batch
        source = data[at * size : (at + 1) * size]
        if not self._check.deliver(batch, i, run.pack.headers[run.first + at], source):
            return False
        self._check.stamp_ready(batch, i, checksum)
        return True

    def _settle(self, run: _Run, answer: list[bool] | Exception, *, is_last: bool) -> list[int]:
        """Record the outcomes of a run; return the blocks that are worth another look."""
        if isinstance(answer, ObjectMissingError):
            self.outcomes[run.blocks] = Outcome.MISS
            return [] if is_last else run.blocks
        if isinstance(answer, DamagedObjectError):
            self.error = self.error or str(answer)
            answer = [False] * len(run.blocks)
        elif isinstance(answer, Exception):
            for i in run.blocks:
                self._failed(i, answer)
            return []
        if any(answer):
            self.used.append(run.pack)
        wrong = []
        for at, (i, intact) in enumerate(zip(run.blocks, answer, strict=True)):
            self.outcomes[i] = Outcome.OK if intact else Outcome.CORRUPT
            self.checksums[i] = run.pack.headers[run.first + at].payload_checksum if intact else 0
            if not intact:
                wrong.append((i, at))
        if is_last:
            self.corrupt += [(run.pack.name, run.first + at) for _, at in wrong]
            if wrong:
                self.error = self.error or f"{len(wrong)} records differ from their checksums"
            return []
        return [i for i, _ in wrong]

    def _failed(self, i: int, error: Exception) -> None:
        outcome, message = self._judge(error)
        self.outcomes[i] = outcome
        if outcome is not Outcome.MISS:
            self.error = self.error or message
