"""BlockNotes: what a service's routers are told of the blocks of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fdcache._core import DescribedBlocks
from fdcache.service.client.session import MOST_BLOCKS, Session
from fdcache.service.client.session_keeper import SessionKeeper
from fdcache.service.wire.protocol import DescribedPath
from fdcache.tiers.host import PathNote
from fdcache.tiers.pool import EVENT_CLEARED

MOST_REMEMBERED = 1 << 17
"""Blocks that are known to be described; what is forgotten is described again."""
MOST_TOKENS = 1 << 18
"""Of a part of a path."""
_HASH_BYTES, _TOKEN_BYTES = 32, 4


class BlockNotes:
    """Descriptions of the blocks of this process. They are queued before the blocks are stored.

    A step queues them and goes on: they are sent before the next message, or within moments.
    """

    def __init__(self, sessions: SessionKeeper) -> None:
        self._sessions = sessions
        self._session: Session | None = None
        self._device_session: Session | None = None
        self._described = DescribedBlocks(MOST_REMEMBERED)

    @property
    def is_wanted(self) -> bool:
        """True while there is a service that tells routers of its blocks."""
        session = self._sessions.session
        return session is not None and session.wants_notes

    @property
    def has_device(self) -> bool:
        """True if this session was told of the device's blocks."""
        return self._device_session is self._sessions.session

    def tell_device(self, kinds: bytes, hashes: bytes) -> None:
        """Tell which blocks came to and left the device, in order; a session is told of all first.

        That begins with an empty device. A session that begins meanwhile is told nothing yet.
        """
        session = self._sessions.session
        if kinds[0] == EVENT_CLEARED:
            self._device_session = session
        if session is None or session is not self._device_session:
            return
        for start in range(0, len(kinds), MOST_BLOCKS):
            stop = start + MOST_BLOCKS
            part = (kinds[start:stop], hashes[_HASH_BYTES * start : _HASH_BYTES * stop])
            self._sessions.outbox.note(session, part)

    def on_session(self, tell: Callable[[], bool]) -> None:
        """Call ``tell`` in each new session until it returns True, so that an idle engine's device is known, too."""
        self._sessions.greet = tell

    def describe(self, requests: Sequence[Any]) -> None:
        """Describe the blocks of requests that are not described in this session: those at the end of each path."""
        session = self._sessions.session
        if session is None:
            return
        if session is not self._session or session.has_forgotten:
            self._session, session.has_forgotten = session, False
            self._described.clear()
        for position, first, parent, hashes, tokens in self._described.describe(requests):
            note = requests[position].note
            path = DescribedPath(hashes, tokens, parent, note.tenant, note.adapter)
            self._queue(session, first, path, note)

    def describe_path(self, hashes: bytes, tokens: bytes, parent: bytes, note: PathNote) -> None:
        """Describe blocks of a path, whether they were described before or not."""
        if (session := self._sessions.session) is not None:
            self._queue(session, 0, DescribedPath(hashes, tokens, parent, note.tenant, note.adapter), note)

    def _queue(self, session: Session, first: int, path: DescribedPath, note: PathNote) -> None:
        """Queue the blocks of a path from ``first`` on, in parts if they do not fit into a message."""
        hashes, tokens = path.hashes, path.tokens
        if note.items or len(hashes) > _HASH_BYTES * MOST_BLOCKS or len(tokens) > _TOKEN_BYTES * MOST_TOKENS:
            for part in _parts(session.block_size, first, path, note):
                self._sessions.outbox.note(session, part)
        else:
            self._sessions.outbox.note(session, path)


def _parts(size: int, first: int, path: DescribedPath, note: PathNote) -> list[DescribedPath]:
    """Return the blocks of a path, from ``first`` on, in parts of one message each."""
    step, made, parent = max(min(MOST_BLOCKS, MOST_TOKENS // size), 1), list[DescribedPath](), path.parent
    for start in range(0, len(path.hashes) // _HASH_BYTES, step):
        hashes = path.hashes[start * _HASH_BYTES : (start + step) * _HASH_BYTES]
        tokens = path.tokens[start * size * _TOKEN_BYTES : (start + step) * size * _TOKEN_BYTES]
        begin = (first + start) * size
        end = begin + len(tokens) // _TOKEN_BYTES
        items = [
            (offset - begin, length, name)
            for offset, length, name in note.items
            if offset < end and offset + length > begin
        ]
        made.append(DescribedPath(hashes, tokens, parent, note.tenant, note.adapter, items))
        parent = hashes[-_HASH_BYTES:]
    return made
