"""Which layers of a load share an event."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

from fdcache.devices.base import BlockCopy, Device, Event, Stream
from fdcache.errors import LayerSwapTimeoutError, PlanError
from fdcache.layout import KVLayout
from fdcache.machine.process_guard import ProcessGuard


class LayerGroups:
    """The groups of one layout: a small first one, so that the forward pass can start, and larger later ones."""

    def __init__(self, device: Device, layout: KVLayout, *, first: int, later: int) -> None:
        self._device = device
        starts = [layout.layer_planes(layer)[0].offset for layer in range(layout.total_layers)]
        self._offsets = [*starts, layout.record_bytes]
        planes = [len(layout.layer_planes(layer)) for layer in range(layout.total_layers)]
        self._first_plane = [0, *accumulate(planes)]
        self._groups = layer_groups(layout.total_layers, first, later)
        self._widened: dict[int, list[tuple[int, int]]] = {}

    @property
    def num_layers(self) -> int:
        """Main and draft layers together."""
        return len(self._first_plane) - 1

    def enqueue_whole(self, copy: BlockCopy, stream: Stream) -> None:
        """Put all planes of a batch on a stream at once."""
        copy.enqueue(stream, 0, self._first_plane[-1])

    def enqueue(self, copy: BlockCopy, stream: Stream, num_blocks: int) -> list[Event | None]:
        """Put a batch on a stream group by group; the event of each layer."""
        min_bytes = self._device.min_group_bytes(num_blocks, self._offsets[-1])
        if min_bytes not in self._widened:
            self._widened[min_bytes] = widen_groups(self._groups, self._offsets, min_bytes)
        groups = self._widened[min_bytes]
        ranges = [(self._first_plane[first], self._first_plane[last]) for first, last in groups]
        events: list[Event | None] = []
        for (first, last), event in zip(groups, copy.enqueue_groups(stream, ranges), strict=True):
            events += [event] * (last - first)
        return events


def layer_groups(num_layers: int, first: int, later: int) -> list[tuple[int, int]]:
    """Ranges of layers, the end not included: one of ``first`` layers, the others of ``later``."""
    starts = [0, *range(min(first, num_layers), num_layers, later)]
    return list(zip(starts, [*starts[1:], num_layers], strict=True))


def widen_groups(
    groups: Sequence[tuple[int, int]], offsets: Sequence[int], min_bytes: int
) -> list[tuple[int, int]]:
    """The same groups, later ones joined until each has ``min_bytes`` of the record; the first stays small.

    ``offsets`` has the record offset of each layer, and the end.
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
    """An event for each layer of a plan, None for a layer without copies."""

    def known(self) -> Sequence[Event | None] | None:
        """The events; None while the copies wait to be put on their stream."""

    def required(self) -> Sequence[Event | None]:
        """The events: copies that wait are given to their stream now."""


class LaunchedLayers:
    """The events of copies that are on their stream."""

    def __init__(self, events: Sequence[Event | None]) -> None:
        self._events = tuple(events)

    def known(self) -> Sequence[Event | None]:
        """The events."""
        return self._events

    def required(self) -> Sequence[Event | None]:
        """The events."""
        return self._events


class LayerDoneCounter:
    """The layers of one plan. After layer i is done, layer i of every slot that the plan loads or empties may
    be read or written. A layer is done when its copies have ended, be it with a failure: that stands in the
    report. Waits are on the copies' own events.

    A load that waits for its turn is begun by the first wait for one of its layers, not by a question about it.
    ``as_stream`` is the device's.
    """

    def __init__(
        self,
        plan_id: int,
        num_layers: int,
        layers: LayerEvents,
        *,
        default_timeout: float,
        as_stream: Callable[[Any], Stream],
    ) -> None:
        self.plan_id = plan_id
        self.num_layers = num_layers
        self._layers = layers
        self._default_timeout = default_timeout
        self._as_stream = as_stream
        self._guard = ProcessGuard("LayerDoneCounter")

    def is_layer_done(self, layer: int) -> bool:
        """Whether the copies of a layer have ended."""
        self._check(layer)
        return self._is_done(self._layers.known(), layer)

    def is_all_done(self) -> bool:
        """Whether the copies of all layers have ended."""
        return not self.pending_layers()

    def pending_layers(self) -> list[int]:
        """The layers whose copies have not ended."""
        self._guard.check()
        events = self._layers.known()
        return [layer for layer in range(self.num_layers) if not self._is_done(events, layer)]

    def wait_for_layer(self, layer: int, timeout: float | None = None, *, stream: Any = None) -> None:
        """Wait for a layer: the calling thread, or ``stream`` without holding up the thread for longer than it takes
        to put the layer's copies, and those before them, on their own stream.

        ``stream`` is whatever the device's ``as_stream`` takes; one that is being captured into a CUDA graph
        is refused with ``StreamError``. ``timeout`` in seconds bounds the thread's wait (default:
        ``TransferSettings.layer_timeout``).
        Raises ``LayerSwapTimeoutError`` when it passes, ``PlanError`` for a layer that does not exist.
        """
        self._check(layer)
        event = self._layers.required()[layer]
        if event is None:
            return
        if stream is not None:
            self._as_stream(stream).wait_event(event)
            return
        seconds = self._default_timeout if timeout is None else timeout
        if not event.wait(seconds):
            raise LayerSwapTimeoutError(
                f"layer {layer} of plan {self.plan_id} is not done after {seconds} s; "
                f"pending layers: {self.pending_layers()}"
            )

    def wait_all(self, timeout: float | None = None, *, stream: Any = None) -> None:
        """Wait for all layers, the thread ``timeout`` seconds together; as ``wait_for_layer``."""
        seconds = self._default_timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        self._guard.check()
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
        self._guard.check()
        if not 0 <= layer < self.num_layers:
            raise PlanError(f"layer {layer} is not one of the {self.num_layers} layers")
