"""Bare connection to a service: requests that no engine would send, and their answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fdcache.service.client.connection import Connection
from fdcache.service.wire.liveness import LiveFile
from fdcache.service.wire.protocol import Refused, Register, Registered, Request
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


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()
