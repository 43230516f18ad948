"""How messages travel between a service and its clients: msgspec types in msgpack, versioned, limited in size.

A request is the array [version, session, id, body], an answer or a notice [version, id, body]; a notice answers
nothing and has id 0.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from fdcache.errors import ProtocolError
from fdcache.metadata import HashArray, Int32Array, UInt32Array, UInt64Array
from fdcache.service.wire.protocol import MAX_BLOCKS, Answer, Request

VERSION = 1
MAX_FRAME = 8 << 20
"""Most bytes of a message."""


class RequestFrame(msgspec.Struct, frozen=True, array_like=True):
    """A request as it travels; the body is decoded once the version is known."""

    version: int
    session: int
    id: int
    body: msgspec.Raw


class AnswerFrame(msgspec.Struct, frozen=True, array_like=True):
    """An answer or a notice as it travels."""

    version: int
    id: int
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_request_frame = msgspec.msgpack.Decoder(RequestFrame)
_answer_frame = msgspec.msgpack.Decoder(AnswerFrame)
_request = msgspec.msgpack.Decoder(Request)
_answer = msgspec.msgpack.Decoder(Answer)


def encode_request(session: int, number: int, body: Request) -> bytes:
    """Pack a request."""
    return _encoder.encode((VERSION, session, number, body))


def encode_answer(number: int, body: Answer) -> bytes:
    """Pack an answer, or with number 0 a notice."""
    return _encoder.encode((VERSION, number, body))


def decode_request_frame(data: bytes) -> RequestFrame:
    """Unpack the outside of a request. Raises ``ProtocolError``."""
    try:
        return _request_frame.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"not a request: {error}") from error


def decode_request(frame: RequestFrame) -> Request:
    """Unpack the body of a request. Raises ``ProtocolError`` for another version or a malformed body."""
    if frame.version != VERSION:
        raise ProtocolError(
            f"version {frame.version} is not {VERSION}, which is spoken here; upgrade one side"
        )
    try:
        request: Request = _request.decode(frame.body)
        return request
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed request: {error}") from error


def decode_answer(data: bytes) -> tuple[int, Answer]:
    """Unpack an answer: the number of its request, 0 for a notice. Raises ``ProtocolError``."""
    try:
        frame = _answer_frame.decode(data)
        if frame.version != VERSION:
            raise ProtocolError(
                f"the service speaks version {frame.version}, not {VERSION}; upgrade one side"
            )
        return frame.id, _answer.decode(frame.body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"malformed answer: {error}") from error


def hashes_from(data: bytes, field: str = "hashes") -> HashArray:
    """Hashes, shape (n, 32). Raises ``ProtocolError`` naming the field."""
    if len(data) % 32 or len(data) > 32 * MAX_BLOCKS:
        raise ProtocolError(f"{field}: {len(data)} bytes are not up to {MAX_BLOCKS} hashes of 32 bytes")
    return np.frombuffer(data, np.uint8).reshape(-1, 32)


def int32_from(data: bytes, field: str, count: int | None = None) -> Int32Array:
    """An int32 array. Raises ``ProtocolError`` naming the field."""
    return _array(data, field, np.dtype("<i4"), count)


def int64_from(data: bytes, field: str, count: int | None = None) -> NDArray[np.int64]:
    """An int64 array. Raises ``ProtocolError`` naming the field."""
    return _array(data, field, np.dtype("<i8"), count)


def uint32_from(data: bytes, field: str, count: int | None = None) -> UInt32Array:
    """An uint32 array. Raises ``ProtocolError`` naming the field."""
    return _array(data, field, np.dtype("<u4"), count)


def uint64_from(data: bytes, field: str, count: int | None = None) -> UInt64Array:
    """An uint64 array. Raises ``ProtocolError`` naming the field."""
    return _array(data, field, np.dtype("<u8"), count)


def uint8_from(data: bytes, field: str, count: int | None = None) -> NDArray[np.uint8]:
    """Bytes. Raises ``ProtocolError`` naming the field."""
    return _array(data, field, np.dtype("u1"), count)


def _array(data: bytes, field: str, dtype: np.dtype, count: int | None) -> NDArray:  # type: ignore[type-arg]
    if len(data) % dtype.itemsize or len(data) > dtype.itemsize * MAX_BLOCKS:
        raise ProtocolError(f"{field}: {len(data)} bytes are not up to {MAX_BLOCKS} items")
    if count is not None and len(data) != count * dtype.itemsize:
        raise ProtocolError(f"{field}: {len(data) // dtype.itemsize} items where {count} are needed")
    return np.frombuffer(data, dtype)
