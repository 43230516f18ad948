"""Extents of a service's arena that a client maps and pins before it needs them."""

from __future__ import annotations

from pathlib import Path

from fdcache.devices.cpu import CpuDevice
from fdcache.service.client.ahead import ExtentsAhead
from fdcache.service.wire.shared_memory import Geometry
from tests.service_help import until

EXTENT = 1 << 16


def free_extent(folder: Path, name: str, nbytes: int) -> Path:
    path = folder / f"arena-free-{name}"
    with path.open("wb") as file:
        file.truncate(nbytes)
    return path


def test_a_file_that_is_not_whole_yet_does_not_end_the_pinning(tmp_path: Path) -> None:
    free_extent(tmp_path, "0", EXTENT // 2)
    whole = free_extent(tmp_path, "1", EXTENT)
    device = CpuDevice()
    ahead = ExtentsAhead(Geometry(str(tmp_path), "arena-1", 1, EXTENT, 4096, 4096), device)
    until(lambda: len(ahead) == 1, "the whole one is pinned")
    assert ahead.take(str(whole)) is not None
    whole.rename(tmp_path / "arena-1-r0-00000")
    later = free_extent(tmp_path, "2", EXTENT)
    ahead.look_again()
    until(lambda: len(ahead) == 1, "a later one is pinned, too")
    assert ahead.take(str(later)) is not None
    ahead.close()
