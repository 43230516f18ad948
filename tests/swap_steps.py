"""Run the planner's steps over host memory, in any order that a GPU's two queues allow."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdcache.layout import KVLayout

Step = tuple[Any, ...]


@dataclass
class _Queue:
    """Rest of a queue: actions, and numbers of marks of the other queue to wait for."""

    todo: deque[Callable[[], None] | int] = field(default_factory=deque)


class HostLane:
    """Two queues and a ring. Nothing runs before ``finish``, which then picks the next queue at random.

    A step sees its ring slot by number, as a stream sees an address; a missing wait therefore shows as wrong bytes
    in some order.
    """

    def __init__(
        self, layout: KVLayout, planes: list[NDArray[np.uint8]], *, slots: int, slot_bytes: int
    ) -> None:
        self._layout = layout
        self._planes = planes
        self._slot_bytes = slot_bytes
        self._ring = np.zeros(slots * slot_bytes, np.uint8)
        self._freed: list[int | None] = [None] * slots
        self._slot = slots - 1
        self._queues = {"main": _Queue(), "copy": _Queue()}
        self._marks: set[int] = set()
        self._next_mark = 0
        self.summed: list[tuple[int, int]] = []

    def enqueue(
        self, steps: Sequence[Step], device_slots: Sequence[int], records: Sequence[int], *, to_host: bool
    ) -> None:
        """Queue the steps of a batch; ``records`` are the addresses of its records."""
        for step in steps:
            self._enqueue(step, device_slots, records, to_host)

    def finish(self, random: Random) -> None:
        """Run until both queues are empty."""
        while any(queue.todo for queue in self._queues.values()):
            ready = [queue for queue in self._queues.values() if self._is_ready(queue)]
            assert ready, "the queues wait for each other"
            # A long turn lets one queue run far ahead of the other, as engines do.
            queue = random.choice(ready)
            for _ in range(random.choice((1, 3, 50))):
                if not self._is_ready(queue):
                    break
                action = queue.todo.popleft()
                if not isinstance(action, int):
                    action()

    def _is_ready(self, queue: _Queue) -> bool:
        if not queue.todo:
            return False
        return not isinstance(queue.todo[0], int) or queue.todo[0] in self._marks

    def _mark(self, queue: str) -> int:
        mark = self._next_mark = self._next_mark + 1
        self._queues[queue].todo.append(lambda: self._marks.add(mark))
        return mark

    def _enqueue(
        self, step: Step, device_slots: Sequence[int], records: Sequence[int], to_host: bool
    ) -> None:
        kind, *rest = step
        if kind == "take":
            self._slot = (self._slot + 1) % len(self._freed)
            if (mark := self._freed[self._slot]) is not None:
                self._queues[rest[0]].todo.append(mark)
        elif kind == "free":
            self._freed[self._slot] = self._mark(rest[0])
        elif kind == "hand over":
            self._queues[rest[1]].todo.append(self._mark(rest[0]))
        elif kind == "pieces":
            staged, pieces = rest
            for host, device, nbytes in pieces:
                self._copy(host, self._place(staged, device), nbytes, to_host)
        elif kind == "rows":
            staged, host, host_pitch, device, device_pitch, width, rows = rest
            for row in range(rows):
                place = self._place(staged, device + row * device_pitch)
                self._copy(host + row * host_pitch, place, width, to_host)
        else:
            self._kernel(kind, rest, device_slots, records, to_host)

    def _place(self, staged: bool, device: int) -> int:
        if not staged:
            return device
        return int(self._ring.ctypes.data) + self._slot * self._slot_bytes + device

    def _copy(self, host: int, device: int, nbytes: int, to_host: bool) -> None:
        target, source = (host, device) if to_host else (device, host)

        def copy() -> None:
            ctypes.memmove(target, source, nbytes)

        self._queues["copy"].todo.append(copy)

    def _kernel(
        self, kind: str, rest: list[Any], device_slots: Sequence[int], records: Sequence[int], to_host: bool
    ) -> None:
        staged, (first_plane, last_plane), (first, count), pitch = rest
        planes = self._layout.planes
        start = planes[first_plane].offset
        for row in range(first, first + count):
            base = self._place(True, (row - first) * pitch) - start if staged else records[row]
            for index in range(first_plane, last_plane):
                plane = planes[index]
                layer = int(self._planes[index].ctypes.data) + device_slots[row] * plane.device_stride
                if to_host:
                    self.summed.append((row, index))
                if kind == "sum":
                    continue
                self._queues["main"].todo.append(
                    self._move(base + plane.offset, layer, plane.nbytes, self._gap(index), staged, to_host)
                )

    def _gap(self, index: int) -> int:
        planes = self._layout.planes
        end = planes[index + 1].offset if index + 1 < len(planes) else self._layout.record_bytes
        return end - planes[index].offset - planes[index].nbytes

    @staticmethod
    def _move(
        record: int, layer: int, nbytes: int, gap: int, staged: bool, to_host: bool
    ) -> Callable[[], None]:
        def move() -> None:
            target, source = (record, layer) if to_host else (layer, record)
            ctypes.memmove(target, source, nbytes)
            if to_host and staged:  # a row of the ring goes to the record with the gaps between planes
                ctypes.memset(record + nbytes, 0, gap)

        return move
