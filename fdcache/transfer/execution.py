"""One hand-over between its plan and its report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from fdcache.metadata import HandoverEnd, PeerTask, TransferResult
from fdcache.tasks import CpuEvent, Execution


class HandoverTask:
    """A submitted hand-over, the part of its ``execution``. It ends once nothing accesses its slots for it any more."""

    is_waiting = False

    def __init__(self, task: PeerTask, rank: int, cancel: Callable[[], None]) -> None:
        self.execution = Execution(task.plan_id, rank, [self], self._how_it_ended)
        self.done = CpuEvent()
        self._task = task
        self._cancel = cancel
        self._start = time.monotonic()
        self._begun: float | None = None
        self._result: TransferResult | None = None
        self._end: HandoverEnd | None = None
        self._lock = threading.Lock()

    @property
    def age(self) -> float:
        """Seconds since it was submitted."""
        return time.monotonic() - self._start

    @property
    def has_ended(self) -> bool:
        """True once it has a result."""
        return self._result is not None

    @property
    def started(self) -> bool:
        """True once it is read, or decode has asked."""
        return self._begun is not None

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
            if self._result is not None:
                return
            age = self.age
            waited = age if self._begun is None else self._begun - self._start
            self._end = replace(end, waited_seconds=waited)
            self._result = TransferResult(
                purpose=self._task.swap.purpose,
                failed=np.arange(whole, size, dtype=np.int32),
                checksums=np.empty(0, np.uint64),
                copied_bytes=moved,
                seconds=age - waited,
                error_message=error,
                corrupt=np.array(corrupt, np.int32),
            )
        self.done.set()

    def cancel(self) -> bool:
        """End the wait; return False: reads in flight go on, and the report follows."""
        self._cancel()
        return False

    def result(self) -> TransferResult:
        """Return what was handed over, once it has ended."""
        assert self._result is not None
        return self._result

    def _how_it_ended(self) -> HandoverEnd:
        assert self._end is not None
        return self._end
