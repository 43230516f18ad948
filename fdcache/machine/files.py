"""Files that a user keeps: written whole, or left as they are."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a file in place, which keeps its owner, its permissions and the links to it. Raises ``OSError``.

    Where the disk has no room the file is as before, and a new one is not made.
    """
    data, is_new = text.encode(), not path.exists()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb", closefd=True) as file:
        before = os.fstat(descriptor)
        is_regular = stat.S_ISREG(before.st_mode)  # a pipe and a terminal have no room to ask for
        if is_regular and data:
            try:
                os.posix_fallocate(descriptor, 0, len(data))
            except OSError:
                os.ftruncate(descriptor, before.st_size)
                if is_new:
                    path.unlink()
                raise
        file.write(data)
        if is_regular:
            file.truncate()
