"""Leases: what is kept for peers, and until when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

MOST_LEASES = 4096
"""Leases that peers may have at once of what they have asked for."""
MOST_LEASE_SECONDS = 600.0

KeyT = TypeVar("KeyT")
KeptT = TypeVar("KeptT")


class Leases(Generic[KeyT, KeptT]):
    """What is kept for peers, each until some time after a peer's last message about it, in the order of grants.

    So a peer that has died keeps nothing for long. One thread calls, with the time of its clock.
    """

    def __init__(self) -> None:
        self._kept: dict[KeyT, KeptT] = {}
        self._ends: dict[KeyT, float] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: KeyT) -> bool:
        return key in self._kept

    def __getitem__(self, key: KeyT) -> KeptT:
        return self._kept[key]

    def __iter__(self) -> Iterator[KeyT]:
        return iter(self._kept)

    def get(self, key: KeyT) -> KeptT | None:
        """Return what is kept under a key."""
        return self._kept.get(key)

    def values(self) -> list[KeptT]:
        """Return all that is kept now."""
        return list(self._kept.values())

    def grant(self, key: KeyT, kept: KeptT, end: float) -> None:
        """Keep something under a new key until ``end``."""
        self._kept[key], self._ends[key] = kept, end

    def renew(self, key: KeyT, end: float) -> None:
        """Set another end of a lease that is granted."""
        self._ends[key] = end

    def extend(self, key: KeyT, end: float) -> None:
        """Do the same unless it ends later already."""
        self._ends[key] = max(self._ends[key], end)

    def end(self, key: KeyT) -> KeptT | None:
        """End a lease; return what was kept, None if there is none of this key."""
        self._ends.pop(key, None)
        return self._kept.pop(key, None)

    def expired(self, now: float) -> list[KeyT]:
        """Return the leases whose time is over; the caller ends them."""
        return [key for key, end in self._ends.items() if end <= now]

    @property
    def next_end(self) -> float | None:
        """When the first of them will end, None without any."""
        return min(self._ends.values(), default=None)


def lease_seconds(milliseconds: int) -> float:
    """Return how long a lease lasts that a peer asks for."""
    return min(milliseconds / 1000, MOST_LEASE_SECONDS)
