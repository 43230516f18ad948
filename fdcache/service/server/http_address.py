"""Addresses of the HTTP interface: their numbers, and who can reach them."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from typing import Any

from fdcache.errors import ConfigurationError


def is_loopback_number(text: str) -> bool:
    """Return True for the number of an address that only this machine reaches."""
    try:
        return ip_address(text).is_loopback
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches a host, whatever its name looks like.

    Raises ``ConfigurationError`` for a name that has no address.
    """
    return all(is_loopback_number(number) for number in numbers_of(host))


def numbers_of(host: str) -> list[str]:
    """Return the numbers of a host's addresses. Raises ``ConfigurationError`` if it has none."""
    try:
        found: list[Any] = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"FDCACHE_HTTP_ADDRESS: {host} has no address: {error}; use 127.0.0.1"
        ) from error
    return [str(address[0]) for *_, address in found]


def require_keys(host: str, keys: object) -> None:
    """Raise ``ConfigurationError`` for a host that other machines reach, unless there are ``keys``."""
    if not keys and not is_loopback(host):
        raise ConfigurationError(
            f"FDCACHE_HTTP_ADDRESS: {host} is reachable from other machines; set FD_API_KEY, or use 127.0.0.1"
        )
