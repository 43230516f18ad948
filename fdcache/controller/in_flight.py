"""The plans of one worker whose reports were not polled yet."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fdcache.controller.execution import PlanExecution
from fdcache.devices.base import Device, Event
from fdcache.devices.cpu import CpuEvent, wait_any_cpu_event
from fdcache.errors import PlanError
from fdcache.metadata import AsyncTaskHandler, TransferReport

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
