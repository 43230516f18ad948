"""Reads of files into memory that is used again."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from fdcache.storage.objects import files
from fdcache.storage.objects.files import read_file


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    made = np.random.default_rng(0).integers(0, 256, 5 << 20, np.uint8).tobytes()
    (tmp_path / "file").write_bytes(made)
    return made


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 10), (7, 1 << 20), (0, 5 << 20), (5 << 20, 4096), ((5 << 20) - 3, 4096), (9 << 20, 1)],
)
def test_what_the_range_has_is_read(tmp_path: Path, content: bytes, offset: int, length: int) -> None:
    assert bytes(read_file(tmp_path / "file", offset, length)) == content[offset : offset + length]


def test_memory_is_used_again_and_no_more_than_that_is_kept(tmp_path: Path, content: bytes) -> None:
    first = read_file(tmp_path / "file", 0, 1 << 20)
    second = read_file(tmp_path / "file", 1 << 20, 1 << 20)
    assert bytes(first) == bytes(second) == content[1 << 20 : 2 << 20]
    large = read_file(tmp_path / "file", 0, 5 << 20)
    assert len(large) == 5 << 20
    assert len(files._KEPT.memory) <= files._MOST_KEPT


def test_threads_have_memory_of_their_own(tmp_path: Path, content: bytes) -> None:
    mine = read_file(tmp_path / "file", 0, 4096)
    other = threading.Thread(target=read_file, args=(tmp_path / "file", 4096, 4096))
    other.start()
    other.join()
    assert bytes(mine) == content[:4096]


def test_a_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none", 0, 1)
