"""The fingerprint of a layout: what keeps the keys of unequal models and layouts apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from fdcache.planes import Plane

FINGERPRINT_TAG = b"fdcache.layout.1"


def layout_fingerprint(model: str, revision: str, figures: Sequence[int], planes: Sequence[Plane]) -> bytes:
    """SHA-256 (32 bytes) over the canonical encoding of a layout that docs/format.md writes down.

    ``figures``: block size, layers, draft layers, TP size, group, record bytes.
    """
    return hashlib.sha256(b"".join(_canonical(model, revision, figures, planes))).digest()


def _canonical(model: str, revision: str, figures: Sequence[int], planes: Sequence[Plane]) -> Iterator[bytes]:
    def number(value: int) -> bytes:
        return value.to_bytes(8, "little")

    def text(value: str) -> bytes:
        data = value.encode()
        return number(len(data)) + data

    yield FINGERPRINT_TAG
    yield text(model) + text(revision)
    yield from map(number, (*figures, len(planes)))
    for plane in planes:
        yield number(plane.layer) + text(plane.kind.value) + text(plane.dtype)
        yield number(len(plane.shape)) + b"".join(map(number, plane.shape))
        yield number(plane.nbytes) + number(plane.offset)
