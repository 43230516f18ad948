"""Signals: the first one lets the service end in order, the second one ends it without waiting."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_by_signals(is_serving: Callable[[], bool], stop: Callable[[bool], None]) -> Iterator[None]:
    """Catch SIGTERM and SIGINT: ``stop(False)``, from the second one on ``stop(True)``.

    A process that does not serve yet ends at once, through ``SystemExit`` or ``KeyboardInterrupt``, so that what it has
    made by then is taken away. Only for the main thread.
    """
    received = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if is_serving():
            stop(received > 1)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(0)

    former = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
