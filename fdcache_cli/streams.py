"""Standard streams of a command, which may be closed, full, or unable to encode every character."""

from __future__ import annotations

import io
import os
import sys

from fdcache_cli.errors import OutputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def prepare() -> None:
    """Open /dev/null in place of closed streams, and let standard output raise ``OutputError``.

    No file that is opened later gets the number of a standard stream.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False))
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False))
    elif sys.stdout is sys.__stdout__:
        sys.stdout = _checked(sys.stdout)
    else:
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


class _Output(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"standard output cannot be written: {error.strerror}") from None


def _checked(stream: Any) -> io.TextIOWrapper:
    raw = _Output(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
