"""Interface of a device: memory, streams, events, block copies.

    copy = device.copy_blocks(planes, arena, swap)
    copy.enqueue(stream, 0, planes.num_planes)
    copy.done.wait()
    result = copy.result()

A stream runs its operations in order; an event orders streams with each other and with the host. Copies move whole
blocks between the device's planes and host records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import DTypeLike

from fdcache import _core
from fdcache._core import CopyWindow, PlaneTable, PlanLauncher, RecordTable
from fdcache.errors import PlanError
from fdcache.layout_planes import Plane
from fdcache.metadata import CacheSwapMetadata, Int32Array, TransferResult
from fdcache.tasks import Event


@dataclass(frozen=True, slots=True)
class TensorView:
    """Address and shape of a tensor; ``strides`` in bytes. ``owner`` keeps its memory alive."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    owner: object


@dataclass(frozen=True, slots=True)
class PlaneBinding:
    """Location of one plane on the device: block ``b`` starts at ``address + b * stride``."""

    plane: Plane
    address: int
    stride: int
    num_blocks: int
    owner: object


class PinnedMemory(Protocol):
    """Host memory that the device can copy from and to, for as long as this object lives."""

    @property
    def device_address(self) -> int:
        """Address by which the device's kernels reach the memory."""


class ArenaRecords(Protocol):
    """Host records with their slot headers."""

    @property
    def pinned(self) -> Sequence[PinnedMemory]:
        """The extents, in order, pinned for the device."""

    @property
    def epoch(self) -> int:
        """Number that changes whenever extents are added or removed."""

    @property
    def num_blocks(self) -> int:
        """Slots in the arena."""

    @property
    def fingerprint(self) -> bytes:
        """The layout's fingerprint; every slot header holds its first 16 bytes."""

    @property
    def table(self) -> RecordTable:
        """Table of the records and their headers."""


class DevicePlanes(Protocol):
    """Planes of a layout on a device, made by ``Device.bind_planes``."""

    @property
    def table(self) -> PlaneTable:
        """Addresses and strides of the planes."""

    @property
    def num_blocks(self) -> int:
        """Device slots that have a block in every plane."""

    @property
    def num_planes(self) -> int:
        """Planes of a block."""


class Stream(Protocol):
    """Queue of operations that run in order."""

    def wait_event(self, event: Event) -> None:
        """Hold later operations until the event is reached."""

    def retire(self) -> None:
        """Release the memory that finished copies kept alive."""

    def close(self) -> None:
        """End the stream; queued copies are abandoned and their events are reached."""


class PendingCopy(Protocol):
    """Blocks in flight."""

    @property
    def done(self) -> Event:
        """Event after which the copy accesses no memory."""

    @property
    def started(self) -> bool:
        """True once a block is being copied."""

    def cancel(self) -> bool:
        """Cancel the batch if none of it has begun: it accesses no memory, and all its positions fail."""

    def result(self, start: int = 0, stop: int | None = None) -> TransferResult:
        """Return the result of positions ``start`` to ``stop``, once ``done`` is reached; positions count from 0.

        A part has the bytes of its blocks and a share of the seconds, so that parts add up to the whole.
        """


class PlannedCopy(PendingCopy, Protocol):
    """Validated batch of block copies that can be enqueued."""

    @property
    def is_certain(self) -> bool:
        """True once it can only fail with the device: it is enqueued, its records are right, no checksum is due."""

    def enqueue(self, stream: Stream, first_plane: int, last_plane: int) -> None:
        """Copy planes ``first_plane`` up to, but not including, ``last_plane`` on the stream.

        The ranges of a batch must be enqueued in order, on one stream, and together cover all planes.
        """

    def enqueue_groups(self, stream: Stream, ranges: Sequence[tuple[int, int]]) -> Sequence[Event]:
        """Enqueue ranges of planes in order; return an event recorded after each."""


def enqueue_each(
    copy: PlannedCopy, stream: Stream, ranges: Sequence[tuple[int, int]], create_event: Callable[[], Event]
) -> list[Event]:
    """Implement ``BlockCopy.enqueue_groups`` with its ``enqueue``."""
    events = []
    for first, last in ranges:
        copy.enqueue(stream, first, last)
        events.append(create_event())
        events[-1].record(stream)
    return events


class LayerRanges(Protocol):
    """Ranges of planes that share an event, and the number of the range that each layer is in."""

    @property
    def planes(self) -> Sequence[tuple[int, int]]:
        """First plane and end of each range, in the order in which they are copied."""

    @property
    def group_of_layer(self) -> Sequence[int]:
        """The number of the range of each layer."""


@dataclass(frozen=True, slots=True)
class LaunchWays:
    """Streams and rules by which a worker's plans are enqueued.

    ``session``: the arena of a service that slots of plans refer to, None for an own one. ``window``: the loads in
    flight. ``ranges_of``: the ranges of a load of that many blocks.
    """

    rank: int
    session: str | None
    loads: Stream
    backups: Stream
    window: CopyWindow
    ranges_of: Callable[[int], LayerRanges]
    num_layers: int


class Device(Protocol):
    """Device that holds planes: CPU or GPU."""

    @property
    def numa_node(self) -> int | None:
        """NUMA node nearest to the device; None when unknown."""

    def min_group_bytes(self, num_blocks: int, record_bytes: int) -> int:
        """Return the least bytes of a record that a group of layers should have in a load of ``num_blocks`` blocks.

        Smaller groups cost more, in submission or in speed, than the earlier start of a layer gains.
        """

    @property
    def has_compute_streams(self) -> bool:
        """True when engines compute on streams of this device, so that copies must be ordered with one.

        False when an engine's computation is complete as soon as its call returns.
        """

    @property
    def lost(self) -> str | None:
        """Reason why the device can no longer be used; None while it works."""

    def as_stream(self, stream: Any) -> Stream:
        """Return a stream of this device, or of a framework on this device, as a ``Stream``.

        Raises ``StreamError`` or ``TypeError`` for anything else.
        """

    def create_stream(self, *, background: bool = False) -> Stream:
        """Create a stream; a background stream has lower priority than the others."""

    def create_event(self) -> Event:
        """Create an event that is not recorded yet."""

    def wait_any(self, events: Sequence[Event], timeout: float | None = None) -> bool:
        """Wait on the host until one of the events is reached; return False at the timeout."""

    def allocate_plane(self, plane: Plane, num_blocks: int, framework: str | None = None) -> Any:
        """Return a zero-filled tensor of shape (num_blocks, *plane.shape) with the plane's device stride.

        ``framework`` is one of ``frameworks.FRAMEWORKS``; None means the device's default. Raises ``TensorError``.
        """

    def pin_memory(self, address: int, nbytes: int, owner: object) -> PinnedMemory:
        """Pin host memory for copies of this device; ``owner`` keeps the memory alive.

        Raises ``HostMemoryError`` with the remedy when the system refuses.
        """

    def inspect_tensor(self, tensor: Any) -> TensorView:
        """Return address and shape of a tensor of any framework. Raises ``TensorError`` for another device's."""

    def bind_planes(self, bindings: Sequence[PlaneBinding], record_bytes: int) -> DevicePlanes:
        """Bind the planes of a layout, in its order, for ``copy_blocks`` with records of ``record_bytes``."""

    def copy_blocks(self, planes: DevicePlanes, arena: ArenaRecords, swap: CacheSwapMetadata) -> PlannedCopy:
        """Prepare a batch of copies. Raises ``PlanError`` naming the pair that cannot be copied."""

    def plan_launcher(
        self, planes: DevicePlanes, arena: ArenaRecords, ways: LaunchWays
    ) -> PlanLauncher | None:
        """Return the native submission of whole plans, None if every plan takes ``copy_blocks``.

        It is used for as long as the extents of ``arena`` do not change.
        """


def check_swap(swap: CacheSwapMetadata, *, device_blocks: int, host_blocks: int) -> None:
    """Raise ``PlanError`` for arrays of wrong type or shape, and for a slot out of range or written twice.

    The error names the pair.
    """
    if not _core.is_sound_transfer(swap, swap.to_host, device_blocks, host_blocks):
        refuse_swap(swap, device_blocks=device_blocks, host_blocks=host_blocks)


def refuse_swap(swap: CacheSwapMetadata, *, device_blocks: int, host_blocks: int) -> NoReturn:
    """Raise the ``PlanError`` of a transfer that the native module found unsound."""
    check_arrays(swap)
    _check_range(swap, "device", swap.device_slots, device_blocks)
    _check_range(swap, "host", swap.host_slots, host_blocks)
    repeated = _first_repeated(swap.dst_block_ids)
    if repeated is None:
        raise PlanError(f"{swap.purpose.value}: the arrays changed while they were checked")
    first, second = repeated
    raise PlanError(
        f"{swap.purpose.value}: pairs {first} and {second}: both are copied {swap.src_type.value} to "
        f"{swap.dst_type.value} into slot {swap.dst_block_ids[first]}"
    )


def _first_repeated(slots: Int32Array) -> tuple[int, int] | None:
    """Return the positions of a slot that occurs twice, or None."""
    order = np.argsort(slots, kind="stable")
    equal = np.flatnonzero(np.diff(slots[order]) == 0)
    if not len(equal):
        return None
    return int(order[equal[0]]), int(order[equal[0] + 1])


def _check_array(name: str, array: Any, dtype: DTypeLike, shape: tuple[int, ...]) -> None:
    """Raise ``PlanError`` unless ``array`` is a NumPy array of this type and shape."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise PlanError(f"{name} must be an array of {np.dtype(dtype)}, got {found}")
    if array.shape != shape:
        raise PlanError(f"{name} has shape {array.shape}, but {shape[0]} blocks need {shape}")


def check_arrays(swap: CacheSwapMetadata) -> None:
    """Raise ``PlanError`` naming the array of a transfer that has the wrong type or length."""
    count, purpose = swap.num_blocks, swap.purpose.value
    _check_array(f"{purpose}: src_block_ids", swap.src_block_ids, np.int32, (count,))
    _check_array(f"{purpose}: dst_block_ids", swap.dst_block_ids, np.int32, (count,))
    _check_array(f"{purpose}: src_generations", swap.src_generations, np.uint32, (count,))
    _check_array(f"{purpose}: dst_generations", swap.dst_generations, np.uint32, (count,))
    _check_array(f"{purpose}: hash_values", swap.hash_values, np.uint8, (count, 32))
    _check_array(f"{purpose}: parent_hashes", swap.parent_hashes, np.uint8, (count, 32))
    if swap.unverified is not None:
        _check_array(f"{purpose}: unverified", swap.unverified, np.uint8, (count,))


def _check_range(swap: CacheSwapMetadata, kind: str, slots: Int32Array, limit: int) -> None:
    outside = np.flatnonzero((slots < 0) | (slots >= limit))
    if len(outside):
        raise PlanError(
            f"{swap.purpose.value}: pair {outside[0]}: {kind} slot {slots[outside[0]]} is not one of the "
            f"{limit} {kind} blocks"
        )
