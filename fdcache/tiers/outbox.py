"""Outbox: what a client tells its service in the background, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from threading import RLock

import numpy as np

from fdcache.metadata import HashArray
from fdcache.node.protocol import Missed, Request
from fdcache.tiers.session import Session

_MOST_ABSENT = 4096  # look-ups without an answer that are remembered between two messages


class Outbox:
    """Messages and ends of runs, each of one session. Any thread puts in, one takes out; ``lock`` keeps the order."""

    def __init__(self) -> None:
        self.lock = RLock()
        self._messages: deque[tuple[Session, Request]] = deque()
        self._releases: deque[tuple[Session, int]] = deque()
        self._absent: deque[tuple[bytes, int, bool]] = deque()

    def __bool__(self) -> bool:
        return bool(self._messages or self._releases)

    def tell(self, session: Session, body: Request) -> None:
        """To be sent; dropped when the session ends before."""
        with self.lock:
            self.tell_absent(session)
            self._messages.append((session, body))

    def release(self, session: Session, lease: int) -> None:
        """Give a run back."""
        self._releases.append((session, lease))

    def count_absent(self, first: HashArray, blocks: int, whole: bool) -> None:
        """The data path saw that so many blocks from ``first``, shape (32,), on are not there.

        ``whole``: nothing of the path is. Told before the next thing that is told, or with the next sign of life.
        """
        if len(self._absent) < _MOST_ABSENT:
            self._absent.append((first.tobytes(), blocks, whole))

    def tell_absent(self, session: Session) -> None:
        """Before the blocks are told of that are computed now: after that nobody knows why they were not there."""
        with self.lock:
            if not self._absent:
                return
            absent = [self._absent.popleft() for _ in range(len(self._absent))]
            first = b"".join(key for key, _, _ in absent)
            blocks = np.array([count for _, count, _ in absent], np.int32)
            body = Missed(sum(whole for _, _, whole in absent), first, blocks.tobytes())
            self._messages.append((session, body))

    def forget_absent(self) -> None:
        """There is no session in which they count."""
        self._absent.clear()

    def forget_told(self) -> None:
        """A session begins: nothing of those before it is sent any more."""
        self._messages.clear()
        self._releases.clear()

    def take_messages(self) -> Iterator[tuple[Session, Request]]:
        """What there is, in order."""
        while self._messages:
            yield self._messages.popleft()

    def take_releases(self, session: Session | None) -> list[int]:
        """Leases of this session's runs that were given back; others went with their session."""
        leases = []
        while self._releases:
            its, lease = self._releases.popleft()
            if its is session:
                leases.append(lease)
        return leases
