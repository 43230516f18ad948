"""Loads of several plans on one stream: joined into batches while they wait, each reported by itself.

A load is enqueued at once as long as few bytes are ahead of it. Otherwise it waits here, in order, and is enqueued
with its neighbours as one batch: fewer copies to submit, and longer runs of records. A wait for one of its layers
enqueues a load at once and alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from fdcache import _core
from fdcache.controller.execution import Fence, reason_of
from fdcache.controller.layers import LayerGroups
from fdcache.devices.base import (
    ArenaRecords,
    Device,
    DevicePlanes,
    Event,
    PlannedCopy,
    Stream,
)
from fdcache.devices.copies import Fault, check_swap, make_result
from fdcache.errors import DeviceLostError
from fdcache.layout import KVLayout
from fdcache.metadata import CacheSwapMetadata, TransferResult


class _Batch:
    """One or more loads that are copied together."""

    def __init__(self, copy: PlannedCopy, sizes: Sequence[int], block_bytes: int) -> None:
        self.copy = copy
        self.sizes = tuple(sizes)
        self.nbytes = sum(sizes) * block_bytes
        self._lock = threading.Lock()

    def result(self, index: int) -> TransferResult:
        """Return the result of one of the loads."""
        start = sum(self.sizes[:index])
        with self._lock:
            return self.copy.result(start, start + self.sizes[index])


class QueuedLoad:
    """The load of one plan, waiting or in flight.

    ``emptied``: the plan's evictions, as events of the layers, which a refused load waits for instead of copies.
    """

    def __init__(
        self, queue: LoadQueue, swap: CacheSwapMetadata, planes: DevicePlanes, arena: ArenaRecords
    ) -> None:
        self._queue = queue
        self.swap = swap
        self.memory: tuple[DevicePlanes, ArenaRecords] | None = (planes, arena)
        self.after: list[Event] = []
        self.emptied: Sequence[Event | None] = ()
        self.copy: PlannedCopy | None = None
        self._batch: tuple[_Batch, int] | None = None
        self._layer_events: Sequence[Event | None] | None = None
        self._refusal: tuple[Fault, str] | None = None
        self._behind: Event | None = None
        self._result: TransferResult | None = None

    @property
    def is_waiting(self) -> bool:
        """True until the load is enqueued, refused or cancelled."""
        return self._layer_events is None

    def launched(self, batch: _Batch, index: int, layer_events: Sequence[Event | None]) -> None:
        """Record that the load was enqueued as number ``index`` of a batch."""
        self._batch = batch, index
        self._layer_events = layer_events
        self._release_memory()

    def refused(self, fault: Fault, reason: str = "", behind: Event | None = None) -> None:
        """Fail all blocks, after ``behind`` if part of the load was enqueued."""
        self._refusal, self._behind = (fault, reason), behind
        self._layer_events = self.emptied if behind is None else [behind] * len(self.emptied)
        self._release_memory()

    def _release_memory(self) -> None:
        self.memory, self.copy, self.after = None, None, []

    def pending_event(self) -> Event | None:
        """Return an event that comes before the end of the load, or None if it has ended."""
        with self._queue.lock:
            self._queue.advance()
            if self.is_waiting:
                return self._queue.next_end()
            end = self._batch[0].copy.done if self._batch is not None else self._behind
        return None if end is None or end.query() else end

    @property
    def started(self) -> bool:
        """True if copying has begun."""
        batch = self._batch
        return batch is not None and batch[0].copy.started

    def cancel(self) -> bool:
        """Cancel a load that waits, or that is a batch by itself and has not begun; return True if it did."""
        with self._queue.lock:
            if self.is_waiting:
                self._queue.withdraw(self)
                return True
            batch = self._batch
        return batch is not None and len(batch[0].sizes) == 1 and batch[0].copy.cancel()

    def result(self) -> TransferResult:
        """Return the result, once the load has ended, and release its memory."""
        if self._result is None and self._refusal is not None:
            fault, reason = self._refusal
            faults = bytes([fault]) * len(self.swap)
            self._result = make_result(self.swap, (faults, b"", 0, 0.0, reason))
        elif self._result is None:
            assert self._batch is not None, "asked before the end"
            batch, index = self._batch
            self._result = batch.result(index)
            self._batch = None
        return self._result

    def known(self) -> Sequence[Event | None] | None:
        """Return the event of each layer, None while the load waits."""
        with self._queue.lock:
            self._queue.advance()
            return self._layer_events

    def required(self) -> Sequence[Event | None]:
        """Return the event of each layer; enqueue the load first if it waits."""
        with self._queue.lock:
            self._queue.require(self)
            assert self._layer_events is not None
            return self._layer_events


class LoadQueue:
    """The stream of the loads. At most ``ahead_bytes``, or one load, are enqueued behind the batch being copied.

    Call every method with ``lock`` held, under which plans are submitted.
    """

    def __init__(
        self,
        device: Device,
        layout: KVLayout,
        groups: LayerGroups,
        lock: threading.RLock,
        *,
        ahead_bytes: int,
    ) -> None:
        self.lock = lock
        self.stream: Stream = device.create_stream()
        self._device = device
        self._groups = groups
        self._block_bytes = layout.payload_bytes
        self._ahead_bytes = ahead_bytes
        self.window = _core.CopyWindow(ahead_bytes)
        self._fence = Fence(device)
        self._waiting: list[QueuedLoad] = []

    def prepare(self, swap: CacheSwapMetadata, planes: DevicePlanes, arena: ArenaRecords) -> QueuedLoad:
        """Check a load. Raises ``PlanError`` naming the pair that is wrong, ``DeviceLostError``."""
        self.advance()
        load = QueuedLoad(self, swap, planes, arena)
        if not self._waiting and self.window.has_room():
            load.copy = self._device.copy_blocks(planes, arena, swap)
            return load
        if (reason := self._device.lost) is not None:
            raise DeviceLostError(f"the device has failed ({reason}); start this process anew")
        check_swap(swap, device_blocks=planes.num_blocks, host_blocks=arena.num_blocks)
        return load

    @property
    def is_empty(self) -> bool:
        """True if no load waits."""
        return not self._waiting

    def submit(self, load: QueuedLoad, after: Sequence[Event], emptied: Sequence[Event | None]) -> None:
        """Enqueue a prepared load after these events, or let it wait. Later failures are in its result."""
        load.after, load.emptied = list(after), emptied
        if load.copy is not None:
            self._launch([load])
            return
        slots = load.swap.dst_block_ids
        try:
            disjoint = all(_core.are_disjoint_slots(slots, each.swap.dst_block_ids) for each in self._waiting)
        except Exception as error:  # noqa: BLE001 - as in _launch
            load.refused(Fault.DEVICE, reason_of(error))
            return
        if not disjoint:
            self.flush()  # loads write a shared slot in the order of submission
        self._waiting.append(load)

    def advance(self) -> None:
        """Enqueue waiting loads as far as there is room."""
        while self._waiting and self.window.has_room():
            self._launch(self._next_batch())

    def require(self, load: QueuedLoad) -> None:
        """Enqueue a load now."""
        if load.is_waiting:
            self._waiting.remove(load)
            self._launch([load])

    def withdraw(self, load: QueuedLoad) -> None:
        """Cancel a load that waits."""
        self._waiting.remove(load)
        load.refused(Fault.CANCELLED)

    def flush(self) -> None:
        """Enqueue all loads, however many bytes are ahead."""
        while self._waiting:
            self._launch(self._next_batch())

    def next_end(self) -> Event:
        """Return the end of the oldest batch in flight, after which there may be room."""
        event: Event = self.window.next_end()
        return event

    def retire(self) -> None:
        """Release the memory of finished copies."""
        self.window.drop_ended()
        self.stream.retire()

    def _next_batch(self) -> list[QueuedLoad]:
        """Remove and return the first loads that share planes and arena, up to ``ahead_bytes``."""
        taken = [self._waiting.pop(0)]
        nbytes = len(taken[0].swap) * self._block_bytes
        while self._waiting and self._waiting[0].memory == taken[0].memory:
            nbytes += len(self._waiting[0].swap) * self._block_bytes
            if nbytes > self._ahead_bytes:
                break
            taken.append(self._waiting.pop(0))
        return taken

    def _launch(self, loads: Sequence[QueuedLoad]) -> None:
        """Enqueue loads as one batch. An exception fails these loads and no others."""
        memory = loads[0].memory
        assert memory is not None
        behind: Event | None = None
        try:
            swap = loads[0].swap if len(loads) == 1 else _joined([load.swap for load in loads])
            copy = loads[0].copy or self._device.copy_blocks(*memory, swap)
            for load in loads:
                for event in load.after:
                    self.stream.wait_event(event)
            behind = self._fence.prepare()
            layer_events = self._groups.enqueue(copy, self.stream, len(swap))
        except Exception as error:  # noqa: BLE001 - it goes into the report
            reason = reason_of(error)
            if behind is not None:
                self._fence.record(self.stream)
            for load in loads:
                load.refused(Fault.DEVICE, reason, behind)
            return
        batch = _Batch(copy, [len(load.swap) for load in loads], self._block_bytes)
        self.window.add(batch.nbytes, copy.done)
        for index, load in enumerate(loads):
            load.launched(batch, index, layer_events)


def _joined(parts: Sequence[CacheSwapMetadata]) -> CacheSwapMetadata:
    first = parts[0]
    marks = None
    if any(part.unverified is not None for part in parts):
        marks = [
            np.zeros(len(part), np.uint8) if part.unverified is None else part.unverified for part in parts
        ]
    return CacheSwapMetadata(
        purpose=first.purpose,
        src_type=first.src_type,
        dst_type=first.dst_type,
        src_block_ids=np.concatenate([part.src_block_ids for part in parts]),
        dst_block_ids=np.concatenate([part.dst_block_ids for part in parts]),
        src_generations=np.concatenate([part.src_generations for part in parts]),
        dst_generations=np.concatenate([part.dst_generations for part in parts]),
        hash_values=np.concatenate([part.hash_values for part in parts]),
        parent_hashes=np.concatenate([part.parent_hashes for part in parts]),
        unverified=None if marks is None else np.concatenate(marks),
    )
