"""Commands run on a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

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
    """Press Ctrl-C once a command asks ``question`` and waits; return its status and the terminal's content."""
    process, ours = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-m", "fdcache_cli.main", *arguments])
    seen, pressed = b"", False
    try:
        while True:
            if select.select([ours], [], [], 0.1)[0]:
                seen += os.read(ours, 65536)
            elif not pressed and question.encode() in seen and _sleeps(process):
                pressed = os.write(ours, b"\x03") == 1
    except OSError:  # Linux reports the end of a terminal as EIO
        os.close(ours)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), seen.decode()


def _sleeps(process: int) -> bool:
    """Return True for a process that waits. Of a signal that comes just before, Python knows when it has an answer."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].startswith("S")


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
