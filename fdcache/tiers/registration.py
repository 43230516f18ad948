"""The beginning of a session: a service hears who comes, and its table of what is there is mapped."""

from __future__ import annotations

import os
from pathlib import Path

from fdcache._core import OutgoingCopies
from fdcache.errors import ProtocolError, ServiceUnavailableError
from fdcache.layout import KVLayout
from fdcache.node.connection import Connection
from fdcache.node.presence import open_table
from fdcache.node.protocol import FetchTerms, Live, Register, Registered
from fdcache.tiers.session import Session

_TIMEOUT = 2.0


def register(line: Connection, layout: KVLayout, live: Live, terms: FetchTerms, *, events: bool) -> Session:
    """A new session, which ``line`` speaks in from now on. ``events``: it is told what comes and goes.

    Raises ``RefusedError``, ``ProtocolError``, and ``ServiceUnavailableError`` also when the service's memory cannot
    be seen from here.
    """
    line.session = 0
    answer, _ = line.call(
        Register(
            layout=layout.to_json().encode(),
            live=live,
            name=f"{layout.model}:{os.getpid()}",
            events=events,
            fetches=terms,
        ),
        _TIMEOUT,
    )
    if not isinstance(answer, Registered):
        raise ProtocolError(f"a registration was answered by {type(answer).__name__}")
    geometry = answer.geometry
    try:
        table = open_table(Path(geometry.table_path), geometry.table_bytes)
    except OSError as error:
        raise ServiceUnavailableError(
            f"{geometry.table_path}: {error}; this process needs the service's FDCACHE_ARENA_DIR"
        ) from error
    line.session = answer.session
    arena = f"{geometry.incarnation:x}/{answer.session:x}/{live.path}"
    return Session(answer.session, arena, answer.num_slots, OutgoingCopies(table), answer.storage)
