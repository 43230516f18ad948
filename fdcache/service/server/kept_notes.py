"""KeptNotes: what clients say of blocks for routers, for as long as a tier has them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import msgspec

from fdcache.errors import ProtocolError
from fdcache.hashing import tenant_key
from fdcache.service.server.notes_file import NotesFile, Row
from fdcache.service.wire.arrays import hashes_from, int32_from
from fdcache.service.wire.protocol import DescribedPath

_SLACK = 65536
"""Notes of blocks that are in no tier, before they are dropped."""
_AT_ONCE = 4096
"""Notes that are looked at in one call."""
_LOOK_SECONDS, _REWRITE_SECONDS = 0.2, 5.0
"""Between two looks whether deleted blocks have left all tiers, and between two times that the file is written."""


class Note(msgspec.Struct, frozen=True, array_like=True):
    """A block: hash of the one before it, tokens in int32, and what else its hash covers."""

    parent: bytes
    tokens: bytes
    salt: str | None = None
    adapter: str | None = None
    items: list[tuple[str, int]] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Note).decode


class KeptNotes:
    """Notes of blocks by hash, and their file. ``are_gone`` says of each block whether no tier has it."""

    def __init__(
        self, block_size: int, file: NotesFile, are_gone: Callable[[list[bytes]], list[bool]]
    ) -> None:
        self._block_size = block_size
        self._file = file
        self._are_gone = are_gone
        self._notes: dict[bytes, bytes] = {}
        self._loading: Future[dict[bytes, bytes]] | None = file.load()
        self._to_sweep: list[bytes] = []
        self._tenants: set[bytes] = set()  # keys of those whose notes are to go
        self._deleted: deque[bytes] = deque()  # blocks whose notes are to go once they are in no tier
        self._is_deleting = False
        self._look_at = self._rewrite_at = 0.0
        self._must_rewrite = False
        self.has_forgotten = False
        """True if notes were dropped that clients have described, until they are told."""

    def __contains__(self, block: bytes) -> bool:
        return block in self._notes

    def of(self, block: bytes) -> Note | None:
        """Return the note of a block; None if it has none."""
        text = self._notes.get(block)
        return None if text is None else _decode(text)

    @property
    def is_loaded(self) -> bool:
        """True once the file has been read."""
        return self._loading is None

    def take_loaded(self) -> bool:
        """Take over what the file had; return True if that was read since the last call."""
        if self._loading is None or not self._loading.done():
            return False
        self._notes = self._loading.result() | self._notes
        self._loading = None
        return True

    def add(self, paths: Iterable[DescribedPath]) -> list[bytes]:
        """Keep what a client says of blocks; return those that had no note.

        Raises ``ProtocolError`` for fields that do not fit.
        """
        rows = [row for path in paths for row in self._rows_of(path)]
        self._notes.update(rows)
        self._file.add(rows)
        return [block for block, _ in rows]

    def _rows_of(self, path: DescribedPath) -> list[Row]:
        hashes, size = hashes_from(path.hashes), self._block_size
        int32_from(path.tokens, "tokens", size * len(hashes))
        if len(path.parent) not in (0, hashes.shape[1]):
            raise ProtocolError("parent: a hash has 32 bytes")
        parent, rows, step = path.parent, list[Row](), 4 * size
        for i in range(len(hashes)):
            block = path.hashes[32 * i : 32 * (i + 1)]
            if block not in self._notes:
                tokens = path.tokens[step * i : step * (i + 1)]
                items = _items_in(path, i * size, (i + 1) * size) if path.items else []
                rows.append((block, _encode(Note(parent, tokens, path.tenant, path.adapter, items))))
            parent = block
        return rows

    # --- deletion -----------------------------------------------------------------------------------------

    def forget_tenant(self, key: bytes) -> None:
        """Drop the notes of a tenant's blocks once they are in no tier, from the file too."""
        self._tenants.add(key)

    @contextmanager
    def deleting(self, blocks: Iterable[bytes]) -> Iterator[None]:
        """Drop the notes of these blocks, and of those ``removed`` meanwhile, once they are in no tier."""
        self._deleted.extend(blocks)
        self._is_deleting = True
        try:
            yield
        finally:
            self._is_deleting = False

    def removed(self, blocks: Iterable[bytes]) -> None:
        """Take that blocks have left a tier."""
        if self._is_deleting:
            self._deleted.extend(blocks)

    def tidy(self, resident: int) -> None:
        """Go on dropping notes of blocks that are in no tier; tiers have ``resident`` blocks.

        Those of tenants and prefixes that were deleted go soon, all others once the file has many rows too many.
        """
        if not self.is_loaded:
            return
        self._drop_deleted()
        if self._tenants and not self._to_sweep:
            self._to_sweep = list(self._notes)
        elif not self._to_sweep and self._file.rows > 2 * resident + _SLACK:
            self._to_sweep = list(self._notes)[: -_SLACK // 2]  # the newest are perhaps about to be stored
        if self._to_sweep:
            self._sweep()

    def _drop_deleted(self) -> None:
        now = time.monotonic()
        if self._deleted and now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            some = [self._deleted.popleft() for _ in range(min(len(self._deleted), _SLACK))]
            self._deleted.extend(self._drop(some))
        if self._must_rewrite and now >= self._rewrite_at:
            self._rewrite_at, self._must_rewrite = now + _REWRITE_SECONDS, False
            self._file.rewrite(list(self._notes.items()))

    def _sweep(self) -> None:
        some, self._to_sweep = self._to_sweep[-_AT_ONCE:], self._to_sweep[:-_AT_ONCE]
        if self._tenants:
            self._deleted.extend(self._drop([block for block in some if self._is_tenants(block)]))
        else:
            self._drop(some)
        if not self._to_sweep:
            self._tenants.clear()
            self._must_rewrite, self._rewrite_at = True, 0.0

    def _drop(self, blocks: list[bytes]) -> list[bytes]:
        """Drop the notes of those blocks that are in no tier; return the others."""
        if not blocks:
            return []
        kept = []
        for block, is_gone in zip(blocks, self._are_gone(blocks), strict=True):
            if not is_gone:
                kept.append(block)
            elif self._notes.pop(block, None) is not None:
                self.has_forgotten = self._must_rewrite = True
        return kept

    def _is_tenants(self, block: bytes) -> bool:
        note = self.of(block)
        return note is not None and note.salt is not None and tenant_key(note.salt) in self._tenants

    def close(self) -> None:
        """Write what waits."""
        if self._must_rewrite:
            self._file.rewrite(list(self._notes.items()))
        self._file.close()


def _items_in(message: DescribedPath, first: int, last: int) -> list[tuple[str, int]]:
    """Return the images and the like in a range of tokens, each with its offset there."""
    return [
        (name, offset - first)
        for offset, length, name in message.items
        if offset < last and offset + length > first
    ]
