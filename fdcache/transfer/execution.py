"""One hand-over between its plan and its report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from fdcache.devices.base import Event
from fdcache.metadata import HandoverEnd, PeerTask, TransferReport, TransferResult
from fdcache.tasks import CpuEvent, TransferStatus


class TransferExecution:
    """A submitted hand-over. It ends once nothing accesses its slots for it any more."""

    def __init__(self, task: PeerTask, rank: int, cancel: Callable[[], None]) -> None:
        self.plan_id = task.plan_id
        self._task = task
        self._rank = rank
        self._cancel = cancel
        self._start = time.monotonic()
        self._begun: float | None = None
        self._report: TransferReport | None = None
        self._done = CpuEvent()
        self._lock = threading.Lock()

    @property
    def age(self) -> float:
        """Seconds since it was submitted."""
        return time.monotonic() - self._start

    @property
    def has_ended(self) -> bool:
        """True once it is reported."""
        return self._report is not None

    def begin(self) -> None:
        """Record the begin of the first read, or that decode has asked."""
        if self._begun is None:
            self._begun = time.monotonic()

    def finish(
        self, end: HandoverEnd, whole: int, corrupt: Sequence[int], moved: int, error: str | None
    ) -> None:
        """End it: the first ``whole`` blocks of the plan were handed over, and ``moved`` bytes of them copied."""
        size = len(self._task.swap)
        with self._lock:
            if self._report is not None:
                return
            age = self.age
            waited = age if self._begun is None else self._begun - self._start
            result = TransferResult(
                purpose=self._task.swap.purpose,
                failed=np.arange(whole, size, dtype=np.int32),
                checksums=np.empty(0, np.uint64),
                copied_bytes=moved,
                seconds=age - waited,
                error_message=error,
                corrupt=np.array(corrupt, np.int32),
            )
            self._report = TransferReport(
                plan_id=self.plan_id,
                rank=self._rank,
                results=(result,),
                handover=replace(end, waited_seconds=waited),
            )
        self._done.set()

    def pending_event(self) -> Event | None:
        """Return the event of its end, None once it has ended."""
        return None if self._done.query() else self._done

    def wait(self, timeout: float | None) -> bool:
        """Wait up to ``timeout`` seconds, None without limit; return True if it has ended."""
        return self._done.wait(timeout)

    def cancel(self) -> bool:
        """End the wait; return False: reads in flight go on, and its report follows."""
        self._cancel()
        return False

    def status(self) -> TransferStatus:
        """Return the status of the hand-over."""
        if self._report is None:
            return TransferStatus.PENDING if self._begun is None else TransferStatus.IN_PROGRESS
        success = all(result.success for result in self._report.results)
        return TransferStatus.COMPLETED if success else TransferStatus.FAILED

    def result(self) -> TransferReport:
        """Return the report of a hand-over that has ended."""
        assert self._report is not None
        return self._report
