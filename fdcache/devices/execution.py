"""A submitted plan until its report."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from fdcache.devices.base import Device, Event, PendingCopy, Stream
from fdcache.devices.cpu import CpuEvent, wait_any_cpu_event
from fdcache.errors import FdcacheError, PlanError
from fdcache.metadata import StorageTask, TransferPlan, TransferReport, TransferResult
from fdcache.tasks import AsyncTaskHandler, TransferStatus

logger = logging.getLogger(__name__)


class Work(Protocol):
    """The blocks of one transfer on their way."""

    def pending_event(self) -> Event | None:
        """An event that must be reached before it has ended; None when it has."""

    @property
    def started(self) -> bool:
        """Whether a copy has begun."""

    def cancel(self) -> bool:
        """Take it back if none of it has begun: all its positions fail."""

    def result(self) -> TransferResult:
        """Return the result, once it has ended."""


class LaunchedCopy:
    """A copy that is on its stream."""

    def __init__(self, copy: PendingCopy) -> None:
        self._copy = copy

    @property
    def done(self) -> Event:
        """Reached once it has ended."""
        return self._copy.done

    def pending_event(self) -> Event | None:
        """Its end, until that is reached."""
        return None if self._copy.done.query() else self._copy.done

    @property
    def started(self) -> bool:
        """Whether a copy has begun."""
        return self._copy.started

    def cancel(self) -> bool:
        """Take it back if none of it has begun."""
        return self._copy.cancel()

    def result(self) -> TransferResult:
        """Return the result."""
        return self._copy.result()


class RefusedCopy:
    """A copy that could not be put on its stream, or has no blocks: its ``result`` is known.

    ``behind`` is reached when whatever of it the stream took has ended; None when the stream took nothing. The slots
    are the copy's until then.
    """

    started = False

    def __init__(self, result: TransferResult, behind: Event | None = None) -> None:
        self._result = result
        self.done = behind

    def pending_event(self) -> Event | None:
        """The end of what is on the stream, until that is reached."""
        return None if self.done is None or self.done.query() else self.done

    def cancel(self) -> bool:
        """There is nothing to take back."""
        return False

    def result(self) -> TransferResult:
        """Return the result."""
        return self._result


def reason_of(error: Exception) -> str:
    """The words of an error for a report; one that nobody foresaw goes to the log with its traceback."""
    if isinstance(error, FdcacheError):
        return str(error)
    logger.error("a copy could not be submitted", exc_info=error)
    return f"{type(error).__name__}: {error}"


def fence(stream: Stream, behind: Event) -> None:
    """Let an event be reached when a stream has done what it took of a copy that was refused midway.

    When the stream does not take the event either it is never reached: then the slots stay the copy's for good.
    """
    try:
        behind.record(stream)
    except Exception as error:  # noqa: BLE001 - the copy is reported with the first one
        logger.error("a stream takes no event: %s", reason_of(error))


class PlanExecution:
    """One submitted plan: the task that its handler stands for. Its report is made once, at the end."""

    def __init__(self, plan_id: int, rank: int, transfers: Sequence[Work]) -> None:
        self.plan_id = plan_id
        self._rank = rank
        self._transfers = tuple(transfers)
        self._report: TransferReport | None = None
        self._lock = threading.Lock()

    def pending_event(self) -> Event | None:
        """An event that must be reached before the plan has ended; None when it has."""
        for transfer in self._transfers:
            if (event := transfer.pending_event()) is not None:
                return event
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
        taken = [transfer.cancel() for transfer in self._transfers]
        return any(taken)

    def status(self) -> TransferStatus:
        """How far the plan has come."""
        if self.pending_event() is None:
            success = all(result.success for result in self.result().results)
            return TransferStatus.COMPLETED if success else TransferStatus.FAILED
        started = any(transfer.started for transfer in self._transfers)
        return TransferStatus.IN_PROGRESS if started else TransferStatus.PENDING

    def result(self) -> TransferReport:
        """The report of a plan that has ended; the copies and the memory they name are let go."""
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
    """A plan of which nothing is copied, and its storage tasks: each has its report."""
    parts: tuple[TransferPlan | StorageTask, ...] = (plan, *plan.storage)
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
    """Executions in the order of submission, with the handlers that stand for them. The caller locks."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._executions: dict[int, PlanExecution] = {}
        self._handlers: dict[int, AsyncTaskHandler[TransferReport]] = {}

    def __contains__(self, plan_id: int) -> bool:
        return plan_id in self._executions

    def add(self, execution: PlanExecution) -> None:
        """A plan was submitted."""
        self._executions[execution.plan_id] = execution
        self._handlers[execution.plan_id] = AsyncTaskHandler(execution)

    def handler(self, plan_id: int) -> AsyncTaskHandler[TransferReport]:
        """The handler of a plan. Raises ``PlanError`` for one that is not here."""
        if plan_id not in self._handlers:
            raise PlanError(f"plan {plan_id} is not in flight")
        return self._handlers[plan_id]

    def running(self) -> list[PlanExecution]:
        """The plans that have not ended."""
        return [each for each in self._executions.values() if each.pending_event() is not None]

    def settle(self) -> None:
        """Make the reports of the plans that have ended, which lets go of the memory that their copies name."""
        for execution in self._executions.values():
            if execution.pending_event() is None:
                execution.result()

    def take_ended(self) -> list[TransferReport]:
        """The reports of the plans that have ended; they are in flight no more."""
        reports = [each.result() for each in self._executions.values() if each.pending_event() is None]
        for report in reports:
            del self._executions[report.plan_id], self._handlers[report.plan_id]
        return reports

    def pending_events(self) -> list[Event | None]:
        """For each plan an event that must be reached before it has ended; None for one that has."""
        return [each.pending_event() for each in self._executions.values()]

    def wait_any(self, events: Sequence[Event], timeout: float | None) -> bool:
        """As the device's ``wait_any``; storage has events of its own, which another device does not know."""
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
