"""Progress: how an engine is doing and what it has done, as its signs of life tell it to the service."""

from __future__ import annotations

from collections.abc import Callable

from fdcache.node.protocol import Heartbeat
from fdcache.node.traffic import Traffic


class Progress:
    """Figures of this moment, and totals, which are told from each session's beginning: the service adds them up."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.in_flight_misses = 0
        """Look-ups that ended at a block which this engine was still copying."""
        self._figures = b"{}"
        self._wants_figures = True
        self._told = self._told_before = (
            Traffic(),
            0,
        )  # at the last sign of life, and when the session began

    def report(self, figures: Callable[[], bytes]) -> None:
        """Figures of the engine, a JSON object, for the next sign of life; asked for once between two."""
        if self._wants_figures:
            self._wants_figures = False
            self._figures = figures()

    def begin_session(self) -> None:
        """What was told so far is known; what comes now is told to another session."""
        self._told_before = self._told

    def heartbeat(self, device_resets: int) -> Heartbeat:
        """A sign of life of this moment, from an engine that has taken so many orders to reset its device tier."""
        self._told = (self.traffic.copy(), self.in_flight_misses)
        traffic, misses = self._told_before
        heartbeat = Heartbeat(
            self._figures, device_resets, self._told[0].since(traffic), self._told[1] - misses
        )
        self._wants_figures = True
        return heartbeat
