"""A submitted plan until its report."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fdcache.devices.base import Event, PendingCopy
from fdcache.metadata import SwapPurpose, TransferReport, TransferResult, TransferStatus


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer of a plan; ``copy`` is None when it has no blocks, or was refused: then all of them fail."""

    purpose: SwapPurpose
    copy: PendingCopy | None
    size: int = 0
    refusal: str | None = None


class PlanExecution:
    """One submitted plan: the task that its handler stands for. Its report is made once, at the end."""

    def __init__(self, plan_id: int, rank: int, transfers: Sequence[Transfer]) -> None:
        self.plan_id = plan_id
        self._rank = rank
        self._transfers = tuple(transfers)
        self._report: TransferReport | None = None
        self._lock = threading.Lock()

    def pending_event(self) -> Event | None:
        """An event that must be reached before the plan has ended; None when it has."""
        for transfer in self._transfers:
            if transfer.copy is not None and not transfer.copy.done.query():
                return transfer.copy.done
        return None

    def wait(self, timeout: float | None) -> bool:
        """Wait up to ``timeout`` seconds, None for ever; whether the plan has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (event := self.pending_event()) is not None:
            if not event.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0)):
                return False
        return True

    def cancel(self) -> bool:
        """Take back the transfers that have not started; whether there was one."""
        taken = [transfer.copy.cancel() for transfer in self._transfers if transfer.copy is not None]
        return any(taken)

    def status(self) -> TransferStatus:
        """How far the plan has come."""
        if self.pending_event() is None:
            success = all(result.success for result in self.result().results)
            return TransferStatus.COMPLETED if success else TransferStatus.FAILED
        started = any(transfer.copy is not None and transfer.copy.started for transfer in self._transfers)
        return TransferStatus.IN_PROGRESS if started else TransferStatus.PENDING

    def result(self) -> TransferReport:
        """The report of a plan that has ended; the copies and the memory they name are let go."""
        with self._lock:
            if self._report is None:
                self._report = TransferReport(
                    plan_id=self.plan_id,
                    rank=self._rank,
                    results=tuple(_result(transfer) for transfer in self._transfers),
                )
                self._transfers = ()
            return self._report


def _result(transfer: Transfer) -> TransferResult:
    if transfer.copy is None:
        return TransferResult(
            purpose=transfer.purpose,
            failed=np.arange(transfer.size, dtype=np.int32),
            checksums=np.empty(0, np.uint64),
            copied_bytes=0,
            seconds=0.0,
            error_message=transfer.refusal,
        )
    outcome = transfer.copy.outcome()
    return TransferResult(
        purpose=transfer.purpose,
        failed=outcome.failed,
        checksums=outcome.checksums,
        copied_bytes=outcome.copied_bytes,
        seconds=outcome.seconds,
        error_message=outcome.error_message,
        lost=outcome.lost,
        corrupt=outcome.corrupt,
    )
