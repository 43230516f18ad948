"""Small file systems, to fill up and to freeze; mounting them needs rights that a container may lack."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
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


@contextlib.contextmanager
def freezable(folder: Path, megabytes: int) -> Iterator[Path]:
    """Mount an ext4 file system of an image beside a new folder; skip where that is not allowed."""
    folder.mkdir()
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    made = (["mkfs.ext4", "-q", "-F", str(image)], ["mount", "-o", "loop", str(image), str(folder)])
    if not all(map(shutil.which, ("mkfs.ext4", "mount", "fsfreeze"))) or any(
        subprocess.run(command, capture_output=True, check=False).returncode for command in made
    ):
        pytest.skip("mounting an image of ext4 is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


@contextlib.contextmanager
def frozen(folder: Path, most_seconds: int) -> Iterator[None]:
    """Freeze a file system for ``most_seconds`` at most, until which its writers hang; fail if the work takes them."""
    thaw: list[str] = ["sh", "-c", 'sleep "$1"; fsfreeze -u "$2"', "sh", str(most_seconds), str(folder)]
    watch = subprocess.Popen(thaw, start_new_session=True)
    try:
        subprocess.run(["fsfreeze", "-f", str(folder)], check=True)
        yield
        assert watch.poll() is None, "it ended by itself"
    finally:
        subprocess.run(["fsfreeze", "-u", str(folder)], check=False, capture_output=True)
        os.killpg(watch.pid, signal.SIGKILL)
        watch.wait()
