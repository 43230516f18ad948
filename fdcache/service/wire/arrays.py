"""Arrays in the fields of messages: hashes and numbers, little-endian, limited in size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fdcache.errors import ProtocolError
from fdcache.metadata import HashArray, Int32Array, UInt32Array, UInt64Array
from fdcache.service.wire.protocol import MAX_BLOCKS


def hashes_from(data: bytes, field: str = "hashes") -> HashArray:
    """Return a field's hashes, shape (n, 32). Raises ``ProtocolError`` naming the field."""
    if len(data) % 32 or len(data) > 32 * MAX_BLOCKS:
        raise ProtocolError(f"{field}: {len(data)} bytes are not up to {MAX_BLOCKS} hashes of 32 bytes")
    return np.frombuffer(data, np.uint8).reshape(-1, 32)


def int32_from(data: bytes, field: str, count: int | None = None) -> Int32Array:
    """Return a field as int32, ``count`` items if given. Raises ``ProtocolError`` naming the field."""
    return _array(data, field, np.dtype("<i4"), count)


def int64_from(data: bytes, field: str, count: int | None = None) -> NDArray[np.int64]:
    """Return a field as int64, ``count`` items if given. Raises ``ProtocolError`` naming the field."""
    return _array(data, field, np.dtype("<i8"), count)


def uint32_from(data: bytes, field: str, count: int | None = None) -> UInt32Array:
    """Return a field as uint32, ``count`` items if given. Raises ``ProtocolError`` naming the field."""
    return _array(data, field, np.dtype("<u4"), count)


def uint64_from(data: bytes, field: str, count: int | None = None) -> UInt64Array:
    """Return a field as uint64, ``count`` items if given. Raises ``ProtocolError`` naming the field."""
    return _array(data, field, np.dtype("<u8"), count)


def uint8_from(data: bytes, field: str, count: int | None = None) -> NDArray[np.uint8]:
    """Return a field as uint8, ``count`` items if given. Raises ``ProtocolError`` naming the field."""
    return _array(data, field, np.dtype("u1"), count)


def _array(data: bytes, field: str, dtype: np.dtype, count: int | None) -> NDArray:  # type: ignore[type-arg]
    if len(data) % dtype.itemsize or len(data) > dtype.itemsize * MAX_BLOCKS:
        raise ProtocolError(f"{field}: {len(data)} bytes are not up to {MAX_BLOCKS} items")
    if count is not None and len(data) != count * dtype.itemsize:
        raise ProtocolError(f"{field}: {len(data) // dtype.itemsize} items where {count} are needed")
    return np.frombuffer(data, dtype)
