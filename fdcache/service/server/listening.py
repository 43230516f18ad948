"""Sockets that listen for the service before it is there: those of a supervisor, and of the first moment of its start.

A reader whose connection is refused waits, some longer each time; one that is accepted waits for the service alone. A
supervisor hands over sockets that outlive the service (``LISTEN_FDS`` and ``LISTEN_PID``, as systemd does); without one
``fdcache serve`` listens before it imports anything. So this module imports little.
"""

from __future__ import annotations

import os
import socket

TYPE_CHECKING = False  # importing typing takes time
if TYPE_CHECKING:
    from collections.abc import Mapping

_VARIABLES = ("FDCACHE_KV_EVENTS", "FDCACHE_KV_EVENTS_REPLAY")
_FIRST_DESCRIPTOR = 3
_ANY = ("*", "0.0.0.0", "::")
_BACKLOG = 100

_held: list[socket.socket] = []
"""Sockets of this process that nobody has taken."""

Place = tuple[str, int]


def begin(environ: Mapping[str, str]) -> None:
    """Hold the sockets of a supervisor, and listen at the addresses of the environment that it has none for.

    What cannot be listened at, or is no ``tcp`` address of IPv4 numbers, is left to whoever binds it later.
    """
    _held.extend(_handed_over(environ))
    for name in _VARIABLES:
        place = _place(environ.get(name, ""))
        if place is not None and "." in place[0] and not any(_listens_at(each, place) for each in _held):
            try:
                _held.append(socket.create_server(place, backlog=_BACKLOG))
            except OSError:
                continue


def take(address: str) -> int | None:
    """Return the descriptor of the socket that listens at an address, which is the caller's then; None without one."""
    place = _place(address)
    found = next((each for each in _held if place is not None and _listens_at(each, place)), None)
    if found is None:
        return None
    _held.remove(found)
    found.setblocking(False)
    return found.detach()


def drop() -> list[str]:
    """Close the sockets that nobody has taken; return where they listened."""
    places = [str(each.getsockname()) for each in _held]
    while _held:
        _held.pop().close()
    return places


def _handed_over(environ: Mapping[str, str]) -> list[socket.socket]:
    """Return the listening sockets of a supervisor, which children of this process do not get."""
    count = environ.get("LISTEN_FDS", "")
    if environ.get("LISTEN_PID") != str(os.getpid()) or not count.isdecimal():
        return []
    found = []
    for descriptor in range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + int(count)):
        try:
            os.set_inheritable(descriptor, False)
            found.append(socket.socket(fileno=descriptor))
        except OSError:  # no socket
            continue
    return found


def _place(address: str) -> Place | None:
    """Return host and port of a ZeroMQ address of TCP, by numbers; None for any other."""
    transport, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if transport != "tcp" or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        return None
    host = "0.0.0.0" if host == "*" else host.strip("[]")
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return host, int(port)
    return None


def _listens_at(one: socket.socket, place: Place) -> bool:
    if one.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    host, port = one.getsockname()[:2]
    return port == place[1] and (host == place[0] or (host in _ANY and place[0] in _ANY))
