"""Transfers of plans on streams: each alone, or loads of several plans in batches.

A copy out of the device is enqueued at once. So is a load, as long as few bytes are ahead of it. Otherwise it waits
here, in order, and is enqueued with its neighbours as one batch: fewer copies to submit, and longer runs of records.
A wait for one of its layers enqueues a load at once and alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from fdcache import _core
from fdcache.controller.layers import LayerGroups
from fdcache.devices.base import ArenaRecords, Device, DevicePlanes, PlannedCopy, check_swap
from fdcache.errors import DeviceLostError, FdcacheError
from fdcache.layout import KVLayout
from fdcache.metadata import CacheSwapMetadata, TransferResult
from fdcache.tasks import Event, Fault, make_result

logger = logging.getLogger(__name__)

Memory = tuple[DevicePlanes, ArenaRecords]


def reason_of(error: Exception) -> str:
    """Return an error's message for a report; log the traceback if it is not an ``FdcacheError``."""
    if isinstance(error, FdcacheError):
        return str(error)
    logger.error("a copy could not be submitted", exc_info=error)
    return f"{type(error).__name__}: {error}"


class _Batch:
    """One or more transfers that are copied together."""

    def __init__(self, copy: PlannedCopy, sizes: Sequence[int]) -> None:
        self.copy = copy
        self.sizes = tuple(sizes)
        self._lock = threading.Lock()

    def result(self, index: int) -> TransferResult:
        """Return the result of one of the transfers."""
        start = sum(self.sizes[:index])
        with self._lock:
            return self.copy.result(start, start + self.sizes[index])


class Transfer:
    """One transfer of a plan, and a part of its execution: it waits, is enqueued, or was refused.

    ``queue``: where a load may wait. ``emptied``: the evictions of its plan, as events of the layers, which a refused
    load waits for instead of copies.
    """

    def __init__(
        self,
        swap: CacheSwapMetadata,
        memory: Memory | None = None,
        copy: PlannedCopy | None = None,
        queue: LoadQueue | None = None,
    ) -> None:
        self.swap = swap
        self.memory = memory
        self.copy = copy
        self.after: Sequence[Event] = ()
        self.emptied: Sequence[Event | None] = ()
        self._queue = queue
        self._batch: tuple[_Batch, int] | None = None
        self._layer_events: Sequence[Event | None] | None = None
        self._behind: Event | None = None
        self._result: TransferResult | None = None

    @classmethod
    def failed(cls, swap: CacheSwapMetadata, reason: str | None) -> Transfer:
        """Return a transfer of which nothing is copied."""
        transfer = cls(swap)
        transfer.refused(TransferResult.failure(swap, reason))
        return transfer

    @classmethod
    def left(cls, swap: CacheSwapMetadata) -> Transfer:
        """Return a transfer that another rank makes for this one."""
        transfer = cls(swap)
        nothing = TransferResult.failure(swap, None)
        transfer.refused(replace(nothing, failed=nothing.lost))
        return transfer

    @property
    def is_waiting(self) -> bool:
        """True until the transfer is enqueued, refused or cancelled."""
        return self._layer_events is None

    def launched(self, batch: _Batch, index: int, layer_events: Sequence[Event | None]) -> None:
        """Record that the transfer was enqueued as number ``index`` of a batch."""
        self._batch = batch, index
        self._layer_events = layer_events
        self._release_memory()

    def refused(self, result: TransferResult, behind: Event | None = None) -> None:
        """Fail all blocks, after ``behind`` if part of the transfer was enqueued."""
        self._result, self._behind = result, behind
        self._layer_events = self.emptied if behind is None else [behind] * len(self.emptied)
        self._release_memory()

    def _release_memory(self) -> None:
        self.memory, self.copy, self.after = None, None, ()

    @property
    def done(self) -> Event | None:
        """The event of its end, or while it waits one before that; None if nothing is copied."""
        if self._queue is None:
            return self._end
        with self._queue.lock:
            self._queue.advance()
            return self._queue.next_end() if self.is_waiting else self._end

    @property
    def _end(self) -> Event | None:
        batch = self._batch
        return self._behind if batch is None else batch[0].copy.done

    @property
    def started(self) -> bool:
        """True if copying has begun."""
        batch = self._batch
        return batch is not None and batch[0].copy.started

    @property
    def is_certain(self) -> bool:
        """True once the transfer can only fail with the device."""
        batch = self._batch
        return batch is not None and batch[0].copy.is_certain

    def cancel(self) -> bool:
        """Cancel a transfer that waits, or that is a batch by itself and has not begun; return True if it did."""
        if self._queue is not None:
            with self._queue.lock:
                if self.is_waiting:
                    self._queue.withdraw(self)
                    return True
        batch = self._batch
        return batch is not None and len(batch[0].sizes) == 1 and batch[0].copy.cancel()

    def result(self) -> TransferResult:
        """Return the result, once the transfer has ended, and release its memory."""
        if self._result is None:
            assert self._batch is not None, "asked before the end"
            batch, index = self._batch
            self._result = batch.result(index)
            self._batch = None
        return self._result

    def known(self) -> Sequence[Event | None] | None:
        """Return the event of each layer, None while the load waits."""
        assert self._queue is not None
        with self._queue.lock:
            self._queue.advance()
            return self._layer_events

    def required(self) -> Sequence[Event | None]:
        """Return the event of each layer; enqueue the load first if it waits."""
        assert self._queue is not None
        with self._queue.lock:
            self._queue.require(self)
            assert self._layer_events is not None
            return self._layer_events


class Lane:
    """A stream of copies in one direction."""

    def __init__(self, device: Device, groups: LayerGroups, *, background: bool = False) -> None:
        self.stream = device.create_stream(background=background)
        self._device = device
        self._groups = groups
        self._fence: Event | None = None

    def launch(self, transfers: Sequence[Transfer], *, by_layer: bool) -> _Batch | None:
        """Enqueue transfers as one batch, with an event for each layer if ``by_layer``.

        An exception fails these transfers and no others; return None then.
        """
        memory, behind = transfers[0].memory, None
        assert memory is not None
        try:
            swap = transfers[0].swap if len(transfers) == 1 else _joined([each.swap for each in transfers])
            copy = transfers[0].copy or self._device.copy_blocks(*memory, swap)
            for transfer in transfers:
                for event in transfer.after:
                    self.stream.wait_event(event)
            behind = self._fence_event()
            layer_events = self._enqueue(copy, len(swap), by_layer)
        except Exception as error:  # noqa: BLE001 - it goes into the report
            reason = reason_of(error)
            if behind is not None:
                self._record_fence()
            for transfer in transfers:
                transfer.refused(_failure(transfer.swap, Fault.DEVICE, reason), behind)
            return None
        batch = _Batch(copy, [len(transfer.swap) for transfer in transfers])
        for index, transfer in enumerate(transfers):
            transfer.launched(batch, index, layer_events)
        return batch

    def _enqueue(self, copy: PlannedCopy, num_blocks: int, by_layer: bool) -> Sequence[Event | None]:
        if by_layer:
            return self._groups.enqueue(copy, self.stream, num_blocks)
        self._groups.enqueue_whole(copy, self.stream)
        return ()

    def _fence_event(self) -> Event:
        """Return an event for the accepted part of a copy that is refused midway.

        It is created before a copy is enqueued, since afterwards the device may refuse it, and kept until one is
        needed.
        """
        if self._fence is None:
            self._fence = self._device.create_event()
        return self._fence

    def _record_fence(self) -> None:
        """Record the event on the stream that has refused a copy.

        If the stream refuses the event as well it is never reached, and the copy holds its slots for good.
        """
        event, self._fence = self._fence_event(), None
        try:
            event.record(self.stream)
        except Exception as error:  # noqa: BLE001 - the report has the first error
            logger.error("a stream accepts no event: %s", reason_of(error))


class LoadQueue:
    """The lane of the loads. At most ``ahead_bytes``, or one load, are enqueued behind the batch being copied.

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
        self.window = _core.CopyWindow(ahead_bytes)
        self._lane = Lane(device, groups)
        self.stream = self._lane.stream
        self._device = device
        self._block_bytes = layout.payload_bytes
        self._ahead_bytes = ahead_bytes
        self._waiting: list[Transfer] = []

    def prepare(self, swap: CacheSwapMetadata, planes: DevicePlanes, arena: ArenaRecords) -> Transfer:
        """Check a load. Raises ``PlanError`` naming the pair that is wrong, ``DeviceLostError``."""
        self.advance()
        load = Transfer(swap, (planes, arena), queue=self)
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

    def submit(self, load: Transfer, after: Sequence[Event], emptied: Sequence[Event | None]) -> None:
        """Enqueue a prepared load after these events, or let it wait. Later failures are in its result."""
        load.after, load.emptied = after, emptied
        if load.copy is not None:
            self._launch([load])
            return
        slots = load.swap.dst_block_ids
        try:
            disjoint = all(_core.are_disjoint_slots(slots, each.swap.dst_block_ids) for each in self._waiting)
        except Exception as error:  # noqa: BLE001 - as in Lane.launch
            load.refused(_failure(load.swap, Fault.DEVICE, reason_of(error)))
            return
        if not disjoint:
            self.flush()  # loads write a shared slot in the order of submission
        self._waiting.append(load)

    def advance(self) -> None:
        """Enqueue waiting loads as far as there is room."""
        while self._waiting and self.window.has_room():
            self._launch(self._next_batch())

    def require(self, load: Transfer) -> None:
        """Enqueue a load now."""
        if load.is_waiting:
            self._waiting.remove(load)
            self._launch([load])

    def withdraw(self, load: Transfer) -> None:
        """Cancel a load that waits."""
        self._waiting.remove(load)
        load.refused(_failure(load.swap, Fault.CANCELLED))

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

    def _next_batch(self) -> list[Transfer]:
        """Remove and return the first loads that share planes and arena, up to ``ahead_bytes``."""
        taken = [self._waiting.pop(0)]
        nbytes = len(taken[0].swap) * self._block_bytes
        while self._waiting and self._waiting[0].memory == taken[0].memory:
            nbytes += len(self._waiting[0].swap) * self._block_bytes
            if nbytes > self._ahead_bytes:
                break
            taken.append(self._waiting.pop(0))
        return taken

    def _launch(self, loads: Sequence[Transfer]) -> None:
        if (batch := self._lane.launch(loads, by_layer=True)) is not None:
            self.window.add(sum(batch.sizes) * self._block_bytes, batch.copy.done)


def _failure(swap: CacheSwapMetadata, fault: Fault, reason: str = "") -> TransferResult:
    return make_result(swap, (bytes([fault]) * len(swap), b"", 0, 0.0, reason))


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
