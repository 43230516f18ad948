"""BlockNotes: descriptions of blocks for a service that tells routers of them."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from fdcache.metadata import HashArray, Int32Array
from fdcache.service.client.session import Session
from fdcache.service.client.session_keeper import SessionKeeper
from fdcache.service.wire.protocol import Describe, DeviceBlocks
from fdcache.tiers.host import PathNote
from fdcache.tiers.pool import EventKinds

MOST_REMEMBERED = 1 << 17
"""Blocks that are known to be described; what is forgotten is described again."""
_MOST_BLOCKS = 1024
_MOST_TOKENS = 1 << 18
"""Of one message."""
_MOST_EVENTS = 4096


class BlockNotes:
    """Descriptions of the blocks of this process. They are queued before the blocks are stored."""

    def __init__(self, sessions: SessionKeeper) -> None:
        self._sessions = sessions
        self._session: Session | None = None
        self._device_session: Session | None = None
        self._described: OrderedDict[bytes, None] = OrderedDict()

    @property
    def is_wanted(self) -> bool:
        """True while there is a service that tells routers of its blocks."""
        session = self._sessions.session
        return session is not None and session.wants_notes

    @property
    def has_device(self) -> bool:
        """True if this session was told of the device's blocks."""
        return self._device_session is self._sessions.session

    def tell_device(self, kinds: EventKinds, hashes: HashArray) -> None:
        """Tell which blocks came to and left the device, in order; a session is told of all first."""
        session = self._device_session = self._sessions.session
        if session is None:
            return
        for start in range(0, len(kinds), _MOST_EVENTS):
            some = slice(start, start + _MOST_EVENTS)
            body = DeviceBlocks(kinds[some].tobytes(), hashes[some].tobytes())
            self._sessions.outbox.add(session, body)

    def describe(self, hashes: HashArray, tokens: Int32Array, note: PathNote) -> None:
        """Describe the blocks of one path that this session has not described: those at its end."""
        session = self._sessions.session
        if session is not self._session:
            self._session = session
            self._described.clear()
        if session is None or not len(hashes):
            return
        stop = len(hashes)
        first = stop
        while first and hashes[first - 1].tobytes() not in self._described:
            first -= 1
        if first == stop:
            return
        size = session.block_size
        step = max(min(_MOST_BLOCKS, _MOST_TOKENS // size), 1)
        for start in range(first, stop, step):
            end = min(start + step, stop)
            begin, last = start * size, end * size
            body = Describe(
                parent=hashes[start - 1].tobytes() if start else b"",
                hashes=hashes[start:end].tobytes(),
                tokens=np.ascontiguousarray(tokens[begin:last], np.int32).tobytes(),
                tenant=note.tenant,
                adapter=note.adapter,
                items=[
                    (offset - begin, length, name)
                    for offset, length, name in note.items
                    if offset < last and offset + length > begin
                ],
            )
            self._sessions.outbox.add(session, body)
        self._described.update((row.tobytes(), None) for row in hashes[first:])
        while len(self._described) > MOST_REMEMBERED:
            self._described.popitem(last=False)
