"""The 128-byte slot header."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from fdcache import _core


def header(**changes: object) -> _core.SlotHeader:
    fields: dict[str, object] = {
        "state": 2,
        "generation": 7,
        "block_hash": bytes(range(32)),
        "parent": bytes(range(32, 64)),
        "fingerprint": b"f" * 32,
        "payload_bytes": 4000,
        "payload_checksum": 0x0123456789ABCDEF,
    }
    return _core.SlotHeader(**(fields | changes))  # type: ignore[arg-type]


def test_survives_its_bytes() -> None:
    copy = _core.SlotHeader.from_bytes(header().to_bytes())
    assert copy.is_valid
    assert (copy.state, copy.generation, copy.version) == (2, 7, 2)
    assert (copy.hash, copy.parent) == (bytes(range(32)), bytes(range(32, 64)))
    assert copy.fingerprint == b"f" * 16
    assert (copy.payload_bytes, copy.payload_checksum) == (4000, 0x0123456789ABCDEF)


def test_lies_in_memory_as_documented() -> None:
    data = header().to_bytes()
    fields = struct.unpack("<4sHHIIQQ32s32s16sQQ", data)
    assert len(data) == 128
    assert fields[:5] == (b"FDSL", 2, 2, 7, 0)
    assert fields[5:7] == (4000, 0x0123456789ABCDEF)
    assert fields[7:10] == (bytes(range(32)), bytes(range(32, 64)), b"f" * 16)
    covered = np.frombuffer(data[:120], np.uint8)
    assert fields[10:] == (0, _core.record_checksum(covered, [0], [120]))


def test_any_flipped_bit_makes_it_invalid() -> None:
    data = header().to_bytes()
    for bit in range(8 * len(data)):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        assert not _core.SlotHeader.from_bytes(bytes(broken)).is_valid


def test_zeros_are_not_a_header() -> None:
    assert not _core.SlotHeader.from_bytes(bytes(128)).is_valid


def test_refuses_fields_of_the_wrong_size() -> None:
    with pytest.raises(ValueError, match="block_hash must have 32 bytes"):
        header(block_hash=b"short")
    with pytest.raises(ValueError, match="at least 16 bytes"):
        header(fingerprint=b"short")
    with pytest.raises(ValueError, match="128 bytes"):
        _core.SlotHeader.from_bytes(b"short")
