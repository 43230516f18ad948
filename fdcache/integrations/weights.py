"""What names the weights of a local folder: what its files contain, not where and when they were written."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from fdcache.errors import ConfigurationError

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.tensors")
_SAMPLE_BYTES = 4096
_MOST_SAMPLES = 32_768
_SAMPLES_OF_TASK = 512
_THREADS = 16
_WHOLE_FILE = "*.json"  # configuration and index


class _File(NamedTuple):
    """A file of weights; size and time tell only whether it has changed since it was last read."""

    path: Path
    size: int
    time: int


def digest_of(path: Path) -> str | None:
    """Return a digest of weights in a local folder or file, None if there are none.

    It covers names, sizes, the whole of the JSON files and samples of the weights, evenly spread, of which there are
    at most 32,768 of 4 KiB in all. A copy has the same, and so has the same folder elsewhere. Raises
    ``ConfigurationError`` for files that cannot be read.
    """
    try:
        files = tuple(_files_of(path.expanduser()))
        return _digest(files) if files else None
    except OSError as error:
        raise ConfigurationError(
            f"the weights of {path} cannot be read: {error.strerror}; let this user read them"
        ) from error


def has_weights(path: Path) -> bool:
    """Return True for a local file, and for a folder with files of weights beside its configuration."""
    path = path.expanduser()
    return path.is_file() or any(True for pattern in _WEIGHTS for _ in path.glob(pattern))


def _files_of(path: Path) -> Iterator[_File]:
    found = [path]
    if path.is_dir():
        found = sorted(each for pattern in (*_WEIGHTS, _WHOLE_FILE) for each in path.glob(pattern))
    for each in found:
        if each.is_file():
            state = each.stat()
            yield _File(each, state.st_size, state.st_mtime_ns)


@functools.lru_cache(64)
def _digest(files: tuple[_File, ...]) -> str:
    total = sum(file.size for file in files)
    step = max(total // _MOST_SAMPLES, _SAMPLE_BYTES)
    tasks = [(file.path, part) for file in files for part in _parts(file, step)]
    digest = hashlib.sha256(repr([(file.path.name, file.size) for file in files]).encode())
    with ThreadPoolExecutor(_THREADS) as pool:
        for part in pool.map(_read, *zip(*tasks, strict=True)):
            digest.update(part)
    return digest.hexdigest()


def _parts(file: _File, step: int) -> Iterator[Sequence[int]]:
    """Yield the offsets of a file's samples in parts that are read beside each other."""
    is_whole = file.path.match(_WHOLE_FILE)
    offsets = iter(range(0, file.size, _SAMPLE_BYTES if is_whole else step))
    while part := list(islice(offsets, _SAMPLES_OF_TASK)):
        yield part
    if not is_whole and file.size > _SAMPLE_BYTES:
        yield [file.size - _SAMPLE_BYTES]


def _read(path: Path, offsets: Sequence[int]) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no page beside the samples is read
        for offset in offsets:
            digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, offset))
    return digest.digest()
