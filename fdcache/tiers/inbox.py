"""Inbox: what a service tells a client unasked, kept until the scheduler's thread takes it."""

from __future__ import annotations

from collections import deque

from fdcache.node.protocol import Events


class Inbox:
    """Events of the tier and orders to reset the device tier. One thread puts in, another takes out."""

    def __init__(self, capacity: int) -> None:
        self._events: deque[Events] = deque()
        self._capacity = 0
        self.device_resets = 0
        """Orders so far, as the service counts them."""
        self.device_resets_taken = 0
        self.record_events(capacity)

    def record_events(self, capacity: int) -> None:
        """Keep the newest ``capacity`` batches of events."""
        self._capacity = capacity
        self._events = deque(self._events, maxlen=capacity or None)

    @property
    def wants_events(self) -> bool:
        """Whether any are kept."""
        return self._capacity > 0

    def add(self, events: Events) -> None:
        """A batch came."""
        if self._capacity:
            self._events.append(events)

    def take_events(self) -> list[Events]:
        """What came since the last call."""
        taken = []
        while self._events:
            taken.append(self._events.popleft())
        return taken

    def take_device_reset(self) -> bool:
        """Whether a reset of the device tier was asked for since the last call."""
        if self.device_resets == self.device_resets_taken:
            return False
        self.device_resets_taken = self.device_resets
        return True
