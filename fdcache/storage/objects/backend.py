"""What the connector needs of a place with objects, and the failures of its calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

ROOT = "fdcache"
"""First part of every object's name."""

LAYOUT = "layout.json"
"""Last part of the name of an object with the JSON text of a layout, beside the ranks' objects."""

Buffer = bytes | memoryview
"""Bytes that were read."""


class ObjectMissingError(Exception):
    """There is no object of this name."""


class ObjectExistsError(Exception):
    """There is an object of this name already."""


class DamagedObjectError(Exception):
    """An object cannot be read, or its page is not one of this layout, or its checksum is wrong. Others are sound."""


class StoreFailedError(Exception):
    """The store does not answer, or refuses. The message contains no secret.

    ``read_only``: it may still be read. ``no_room``: it has no room for a new object.
    """

    def __init__(self, message: str, *, read_only: bool = False, no_room: bool = False) -> None:
        super().__init__(message)
        self.read_only = read_only or no_room
        self.no_room = no_room


@dataclass(frozen=True, slots=True)
class Stored:
    """An object in a listing: its bytes, and when it was stored or last marked as used, in seconds."""

    name: str
    size: int
    used_at: float


class ObjectBackend(Protocol):
    """A bucket or a folder. Calls block, and come from several threads.

    They raise ``ObjectMissingError``, ``ObjectExistsError``, ``DamagedObjectError`` and ``StoreFailedError``, and
    nothing else.
    """

    @property
    def place(self) -> str:
        """The bucket or folder, without secrets."""

    def read(self, name: str, offset: int, length: int) -> Buffer:
        """Return bytes of an object, fewer where it ends before; they hold until this thread reads again."""

    def create(self, name: str, content: NDArray[np.uint8]) -> None:
        """Store a new object as a whole, or nothing. Raises ``ObjectExistsError`` for a name that is taken."""

    def replace(self, name: str, content: NDArray[np.uint8]) -> None:
        """Store an object as a whole in place of another."""

    def mark_used(self, names: Iterable[str]) -> None:
        """Record that objects were used just now, in this order; missing ones are ignored."""

    def stored(self, prefix: str) -> Iterator[Stored]:
        """Yield the objects whose names begin with the folder ``prefix``."""

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; missing ones are ignored."""

    def close(self) -> None:
        """Release all resources."""
