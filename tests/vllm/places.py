"""A node as far as the kernel goes: processes with a network and mounts of their own on this machine."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from fdcache.replay.nodes.network import enter_namespace

_NEW_MOUNTS, _PRIVATE_FROM_THE_ROOT = 0x00020000, 0x4000 | 0x40000

Value = TypeVar("Value")


class NodePlace:
    """A thread in a network namespace, which sees folders of other nodes empty. So do the processes that it starts.

    It lives until the place is closed: a process may be made to end with the thread that started it. ``is_apart`` is
    False where the kernel does not let this process have mounts of its own.
    """

    def __init__(self, network: str | None, hidden: Sequence[Path]) -> None:
        self._thread = ThreadPoolExecutor(1, "node")
        self.is_apart = self.call(lambda: _enter(network, hidden))

    def call(self, function: Callable[[], Value]) -> Value:
        """Run a function there."""
        return self._thread.submit(function).result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


def _enter(network: str | None, hidden: Sequence[Path]) -> bool:
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_NEW_MOUNTS) != 0:
        return False
    if library.mount(None, b"/", None, _PRIVATE_FROM_THE_ROOT, None) != 0:
        raise OSError(ctypes.get_errno(), "the mounts cannot be made private")
    for folder in hidden:
        if library.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=1m") != 0:
            raise OSError(ctypes.get_errno(), f"{folder} cannot be hidden")
    if network is not None:
        enter_namespace(network)
    return True
