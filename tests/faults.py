"""CPU devices for tests: loads that fail, and copies that pause before a layer group.

A load fails for real: it is copied under a generation that its slot does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from fdcache.devices.base import (
    ArenaRecords,
    DevicePlanes,
    PlannedCopy,
    Stream,
    enqueue_each,
)
from fdcache.devices.cpu import CpuDevice
from fdcache.metadata import CacheSwapMetadata, SwapPurpose, TransferResult
from fdcache.tasks import CpuEvent, Event

Choose = Callable[[CacheSwapMetadata], Sequence[int]]


class FailingLoadsDevice(CpuDevice):
    """The positions that ``choose`` picks of a load fail from the group on that holds ``plane``."""

    def __init__(self, choose: Choose, *, plane: int = 0, copy_threads: int = 1) -> None:
        super().__init__(copy_threads=copy_threads)
        self._choose = choose
        self._plane = plane

    def copy_blocks(self, planes: DevicePlanes, arena: ArenaRecords, swap: CacheSwapMetadata) -> PlannedCopy:
        sound = super().copy_blocks(planes, arena, swap)
        chosen = list(self._choose(swap)) if not swap.to_host else []
        if not chosen:
            return sound
        generations = swap.src_generations.copy()
        generations[chosen] += np.uint32(1)
        failing = super().copy_blocks(planes, arena, replace(swap, src_generations=generations))
        return _FailsFrom(self._plane, sound, failing, planes.num_planes)


class _FailsFrom:
    """Groups before ``plane`` go to one copy, the others to another, which fails."""

    is_certain = False

    def __init__(self, plane: int, sound: PlannedCopy, failing: PlannedCopy, num_planes: int) -> None:
        self._plane = plane
        self._sound = sound
        self._failing = failing
        self._num_planes = num_planes

    @property
    def done(self) -> Event:
        return self._failing.done

    @property
    def started(self) -> bool:
        return self._sound.started or self._failing.started

    def enqueue(self, stream: Stream, first_plane: int, last_plane: int) -> None:
        copy = self._sound if last_plane <= self._plane else self._failing
        copy.enqueue(stream, first_plane, last_plane)

    def enqueue_groups(self, stream: Stream, ranges: Sequence[tuple[int, int]]) -> list[Event]:
        return enqueue_each(self, stream, ranges, CpuEvent)

    def cancel(self) -> bool:
        return not self.started and self._sound.cancel() and self._failing.cancel()

    def result(self, start: int = 0, stop: int | None = None) -> TransferResult:
        return self._failing.result(start, stop)


class PausingDevice(CpuDevice):
    """Holds each copy with a purpose in ``purposes`` before its group ``pause_at`` until ``resume`` is set.

    ``ranges`` has all groups.
    """

    def __init__(self, pause_at: int, purposes: Sequence[SwapPurpose] = tuple(SwapPurpose)) -> None:
        super().__init__()
        self.resume = CpuEvent()
        self.ranges: list[tuple[int, int]] = []
        self.pause_at = pause_at
        self._purposes = purposes

    def copy_blocks(self, planes: DevicePlanes, arena: ArenaRecords, swap: CacheSwapMetadata) -> PlannedCopy:
        pause_at = self.pause_at if swap.purpose in self._purposes else -1
        return _Paused(super().copy_blocks(planes, arena, swap), self, pause_at)


class _Paused:
    is_certain = False

    def __init__(self, copy: PlannedCopy, device: PausingDevice, pause_at: int) -> None:
        self._copy = copy
        self._device = device
        self._pause_at = pause_at
        self._groups = 0

    @property
    def done(self) -> Event:
        return self._copy.done

    @property
    def started(self) -> bool:
        return self._copy.started

    def enqueue(self, stream: Stream, first_plane: int, last_plane: int) -> None:
        if self._groups == self._pause_at:
            stream.wait_event(self._device.resume)
        self._groups += 1
        self._device.ranges.append((first_plane, last_plane))
        self._copy.enqueue(stream, first_plane, last_plane)

    def enqueue_groups(self, stream: Stream, ranges: Sequence[tuple[int, int]]) -> list[Event]:
        return enqueue_each(self, stream, ranges, CpuEvent)

    def cancel(self) -> bool:
        return self._copy.cancel()

    def result(self, start: int = 0, stop: int | None = None) -> TransferResult:
        return self._copy.result(start, stop)
