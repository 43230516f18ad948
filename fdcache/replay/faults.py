"""Loads that fail: a CPU device some of whose copies into the device stop at a random layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fdcache.devices.base import (
    BlockCopy,
    BlockPairs,
    CopyOutcome,
    DevicePlanes,
    Direction,
    Event,
    HostArena,
    Stream,
    enqueue_each,
)
from fdcache.devices.cpu import CpuDevice, CpuEvent
from fdcache.layout import KVLayout
from fdcache.metadata import Int32Array
from fdcache.settings.cache import TransferSettings, Verify


@dataclass(frozen=True, slots=True)
class LoadFaults:
    """``rate``: the share of load transfers that fail, from 0 to 1; which ones follows from ``seed``."""

    rate: float = 0.0
    seed: int = 0


class FaultyDevice(CpuDevice):
    """A CPU device that leaves some blocks of some loads half copied, and says so as a device would."""

    def __init__(self, faults: LoadFaults, layout: KVLayout, rank: int, transfer: TransferSettings) -> None:
        super().__init__(copy_threads=transfer.copy_threads, verify=transfer.verify is Verify.ALL)
        self._rate = faults.rate
        self._random = np.random.default_rng((faults.seed, rank))
        self._layers = [plane.layer for plane in layout.planes]

    def copy_blocks(
        self, planes: DevicePlanes, arena: HostArena, pairs: BlockPairs, direction: Direction
    ) -> BlockCopy:
        """A batch of copies that may be bound to fail."""
        if direction is Direction.TO_HOST or self._random.random() >= self._rate:
            return super().copy_blocks(planes, arena, pairs, direction)
        fails = self._random.random(len(pairs)) < 0.5
        fails[self._random.integers(len(pairs))] = True
        layer = int(self._random.integers(self._layers[-1] + 1))
        failing, sound = np.flatnonzero(fails), np.flatnonzero(~fails)
        return _StoppingCopy(
            whole=super().copy_blocks(planes, arena, _select(pairs, sound), direction)
            if len(sound)
            else None,
            stopped=super().copy_blocks(planes, arena, _select(pairs, failing), direction),
            failed=failing.astype(np.int32),
            sound=sound.astype(np.int32),
            layer=layer,
            first_plane=self._layers.index(layer),
            num_planes=len(self._layers),
        )


class _StoppingCopy:
    """A batch of which some positions are copied up to ``first_plane`` and no further."""

    def __init__(
        self,
        whole: BlockCopy | None,
        stopped: BlockCopy,
        failed: Int32Array,
        *,
        sound: Int32Array,
        layer: int,
        first_plane: int,
        num_planes: int,
    ) -> None:
        self._whole = whole
        self._stopped = stopped
        self._failed = failed
        self._sound = sound
        self._layer = layer
        self._first_plane = first_plane
        self._num_planes = num_planes
        self.done = CpuEvent()

    @property
    def started(self) -> bool:
        """Whether a copy has begun."""
        return self._stopped.started or (self._whole is not None and self._whole.started)

    def enqueue(self, stream: Stream, first_plane: int, last_plane: int) -> None:
        """Copy a range of planes on the stream, as far as it goes."""
        if self._whole is not None:
            self._whole.enqueue(stream, first_plane, last_plane)
        if first_plane < self._first_plane:
            self._stopped.enqueue(stream, first_plane, min(last_plane, self._first_plane))
        if last_plane == self._num_planes:
            self.done.record(stream)

    def enqueue_groups(self, stream: Stream, ranges: Sequence[tuple[int, int]]) -> list[Event]:
        """Enqueue ranges of planes one after the other; an event recorded after each."""
        return enqueue_each(self, stream, ranges, CpuEvent)

    def cancel(self) -> bool:
        """Never: a copy that is bound to fail runs to its failure."""
        return False

    def outcome(self) -> CopyOutcome:
        """What came of it: the failed positions with the layer at which they stopped."""
        whole = None if self._whole is None else self._whole.outcome()
        failed = self._failed if whole is None else np.union1d(self._failed, self._sound[whole.failed])
        return CopyOutcome(
            failed=failed.astype(np.int32),
            checksums=np.empty(0, dtype=np.uint64),
            copied_bytes=0 if whole is None else whole.copied_bytes,
            seconds=0.0 if whole is None else whole.seconds,
            error_message=f"injected: {len(self._failed)} blocks stopped before layer {self._layer}",
        )


def _select(pairs: BlockPairs, index: np.ndarray) -> BlockPairs:
    return BlockPairs(
        device_slots=pairs.device_slots[index],
        host_slots=pairs.host_slots[index],
        generations=pairs.generations[index],
        hashes=pairs.hashes[index],
        parents=pairs.parents[index],
        verify=None if pairs.verify is None else pairs.verify[index],
    )
