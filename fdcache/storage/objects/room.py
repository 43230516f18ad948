"""Room: keeps the objects of all nodes within a size, without a node that is in charge."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue

from fdcache.settings.kinds import readable_size
from fdcache.storage.objects.backend import LAYOUT, ROOT, ObjectBackend, Stored, StoreFailedError

log = logging.getLogger(__name__)

_SHARE_KEPT = 15 / 16
"""What a sweep leaves of a store that is too large, so that not every write needs one."""

_LEAST_SHARE = 64
_NODES = 16
"""A node sweeps after it has written a 16th of what was free, but not less than a 64th of the size."""

_INTERVALS = 8
"""Intervals between the median use and the newest: a few objects of a wrong date do not change their length."""

_SHORTEST, _LONGEST = 1.0, 3600.0
_FIRST_INTERVAL = 60.0
_DELETED_AT_ONCE = 256
_DATED_AT_ONCE = 256
_SWEEP: list[str] = []
"""Work that is a sweep; all other work is names to mark."""


class Room:
    """Sweeps over all objects when this node has written enough, and marks objects as used, on a thread of its own.

    Every node does the same by the same rule, so two that sweep at once choose the same objects. Those that were not
    used for longest go first. Time counts in intervals, an eighth of the time between the median use and the newest:
    within one, what was written last goes first, so that a path is shortened from its end. A use in the future counts
    as one just now, and an object of more than an hour ahead is dated anew, so that a wrong clock's objects do not stay
    for as long as it was wrong.
    """

    def __init__(
        self, backend: ObjectBackend, size: int, on_removed: Callable[[str], None] = lambda name: None
    ) -> None:
        self.interval = _FIRST_INTERVAL
        """Seconds between two marks of one object."""

        self.objects: int | None = None
        self.bytes: int | None = None
        """All nodes' objects and bytes, as of the last sweep."""

        self.removed = 0
        self._backend = backend
        self._size = size
        self._on_removed = on_removed
        self._lock = threading.Lock()
        self._written = 0
        self._allowance = 0
        self._is_short = False
        self._asked = False
        self._work: SimpleQueue[list[str] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Sweep soon."""
        with self._lock:
            self._ask_for_sweep()

    def wrote(self, nbytes: int) -> None:
        """Count bytes that this node has stored."""
        with self._lock:
            self._written += nbytes
            if self._written > self._allowance:
                self._ask_for_sweep()

    def is_short(self) -> None:
        """Sweep, because the medium has less room than promised: a 16th of what is stored has to go."""
        with self._lock:
            self._is_short = True
            self._ask_for_sweep()

    def mark_used(self, names: list[str]) -> None:
        """Mark objects as used, in this order, some time soon."""
        with self._lock:
            self._put(names)

    def _ask_for_sweep(self) -> None:
        if not self._asked:
            self._asked = True
            self._put(_SWEEP)

    def _put(self, work: list[str]) -> None:
        self._work.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="fdcache-objects-room", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                if work is _SWEEP:
                    self.sweep()
                else:
                    self._backend.mark_used(work)
            except StoreFailedError as error:
                log.warning("objects are not tidied up: %s", error)
            except Exception:
                log.exception("objects are not tidied up")

    def sweep(self) -> int:
        """List all objects and remove what is too much; return how many. Raises ``StoreFailedError``."""
        with self._lock:
            self._asked = False
            written, short = self._written, self._is_short
            self._is_short = False
        listed = [each for each in self._backend.stored(f"{ROOT}/") if not each.name.endswith(f"/{LAYOUT}")]
        now = time.time()
        stored = [replace(each, used_at=min(each.used_at, now)) for each in listed]
        total = sum(each.size for each in stored)
        limit = min(self._size, total - 1) if short else self._size
        self.interval = interval_of(stored)
        chosen = victims(stored, limit)
        self._date_anew(listed, {each.name for each in chosen}, now)
        for first in range(0, len(chosen), _DELETED_AT_ONCE):
            names = [each.name for each in chosen[first : first + _DELETED_AT_ONCE]]
            for name in names:
                self._on_removed(name)
            self._backend.delete(names)
        freed = sum(each.size for each in chosen)
        with self._lock:
            self._written = max(self._written - written, 0)
            self._allowance = max(self._size // _LEAST_SHARE, (self._size - total + freed) // _NODES)
            self.objects, self.bytes = len(stored) - len(chosen), total - freed
            self.removed += len(chosen)
        if chosen:
            log.info(
                "%d objects with %s were removed, %s are kept",
                len(chosen),
                readable_size(freed),
                readable_size(total - freed),
            )
        return len(chosen)

    def _date_anew(self, listed: Sequence[Stored], chosen: set[str], now: float) -> None:
        """Mark some objects that are dated in the future and stay: from then on they age as others do."""
        ahead = [each.name for each in listed if each.used_at > now + _LONGEST and each.name not in chosen]
        if ahead:
            log.warning("%d objects are dated more than an hour ahead; compare the nodes' clocks", len(ahead))
            self._backend.mark_used(ahead[:_DATED_AT_ONCE])

    def close(self, timeout: float = 5.0) -> None:
        """End the thread, if the store answers within ``timeout`` seconds."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            while True:  # work that has not begun is dropped
                try:
                    self._work.get_nowait()
                except Empty:
                    break
            self._work.put(None)
            thread.join(timeout)


def interval_of(stored: Sequence[Stored]) -> float:
    """Return the seconds that count as one time."""
    if not stored:
        return _FIRST_INTERVAL
    times = sorted(each.used_at for each in stored)
    return min(max((times[-1] - times[len(times) // 2]) / _INTERVALS, _SHORTEST), _LONGEST)


def victims(stored: Sequence[Stored], limit: int) -> list[Stored]:
    """Return the objects that go if there are more bytes than ``limit``, the first one first."""
    left = sum(each.size for each in stored)
    if left <= limit:
        return []
    oldest, interval = min(each.used_at for each in stored), interval_of(stored)
    chosen = []
    for each in sorted(stored, key=lambda one: ((one.used_at - oldest) // interval, -one.used_at, one.name)):
        if left <= limit * _SHARE_KEPT:
            break
        left -= each.size
        chosen.append(each)
    return chosen
