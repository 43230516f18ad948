"""Small file systems in memory, to fill up; mounting them needs rights that a container may lack."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def mount(folder: Path, size: str) -> bool:
    if shutil.which("mount") is None:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "fdcache-test", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def unmount(folder: Path, *options: str) -> None:
    subprocess.run(["umount", *options, str(folder)], check=True, capture_output=True)


def file_system(folder: Path, size: str) -> Iterator[Path]:
    """Mount one in a new folder, for a fixture to yield from; skip where mounting is not allowed."""
    folder.mkdir()
    if not mount(folder, size):
        pytest.skip("mounting a tmpfs is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def fill_up(folder: Path) -> Path:
    """Write a file that leaves no room in the folder's file system; return it."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC
    return ballast
