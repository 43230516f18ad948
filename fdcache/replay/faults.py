"""Loads that fail: a CPU device some of whose copies into the device stop at a random layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from fdcache.devices.base import (
    BlockCopy,
    DevicePlanes,
    Event,
    HostArena,
    Stream,
    enqueue_each,
)
from fdcache.devices.cpu import CpuDevice, CpuEvent
from fdcache.layout import KVLayout
from fdcache.metadata import CacheSwapMetadata, Int32Array, SwapPurpose, TransferResult
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

    def copy_blocks(self, planes: DevicePlanes, arena: HostArena, swap: CacheSwapMetadata) -> BlockCopy:
        """A batch of copies that may be bound to fail."""
        if swap.to_host or self._random.random() >= self._rate:
            return super().copy_blocks(planes, arena, swap)
        fails = self._random.random(len(swap)) < 0.5
        fails[self._random.integers(len(swap))] = True
        layer = int(self._random.integers(self._layers[-1] + 1))
        failing, sound = np.flatnonzero(fails), np.flatnonzero(~fails)
        return _StoppingCopy(
            whole=super().copy_blocks(planes, arena, _select(swap, sound)) if len(sound) else None,
            stopped=super().copy_blocks(planes, arena, _select(swap, failing)),
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

    def result(self, start: int = 0, stop: int | None = None) -> TransferResult:
        """Return the failed positions, with the layer at which they stopped, and what the sound ones came to."""
        count = len(self._failed) + len(self._sound)
        stop = count if stop is None else stop
        whole = None if self._whole is None else self._whole.result()
        failed = self._failed if whole is None else np.union1d(self._failed, self._sound[whole.failed])
        failed = failed[(failed >= start) & (failed < stop)].astype(np.int32) - np.int32(start)
        num_copied = stop - start - len(failed)
        share = num_copied / max(len(self._sound) - (0 if whole is None else len(whole.failed)), 1)
        return TransferResult(
            purpose=SwapPurpose.LOAD,
            failed=failed,
            checksums=np.empty(0, dtype=np.uint64),
            copied_bytes=0 if whole is None else round(whole.copied_bytes * share),
            seconds=0.0 if whole is None else whole.seconds * share,
            error_message=f"injected: {len(self._failed)} blocks stopped before layer {self._layer}"
            if len(failed)
            else None,
        )


def _select(swap: CacheSwapMetadata, index: np.ndarray) -> CacheSwapMetadata:
    return msgspec.structs.replace(
        swap,
        src_block_ids=swap.src_block_ids[index],
        dst_block_ids=swap.dst_block_ids[index],
        src_generations=swap.src_generations[index],
        dst_generations=swap.dst_generations[index],
        hash_values=swap.hash_values[index],
        parent_hashes=swap.parent_hashes[index],
        unverified=None if swap.unverified is None else swap.unverified[index],
    )
