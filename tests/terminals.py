"""Commands run on a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys

from tests.service_help import TIMEOUT


def on_terminal(*arguments: str, answer: str = "") -> tuple[int, str, str]:
    """Run a command with ``answer`` typed; return its status, the terminal's content and its standard output."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fdcache_cli.main", *arguments],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "300"},
    )
    os.close(theirs)
    os.write(ours, answer.encode())
    output, _ = process.communicate(timeout=TIMEOUT)
    seen = b""
    try:
        while chunk := os.read(ours, 65536):
            seen += chunk
    except OSError:  # Linux reports the end of a terminal as EIO
        os.close(ours)
    return process.returncode, seen.decode(), output


def interrupted_at_a_question(*arguments: str, question: str) -> tuple[int, str]:
    """Press Ctrl-C once a command asks ``question``; return its status and the terminal's content.

    It is pressed again while nothing comes: Python keeps a signal that comes just before it waits for an answer until
    there is one.
    """
    process, ours = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-m", "fdcache_cli.main", *arguments])
    seen = b""
    try:
        while True:
            if select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 65536)
            elif question.encode() in seen:
                os.write(ours, b"\x03")
    except OSError:  # Linux reports the end of a terminal as EIO
        os.close(ours)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), seen.decode()


def drawn(*arguments: str) -> str:
    """Return what a command draws on a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fdcache_cli.main", *arguments],
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "300"},
    )
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 65536):
            seen += chunk
    except OSError:
        os.close(ours)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, errors) == (0, "")
    return seen.decode()
