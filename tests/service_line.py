"""Bare connection to a service: requests that no engine would send, and their answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fdcache._core import SharedRuns
from fdcache.service.client.connection import Connection
from fdcache.service.wire.liveness import LiveFile
from fdcache.service.wire.protocol import Refused, Register, Registered, Request
from fdcache.service.wire.shared_memory import open_runs, open_table
from tests.service_engine import layout
from tests.service_help import TIMEOUT, LocalService

Line = tuple[LocalService, Connection]


def code(connection: Connection, body: Request) -> str:
    number = connection.send(body)
    while (got := connection.receive(TIMEOUT)) is not None:
        if got[0] == number:
            return got[1].code if isinstance(got[1], Refused) else "done"
    return "silence"


def register(connection: Connection, directory: Path) -> LiveFile:
    live = LiveFile(directory)
    answer, _ = connection.call(Register(layout().to_json().encode(), live.live, "test"), TIMEOUT)
    assert isinstance(answer, Registered)
    connection.session = answer.session
    return live


def runs_of(line: Line) -> SharedRuns:
    """Return what the client of a connection sees and pins in shared memory."""
    service, connection = line
    client = service.service.clients[connection.session]
    geometry = client.namespace.geometry
    return open_runs(open_table(Path(geometry.table_path), geometry.table_bytes), client.ring_path)


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def numbers(*values: int) -> bytes:
    return np.array(values, np.int64).tobytes()
