"""The layers of a load: groups that share an event, and the counter that an engine waits on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from fdcache.devices.base import (
    Device,
    LayerRanges,
    PlannedCopy,
    Stream,
)
from fdcache.errors import LayerSwapTimeoutError, PlanError
from fdcache.layout import KVLayout
from fdcache.machine.process_guard import ProcessGuard
from fdcache.tasks import Event


class LayerGroups:
    """The layer groups of one layout: a small first one, so that the forward pass can start, then larger ones."""

    def __init__(self, device: Device, layout: KVLayout, *, first: int, later: int) -> None:
        self._device = device
        starts = [layout.layer_planes(layer)[0].offset for layer in range(layout.total_layers)]
        self._offsets = [*starts, layout.record_bytes]
        planes = [len(layout.layer_planes(layer)) for layer in range(layout.total_layers)]
        self._first_plane = [0, *accumulate(planes)]
        self._groups = layer_groups(layout.total_layers, first, later)
        self._widened: dict[int, _Ranges] = {}

    @property
    def num_layers(self) -> int:
        """Number of main and draft layers."""
        return len(self._first_plane) - 1

    def enqueue_whole(self, copy: PlannedCopy, stream: Stream) -> None:
        """Enqueue all planes of a batch at once."""
        copy.enqueue(stream, 0, self._first_plane[-1])

    def enqueue(self, copy: PlannedCopy, stream: Stream, num_blocks: int) -> list[Event | None]:
        """Enqueue a batch group by group; return the event of each layer."""
        ranges = self.ranges_of(num_blocks)
        ends = copy.enqueue_groups(stream, ranges.planes)
        return [ends[group] for group in ranges.group_of_layer]

    def ranges_of(self, num_blocks: int) -> LayerRanges:
        """Return the ranges of planes of a load of that many blocks."""
        min_bytes = self._device.min_group_bytes(num_blocks, self._offsets[-1])
        if min_bytes not in self._widened:
            groups = widen_groups(self._groups, self._offsets, min_bytes)
            self._widened[min_bytes] = _Ranges(
                [(self._first_plane[first], self._first_plane[last]) for first, last in groups],
                [group for group, (first, last) in enumerate(groups) for _ in range(first, last)],
            )
        return self._widened[min_bytes]


@dataclass(frozen=True, slots=True)
class _Ranges:
    """Ranges of planes, and the number of the range that each layer is in."""

    planes: list[tuple[int, int]]
    group_of_layer: list[int]


def layer_groups(num_layers: int, first: int, later: int) -> list[tuple[int, int]]:
    """Return half-open ranges of layers: one of ``first`` layers, then ranges of ``later``."""
    starts = [0, *range(min(first, num_layers), num_layers, later)]
    return list(zip(starts, [*starts[1:], num_layers], strict=True))


def widen_groups(
    groups: Sequence[tuple[int, int]], offsets: Sequence[int], min_bytes: int
) -> list[tuple[int, int]]:
    """Join all groups but the first until each has at least ``min_bytes`` of the record.

    ``offsets``: the record offset of each layer, then the record size.
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


class LayerEvents(Protocol):
    """One event for each layer of a plan; None for a layer without copies."""

    @property
    def is_certain(self) -> bool:
        """True once the load of the plan can only fail with the device; False without one."""

    def known(self) -> Sequence[Event | None] | None:
        """Return the events, or None while the copies wait for their turn."""

    def required(self) -> Sequence[Event | None]:
        """Return the events; enqueue the copies first if they wait."""


class LaunchedLayers:
    """The events of copies that are enqueued."""

    is_certain = False

    def __init__(self, events: Sequence[Event | None]) -> None:
        self._events = tuple(events)

    def known(self) -> Sequence[Event | None]:
        """Return the events: those of a launched plan are there at once."""
        return self._events

    def required(self) -> Sequence[Event | None]:
        """Return the events, as ``known``."""
        return self._events


class LayerDoneCounter:
    """Progress of one plan's copies, layer by layer.

    ::

        counter = controller.submit_swap_tasks(plan, compute_stream)
        for layer in range(num_layers):
            counter.wait_for_layer(layer, stream=compute_stream)
            attention(layer)

    Once layer i is done, layer i of every slot that the plan loads or evicts may be read and written. A failed copy
    is done as well; the report names its blocks. A load that waits for its turn starts with the first ``wait_...``
    for one of its layers; ``is_layer_done`` does not start it.
    """

    def __init__(
        self,
        plan_id: int,
        num_layers: int,
        layers: LayerEvents,
        *,
        default_timeout: float,
        as_stream: Callable[[Any], Stream],
        guard: ProcessGuard,
    ) -> None:
        self.plan_id = plan_id
        self.num_layers = num_layers
        self._layers = layers
        self._default_timeout = default_timeout
        self._as_stream = as_stream
        self._guard = guard
        self._held: tuple[Event, Any] | None = None
        """The event that a stream was told to wait for last: layers share events."""

    @property
    def is_certain(self) -> bool:
        """True once the plan's load can only fail with the device.

        Every copy is enqueued, the records were those of the plan, and no checksum is due: a step whose stream waits
        for the layers may be launched. Never true with ``FDCACHE_VERIFY=all``, on a CPU, or without a load.
        """
        return self._layers.is_certain

    def is_layer_done(self, layer: int) -> bool:
        """Return True if the copies of a layer have ended. Raises ``PlanError`` for a layer that does not exist."""
        self._check(layer)
        return self._is_done(self._layers.known(), layer)

    def is_all_done(self) -> bool:
        """Return True if the copies of all layers have ended."""
        return not self.pending_layers()

    def pending_layers(self) -> list[int]:
        """Return the layers whose copies have not ended."""
        if not self._guard.is_own:
            self._guard.refuse()
        events = self._layers.known()
        return [layer for layer in range(self.num_layers) if not self._is_done(events, layer)]

    def wait_for_layer(self, layer: int, timeout: float | None = None, *, stream: Any = None) -> None:
        """Make ``stream`` wait for a layer, or without a stream block the calling thread.

        ``stream``: anything that the device's ``as_stream`` takes. The call itself then returns once the layer's
        copies, and those before them, are enqueued. ``timeout``: seconds that the thread waits at most, by default
        ``CopySettings.layer_timeout``.

        Raises ``LayerSwapTimeoutError`` after the timeout, ``PlanError`` for a layer that does not exist,
        ``StreamError`` for a stream that is being captured into a CUDA graph.
        """
        self._check(layer)
        event = self._layers.required()[layer]
        if event is None:
            return
        if stream is not None:
            if self._held is None or self._held[0] is not event or self._held[1] is not stream:
                self._as_stream(stream).wait_event(event)
                self._held = event, stream
            return
        seconds = self._default_timeout if timeout is None else timeout
        if not event.wait(seconds):
            raise LayerSwapTimeoutError(
                f"layer {layer} of plan {self.plan_id} is not done after {seconds} s; "
                f"pending layers: {self.pending_layers()}"
            )

    def wait_all(self, timeout: float | None = None, *, stream: Any = None) -> None:
        """Wait for all layers like ``wait_for_layer``; ``timeout`` is for all of them together."""
        seconds = self._default_timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        if not self._guard.is_own:
            self._guard.refuse()
        events = self._layers.required()
        for layer in range(self.num_layers):
            if layer == 0 or events[layer] is not events[layer - 1]:
                self.wait_for_layer(layer, max(deadline - time.monotonic(), 0.0), stream=stream)

    @staticmethod
    def _is_done(events: Sequence[Event | None] | None, layer: int) -> bool:
        if events is None:
            return False
        event = events[layer]
        return event is None or event.query()

    def _check(self, layer: int) -> None:
        if not self._guard.is_own:
            self._guard.refuse()
        if not 0 <= layer < self.num_layers:
            raise PlanError(f"layer {layer} is not one of the {self.num_layers} layers")
