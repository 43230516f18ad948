"""The command line in this process: as ``fdcache ARGUMENTS`` without a terminal, without an interpreter's start."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from fdcache_cli.main import run


def command(*arguments: object) -> tuple[int, str]:
    """Run a command; return its exit status, and its standard output followed by its standard error."""
    output, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    status: object = 0
    with (
        mock.patch.object(sys, "argv", ["fdcache", *map(str, arguments)]),
        mock.patch.object(sys, "stdin", io.StringIO()),
        redirect_stdout(output),
        redirect_stderr(errors),
    ):
        try:
            run()
        except SystemExit as end:
            status = end.code or 0
    text = ""
    for stream in (output, errors):
        stream.flush()
        text += stream.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert isinstance(status, int), status
    return status, text
