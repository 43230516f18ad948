"""Settings of a running service, and those that its options override in an environment."""

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
"""Timeout for a service that was not named on the command line."""


@dataclass(frozen=True, slots=True)
class RunningService:
    """A running service and its settings."""

    address: str
    version: str
    pid: int
    fingerprint: str
    settings: Mapping[str, EffectiveValue]

    def overrides(self, environment: Mapping[str, EffectiveValue]) -> dict[str, EffectiveValue]:
        """Return the settings that an option of the service overrides in ``environment``.

        The address is left out, since it may be written in two ways.
        """
        return {
            name: theirs
            for name, theirs in self.settings.items()
            if theirs.source is Source.ARGUMENT
            and name != "FDCACHE_SERVER"
            and name in environment
            and theirs.text != environment[name].text
        }


def ask_service(client: Client) -> RunningService:
    """Ask a service for its settings. Raises ``ServiceError`` or ``ProtocolError``."""
    from fdcache.service.wire.views import ConfigView  # loads NumPy, as the client does

    try:
        found = msgspec.convert(client.ask("config"), ConfigView)
    except msgspec.ValidationError as error:
        raise ProtocolError(
            f"{client.address}: the settings of the service cannot be read ({error}); use the fdcache command of the "
            "service's version"
        ) from error
    return RunningService(client.address, found.version, found.pid, found.fingerprint, found.settings)


def find_service(settings: Settings) -> RunningService | None:
    """Return the service at the address of ``settings`` if one answers within 0.25 s, else None."""
    address = settings.cache.server or default_address(settings.server.runtime_dir)
    try:
        if not is_served(address):
            return None
        from fdcache.service.client.connection import Client  # loads ZeroMQ, which few commands need

        with Client(address, timeout=_SECONDS) as client:
            return ask_service(client)
    except FdcacheError:
        return None  # --server reports the reason


def is_served(address: str) -> bool:
    """Return True if a process of this user listens there. Raises ``ConfigurationError`` for an invalid address."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.setblocking(False)
        # A service with a full backlog answers EAGAIN at once.
        return line.connect_ex(str(socket_path(address))) in (0, errno.EAGAIN)
