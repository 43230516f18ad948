"""What the log tells while a service is away: at once what it means, then rarely, and when it is back."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)

_FIRST_INTERVAL, _LONGEST_INTERVAL = 60.0, 3600.0


class Absence:
    """The time in which a service gives no session: a warning when it begins, others at ever longer intervals.

    Each attempt is a line of level DEBUG.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._since: float | None = None
        self._reason: type[Exception] | None = None
        self._interval, self._next = _FIRST_INTERVAL, 0.0

    def goes_on(self, error: Exception) -> None:
        """Count an attempt that failed; another kind of reason is told at once."""
        now = time.monotonic()
        if self._since is None:
            self._since, self._interval = now, _FIRST_INTERVAL
            logger.warning(
                "no session at the service; until there is one the engine computes what it would have found there and "
                "stores nothing there; it asks again by itself: %s",
                error,
            )
        elif now >= self._next or self._reason is not type(error):
            self._interval = min(2 * self._interval, _LONGEST_INTERVAL)
            logger.warning("still no session at the service, for %.0f s: %s", now - self._since, error)
        else:
            logger.debug("no session at the service: %s", error)
            return
        self._reason, self._next = type(error), now + self._interval

    def ends(self) -> None:
        """Log the return of a service that was away."""
        if self._since is not None:
            seconds = time.monotonic() - self._since
            logger.warning("there is a session at the service %s again, after %.0f s", self._address, seconds)
            self._since = None
