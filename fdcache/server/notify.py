"""What a service manager hears of the service: the protocol of sd_notify."""

from __future__ import annotations

import logging
import socket

from fdcache.settings.machine import notify_socket

log = logging.getLogger("fdcache.server")


_TIMEOUT = 5.0


def notify(*states: str) -> None:
    """Tell the service manager, if there is one: READY=1, STOPPING=1, STATUS=text. Waits for it at most 5 s."""
    try:
        _send("\n".join(states), _TIMEOUT)
    except OSError as error:
        log.warning("NOTIFY_SOCKET: %s", error)


def notify_status(text: str) -> None:
    """Tell it what is going on, unless it is busy: there is more to tell soon."""
    try:
        _send(f"STATUS={text}", 0)
    except OSError as error:
        log.debug("NOTIFY_SOCKET: %s", error)


def _send(message: str, timeout: float) -> None:
    target = notify_socket()
    if not target:
        return
    address = "\0" + target[1:] if target.startswith("@") else target
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
        line.settimeout(timeout)
        line.sendto(message.encode(), address)
