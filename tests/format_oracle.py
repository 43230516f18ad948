"""docs/format.md in plain Python, sharing no code with fdcache, and the test vectors in it."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FORMAT_PAGE = Path(__file__).parent.parent / "docs" / "format.md"

Item = tuple[int, int, str | bytes]


def doc_vectors(name: str) -> list[dict[str, Any]]:
    """The JSON list that follows ``<!-- vectors: name -->`` in docs/format.md."""
    pattern = rf"<!-- vectors: {name} -->\s*```json\n(.*?)```"
    match = re.search(pattern, FORMAT_PAGE.read_text(), re.DOTALL)
    assert match, f"docs/format.md has no vectors named {name}"
    vectors: list[dict[str, Any]] = json.loads(match[1])
    return vectors


def sized(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def oracle_root(fingerprint: bytes, tenant: str | None) -> bytes:
    salt = b"" if tenant is None else sized(tenant.encode())
    return hashlib.sha256(b"fdcache.root.v1\0" + fingerprint + salt + b"\x00").digest()


def oracle_hashes(
    tokens: Sequence[int],
    block_size: int,
    parent: bytes,
    *,
    start: int = 0,
    adapter_id: str | None = None,
    items: Sequence[Item] = (),
    lookahead: int = 0,
) -> list[bytes]:
    hashes = []
    for first in range(0, len(tokens) - block_size - lookahead + 1, block_size):
        begin, end = start + first, start + first + block_size
        following = tokens[first + block_size : first + block_size + lookahead]
        extra = b"" if adapter_id is None else b"\x02" + sized(adapter_id.encode())
        for offset, length, key in items:
            if offset < end + lookahead and offset + length > begin:
                tag, data = (b"\x03", key.encode()) if isinstance(key, str) else (b"\x04", key)
                extra += tag + struct.pack("<qq", offset - begin, length) + sized(data)
        if lookahead:
            extra += b"\x05" + struct.pack(f"<I{lookahead}i", lookahead, *following)
        message = struct.pack(f"<{block_size}i", *tokens[first : first + block_size])
        message += parent + extra + struct.pack("<I", block_size) + b"\x01"
        parent = hashlib.sha256(message).digest()
        hashes.append(parent)
    return hashes


def oracle_fingerprint(layout: dict[str, Any]) -> bytes:
    """The fingerprint of a layout given as its JSON object."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    data = b"fdcache.layout.1" + text(layout["model"]) + text(layout["revision"])
    names = ("block_size", "num_layers", "num_draft_layers", "tp_size", "group", "record_bytes")
    data += struct.pack("<6Q", *(layout[name] for name in names))
    data += struct.pack("<Q", len(layout["planes"]))
    for plane in layout["planes"]:
        data += struct.pack("<Q", plane["layer"]) + text(plane["kind"]) + text(plane["dtype"])
        data += struct.pack(f"<{1 + len(plane['shape'])}Q", len(plane["shape"]), *plane["shape"])
        data += struct.pack("<QQ", plane["nbytes"], plane["offset"])
    return hashlib.sha256(data).digest()
