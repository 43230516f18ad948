"""Plans onto streams: checks before anything is copied, then evictions, loads and backups in order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from fdcache import _core
from fdcache.controller.copies import Lane, LoadQueue, Transfer, reason_of
from fdcache.controller.layers import LaunchedLayers, LayerEvents, LayerGroups
from fdcache.devices.base import (
    ArenaRecords,
    Device,
    DevicePlanes,
    LaunchWays,
    Stream,
    check_arrays,
)
from fdcache.errors import PlanError, StreamError
from fdcache.layout import KVLayout
from fdcache.metadata import (
    CacheSwapMetadata,
    Int32Array,
    SwapPurpose,
    TransferPlan,
)
from fdcache.settings.cache import CopySettings
from fdcache.tasks import Event, Execution

logger = logging.getLogger(__name__)


def check_plan(plan: TransferPlan) -> None:
    """Raise ``PlanError`` for a transfer of another purpose than its field, or transfers that share slots."""
    sound = (
        _has_purpose(plan.evictions, SwapPurpose.EVICT)
        and _has_purpose(plan.loads, SwapPurpose.LOAD)
        and _has_purpose(plan.backups, SwapPurpose.BACKUP)
        and _core.are_sound_transfers(plan.evictions, plan.loads, plan.backups)
    )
    if not sound:
        _refuse_plan(plan)


def check_countable(plan: TransferPlan) -> None:
    """Raise ``PlanError`` for a transfer whose slots are no array, so that its blocks cannot be counted."""
    for swap in plan.swaps():
        if not isinstance(swap.src_block_ids, np.ndarray) or swap.src_block_ids.ndim == 0:
            check_arrays(swap)


def _has_purpose(swap: CacheSwapMetadata | None, purpose: SwapPurpose) -> bool:
    return swap is None or (
        swap.purpose is purpose and swap.src_type is purpose.source and swap.dst_type is purpose.target
    )


def _refuse_plan(plan: TransferPlan) -> None:
    """Raise the ``PlanError`` that names what is wrong."""
    fields = (
        (plan.evictions, SwapPurpose.EVICT),
        (plan.loads, SwapPurpose.LOAD),
        (plan.backups, SwapPurpose.BACKUP),
    )
    for swap, purpose in fields:
        if swap is None:
            continue
        check_arrays(swap)
        levels = (purpose.source, purpose.target)
        if swap.purpose is not purpose or (swap.src_type, swap.dst_type) != levels:
            raise PlanError(
                f"{purpose.value}: the transfer is a {swap.purpose.value} from {swap.src_type.value} to "
                f"{swap.dst_type.value}, not one from {levels[0].value} to {levels[1].value}"
            )
    if plan.backups is None:
        return
    if plan.evictions is not None:
        _check_disjoint("host slot", plan.backups.dst_block_ids, plan.evictions.dst_block_ids, "evicted into")
        _check_disjoint("device slot", plan.backups.src_block_ids, plan.evictions.src_block_ids, "emptied")
    if plan.loads is not None:
        _check_disjoint("device slot", plan.backups.src_block_ids, plan.loads.dst_block_ids, "loaded")


def _check_disjoint(kind: str, backups: Int32Array, others: Int32Array, what: str) -> None:
    if _core.are_disjoint_slots(backups, others):
        return
    position = int(np.flatnonzero(np.isin(backups, others))[0])
    raise PlanError(f"backup: pair {position}: {kind} {backups[position]} is {what} by the same plan")


class DeviceReads:
    """The copies out of the device that may be in flight, by plan.

    Plans that were submitted in one call tell theirs themselves, as long as they are in ``executions``.
    """

    def __init__(self, executions: Mapping[int, object]) -> None:
        self._executions = executions
        self._events: dict[int, list[Event]] = {}

    def __bool__(self) -> bool:
        return bool(self._events)

    def add(self, plan_id: int, done: Event) -> None:
        """Add a copy, which ends with this event."""
        self._events.setdefault(plan_id, []).append(done)

    def pending(self, plan_ids: Sequence[int]) -> list[Event]:
        """Return the ends of the copies of these plans that have not ended."""
        events = [event for plan_id in plan_ids for event in self._events.get(plan_id, ())]
        pending = [event for event in events if not event.query()]
        for plan_id in plan_ids:
            launched = self._executions.get(plan_id)
            if isinstance(launched, _core.LaunchedPlan) and (event := launched.pending_read()) is not None:
                pending.append(event)
        return pending

    def forget_ended(self) -> None:
        """Forget the copies that have ended."""
        for plan_id, events in list(self._events.items()):
            if all(event.query() for event in events):
                del self._events[plan_id]


class TransferQueue:
    """The copy streams of one worker. Call every method with ``lock`` held.

    ``executions``: the plans in flight, also those that others have submitted.
    """

    def __init__(
        self,
        device: Device,
        layout: KVLayout,
        settings: CopySettings,
        lock: threading.RLock,
        executions: Mapping[int, object],
    ) -> None:
        self._device = device
        self._groups = LayerGroups(
            device, layout, first=settings.first_group_layers, later=settings.group_layers
        )
        self._loads = LoadQueue(device, layout, self._groups, lock, ahead_bytes=settings.queued_bytes)
        self._evictions = Lane(device, self._groups)
        self._backups = Lane(device, self._groups, background=True)
        self._reads = DeviceReads(executions)
        self._nothing = LaunchedLayers([None] * self._groups.num_layers)
        self.has_copies = False
        """True once copies were enqueued here."""

    def launch(
        self,
        plan: TransferPlan,
        rank: int,
        planes: DevicePlanes | None,
        arena: ArenaRecords | None,
        compute_stream: Stream | None,
        refusal: str | None = None,
    ) -> tuple[Execution, LayerEvents]:
        """Check the whole plan, then enqueue its copies; return its execution and the events of its layers.

        ``planes`` and ``arena`` may be None for a plan without blocks. With a ``refusal`` every copy fails for that
        reason. Raises ``PlanError`` and ``StreamError`` before any copy is enqueued; later exceptions fail the
        transfers concerned.
        """
        check_plan(plan)
        swaps = plan.swaps()
        transfers: dict[SwapPurpose, Transfer] = {}
        computed: Event | None = None
        if refusal is None:
            try:
                # First: a stream that is being captured refuses the event, and allocations would break the capture.
                if compute_stream is not None and any(map(len, swaps)):
                    computed = self._device.create_event()
                    computed.record(compute_stream)
                for swap in swaps:
                    if len(swap) == 0 or planes is None or arena is None:
                        continue
                    if swap.purpose is SwapPurpose.LOAD:
                        transfers[swap.purpose] = self._loads.prepare(swap, planes, arena)
                    else:
                        copy = self._device.copy_blocks(planes, arena, swap)
                        transfers[swap.purpose] = Transfer(swap, (planes, arena), copy)
            except (PlanError, StreamError):
                raise
            except Exception as error:  # noqa: BLE001 - it goes into the report
                refusal = reason_of(error)
        if refusal is not None:
            refused = [Transfer.failed(swap, refusal) for swap in swaps]
            layers = self._overwritable(self._reads.pending(plan.after), compute_stream)
            return Execution(plan.plan_id, rank, refused), layers
        return self._enqueue(plan, rank, transfers, compute_stream, computed)

    def launcher(
        self, planes: DevicePlanes, arena: ArenaRecords, rank: int, session: str | None
    ) -> _core.PlanLauncher | None:
        """Return the device's native submission of plans; use it unless ``has_waiting_loads``."""
        ways = LaunchWays(
            rank=rank,
            session=session,
            loads=self._loads.stream,
            backups=self._backups.stream,
            window=self._loads.window,
            ranges_of=self._groups.ranges_of,
            num_layers=self._groups.num_layers,
        )
        return self._device.plan_launcher(planes, arena, ways)

    @property
    def has_waiting_loads(self) -> bool:
        """True if loads of earlier plans wait, behind which a new one has to queue."""
        return not self._loads.is_empty

    @property
    def keeps_reads(self) -> bool:
        """True if copies out of the device that were enqueued here were not retired yet."""
        return bool(self._reads)

    def retire(self) -> None:
        """Release the memory of finished copies."""
        for each in (self._evictions.stream, self._loads, self._backups.stream):
            each.retire()
        self._reads.forget_ended()

    def close(self) -> None:
        """End the streams."""
        for each in (self._evictions, self._loads, self._backups):
            each.stream.close()

    def _enqueue(
        self,
        plan: TransferPlan,
        rank: int,
        transfers: dict[SwapPurpose, Transfer],
        compute_stream: Stream | None,
        computed: Event | None,
    ) -> tuple[Execution, LayerEvents]:
        """Enqueue evictions, then loads, then backups, all after ``computed``, the work of the compute stream so far.

        A transfer that cannot be enqueued fails by itself: others may be in flight, so nothing is raised.
        """
        self.has_copies = self.has_copies or bool(transfers)
        parts = [transfers.get(swap.purpose) or Transfer.failed(swap, None) for swap in plan.swaps()]
        after: tuple[Event, ...] = () if computed is None else (computed,)
        reads = self._reads.pending(plan.after)
        if (evictions := transfers.get(SwapPurpose.EVICT)) is not None:
            reads += self._read_device(plan, evictions, self._evictions, after)
        layers = self._overwritable(reads, compute_stream)
        if (load := transfers.get(SwapPurpose.LOAD)) is not None:
            self._loads.submit(load, (*after, *reads), layers.required())
            layers = load
        if (backups := transfers.get(SwapPurpose.BACKUP)) is not None:
            self._read_device(plan, backups, self._backups, after)
        return Execution(plan.plan_id, rank, parts), layers

    def _read_device(
        self, plan: TransferPlan, transfer: Transfer, lane: Lane, after: Sequence[Event]
    ) -> list[Event]:
        """Enqueue a copy out of the device, which later plans may wait for; return the event of its end, if any."""
        transfer.after = after
        lane.launch([transfer], by_layer=False)
        if (done := transfer.done) is None:
            return []
        self._reads.add(plan.plan_id, done)
        return [done]

    def _overwritable(self, reads: Sequence[Event], compute_stream: Stream | None) -> LayerEvents:
        """Make the compute stream wait for reads of the device; return the events after which layers may be written."""
        if not reads:
            return self._nothing
        if compute_stream is not None:
            for event in reads:
                _let_wait(compute_stream, event)
        return LaunchedLayers([self._joined(reads)] * self._groups.num_layers)

    def _joined(self, events: Sequence[Event]) -> Event:
        """Return an event that comes after all of these."""
        *others, last = events
        try:
            for event in others:
                self._evictions.stream.wait_event(event)
            if others:
                self._evictions.stream.wait_event(last)
                last = self._device.create_event()
                last.record(self._evictions.stream)
        except Exception as error:  # noqa: BLE001 - copies are in flight, nothing may be raised
            logger.warning("a stream takes no event, so the thread waits for copies: %s", reason_of(error))
            for event in events:
                event.wait()
            return events[-1]
        return last


def _let_wait(compute_stream: Stream, emptied: Event) -> None:
    try:
        compute_stream.wait_event(emptied)
    except Exception as error:  # noqa: BLE001 - evictions are in flight, nothing may be raised
        logger.warning(
            "the compute stream takes no event, so the thread waits for evictions: %s", reason_of(error)
        )
        emptied.wait()  # the engine may write these slots once it has the counter
