"""The encoding of a layout that its fingerprint is taken of, written down in docs/format.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fdcache.groups import CacheGroup, Reach
from fdcache.layout_planes import Plane

_FINGERPRINT_TAG = b"fdcache.layout.1"


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _text(value: str) -> bytes:
    data = value.encode()
    return _number(len(data)) + data


def encoded(
    names: Sequence[str],
    block_size: int,
    numbers: Sequence[int],
    planes: Sequence[Plane],
    groups: Sequence[CacheGroup],
) -> Iterator[bytes]:
    """Yield the encoding of these fields, in parts."""
    yield _FINGERPRINT_TAG
    yield from map(_text, names)
    yield from map(_number, (block_size, *numbers, len(planes)))
    for plane in planes:
        yield _number(plane.layer) + _text(plane.kind.value) + _text(plane.dtype)
        yield _number(len(plane.shape)) + b"".join(map(_number, plane.shape))
        yield _number(plane.nbytes) + _number(plane.offset)
    yield b"".join(_number(each.tokens if each.reach is Reach.LAST else 0) for each in groups)
    plain = (Reach.ALL, Reach.LAST)
    if any(each.block_size != block_size or each.reach not in plain for each in groups):
        for each in groups:
            yield _text(each.reach.value) + _number(each.block_size) + _number(each.tokens)
    if any(each.rank is not None for each in groups):
        yield b"".join(_number(0 if each.rank is None else each.rank + 1) for each in groups)
