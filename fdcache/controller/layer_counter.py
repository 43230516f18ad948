"""How the forward pass learns that a layer's blocks are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fdcache.controller.process_guard import ProcessGuard
from fdcache.devices.base import Event, Stream
from fdcache.errors import LayerSwapTimeoutError, PlanError


class LayerDoneCounter:
    """The layers of one plan. After layer i is done, layer i of every slot that the plan loads or empties may
    be read or written. A layer is done when its copies have ended, be it with a failure: that stands in the
    report. Waits are on the copies' own events.

    ``layer_events`` has one event per layer, None for a layer without copies; ``as_stream`` is the device's.
    """

    def __init__(
        self,
        plan_id: int,
        layer_events: Sequence[Event | None],
        *,
        default_timeout: float,
        as_stream: Callable[[Any], Stream],
    ) -> None:
        self.plan_id = plan_id
        self._events = tuple(layer_events)
        self._default_timeout = default_timeout
        self._as_stream = as_stream
        self._guard = ProcessGuard("LayerDoneCounter")

    @property
    def num_layers(self) -> int:
        """Main and draft layers together."""
        return len(self._events)

    def is_layer_done(self, layer: int) -> bool:
        """Whether the copies of a layer have ended."""
        event = self._event(layer)
        return event is None or event.query()

    def is_all_done(self) -> bool:
        """Whether the copies of all layers have ended."""
        return not self.pending_layers()

    def pending_layers(self) -> list[int]:
        """The layers whose copies have not ended."""
        return [layer for layer in range(self.num_layers) if not self.is_layer_done(layer)]

    def wait_for_layer(self, layer: int, timeout: float | None = None, *, stream: Any = None) -> None:
        """Wait for a layer: the calling thread, or ``stream`` without holding up the thread.

        ``stream`` is whatever the device's ``as_stream`` takes; one that is being captured into a CUDA graph
        is refused with ``StreamError``. ``timeout`` in seconds bounds the thread's wait (default:
        ``TransferSettings.layer_timeout``).
        Raises ``LayerSwapTimeoutError`` when it passes, ``PlanError`` for a layer that does not exist.
        """
        event = self._event(layer)
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
        for layer in range(self.num_layers):
            if layer == 0 or self._events[layer] is not self._events[layer - 1]:
                self.wait_for_layer(layer, max(deadline - time.monotonic(), 0.0), stream=stream)

    def _event(self, layer: int) -> Event | None:
        self._guard.check()
        if not 0 <= layer < len(self._events):
            raise PlanError(f"layer {layer} is not one of the {len(self._events)} layers")
        return self._events[layer]
