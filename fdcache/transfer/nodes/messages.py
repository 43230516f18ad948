"""Messages between nodes: msgpack, after the number of the request. Records follow their headers as frames."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np

from fdcache.errors import ProtocolError
from fdcache.metadata import HashArray

MOST_HASHES = 4096
"""Blocks of one question."""
MOST_READ = 8 << 20
"""Bytes of records in one answer; one record is sent in any case."""

Hashes = Annotated[bytes, msgspec.Meta(max_length=32 * MOST_HASHES)]
Fingerprint = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class AskHeld(msgspec.Struct, tag="ask", frozen=True):
    """Which of these blocks does the node have?

    With a ``lease``, a number of the reader's own, the node holds those records of ``rank`` that it has for
    ``lease_ms`` after this message and each ``ReadRecords`` under it, or until the ``EndLease``.
    """

    layout: Fingerprint
    hashes: Hashes
    lease: int = 0
    lease_ms: Annotated[int, msgspec.Meta(ge=0)] = 0
    rank: int = 0


class ReadRecords(msgspec.Struct, tag="read", frozen=True):
    """Send a rank's records of these blocks."""

    layout: Fingerprint
    rank: int
    hashes: Hashes
    lease: int = 0


class EndLease(msgspec.Struct, tag="end", frozen=True):
    """Hold nothing any more for this lease. There is no answer."""

    lease: int


class Held(msgspec.Struct, tag="held", frozen=True):
    """Bits of the blocks that the node has, for each rank of which it has records."""

    ranks: dict[int, Annotated[bytes, msgspec.Meta(max_length=MOST_HASHES // 8)]]


class Records(msgspec.Struct, tag="records", frozen=True):
    """The header of each leading block that was asked for, empty for one that is not there.

    A frame with the record follows for each that is. Blocks beyond the size of an answer have none: ask again.
    """

    headers: Annotated[
        list[Annotated[bytes, msgspec.Meta(max_length=128)]], msgspec.Meta(max_length=MOST_HASHES)
    ]


Request = AskHeld | ReadRecords | EndLease
Answer = Held | Records

_REQUESTS = msgspec.msgpack.Decoder(Request)
_ANSWERS = msgspec.msgpack.Decoder(Answer)
encode = msgspec.msgpack.encode


def decode_request(data: bytes) -> Request:
    """Read a request. Raises ``ProtocolError``."""
    request: Request = _checked(_REQUESTS, data)
    return request


def decode_answer(data: bytes) -> Answer:
    """Read an answer. Raises ``ProtocolError``."""
    answer: Answer = _checked(_ANSWERS, data)
    return answer


def _checked(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
    try:
        message = decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a message between nodes: {error}") from error
    if len(getattr(message, "hashes", b"")) % 32:
        raise ProtocolError("a message between nodes: hashes have 32 bytes each")
    return message


def rows(hashes: bytes) -> list[bytes]:
    """Return each hash of a message."""
    return [hashes[first : first + 32] for first in range(0, len(hashes), 32)]


def packed(mask: np.ndarray) -> bytes:
    """Return the bits of a mask."""
    return np.packbits(mask).tobytes()


def unpacked(bits: bytes, hashes: HashArray) -> np.ndarray:
    """Return the mask of these blocks; those that the bits are too short for are not there."""
    mask = np.zeros(len(hashes), np.bool_)
    known = np.unpackbits(np.frombuffer(bits, np.uint8))[: len(hashes)]
    mask[: len(known)] = known
    return mask
