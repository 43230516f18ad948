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


def primes(count: int) -> list[int]:
    found: list[int] = []
    number = 2
    while len(found) < count:
        if all(number % prime for prime in found):
            found.append(number)
        number += 1
    return found


def fraction_bits(root: int, prime: int) -> int:
    """The first 32 bits of the fractional part of a prime's square or cube root."""
    low, high = 0, prime << 32
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**root <= prime << 32 * root else (low, middle)
    return low % 2**32


ROUND_CONSTANTS = [fraction_bits(3, prime) for prime in primes(64)]
INITIAL = [fraction_bits(2, prime) for prime in primes(8)]
MASK = 0xFFFFFFFF


def right(x: int, n: int) -> int:
    return (x >> n | x << 32 - n) & MASK


def sha256_compress(state: bytes, piece: bytes) -> bytes:
    """The compression function of FIPS 180-4, 6.2.2, on a state and a piece of 64 bytes."""
    words = list(struct.unpack(">16I", piece))
    for t in range(16, 64):
        s0 = right(words[t - 15], 7) ^ right(words[t - 15], 18) ^ words[t - 15] >> 3
        s1 = right(words[t - 2], 17) ^ right(words[t - 2], 19) ^ words[t - 2] >> 10
        words.append((words[t - 16] + s0 + words[t - 7] + s1) & MASK)
    before = struct.unpack(">8I", state)
    a, b, c, d, e, f, g, h = before
    for constant, word in zip(ROUND_CONSTANTS, words, strict=True):
        t1 = h + (right(e, 6) ^ right(e, 11) ^ right(e, 25)) + (e & f ^ ~e & MASK & g) + constant + word
        t2 = (right(a, 2) ^ right(a, 13) ^ right(a, 22)) + (a & b ^ a & c ^ b & c)
        a, b, c, d, e, f, g, h = (t1 + t2) & MASK, a, b, c, (d + t1) & MASK, e, f, g
    after = (a, b, c, d, e, f, g, h)
    return struct.pack(">8I", *((x + y) & MASK for x, y in zip(before, after, strict=True)))


PERMUTATION = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8]
MIXED = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
MIXED += [(0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)]


def blake3_compress(state: Sequence[int], piece: bytes, length: int, flags: int) -> list[int]:
    """The compression function of BLAKE3, section 2.2, with a counter of zero; the first eight words of its output."""
    words = list(struct.unpack("<16I", piece))
    v = [*state, *INITIAL[:4], 0, 0, length, flags]
    for _ in range(7):
        for i, (a, b, c, d) in enumerate(MIXED):
            for word, first, second in ((words[2 * i], 16, 12), (words[2 * i + 1], 8, 7)):
                v[a] = (v[a] + v[b] + word) & MASK
                v[d] = right(v[d] ^ v[a], first)
                v[c] = (v[c] + v[d]) & MASK
                v[b] = right(v[b] ^ v[c], second)
        words = [words[position] for position in PERMUTATION]
    return [v[i] ^ v[i + 8] for i in range(8)]


def oracle_digest(key: bytes, message: bytes) -> bytes:
    """BLAKE3's keyed hash of a message, as one chunk."""
    state = list(struct.unpack("<8I", key))
    for start in range(0, len(message), 64):
        piece = message[start : start + 64]
        flags = 16 | (1 if start == 0 else 0) | (2 | 8 if start + 64 >= len(message) else 0)
        state = blake3_compress(state, piece.ljust(64, b"\0"), len(piece), flags)
    return struct.pack("<8I", *state)


def oracle_root(fingerprint: bytes, tenant: str | None) -> bytes:
    salt = b"" if tenant is None else sized(tenant.encode())
    return oracle_digest(b"fdcache.root.v2".ljust(32, b"\0"), fingerprint + salt)


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
    keys = [b"fdcache.block.v2" + struct.pack("<II", block_size, part).ljust(16, b"\0") for part in range(3)]
    if adapter_id is not None:
        keys[0] = oracle_digest(keys[0], sized(adapter_id.encode()))
    half = (block_size + 1) // 2
    hashes = []
    for first in range(0, len(tokens) - block_size - lookahead + 1, block_size):
        begin, end = start + first, start + first + block_size
        following = tokens[first + block_size : first + block_size + lookahead]
        extra = b""
        for offset, length, key in items:
            if offset < end + lookahead and offset + length > begin:
                tag, data = (b"\x03", key.encode()) if isinstance(key, str) else (b"\x04", key)
                extra += tag + struct.pack("<qq", offset - begin, length) + sized(data)
        if lookahead:
            extra += b"\x05" + struct.pack(f"<I{lookahead}i", lookahead, *following)
        block = struct.pack(f"<{block_size}i", *tokens[first : first + block_size])
        one = oracle_digest(keys[0], block[: 4 * half])
        two = oracle_digest(keys[1], block[4 * half :].ljust(4 * half, b"\0"))
        if extra:
            two = oracle_digest(keys[2], two + extra)
        parent = sha256_compress(parent, one + two)
        hashes.append(parent)
    return hashes


def oracle_fingerprint(layout: dict[str, Any]) -> bytes:
    """The fingerprint of a layout given as its JSON object."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    data = b"fdcache.layout.1" + text(layout["model"]) + text(layout["revision"])
    layout = layout | {"records": layout["tp_size"] // layout.get("replicas", 1)}
    names = ("block_size", "num_layers", "num_draft_layers", "records", "group", "record_bytes")
    data += struct.pack("<6Q", *(layout[name] for name in names))
    data += struct.pack("<Q", len(layout["planes"]))
    for plane in layout["planes"]:
        data += struct.pack("<Q", plane["layer"]) + text(plane["kind"]) + text(plane["dtype"])
        data += struct.pack(f"<{1 + len(plane['shape'])}Q", len(plane["shape"]), *plane["shape"])
        data += struct.pack("<QQ", plane["nbytes"], plane["offset"])
    groups = layout.get("groups", [])
    for group in groups:
        data += struct.pack("<Q", group["tokens"] if group["reach"] == "last" else 0)
    plain = ("all", "last")
    if any(each["reach"] not in plain or each["block_size"] != layout["block_size"] for each in groups):
        for group in groups:
            data += text(group["reach"]) + struct.pack("<QQ", group["block_size"], group["tokens"])
    if any("rank" in group for group in groups):
        data += b"".join(struct.pack("<Q", group.get("rank", -1) + 1) for group in groups)
    return hashlib.sha256(data).digest()
