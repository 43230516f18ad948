"""Submitted plans until their reports."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from fdcache import _core
from fdcache.devices.base import Device, Event, PendingCopy, Stream
from fdcache.devices.cpu import wait_any_cpu_event
from fdcache.errors import FdcacheError, PlanError
from fdcache.metadata import PeerTask, StorageTask, TransferPlan, TransferReport, TransferResult
from fdcache.tasks import AsyncTask, AsyncTaskHandler, CpuEvent, TransferStatus

logger = logging.getLogger(__name__)


class Work(Protocol):
    """One transfer of a plan in flight."""

    def pending_event(self) -> Event | None:
        """Return an event that comes before the end of the transfer, or None if it has ended."""

    @property
    def started(self) -> bool:
        """True if copying has begun."""

    def cancel(self) -> bool:
        """Cancel the transfer if no copy has begun; return True if it did. All positions fail then."""

    def result(self) -> TransferResult:
        """Return the result, once it has ended."""


class LaunchedCopy:
    """A copy that is enqueued."""

    def __init__(self, copy: PendingCopy) -> None:
        self._copy = copy

    @property
    def done(self) -> Event:
        """Reached once the copy has ended."""
        return self._copy.done

    def pending_event(self) -> Event | None:
        """Return ``done`` until it is reached, then None."""
        return None if self._copy.done.query() else self._copy.done

    @property
    def started(self) -> bool:
        """True if copying has begun."""
        return self._copy.started

    def cancel(self) -> bool:
        """Cancel the copy if it has not begun; return True if it did."""
        return self._copy.cancel()

    def result(self) -> TransferResult:
        """Return what the copy came to, once it has ended."""
        return self._copy.result()


class RefusedCopy:
    """A copy with a known result: it has no blocks, or its stream refused it.

    ``behind``: an event after the part that the stream accepted before it refused the rest, until which the slots
    are in use; None if it accepted nothing.
    """

    started = False

    def __init__(self, result: TransferResult, behind: Event | None = None) -> None:
        self._result = result
        self.done = behind

    def pending_event(self) -> Event | None:
        """Return ``behind`` until it is reached, then None."""
        return None if self.done is None or self.done.query() else self.done

    def cancel(self) -> bool:
        """Return False: nothing is left to cancel."""
        return False

    def result(self) -> TransferResult:
        """Return what was known when it was made."""
        return self._result


def reason_of(error: Exception) -> str:
    """Return an error's message for a report; log the traceback if it is not an ``FdcacheError``."""
    if isinstance(error, FdcacheError):
        return str(error)
    logger.error("a copy could not be submitted", exc_info=error)
    return f"{type(error).__name__}: {error}"


class Fence:
    """An event after the accepted part of a copy that was refused midway.

    It is created before a copy is enqueued, since afterwards the device may refuse it, and kept until one is needed.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._event: Event | None = None

    def prepare(self) -> Event:
        """Return the event, which may be waited for once it is recorded."""
        if self._event is None:
            self._event = self._device.create_event()
        return self._event

    def record(self, stream: Stream) -> None:
        """Record the event on the stream that refused a copy.

        If the stream refuses the event as well it is never reached, and the copy holds its slots for good.
        """
        event, self._event = self.prepare(), None
        try:
            event.record(stream)
        except Exception as error:  # noqa: BLE001 - the report has the first error
            logger.error("a stream accepts no event: %s", reason_of(error))


class Execution(AsyncTask[TransferReport], Protocol):
    """A submitted plan or storage task until its report is polled."""

    @property
    def plan_id(self) -> int:
        """Number of the plan or task."""

    def pending_event(self) -> Event | None:
        """Return an event that comes before the end of the task, or None if it has ended."""


class PlanExecution:
    """One submitted plan, the task behind its ``AsyncTaskHandler``. The report is made once, at the end."""

    def __init__(self, plan_id: int, rank: int, transfers: Sequence[Work]) -> None:
        self.plan_id = plan_id
        self._rank = rank
        self._transfers = tuple(transfers)
        self._report: TransferReport | None = None
        self._lock = threading.Lock()

    def pending_event(self) -> Event | None:
        """Return an event that comes before the end of the plan, or None if it has ended."""
        for transfer in self._transfers:
            if (event := transfer.pending_event()) is not None:
                return event
        return None

    def wait(self, timeout: float | None) -> bool:
        """Wait up to ``timeout`` seconds, None without limit; return True if the plan has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (event := self.pending_event()) is not None:
            if not event.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0)):
                return False
        return True

    def cancel(self) -> bool:
        """Cancel the transfers that have not begun; return True if there was one."""
        taken = [transfer.cancel() for transfer in self._transfers]
        return any(taken)

    def status(self) -> TransferStatus:
        """Return how far the plan is; FAILED if one of its copies has failed."""
        if self.pending_event() is None:
            success = all(result.success for result in self.result().results)
            return TransferStatus.COMPLETED if success else TransferStatus.FAILED
        started = any(transfer.started for transfer in self._transfers)
        return TransferStatus.IN_PROGRESS if started else TransferStatus.PENDING

    def result(self) -> TransferReport:
        """Return the report of a plan that has ended, and release its copies and their memory."""
        with self._lock:
            if self._report is None:
                self._report = TransferReport(
                    plan_id=self.plan_id,
                    rank=self._rank,
                    results=tuple(transfer.result() for transfer in self._transfers),
                )
                self._transfers = ()
            return self._report


def refused_executions(plan: TransferPlan, rank: int, reason: str) -> list[PlanExecution]:
    """Return failed executions of a plan and of each of its tasks."""
    parts: tuple[TransferPlan | StorageTask | PeerTask, ...] = (plan, *plan.tasks)
    return [
        PlanExecution(
            each.plan_id,
            rank,
            [RefusedCopy(TransferResult.failure(swap, reason)) for swap in each.swaps()],
        )
        for each in parts
    ]


_MIXED_WAIT = 0.002


class PlansInFlight:
    """Executions and their handlers, in the order of submission. The caller holds the lock."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.executions: dict[int, Execution] = {}
        self._handlers: dict[int, AsyncTaskHandler[TransferReport]] = {}

    def __contains__(self, plan_id: int) -> bool:
        return plan_id in self.executions

    def add(self, execution: Execution) -> None:
        """Add a submitted plan or storage task."""
        self.executions[execution.plan_id] = execution

    def handler(self, plan_id: int) -> AsyncTaskHandler[TransferReport]:
        """Return the handler of a plan. Raises ``PlanError`` for one that is not in flight."""
        if plan_id not in self.executions:
            raise PlanError(f"plan {plan_id} is not in flight")
        if plan_id not in self._handlers:
            self._handlers[plan_id] = AsyncTaskHandler(self.executions[plan_id])
        return self._handlers[plan_id]

    def running(self) -> list[Execution]:
        """Return the plans and storage tasks that have not ended."""
        return [each for each in self.executions.values() if each.pending_event() is not None]

    def release_ended(self) -> None:
        """Make the reports of the plans that have ended, which releases the memory of their copies."""
        for execution in self.executions.values():
            if execution.pending_event() is None:
                execution.result()

    def take_ended(self) -> list[TransferReport]:
        """Remove the plans that have ended and return their reports."""
        reports: list[TransferReport] = _core.take_ended(self.executions)
        if self._handlers:
            for report in reports:
                self._handlers.pop(report.plan_id, None)
        return reports

    def pending_events(self) -> list[Event | None]:
        """Return for each plan an event that comes before its end, or None if it has ended."""
        return [each.pending_event() for each in self.executions.values()]

    def wait_any(self, events: Sequence[Event], timeout: float | None) -> bool:
        """Wait like the device's ``wait_any``, also for the CPU events of storage tasks."""
        others = [event for event in events if not isinstance(event, CpuEvent)]
        if not others:
            return wait_any_cpu_event(events, timeout)
        if len(others) == len(events):
            return self._device.wait_any(events, timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while not any(event.query() for event in events):
            if deadline is not None and time.monotonic() >= deadline:
                return False
            self._device.wait_any(others, _MIXED_WAIT)
        return True
