"""The fingerprint of a layout: what keeps the keys of unequal models and layouts apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdcache.layout import KVLayout

FINGERPRINT_TAG = b"fdcache.layout.1"


def layout_fingerprint(layout: KVLayout) -> bytes:
    """SHA-256 (32 bytes) over the canonical encoding of a layout that docs/format.md writes down."""
    return hashlib.sha256(b"".join(_canonical(layout))).digest()


def _canonical(layout: KVLayout) -> Iterator[bytes]:
    def number(value: int) -> bytes:
        return value.to_bytes(8, "little")

    def text(value: str) -> bytes:
        data = value.encode()
        return number(len(data)) + data

    yield FINGERPRINT_TAG
    yield text(layout.model) + text(layout.revision)
    for value in (
        layout.block_size,
        layout.num_layers,
        layout.num_draft_layers,
        layout.tp_size,
        layout.group,
        layout.record_bytes,
        len(layout.planes),
    ):
        yield number(value)
    for plane in layout.planes:
        yield number(plane.layer) + text(plane.kind.value) + text(plane.dtype)
        yield number(len(plane.shape)) + b"".join(map(number, plane.shape))
        yield number(plane.nbytes) + number(plane.offset)
