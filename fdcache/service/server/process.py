"""Process of ``fdcache serve``: sd_notify, signals and logging."""

from __future__ import annotations

import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from fdcache import tracing
from fdcache.machine.session import notify_socket
from fdcache.settings import Settings, logs
from fdcache.settings.server import LogFormat

log = logging.getLogger(__name__)


def notify(*states: str, timeout: float = 5.0) -> None:
    """Send states such as READY=1, STOPPING=1 and STATUS=text to the service manager, if there is one.

    A manager that does not read delays this by at most ``timeout`` seconds.
    """
    try:
        _send("\n".join(states), timeout)
    except OSError as error:
        log.warning("NOTIFY_SOCKET: %s", error)


def notify_status(text: str) -> None:
    """Send a status to the service manager, unless that would block: the next one follows soon."""
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


@contextmanager
def ended_by_signals(is_serving: Callable[[], bool], stop: Callable[[bool], None]) -> Iterator[None]:
    """Call ``stop(False)`` for the first SIGTERM or SIGINT, ``stop(True)`` for any further one. Main thread only.

    Before the process serves, a signal raises ``SystemExit`` or ``KeyboardInterrupt`` instead, so that ``finally``
    blocks remove what was made.
    """
    received = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if is_serving():
            stop(received > 1)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(0)

    former = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def raise_descriptor_limit() -> None:
    """Raise the limit of open files to the hard one: clients take several each, and ZeroMQ aborts without one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def configure(settings: Settings) -> None:
    """Log to standard error, and to a file by day where ``FD_LOG_DIR`` is set.

    Raises ``ConfigurationError`` when the file cannot be written, or spans cannot be recorded.
    """
    chosen = settings.server.log_format
    as_text = sys.stderr.isatty() if chosen is LogFormat.AUTO else chosen is LogFormat.TEXT
    logs.take_over(settings, "fdcache-serve", as_text=as_text)
    tracing.follow(settings.deployment.traces, "fdcache-serve")
