import hashlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdcache import _core
from fdcache.hashing import (
    MultimodalItem,
    TokenBlocks,
    hash_blocks,
    root_hash,
)
from fdcache.metadata import HashArray
from tests.format_oracle import (
    INITIAL,
    Item,
    doc_vectors,
    oracle_digest,
    oracle_hashes,
    oracle_root,
    sha256_compress,
)
from tests.unit.test_hashing import keys_of_block

BACKENDS = _core.hash_backends()

# The published test vectors of BLAKE3: keyed hashes of as many bytes of the pattern 0, 1, ..., 250, 0, 1, ...
BLAKE3_KEY = b"whats the Elvish word for friend"
BLAKE3 = {
    1: "6d7878dfff2f485635d39013278ae14f1454b8c0a3a2d34bc1ab38228a80c95b",
    2: "5392ddae0e0a69d5f40160462cbd9bd889375082ff224ac9c758802b7a6fd20a",
    8: "be2f5495c61cba1bb348a34948c004045e3bd4dae8f0fe82bf44d0da245a0600",
    63: "bb1eb5d4afa793c1ebdd9fb08def6c36d10096986ae0cfe148cd101170ce37ae",
    64: "ba8ced36f327700d213f120b1a207a3b8c04330528586f414d09f2f7d9ccb7e6",
    65: "c0a4edefa2d2accb9277c371ac12fcdbb52988a86edc54f0716e1591b4326e72",
    127: "c64200ae7dfaf35577ac5a9521c47863fb71514a3bcad18819218b818de85818",
    128: "b04fe15577457267ff3b6f3c947d93be581e7e3a4b018679125eaf86f6a628ec",
    129: "d4a64dae6cdccbac1e5287f54f17c5f985105457c1a2ec1878ebd4b57e20d38f",
    1023: "c951ecdf03288d0fcc96ee3413563d8a6d3589547f2c2fb36d9786470f1b9d6e",
    1024: "75c46f6f3d9eb4f55ecaaee480db732e6c2105546f1e675003687c31719c7ba4",
}

digests = st.binary(min_size=32, max_size=32)
token_ids = st.integers(-(2**31), 2**31 - 1)
block_sizes = st.one_of(st.integers(1, 40), st.sampled_from([16, 32, 48, 64, 128, 520]))
keys: st.SearchStrategy[str | bytes] = st.one_of(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=70), st.binary(min_size=1, max_size=40)
)
lookaheads = st.sampled_from([0, 0, 1, 2, 7, 30])
optional_names = st.none() | st.text(st.characters(codec="utf-8"), max_size=30)


@st.composite
def item_lists(draw: st.DrawFn) -> list[Item]:
    items: list[Item] = []
    end = 0
    for gap, length, key in draw(
        st.lists(st.tuples(st.integers(0, 20), st.integers(1, 60), keys), max_size=6)
    ):
        items.append((end + gap, length, key))
        end += gap + length
    return items


def as_items(items: list[Item]) -> list[MultimodalItem]:
    return [MultimodalItem(*item) for item in items]


def rows(hashes: HashArray) -> list[bytes]:
    return [row.tobytes() for row in hashes]


def test_portable_backend_is_always_last() -> None:
    assert BACKENDS[-1] == "portable"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("length", "expected"), BLAKE3.items())
def test_digests_equal_the_published_vectors(backend: str, length: int, expected: str) -> None:
    message = bytes(i % 251 for i in range(length))
    assert oracle_digest(BLAKE3_KEY, message).hex() == expected
    assert _core.keyed_digest(message, BLAKE3_KEY, backend).hex() == expected


@given(message=st.binary(min_size=1, max_size=400), repeat=st.integers(1, 9), key=digests)
def test_digests_equal_the_oracles(message: bytes, repeat: int, key: bytes) -> None:
    expected = oracle_digest(key, message * repeat)
    for backend in BACKENDS:
        assert _core.keyed_digest(message * repeat, key, backend) == expected, backend


@given(message=st.binary(max_size=300))
def test_the_oracles_compression_makes_sha256(message: bytes) -> None:
    padded = message + b"\x80" + bytes(-(len(message) + 9) % 64) + struct.pack(">Q", 8 * len(message))
    state = struct.pack(">8I", *INITIAL)
    for start in range(0, len(padded), 64):
        state = sha256_compress(state, padded[start : start + 64])
    assert state == hashlib.sha256(message).digest()


@pytest.mark.parametrize("vector", doc_vectors("hashes"), ids=lambda vector: vector["name"])
def test_documented_vectors(vector: dict[str, Any]) -> None:
    fingerprint, tenant, adapter_id = (
        bytes.fromhex(vector["fingerprint"]),
        vector["tenant"],
        vector["adapter_id"],
    )
    items: list[Item] = [
        (item["offset"], item["length"], item["text"] if "text" in item else bytes.fromhex(item["bytes"]))
        for item in vector["multimodal"]
    ]
    tokens, block_size = vector["tokens"], vector["block_size"]
    options: dict[str, Any] = {"adapter_id": adapter_id, "lookahead": vector.get("lookahead", 0)}
    root, expected = bytes.fromhex(vector["root"]), [bytes.fromhex(row) for row in vector["hashes"]]
    assert oracle_root(fingerprint, tenant) == root == root_hash(fingerprint, tenant)
    assert oracle_hashes(tokens, block_size, root, items=items, **options) == expected
    assert (
        rows(hash_blocks(tokens, block_size, parent=root, multimodal=as_items(items), **options)) == expected
    )


@given(fingerprint=digests, tenant=optional_names)
def test_roots_equal_the_oracles(fingerprint: bytes, tenant: str | None) -> None:
    assert root_hash(fingerprint, tenant) == oracle_root(fingerprint, tenant)


@given(
    tokens=st.lists(token_ids, max_size=20),
    repeat=st.integers(1, 60),
    block_size=block_sizes,
    parent=digests,
)
def test_hashes_without_extra_keys_equal_the_oracles(
    tokens: list[int], repeat: int, block_size: int, parent: bytes
) -> None:
    tokens = tokens * repeat
    none = _core.ExtraKeys(None, [])
    expected = oracle_hashes(tokens, block_size, parent)
    for backend in BACKENDS:
        hashes = _core.hash_blocks(tokens, block_size, parent, 0, none, 0, backend)
        assert rows(hashes) == expected, backend


@given(
    tokens=st.lists(token_ids, max_size=120),
    repeat=st.sampled_from([1, 1, 1, 9]),
    block_size=block_sizes,
    parent=digests,
    start_block=st.integers(0, 4),
    adapter_id=optional_names,
    items=item_lists(),
    lookahead=lookaheads,
)
def test_hashes_with_extra_keys_equal_the_oracles(
    *,
    tokens: list[int],
    repeat: int,
    block_size: int,
    parent: bytes,
    start_block: int,
    adapter_id: str | None,
    items: list[Item],
    lookahead: int,
) -> None:
    start = start_block * block_size
    shared: dict[str, Any] = {"start": start, "adapter_id": adapter_id, "lookahead": lookahead}
    tokens = tokens * repeat
    hashes = hash_blocks(tokens, block_size, parent=parent, multimodal=as_items(items), **shared)
    assert rows(hashes) == oracle_hashes(tokens, block_size, parent, items=items, **shared)
    texts = [
        (offset, length, key if isinstance(key, bytes) else key.encode(), isinstance(key, str))
        for offset, length, key in items
    ]
    extra = _core.ExtraKeys(None if adapter_id is None else adapter_id.encode(), texts)
    for backend in BACKENDS:
        same = _core.hash_blocks(tokens, block_size, parent, start, extra, lookahead, backend)
        assert np.array_equal(same, hashes), backend


@given(
    pieces=st.lists(st.lists(token_ids, max_size=50), max_size=8),
    block_size=block_sizes,
    root=digests,
    adapter_id=optional_names,
    items=item_lists(),
    as_array=st.booleans(),
    lookahead=lookaheads,
)
def test_hashes_do_not_depend_on_how_a_request_grows(
    *,
    pieces: list[list[int]],
    block_size: int,
    root: bytes,
    adapter_id: str | None,
    items: list[Item],
    as_array: bool,
    lookahead: int,
) -> None:
    extra: dict[str, Any] = {"adapter_id": adapter_id, "lookahead": lookahead}
    blocks = TokenBlocks(block_size, root, multimodal=as_items(items), **extra)
    tokens: list[int] = []
    for piece in pieces:
        if len(piece) == 1:
            blocks.append(piece[0])
        else:
            blocks.append(np.array(piece, np.int32) if as_array else piece)
        tokens += piece
        assert blocks.tokens.tolist() == tokens
        assert blocks.num_blocks == max(len(tokens) - lookahead, 0) // block_size
    assert rows(blocks.hashes) == oracle_hashes(tokens, block_size, root, items=items, **extra)


@given(
    tokens=st.lists(token_ids, min_size=8, max_size=200),
    block_size=st.integers(1, 20),
    root=digests,
    items=item_lists(),
    data=st.data(),
)
def test_hashing_continues_from_any_block(
    tokens: list[int], block_size: int, root: bytes, items: list[Item], data: st.DataObject
) -> None:
    whole = hash_blocks(tokens, block_size, parent=root, multimodal=as_items(items))
    done = data.draw(st.integers(0, len(whole)), label="blocks hashed before")
    parent = whole[done - 1].tobytes() if done else root
    start = done * block_size
    rest = hash_blocks(tokens[start:], block_size, parent=parent, start=start, multimodal=as_items(items))
    assert np.array_equal(rest, whole[done:])


@given(items=item_lists(), block_size=st.integers(1, 40), blocks=st.integers(1, 12))
def test_running_index_skips_no_item(items: list[Item], block_size: int, blocks: int) -> None:
    index = 0
    for start in range(0, blocks * block_size, block_size):
        end = start + block_size
        index, found = keys_of_block(as_items(items), start, end, index)
        assert found == [key for offset, length, key in items if offset < end and offset + length > start]
        assert 0 <= index < max(1, len(items))


@given(
    block_size=st.integers(1, 12),
    tokens=st.lists(st.integers(0, 3), min_size=24, max_size=24),
    position=st.integers(0, 23),
    lookahead=lookaheads,
)
def test_token_changes_its_block_and_all_after_it(
    block_size: int, tokens: list[int], position: int, lookahead: int
) -> None:
    other = tokens.copy()
    other[position] += 1
    before, after = (
        rows(hash_blocks(t, block_size, parent=bytes(32), lookahead=lookahead)) for t in (tokens, other)
    )
    changed = [a != b for a, b in zip(before, after, strict=True)]
    assert changed == [position < (i + 1) * block_size + lookahead for i in range(len(before))]
