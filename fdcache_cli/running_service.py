"""A running service's settings, and which of them its options took away from an environment."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fdcache.errors import FdcacheError, ProtocolError
from fdcache.service.wire.address import default_address, socket_path
from fdcache.settings import Settings, Source
from fdcache.settings.effective import EffectiveValue

if TYPE_CHECKING:
    from fdcache.service.client.connection import Client

_SECONDS = 0.25
"""What a service gets that nobody asked for by name."""


@dataclass(frozen=True, slots=True)
class RunningService:
    """What a service says of itself."""

    address: str
    version: str
    pid: int
    fingerprint: str
    settings: Mapping[str, EffectiveValue]

    def overrides(self, environment: Mapping[str, EffectiveValue]) -> dict[str, EffectiveValue]:
        """The settings that an option of the service made another than in ``environment``.

        Its address is left out: two ways to write it lead to the same socket.
        """
        return {
            name: theirs
            for name, theirs in self.settings.items()
            if theirs.source is Source.ARGUMENT
            and name != "FDCACHE_SERVER"
            and name in environment
            and theirs.text != environment[name].text
        }


class _Answer(msgspec.Struct):
    version: str
    pid: int
    fingerprint: str
    settings: dict[str, EffectiveValue]


def ask_service(client: Client) -> RunningService:
    """Ask a service for its settings. Raises ``ServiceError`` or ``ProtocolError``."""
    try:
        told = msgspec.convert(client.ask("config"), _Answer)
    except msgspec.ValidationError as error:
        raise ProtocolError(
            f"{client.address}: the service there tells its settings in another form ({error}); "
            "use the fdcache command of its version"
        ) from error
    return RunningService(client.address, told.version, told.pid, told.fingerprint, told.settings)


def find_service(settings: Settings) -> RunningService | None:
    """The service at the address that ``settings`` name, if one answers at once; without a socket nothing is tried."""
    address = settings.cache.server or default_address(settings.server.runtime_dir)
    try:
        if not is_served(address):
            return None
        from fdcache.service.client.connection import Client  # loaded where there is somebody to talk to

        with Client(address, timeout=_SECONDS) as client:
            return ask_service(client)
    except FdcacheError:
        return None  # whoever wants to know why asks for it with --server


def is_served(address: str) -> bool:
    """Whether a process listens there that this user may speak to. Raises ``ConfigurationError`` for no address."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.setblocking(False)
        # One that is asked by very many at the moment says so, without delay.
        return line.connect_ex(str(socket_path(address))) in (0, errno.EAGAIN)
