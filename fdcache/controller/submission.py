"""The submission of plans to one rank: copies to the device, reads and writes to the storage, hand-overs to peers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fdcache import _core
from fdcache._core import PlanLauncher
from fdcache.controller.arena import HostArena
from fdcache.controller.copies import Transfer, reason_of
from fdcache.controller.device_planes import DeviceMemory
from fdcache.controller.layers import LayerEvents
from fdcache.controller.shares import CopyShares
from fdcache.controller.transfers import TransferQueue, check_countable
from fdcache.devices.base import (
    Device,
    Stream,
)
from fdcache.devices.cpu import wait_any_cpu_event
from fdcache.errors import CacheNotReadyError, DeviceError, PlanError, StreamError, TransferTimeoutError
from fdcache.layout import KVLayout
from fdcache.metadata import PeerTask, StorageTask, TransferPlan, TransferReport
from fdcache.settings.cache import CopySettings
from fdcache.storage.queue import StorageQueue, StorageTransfer
from fdcache.tasks import AsyncTaskHandler, CpuEvent, Event, Execution

if TYPE_CHECKING:
    from fdcache.controller.planned_handovers import PlannedHandovers
    from fdcache.service.client.shared_arena import SharedHostArena

logger = logging.getLogger(__name__)


def refused_executions(plan: TransferPlan, rank: int, reason: str) -> list[Execution]:
    """Return failed executions of a plan and of each of its tasks."""
    parts: tuple[TransferPlan | StorageTask | PeerTask, ...] = (plan, *plan.tasks)
    return [
        Execution(each.plan_id, rank, [Transfer.failed(swap, reason) for swap in each.swaps()])
        for each in parts
    ]


_MIXED_WAIT = 0.002


class PlansInFlight:
    """Executions and their handlers, in the order of submission. The caller holds the lock."""

    def __init__(self, device: Device, shares: CopyShares) -> None:
        self._device = device
        self._shares = shares
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
            self._handlers[plan_id] = AsyncTaskHandler(self._shares.task(plan_id, self.executions[plan_id]))
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


@dataclass(slots=True)
class RankParts:
    """The memory of one rank, and what reads and writes it besides copies. None before they are made."""

    memory: DeviceMemory
    arena: HostArena | SharedHostArena | None = None
    storage: StorageQueue | None = None
    transfer: PlannedHandovers | None = None
    is_shut_down: bool = False

    @property
    def shared(self) -> SharedHostArena | None:
        """The arena of a service, which a plan has to be attached to; None without one."""
        return None if self.arena is None or isinstance(self.arena, HostArena) else self.arena

    def check_usable(self) -> None:
        """Raise ``CacheNotReadyError`` after the shutdown."""
        if self.is_shut_down:
            raise CacheNotReadyError("the controller is shut down; make a new one")


class PlanSubmission:
    """Submits the plans of one rank, and keeps them in flight until they are polled.

    ``lock``: guards all state; released while waiting for the service.
    """

    def __init__(
        self,
        device: Device,
        layout: KVLayout,
        settings: CopySettings,
        rank: int,
        parts: RankParts,
        lock: threading.RLock,
    ) -> None:
        self.serial = threading.RLock()
        """Serializes submissions, which may ask the service. Taken before ``lock``."""
        self.shares = CopyShares(layout, rank)
        self.in_flight = PlansInFlight(device, self.shares)
        self.queue = TransferQueue(device, layout, settings, lock, self.in_flight.executions)
        self.launcher: PlanLauncher | None = None
        """Submits most plans in one call; None until planes and arena were used once."""
        self._launches: tuple[str | None, int] = (None, 0)
        self._device = device
        self._rank = rank
        self._parts = parts
        self._lock = lock

    def submit(self, plan: TransferPlan, compute_stream: Any) -> LayerEvents:
        """Enqueue a plan; see ``CacheController.submit_swap_tasks``."""
        with self.serial:
            if self.shares.divides:
                plan = self.shares.cut(plan)
            layers = self._launch_natively(plan, compute_stream)
            if layers is None or isinstance(layers, str):
                layers = self._launch_checked(plan, compute_stream, layers)
            return layers

    def refuse(self, plan: TransferPlan, reason: str) -> None:
        """Fail a plan, and its storage tasks. Raises ``PlanError`` for a plan that is in flight already."""
        with self._lock:
            self._check_new(plan)
            self._refuse_all(plan, reason)

    def take_reports(self) -> list[TransferReport]:
        """Return the reports of the plans that ended since the last call, in the order of submission."""
        if not self.in_flight.executions:
            return []
        with self._lock:
            reports = self.in_flight.take_ended()
            if reports and self.launcher is not None:
                self.launcher.retire()
            if reports and (self.queue.has_copies if self.launcher is None else self.queue.keeps_reads):
                self.queue.retire()
            return self.shares.take_whole(reports) if self.shares.divides else reports

    def wait_reports(self, timeout: float | None) -> list[TransferReport]:
        """Wait up to ``timeout`` seconds, None without limit, for a plan to end; then return the reports."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not (reports := self.take_reports()):
            with self._lock:
                pending = self.in_flight.pending_events()
            if not pending:
                break
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if None in pending:  # one ended since the last call
                continue
            if not self.in_flight.wait_any([event for event in pending if event is not None], left):
                break
        return reports

    def _check_new(self, plan: TransferPlan) -> None:
        for plan_id in plan.plan_ids:
            if plan_id in self.in_flight:
                raise PlanError(f"plan {plan_id} is in flight already; poll its report first")

    def _launch_natively(self, plan: TransferPlan, compute_stream: Any) -> LayerEvents | str | None:
        """Enqueue a plan in one call; return the reason of a failure, or None if it takes ``_launch_checked``."""
        with self._lock:
            shared = self._parts.shared
            if self.launcher is None or self.queue.has_waiting_loads:
                return None
            if shared is not None and not (shared.state == self._launches and shared.is_ready_for(plan)):
                return None  # it has to be attached to, or mapped
            launched: LayerEvents | str | None = self.launcher.submit(
                plan, compute_stream, self.in_flight.executions
            )
            return launched

    def _launch_checked(self, plan: TransferPlan, compute_stream: Any, refusal: str | None) -> LayerEvents:
        # Not under the lock: others may poll while the service answers.
        refusal = refusal or self._attach(plan)
        with self._lock:
            self._check_new(plan)
            try:
                layers = self._launch(plan, compute_stream, refusal)
            except Exception as error:
                self._refuse_all(plan, reason_of(error))
                raise
            self._make_launcher()
            return layers

    def _make_launcher(self) -> None:
        """Make the launcher of the arena as it is now, unless there is one."""
        planes, arena, shared = self._parts.memory.planes, self._parts.arena, self._parts.shared
        state = (None, 0) if shared is None else shared.state
        if planes is not None and arena is not None and (self.launcher is None or state != self._launches):
            self.launcher = self.queue.launcher(planes, arena, self._rank, state[0])
            self._launches = state

    def _attach(self, plan: TransferPlan) -> str | None:
        if (shared := self._parts.shared) is None:
            return None
        try:
            check_countable(plan)
            return shared.attach(plan)
        except PlanError:
            return None  # it is raised under the lock
        except Exception as error:  # noqa: BLE001 - it goes into the report
            return reason_of(error)

    def _launch(self, plan: TransferPlan, compute_stream: Any, unattached: str | None) -> LayerEvents:
        self._parts.check_usable()
        check_countable(plan)
        has_copies = any(map(len, plan.swaps()))
        if has_copies:
            self._check_memory()
        stream, refusal = self._compute_stream(
            compute_stream, has_copies or any(len(task.swap) for task in plan.peers)
        )
        prepared = self._prepare_storage(plan)
        if plan.peers:
            if self._parts.transfer is None:
                raise CacheNotReadyError("no transfer: call open_transfer")
            self._parts.transfer.check(plan)
        unordered = refusal
        refusal = refusal or unattached
        if refusal is None and (shared := self._parts.shared) is not None:
            refusal = shared.prepare(plan)
        execution, layers = self.queue.launch(
            plan, self._rank, self._parts.memory.planes, self._parts.arena, stream, refusal
        )
        self.in_flight.add(execution)
        self._launch_storage(plan, prepared)
        if self._parts.transfer is not None:
            for handover in self._parts.transfer.submit(plan, stream, unordered):
                self.in_flight.add(handover)
        return layers

    def _compute_stream(self, compute_stream: Any, has_copies: bool) -> tuple[Stream | None, str | None]:
        """Return the stream to order copies with, or the device's reason to refuse it."""
        if compute_stream is None:
            if has_copies and self._device.has_compute_streams:
                raise StreamError(
                    "compute_stream: None orders nothing on a GPU; pass the stream that the model computes on, such as "
                    "torch.cuda.current_stream(), paddle.device.current_stream() or cupy.cuda.get_current_stream(), or "
                    "an idle stream where nothing computes on the plan's blocks"
                )
            return None, None
        try:
            return self._device.as_stream(compute_stream), None
        except TypeError as error:
            raise StreamError(f"compute_stream: {error}") from error
        except DeviceError as error:
            return None, str(error)

    def _refuse_all(self, plan: TransferPlan, reason: str) -> None:
        for execution in refused_executions(plan, self._rank, reason):
            self.in_flight.add(execution)
        if self._parts.storage is not None:
            # Cancellations and clearing happen all the same.
            self._parts.storage.submit((), cancelled=plan.cancelled, clear=plan.clear_storage)

    def _prepare_storage(self, plan: TransferPlan) -> list[StorageTransfer]:
        if not plan.storage or not self.shares.has_storage:
            return []
        if self._parts.storage is None:
            raise CacheNotReadyError("no storage: call initialize_storage")
        return [self._parts.storage.prepare(task) for task in plan.storage]

    def _launch_storage(self, plan: TransferPlan, prepared: list[StorageTransfer]) -> None:
        if not self.shares.has_storage:
            for task in plan.storage:
                self.in_flight.add(Execution(task.plan_id, self._rank, [Transfer.left(task.swap)]))
        if self._parts.storage is None:
            return
        for transfer in prepared:
            self.in_flight.add(Execution(transfer.plan_id, self._rank, [transfer]))
        try:
            self._parts.storage.submit(prepared, cancelled=plan.cancelled, clear=plan.clear_storage)
        except Exception as error:  # noqa: BLE001 - copies are in flight; it goes into the reports
            logger.error("plan %d: the storage accepts no tasks: %s", plan.plan_id, reason_of(error))
            for transfer in prepared:
                transfer.cancel()

    def _check_memory(self) -> None:
        if self._parts.memory.planes is None:
            raise CacheNotReadyError(
                "no device planes: call initialize_kv_cache or register_kv_cache, or wakeup after sleep"
            )
        if self._parts.arena is None:
            raise CacheNotReadyError("no host cache: call initialize_host_cache")

    @contextmanager
    def drained(self, timeout: float) -> Iterator[None]:
        """Hold the lock while no copy is in flight, with the memory of finished copies released."""
        deadline = time.monotonic() + timeout
        while True:
            with self.serial, self._lock:
                running = self.in_flight.running()
                if not running:
                    self.in_flight.release_ended()
                    self.queue.retire()
                    yield
                    return
            # Not under the lock: others may poll and cancel meanwhile.
            if not running[0].wait(max(deadline - time.monotonic(), 0.0)):
                raise TransferTimeoutError(
                    f"plan {running[0].plan_id} is still in flight after {timeout} s, so nothing was freed; "
                    "try again, or give a longer timeout"
                )
