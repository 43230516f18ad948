"""CircuitBreaker: a store that has failed is left alone for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Closed until a failure; then open for ``retry_after`` seconds, after which one call at a time may try."""

    def __init__(self, retry_after: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._retry_after = retry_after
        self._clock = clock
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._retry_at = 0.0
        self.failures = 0
        """Failures since the start."""
        self.last_failure: str | None = None
        """The newest of them, whatever has become of it."""

    @property
    def reason(self) -> str | None:
        """The failure that opened the breaker; None while it is closed."""
        return self._reason

    def refuses(self) -> str | None:
        """Return why a call must not be made now, or None when it may."""
        with self._lock:
            if self._reason is None:
                return None
            now = self._clock()
            if now < self._retry_at:
                return self._reason
            self._retry_at = now + self._retry_after
            return None

    def succeeded(self) -> None:
        """Close the breaker after a successful call."""
        with self._lock:
            self._reason = None

    def failed(self, reason: str) -> None:
        """Open the breaker."""
        with self._lock:
            self._reason = self.last_failure = reason
            self.failures += 1
            self._retry_at = self._clock() + self._retry_after
