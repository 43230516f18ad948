"""Loads of several plans on one stream: merged while they wait, each confirmed by itself.

A load is put on the stream at once as long as the stream has little to do. What is beyond that waits here, in order,
and goes together with its neighbours as one batch once there is room: fewer copies to submit, and longer runs of
records. A load whose layers somebody waits for does not wait: it goes at once, and alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from fdcache import _core
from fdcache.controller.layers import LayerGroups
from fdcache.devices.base import (
    BlockCopy,
    Device,
    DevicePlanes,
    Event,
    HostArena,
    Stream,
)
from fdcache.devices.execution import fence, reason_of
from fdcache.devices.faults import Fault, make_result
from fdcache.devices.validation import check_swap
from fdcache.errors import DeviceLostError
from fdcache.layout import KVLayout
from fdcache.metadata import CacheSwapMetadata, TransferResult


class _Batch:
    """One submission of one or more loads."""

    def __init__(self, copy: BlockCopy, sizes: Sequence[int], block_bytes: int) -> None:
        self.copy = copy
        self.sizes = tuple(sizes)
        self.nbytes = sum(sizes) * block_bytes
        self._lock = threading.Lock()

    def result(self, index: int) -> TransferResult:
        """Return the result of one of its loads."""
        start = sum(self.sizes[:index])
        with self._lock:
            return self.copy.result(start, start + self.sizes[index])


class QueuedLoad:
    """The load of one plan, waiting or under way. To the plan's execution it is a copy.

    ``emptied`` has the events of the layers for as long as nothing is copied: those of the plan's evictions.
    """

    def __init__(
        self, queue: LoadQueue, swap: CacheSwapMetadata, planes: DevicePlanes, arena: HostArena
    ) -> None:
        self._queue = queue
        self.swap = swap
        self.memory: tuple[DevicePlanes, HostArena] | None = (planes, arena)
        self.after: list[Event] = []
        self.emptied: Sequence[Event | None] = ()
        self.copy: BlockCopy | None = None
        self._batch: tuple[_Batch, int] | None = None
        self._layer_events: Sequence[Event | None] | None = None
        self._refusal: tuple[Fault, str] | None = None
        self._behind: Event | None = None
        self._result: TransferResult | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it is still to be put on the stream."""
        return self._layer_events is None

    def launched(self, batch: _Batch, index: int, layer_events: Sequence[Event | None]) -> None:
        """It is on the stream, as number ``index`` of a batch."""
        self._batch = batch, index
        self._layer_events = layer_events
        self._let_go()

    def refused(self, fault: Fault, reason: str = "", behind: Event | None = None) -> None:
        """It is not copied; all its blocks fail, once whatever of it is on the stream has ended: ``behind``."""
        self._refusal, self._behind = (fault, reason), behind
        self._layer_events = self.emptied if behind is None else [behind] * len(self.emptied)
        self._let_go()

    def _let_go(self) -> None:
        self.memory, self.copy, self.after = None, None, []

    def pending_event(self) -> Event | None:
        """An event that must be reached before it has ended; None when it has."""
        with self._queue.lock:
            self._queue.advance()
            if self.is_waiting:
                return self._queue.next_end()
            end = self._batch[0].copy.done if self._batch is not None else self._behind
        return None if end is None or end.query() else end

    @property
    def started(self) -> bool:
        """Whether a copy has begun."""
        batch = self._batch
        return batch is not None and batch[0].copy.started

    def cancel(self) -> bool:
        """Take it back if it waits, or is a batch by itself that has not begun."""
        with self._queue.lock:
            if self.is_waiting:
                self._queue.withdraw(self)
                return True
            batch = self._batch
        return batch is not None and len(batch[0].sizes) == 1 and batch[0].copy.cancel()

    def result(self) -> TransferResult:
        """Return the result, once the load has ended; the memory is let go."""
        if self._result is None and self._refusal is not None:
            fault, reason = self._refusal
            faults = bytes([fault]) * len(self.swap)
            self._result = make_result(
                self.swap, slice(None), faults, b"", copied_bytes=0, seconds=0.0, detail=reason
            )
        elif self._result is None:
            assert self._batch is not None, "asked before the end"
            batch, index = self._batch
            self._result = batch.result(index)
            self._batch = None
        return self._result

    def known(self) -> Sequence[Event | None] | None:
        """The event of each layer; None while it waits."""
        with self._queue.lock:
            self._queue.advance()
            return self._layer_events

    def required(self) -> Sequence[Event | None]:
        """The event of each layer. A load that waits is put on the stream before all others."""
        with self._queue.lock:
            self._queue.require(self)
            assert self._layer_events is not None
            return self._layer_events


class LoadQueue:
    """The stream of the loads. Behind the batch being copied at most ``ahead_bytes`` are put on it, or one load.

    All methods are called with ``lock`` held, the one under which plans are submitted.
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
        self._waiting: list[QueuedLoad] = []
        self._under_way: list[_Batch] = []

    def prepare(self, swap: CacheSwapMetadata, planes: DevicePlanes, arena: HostArena) -> QueuedLoad:
        """Check a load. Raises ``PlanError`` naming the pair, ``DeviceLostError``."""
        self.advance()
        load = QueuedLoad(self, swap, planes, arena)
        if not self._waiting and self._has_room():
            load.copy = self._device.copy_blocks(planes, arena, swap)
            return load
        if (reason := self._device.lost) is not None:
            raise DeviceLostError(f"the device has failed ({reason}); start this process anew")
        check_swap(swap, device_blocks=planes.num_blocks, host_blocks=arena.num_blocks)
        return load

    def submit(self, load: QueuedLoad, after: Sequence[Event], emptied: Sequence[Event | None]) -> None:
        """Take a prepared load, to be copied after these events. What fails from now on stands in its outcome."""
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
            self.flush()  # the last to be submitted is the last to write a slot
        self._waiting.append(load)

    def advance(self) -> None:
        """Put on the stream what there is room for."""
        while self._waiting and self._has_room():
            self._launch(self._next_batch())

    def require(self, load: QueuedLoad) -> None:
        """Put a load on the stream now."""
        if load.is_waiting:
            self._waiting.remove(load)
            self._launch([load])

    def withdraw(self, load: QueuedLoad) -> None:
        """Forget a load that waits."""
        self._waiting.remove(load)
        load.refused(Fault.CANCELLED)

    def flush(self) -> None:
        """Put everything on the stream, however much it has to do."""
        while self._waiting:
            self._launch(self._next_batch())

    def next_end(self) -> Event:
        """The end of the oldest batch on the stream, after which there may be room for what waits."""
        return self._under_way[0].copy.done

    def retire(self) -> None:
        """Let go of the memory that finished copies kept alive."""
        self._under_way = [batch for batch in self._under_way if not batch.copy.done.query()]
        self.stream.retire()

    def _has_room(self) -> bool:
        self._under_way = [batch for batch in self._under_way if not batch.copy.done.query()]
        return sum(batch.nbytes for batch in self._under_way[1:]) < self._ahead_bytes

    def _next_batch(self) -> list[QueuedLoad]:
        """The loads at the front that go together, up to as many bytes as may be ahead."""
        taken = [self._waiting.pop(0)]
        nbytes = len(taken[0].swap) * self._block_bytes
        while self._waiting and self._waiting[0].memory == taken[0].memory:
            nbytes += len(self._waiting[0].swap) * self._block_bytes
            if nbytes > self._ahead_bytes:
                break
            taken.append(self._waiting.pop(0))
        return taken

    def _launch(self, loads: Sequence[QueuedLoad]) -> None:
        """Put loads on the stream as one batch. Whatever is raised there fails them, and them alone."""
        memory = loads[0].memory
        assert memory is not None
        behind: Event | None = None
        try:
            swap = loads[0].swap if len(loads) == 1 else _joined([load.swap for load in loads])
            copy = loads[0].copy or self._device.copy_blocks(*memory, swap)
            for load in loads:
                for event in load.after:
                    self.stream.wait_event(event)
            behind = self._device.create_event()
            layer_events = self._groups.enqueue(copy, self.stream, len(swap))
        except Exception as error:  # noqa: BLE001 - the report carries it, and the queue goes on
            reason = reason_of(error)
            if behind is not None:
                fence(self.stream, behind)
            for load in loads:
                load.refused(Fault.DEVICE, reason, behind)
            return
        batch = _Batch(copy, [len(load.swap) for load in loads], self._block_bytes)
        self._under_way.append(batch)
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
