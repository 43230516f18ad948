"""Format of a slab file, as in docs/format-storage.md: superblock, layout, slot headers, records."""

from __future__ import annotations

import hashlib
import os
import re
import struct
import time
from dataclasses import dataclass, replace
from pathlib import Path

from fdcache.errors import LayoutError, StorageError, StorageFormatError
from fdcache.layout import KVLayout
from fdcache.metadata import SLOT_HEADER_BYTES

MAGIC = b"FDCSLAB\x00"
VERSION = 1
PAGE = 4096
SUFFIX = ".slab"

_NAME = re.compile(rf"fdcache-[0-9a-f]{{16}}-rank\d+{re.escape(SUFFIX)}")
_FIELDS = struct.Struct("<8sIIIIIIQQQQQQQ32s32s")
_COPIES = 2
_SPARE_SLOTS = 4
"""Room for slot headers in a new file, as a multiple of its slots; the file can grow this much later."""


@dataclass(frozen=True, slots=True)
class Superblock:
    """Description of a slab file, stored in it. Offsets and sizes are in bytes; ``sequence`` counts versions."""

    rank: int
    num_ranks: int
    slots: int
    header_capacity: int
    record_bytes: int
    layout_offset: int
    layout_bytes: int
    header_offset: int
    record_offset: int
    created_ms: int
    sequence: int
    fingerprint: bytes
    layout_digest: bytes

    @classmethod
    def plan(cls, layout: KVLayout, rank: int, slots: int) -> Superblock:
        """Return the superblock of a new file."""
        text = layout.to_json().encode()
        layout_offset = _COPIES * PAGE
        header_offset = _page_up(layout_offset + len(text))
        capacity = slots * _SPARE_SLOTS
        return cls(
            rank=rank,
            num_ranks=layout.record_ranks,
            slots=slots,
            header_capacity=capacity,
            record_bytes=layout.record_bytes,
            layout_offset=layout_offset,
            layout_bytes=len(text),
            header_offset=header_offset,
            record_offset=_page_up(header_offset + capacity * SLOT_HEADER_BYTES),
            created_ms=time.time_ns() // 1_000_000,
            sequence=1,
            fingerprint=layout.fingerprint,
            layout_digest=hashlib.sha256(text).digest(),
        )

    @property
    def file_bytes(self) -> int:
        """Size of the file with all its slots."""
        return self.record_offset + self.slots * self.record_bytes

    def resized(self, slots: int) -> Superblock:
        """Return the next version, with another number of slots, at most ``header_capacity``."""
        return replace(self, slots=slots, sequence=self.sequence + 1)

    def pack(self) -> bytes:
        """Return the superblock as one page."""
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            self.rank,
            self.num_ranks,
            self.slots,
            self.header_capacity,
            0,
            self.record_bytes,
            self.layout_offset,
            self.layout_bytes,
            self.header_offset,
            self.record_offset,
            self.created_ms,
            self.sequence,
            self.fingerprint,
            self.layout_digest,
        )
        return (fields + hashlib.sha256(fields).digest()).ljust(PAGE, b"\0")

    def write(self, fd: int) -> None:
        """Write and sync this version; the previous one, on the other page, stays intact."""
        os.pwrite(fd, self.pack(), self.offset)
        os.fdatasync(fd)

    @property
    def offset(self) -> int:
        """Offset of this version in the file."""
        return self.sequence % _COPIES * PAGE


def _page_up(offset: int) -> int:
    return -(-offset // PAGE) * PAGE


def file_name(fingerprint: bytes, rank: int) -> str:
    """Return the name of a layout's and rank's file."""
    return f"fdcache-{fingerprint[:8].hex()}-rank{rank}{SUFFIX}"


def is_file_name(name: str) -> bool:
    """Return True for a name that ``file_name`` gives."""
    return _NAME.fullmatch(name) is not None


def has_magic(path: Path) -> bool:
    """Return True for a file with the magic of fdcache in at least one superblock. Raises ``StorageError``."""
    try:
        with path.open("rb") as file:
            return any(os.pread(file.fileno(), len(MAGIC), copy * PAGE) == MAGIC for copy in range(_COPIES))
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}; check its owner and mount") from error


def read_superblock(fd: int, path: Path) -> Superblock:
    """Return the newest intact superblock. Raises ``StorageFormatError`` when there is none."""
    pages = [os.pread(fd, PAGE, copy * PAGE) for copy in range(_COPIES)]
    found = [block for page in pages if (block := _unpack(page)) is not None]
    if found:
        return max(found, key=lambda block: block.sequence)
    marked = [page for page in pages if page.startswith(MAGIC)]
    if not marked:
        raise StorageFormatError(f"{path}: not a slab file of fdcache; use another folder or remove it")
    version = int.from_bytes(marked[0][len(MAGIC) : len(MAGIC) + 4], "little")
    if version != VERSION:
        raise StorageFormatError(
            f"{path}: written in format version {version}, this fdcache reads version {VERSION}; "
            "use another folder, or remove the file with the fdcache that wrote it"
        )
    raise StorageFormatError(f"{path}: both superblocks are damaged; `fdcache reset storage` removes it")


def _unpack(page: bytes) -> Superblock | None:
    if len(page) < _FIELDS.size:
        return None
    fields, digest = page[: _FIELDS.size], page[_FIELDS.size : _FIELDS.size + 32]
    if hashlib.sha256(fields).digest() != digest:
        return None
    magic, version, rank, ranks, slots, capacity, _, *rest = _FIELDS.unpack(fields)
    if (magic, version) != (MAGIC, VERSION):
        return None
    record, layout_at, layout_size, headers_at, records_at, created, sequence, fingerprint, layout = rest
    return Superblock(
        rank=rank,
        num_ranks=ranks,
        slots=slots,
        header_capacity=capacity,
        record_bytes=record,
        layout_offset=layout_at,
        layout_bytes=layout_size,
        header_offset=headers_at,
        record_offset=records_at,
        created_ms=created,
        sequence=sequence,
        fingerprint=fingerprint,
        layout_digest=layout,
    )


def read_layout(fd: int, superblock: Superblock, path: Path) -> KVLayout:
    """Return the layout that the file was made for. Raises ``StorageFormatError`` when it is damaged."""
    text = os.pread(fd, superblock.layout_bytes, superblock.layout_offset)
    if not _is_layout(text, superblock):
        raise StorageFormatError(f"{path}: its layout is damaged; `fdcache reset storage` removes it")
    try:
        return KVLayout.from_json(text)
    except LayoutError as error:
        raise StorageFormatError(f"{path}: its layout cannot be read by this version: {error}") from error


def _is_layout(text: bytes, superblock: Superblock) -> bool:
    return hashlib.sha256(text).digest() == superblock.layout_digest


def is_blank(fd: int) -> bool:
    """Return True for a file without a byte in its superblocks: new, or cut off there."""
    return not any(os.pread(fd, _COPIES * PAGE, 0))


def write_new(fd: int, path: Path, layout: KVLayout, superblock: Superblock) -> None:
    """Make a slab file of a blank one. The caller holds its lock. It stays blank until all else is on the disk."""
    os.ftruncate(fd, 0)
    os.ftruncate(fd, superblock.file_bytes)
    os.pwrite(fd, layout.to_json().encode(), superblock.layout_offset)
    os.fsync(fd)
    superblock.write(fd)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def restore_size(fd: int, layout: KVLayout, superblock: Superblock) -> None:
    """Give a file that was cut off its size and its layout again. Its lost slots are empty."""
    os.ftruncate(fd, superblock.file_bytes)
    text = layout.to_json().encode()
    stored = os.pread(fd, superblock.layout_bytes, superblock.layout_offset)
    if stored != text and _is_layout(text, superblock):
        os.pwrite(fd, text, superblock.layout_offset)


def check_fits(superblock: Superblock, layout: KVLayout, rank: int, path: Path) -> None:
    """Raise ``StorageFormatError`` for a file of another layout or rank."""
    if superblock.fingerprint != layout.fingerprint:
        raise StorageFormatError(
            f"{path}: made for another model or layout (fingerprint {superblock.fingerprint.hex()[:16]}, "
            f"not {layout.fingerprint.hex()[:16]}); the file was renamed: restore its name or remove it"
        )
    if (superblock.rank, superblock.num_ranks) != (rank, layout.record_ranks):
        raise StorageFormatError(
            f"{path}: made for rank {superblock.rank} of {superblock.num_ranks}, not {rank} of {layout.record_ranks}"
        )


def slots_for(size: int, layout: KVLayout) -> int:
    """Return the number of slots of a file of at most ``size`` bytes. Raises ``StorageError`` when none fits."""
    slot_bytes = layout.record_bytes + _SPARE_SLOTS * SLOT_HEADER_BYTES
    slots = (size - _max_overhead(layout)) // slot_bytes
    if slots < 1:
        raise StorageError(
            f"FDCACHE_STORAGE_SIZE: {size} bytes cannot hold one block of {layout.record_bytes} bytes; "
            f"set at least {_max_overhead(layout) + slot_bytes}"
        )
    return int(min(slots, (2**31 - 1) // _SPARE_SLOTS))


def _max_overhead(layout: KVLayout) -> int:
    """Bytes before the records, apart from slot headers: superblocks, layout, rounding."""
    return _COPIES * PAGE + _page_up(len(layout.to_json().encode())) + PAGE
