"""Turns: what SGLang's scheduler need not wait for, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class Turns:
    """Calls ``turn`` on a thread of its own each time that it is asked for; once if it is asked for several times.

    What a turn raises, the next call raises, and no other turn follows.
    """

    def __init__(self, turn: Callable[[], None], device: torch.device) -> None:
        self._turn = turn
        self._device = device
        self._asked = threading.Event()
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fdcache-turns", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Ask for a turn."""
        if self._error is not None:
            raise self._error
        if not self._asked.is_set():
            self._asked.set()

    def close(self) -> None:
        """End the thread, after the turn that it is in. Idempotent."""
        self._is_closed = True
        self._asked.set()
        self._thread.join()

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while True:
            self._asked.wait()
            self._asked.clear()
            if self._is_closed:
                return
            try:
                self._turn()
            except BaseException as error:  # noqa: BLE001 - the thread that asks raises it
                self._error = error
                return
