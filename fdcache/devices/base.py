"""What the data plane needs of a device: memory, streams, events, block copies.

A stream runs its operations in order; an event orders streams among each other and with the host. Copies move
whole blocks between the device's planes and host records (``Direction``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from fdcache._core import RecordTable
from fdcache.layout import Plane
from fdcache.metadata import CacheSwapMetadata, TransferResult


class Direction(Enum):
    """Which way blocks are copied."""

    TO_HOST = "device to host"
    TO_DEVICE = "host to device"


@dataclass(frozen=True, slots=True)
class TensorView:
    """Where a tensor lies; ``strides`` in bytes. ``owner`` keeps its memory alive."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    owner: object


@dataclass(frozen=True, slots=True)
class PlaneBinding:
    """One plane's place on the device: block ``b`` starts at ``address + b * stride``."""

    plane: Plane
    address: int
    stride: int
    num_blocks: int
    owner: object


class PinnedMemory(Protocol):
    """Host memory that the device's copies reach, for as long as this object lives."""

    @property
    def device_address(self) -> int:
        """Where the device sees it."""


class HostArena(Protocol):
    """Host records with their slot headers."""

    @property
    def pinned(self) -> Sequence[PinnedMemory]:
        """The extents, in order, as the device sees them."""

    @property
    def epoch(self) -> int:
        """Another number whenever extents came or went."""

    @property
    def num_blocks(self) -> int:
        """Slots in the arena."""

    @property
    def fingerprint(self) -> bytes:
        """The layout's fingerprint; its first 16 bytes stand in every slot header."""

    @property
    def table(self) -> RecordTable:
        """Where records and headers are."""


class DevicePlanes(Protocol):
    """The planes of a layout on a device, as ``Device.bind_planes`` made them."""

    @property
    def num_blocks(self) -> int:
        """Device slots for which every plane has a block."""

    @property
    def num_planes(self) -> int:
        """Planes of a block."""


class Event(Protocol):
    """A point in a stream. It is recorded once."""

    def record(self, stream: Stream) -> None:
        """Let it be reached when the stream has done everything enqueued so far."""

    def query(self) -> bool:
        """Whether it was reached."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait on the host up to ``timeout`` seconds, None for ever; whether it was reached."""


class Stream(Protocol):
    """Operations in order."""

    def wait_event(self, event: Event) -> None:
        """Hold later operations until the event is reached."""

    def retire(self) -> None:
        """Let go of the memory that finished copies kept alive."""

    def close(self) -> None:
        """End the stream; what is still queued is abandoned and its events are reached."""


class PendingCopy(Protocol):
    """Blocks on their way."""

    @property
    def done(self) -> Event:
        """Reached once no block of the batch will be touched any more."""

    @property
    def started(self) -> bool:
        """Whether a copy has begun."""

    def cancel(self) -> bool:
        """Take the batch back if none of it has begun: it touches no memory and all its positions fail."""

    def result(self, start: int = 0, stop: int | None = None) -> TransferResult:
        """Return the result of positions ``start`` to ``stop``, once ``done`` is reached; positions count from 0.

        A part has the bytes of its blocks and a share of the seconds, so that parts add up to the whole.
        """


class BlockCopy(PendingCopy, Protocol):
    """A batch of block copies, validated and ready to be enqueued."""

    def enqueue(self, stream: Stream, first_plane: int, last_plane: int) -> None:
        """Copy planes ``first_plane`` up to, not including, ``last_plane`` on the stream.

        The ranges of one batch are enqueued in order, on one stream, and together cover all planes.
        """

    def enqueue_groups(self, stream: Stream, ranges: Sequence[tuple[int, int]]) -> Sequence[Event]:
        """Enqueue ranges of planes one after the other; an event recorded after each."""


def enqueue_each(
    copy: BlockCopy, stream: Stream, ranges: Sequence[tuple[int, int]], create_event: Callable[[], Event]
) -> list[Event]:
    """``BlockCopy.enqueue_groups`` by its ``enqueue``."""
    events = []
    for first, last in ranges:
        copy.enqueue(stream, first, last)
        events.append(create_event())
        events[-1].record(stream)
    return events


class Device(Protocol):
    """A device that holds planes."""

    @property
    def numa_node(self) -> int | None:
        """The node of the host memory nearest to the device, None where that is not known."""

    def min_group_bytes(self, num_blocks: int, record_bytes: int) -> int:
        """Bytes of a record that a group of layers should have at least in a load of so many blocks.

        Narrower groups cost more, in copies to submit or in speed, than an earlier layer gains.
        """

    @property
    def has_compute_streams(self) -> bool:
        """Whether engines compute on streams of this device, so that copies must be ordered with one.

        Else what an engine has asked for is computed when its call returns.
        """

    @property
    def lost(self) -> str | None:
        """Why the device can no longer be used; None while it can."""

    def as_stream(self, stream: Any) -> Stream:
        """A stream of this device, or of a framework on this device, as a ``Stream``.

        Raises ``StreamError`` or ``TypeError`` for anything else.
        """

    def create_stream(self, *, background: bool = False) -> Stream:
        """A new stream; a background one gives way to the others."""

    def create_event(self) -> Event:
        """A new event, not recorded."""

    def wait_any(self, events: Sequence[Event], timeout: float | None = None) -> bool:
        """Wait on the host until one of the events is reached; whether one was."""

    def allocate_plane(self, plane: Plane, num_blocks: int, framework: str | None = None) -> Any:
        """A zero-filled tensor of shape (num_blocks, *plane.shape) with the plane's device stride.

        ``framework`` is one of ``frameworks.FRAMEWORKS``; None is the device's own. Raises ``TensorError``.
        """

    def pin_memory(self, address: int, nbytes: int, owner: object) -> PinnedMemory:
        """Let the device's copies reach host memory, which ``owner`` keeps.

        Raises ``HostMemoryError`` with the remedy when the system refuses.
        """

    def inspect_tensor(self, tensor: Any) -> TensorView:
        """Where a tensor of any framework lies. Raises ``TensorError`` when it is not on this device."""

    def bind_planes(self, bindings: Sequence[PlaneBinding], record_bytes: int) -> DevicePlanes:
        """The planes of a layout, in its order, for ``copy_blocks`` with records of that size."""

    def copy_blocks(self, planes: DevicePlanes, arena: HostArena, swap: CacheSwapMetadata) -> BlockCopy:
        """Return a batch of copies that is not enqueued yet. Raises ``PlanError`` naming the pair that is wrong."""
