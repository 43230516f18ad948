"""Addresses of a service, from its settings. Checks of a configuration need no more of the service than this."""

from __future__ import annotations

from dataclasses import dataclass

from fdcache.errors import ConfigurationError
from fdcache.service.server import http_address
from fdcache.service.wire.address import SCHEME, default_address, socket_path
from fdcache.settings import Settings, Source
from fdcache.settings.kinds import is_port


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses of a service; ``http`` is None when it is off."""

    address: str
    http: tuple[str, int] | None


def endpoints(settings: Settings, address: str | None = None) -> Endpoints:
    """Return the addresses in force. Raises ``ConfigurationError`` for one that cannot be served."""
    chosen = address or settings.cache.server or default_address(settings.server.runtime_dir)
    try:
        path = socket_path(chosen)
    except ConfigurationError as error:
        if address is None and settings.source("FDCACHE_SERVER") is Source.DEFAULT:
            raise ConfigurationError(f"FDCACHE_RUNTIME_DIR: {error}") from error
        raise
    http = parse_http(settings.server.http_address)
    require_keys(http, settings)
    return Endpoints(f"{SCHEME}{path}", http)


def require_keys(http: tuple[str, int] | None, settings: Settings) -> None:
    """Raise ``ConfigurationError`` for an address that other machines reach without an API key."""
    if http is not None:
        http_address.require_keys(http[0], settings.value("FD_API_KEY"))


def parse_http(text: str) -> tuple[str, int] | None:
    """Return host and port of HOST:PORT; None for off. Raises ``ConfigurationError``."""
    if text.lower() in {"off", "none"}:
        return None
    host, colon, port = text.rpartition(":")
    if not colon or not host or not is_port(port):
        raise ConfigurationError(
            f"FDCACHE_HTTP_ADDRESS: {text!r} is not HOST:PORT, such as 127.0.0.1:9470, or off"
        )
    return host.strip("[]"), int(port)
