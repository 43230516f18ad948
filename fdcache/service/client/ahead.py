"""Extents of a service's arena, mapped and pinned before a plan needs them."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from fdcache import _core
from fdcache.devices.base import Device, PinnedMemory
from fdcache.errors import HostMemoryError
from fdcache.service.wire.shared_memory import Extent, Geometry

logger = logging.getLogger(__name__)

REST = 3.0
"""Rest after each extent, in times of its pinning. The driver lets other threads wait meanwhile, and again and again
if the next extent follows at once: without a rest, pinning 58 GiB kept a GPU from its steps for seconds."""


class ExtentsAhead:
    """A thread that maps and pins the free extents of an arena, in the order in which namespaces get them.

    Pinning takes some 20 ms for 64 MiB: in a step it would delay every request. A file that a namespace gets is renamed
    and stays the same memory, so that ``take`` finds what was pinned under the former name.
    """

    def __init__(self, geometry: Geometry, device: Device) -> None:
        self._geometry = geometry
        self._device = device
        self._ready: dict[int, tuple[Extent, PinnedMemory]] = {}
        self._lock = threading.Lock()
        self._is_wanted = threading.Condition(self._lock)
        self._has_news = True
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="fdcache-pin", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Number of extents that are ready."""
        with self._lock:
            return len(self._ready)

    def take(self, path: str) -> tuple[Extent, PinnedMemory] | None:
        """Return the extent with this file, None if it is not ready. Raises ``OSError`` if there is no such file."""
        inode = Path(path).stat().st_ino
        with self._lock:
            return self._ready.pop(inode, None)

    def look_again(self) -> None:
        """Have extents pinned that have become free since."""
        with self._lock:
            self._has_news = True
            self._is_wanted.notify()

    def close(self) -> None:
        """End the thread, and release what was not taken."""
        with self._lock:
            self._is_closed = True
            self._is_wanted.notify()
        self._thread.join()
        self._ready.clear()

    def _run(self) -> None:
        try:
            while self._wait():
                for path in self._geometry.free_paths():
                    if not self._pin(path):
                        return
        except HostMemoryError as error:
            logger.warning("extents are pinned when a plan first needs them: %s", error)

    def _wait(self) -> bool:
        """Wait for news; return False if the thread is to end."""
        with self._lock:
            self._is_wanted.wait_for(lambda: self._has_news or self._is_closed)
            self._has_news = False
            return not self._is_closed

    def _pin(self, path: Path) -> bool:
        """Map and pin a free extent, unless it is ready or has been given away; return False to end."""
        try:
            inode = path.stat().st_ino
            if inode in self._ready:
                return not self._is_closed
            extent = Extent(path, self._geometry.extent_bytes)
        except (FileNotFoundError, ValueError):  # gone, or shorter: the service is making or removing it
            return not self._is_closed
        _core.map_pages(extent.address, extent.nbytes)
        begin = time.monotonic()
        pinned = self._device.pin_memory(extent.address, extent.nbytes, extent)
        with self._lock:
            if not self._is_closed:
                self._ready[extent.inode] = extent, pinned
            rest = REST * (time.monotonic() - begin)
            return not self._is_wanted.wait_for(lambda: self._is_closed, rest)
