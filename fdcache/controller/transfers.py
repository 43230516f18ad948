"""Plans on their way: checked, put on the streams, collected into reports.

Three streams: loads on one; evictions and backups, both device to host, on two of their own, of which the
backups' is a background stream. So an eviction or a load never queues behind a backup; at most it shares the
machine with the one that is running.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from fdcache.devices.base import (
    BlockCopy,
    BlockPairs,
    Device,
    DevicePlanes,
    Direction,
    Event,
    HostArena,
    PendingCopy,
    Stream,
)
from fdcache.devices.validation import first_repeated
from fdcache.errors import PlanError
from fdcache.layout import KVLayout
from fdcache.metadata import (
    CacheLevel,
    CacheSwapMetadata,
    Int32Array,
    SwapPurpose,
    TransferPlan,
    TransferReport,
    TransferResult,
    TransferStatus,
)

_DIRECTIONS = {
    SwapPurpose.EVICT: Direction.TO_HOST,
    SwapPurpose.LOAD: Direction.TO_DEVICE,
    SwapPurpose.BACKUP: Direction.TO_HOST,
}
_LEVELS = {
    Direction.TO_HOST: (CacheLevel.DEVICE, CacheLevel.HOST),
    Direction.TO_DEVICE: (CacheLevel.HOST, CacheLevel.DEVICE),
}


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer of a plan; ``copy`` is None when it has no blocks."""

    purpose: SwapPurpose
    copy: PendingCopy | None


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


class TransferQueue:
    """The streams of one worker."""

    def __init__(
        self, device: Device, layout: KVLayout, *, first_group_layers: int, group_layers: int
    ) -> None:
        self._device = device
        self._num_layers = layout.total_layers
        starts = [layout.layer_planes(layer)[0].offset for layer in range(layout.total_layers)]
        self._offsets = [*starts, layout.record_bytes]
        self._groups = layer_groups(layout.total_layers, first_group_layers, group_layers)
        self._widened: dict[int, list[tuple[int, int]]] = {}
        planes = [len(layout.layer_planes(layer)) for layer in range(layout.total_layers)]
        self._first_plane = [0, *accumulate(planes)]
        self._loads = device.create_stream()
        self._evictions = device.create_stream()
        self._backups = device.create_stream(background=True)

    def launch(
        self,
        plan: TransferPlan,
        rank: int,
        planes: DevicePlanes | None,
        arena: HostArena | None,
        compute_stream: Stream | None,
    ) -> tuple[PlanExecution, list[Event | None]]:
        """Check the whole plan, then put it on the streams; also the event of each layer.

        ``planes`` and ``arena`` may be None for a plan without blocks. Raises ``PlanError`` before anything
        is launched.
        """
        check_plan(plan)
        made = {swap.purpose: self._copy(swap, planes, arena) for swap in plan.swaps()}
        transfers = [Transfer(purpose, copy) for purpose, copy in made.items()]
        copies = {purpose: copy for purpose, copy in made.items() if copy is not None}
        if copies and compute_stream is not None:
            self._order_after(compute_stream, copies)
        layer_events: list[Event | None] = [None] * self._num_layers
        if (evictions := copies.get(SwapPurpose.EVICT)) is not None:
            evictions.enqueue(self._evictions, 0, self._first_plane[-1])
            layer_events = [evictions.done] * self._num_layers
            if compute_stream is not None:
                compute_stream.wait_event(evictions.done)
        if (loads := copies.get(SwapPurpose.LOAD)) is not None:
            if evictions is not None:
                self._loads.wait_event(evictions.done)
            layer_events = self._enqueue_groups(loads, len(plan.loads or ()))
        if (backups := copies.get(SwapPurpose.BACKUP)) is not None:
            backups.enqueue(self._backups, 0, self._first_plane[-1])
        return PlanExecution(plan.plan_id, rank, transfers), layer_events

    def retire(self) -> None:
        """Let go of the memory that finished copies kept alive."""
        for stream in (self._evictions, self._loads, self._backups):
            stream.retire()

    def close(self) -> None:
        """End the streams."""
        for stream in (self._evictions, self._loads, self._backups):
            stream.close()

    def _copy(
        self, swap: CacheSwapMetadata, planes: DevicePlanes | None, arena: HostArena | None
    ) -> BlockCopy | None:
        pairs, direction = _pairs(swap), _DIRECTIONS[swap.purpose]
        if len(pairs) == 0 or planes is None or arena is None:
            return None
        try:
            return self._device.copy_blocks(planes, arena, pairs, direction)
        except PlanError as error:
            raise PlanError(f"{swap.purpose.value}: {error}") from None

    def _order_after(self, compute_stream: Stream, copies: dict[SwapPurpose, BlockCopy]) -> None:
        computed = self._device.create_event()
        computed.record(compute_stream)
        streams = {
            SwapPurpose.EVICT: self._evictions,
            SwapPurpose.LOAD: self._loads,
            SwapPurpose.BACKUP: self._backups,
        }
        for purpose in copies:
            streams[purpose].wait_event(computed)

    def _enqueue_groups(self, loads: BlockCopy, num_blocks: int) -> list[Event | None]:
        min_bytes = self._device.min_group_bytes(num_blocks, self._offsets[-1])
        if min_bytes not in self._widened:
            self._widened[min_bytes] = widen_groups(self._groups, self._offsets, min_bytes)
        groups = self._widened[min_bytes]
        ranges = [(self._first_plane[first], self._first_plane[last]) for first, last in groups]
        events: list[Event | None] = []
        for (first, last), event in zip(groups, loads.enqueue_groups(self._loads, ranges), strict=True):
            events += [event] * (last - first)
        return events


def layer_groups(num_layers: int, first: int, later: int) -> list[tuple[int, int]]:
    """Ranges of layers, the end not included: one of ``first`` layers, the others of ``later``."""
    starts = [0, *range(min(first, num_layers), num_layers, later)]
    return list(zip(starts, [*starts[1:], num_layers], strict=True))


def widen_groups(
    groups: Sequence[tuple[int, int]], offsets: Sequence[int], min_bytes: int
) -> list[tuple[int, int]]:
    """The same groups, later ones joined until each has ``min_bytes`` of the record; the first stays small.

    ``offsets`` has the record offset of each layer, and the end.
    """
    first, *later = groups
    widened: list[tuple[int, int]] = []
    for start, end in later:
        narrow = bool(widened) and offsets[widened[-1][1]] - offsets[widened[-1][0]] < min_bytes
        if narrow:
            widened[-1] = (widened[-1][0], end)
        else:
            widened.append((start, end))
    if len(widened) > 1 and offsets[widened[-1][1]] - offsets[widened[-1][0]] < min_bytes:
        _, end = widened.pop()
        widened[-1] = (widened[-1][0], end)
    return [first, *widened]


def check_plan(plan: TransferPlan) -> None:
    """Raise ``PlanError`` for transfers that do not suit their place or each other."""
    fields = (
        (plan.evictions, SwapPurpose.EVICT),
        (plan.loads, SwapPurpose.LOAD),
        (plan.backups, SwapPurpose.BACKUP),
    )
    for swap, purpose in fields:
        if swap is None:
            continue
        _check_lengths(swap)
        levels = _LEVELS[_DIRECTIONS[purpose]]
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


def _check_lengths(swap: CacheSwapMetadata) -> None:
    count = len(swap)
    shapes = {
        "dst_block_ids": (swap.dst_block_ids.shape, (count,)),
        "src_generations": (swap.src_generations.shape, (count,)),
        "dst_generations": (swap.dst_generations.shape, (count,)),
        "hash_values": (swap.hash_values.shape, (count, 32)),
        "parent_hashes": (swap.parent_hashes.shape, (count, 32)),
    }
    for name, (shape, expected) in shapes.items():
        if shape != expected:
            raise PlanError(
                f"{swap.purpose.value}: {name} has shape {shape}, but {count} src_block_ids need {expected}"
            )


def _check_disjoint(kind: str, backups: Int32Array, others: Int32Array, what: str) -> None:
    both = np.concatenate([np.unique(backups), np.unique(others)])
    if (repeated := first_repeated(both)) is not None:
        slot = both[repeated[0]]
        position = int(np.flatnonzero(backups == slot)[0])
        raise PlanError(f"backup: pair {position}: {kind} {slot} is {what} by the same plan")


def _pairs(swap: CacheSwapMetadata) -> BlockPairs:
    to_host = _DIRECTIONS[swap.purpose] is Direction.TO_HOST
    source, target = swap.src_block_ids, swap.dst_block_ids
    return BlockPairs(
        device_slots=source if to_host else target,
        host_slots=target if to_host else source,
        generations=swap.dst_generations if to_host else swap.src_generations,
        hashes=swap.hash_values,
        parents=swap.parent_hashes,
    )


def _result(transfer: Transfer) -> TransferResult:
    if transfer.copy is None:
        return TransferResult(
            purpose=transfer.purpose,
            failed=np.empty(0, np.int32),
            checksums=np.empty(0, np.uint64),
            copied_bytes=0,
            seconds=0.0,
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
