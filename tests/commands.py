"""Commands run in this process, as ``fdcache`` runs them: arguments and environment in, status and output out."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from fdcache_cli.main import run

Done = subprocess.CompletedProcess[str]


def fdcache(*arguments: object, **environ: str) -> Done:
    """Run a command with nothing in its environment but ``environ``."""
    return run_command(arguments, environ)


def run_command(arguments: tuple[object, ...], environ: Mapping[str, str]) -> Done:
    """Run a command; what it changes in this process is put back."""
    words = list(map(str, arguments))
    out, err = _stream("strict"), _stream("backslashreplace")
    logger, format_warning, status = logging.getLogger("fdcache"), warnings.formatwarning, 0
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    try:
        with (
            mock.patch.dict(os.environ, environ, clear=True),
            mock.patch.object(sys, "argv", ["fdcache", *words]),
            mock.patch.object(sys, "stdin", io.StringIO()),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            run()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        warnings.formatwarning = format_warning
        for handler in set(logger.handlers) - set(handlers):
            handler.close()
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
    return subprocess.CompletedProcess(words, status, _text(out), _text(err))


def everything(done: Done) -> str:
    """Return all output of a command."""
    return done.stdout + done.stderr


def _stream(errors: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors, write_through=True)


def _text(stream: io.TextIOWrapper) -> str:
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode()


FDCACHE = str(Path(sys.executable).with_name("fdcache"))
"""The command as it is installed, for tests that need a process of its own."""
