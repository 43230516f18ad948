"""Block hashes: extra keys, forms of tokens, which blocks have a hash."""

import gc
import sys
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fdcache.errors import HashingError
from fdcache.hashing import (
    MultimodalItem,
    TokenBlocks,
    hash_blocks,
    make_extra_keys,
    root_hash,
)

ROOT = root_hash(bytes(range(32)))


def item(offset: int, length: int, name: str = "h") -> MultimodalItem:
    return MultimodalItem(offset, length, name)


def keys_of_block(
    items: list[MultimodalItem] | None, start: int, end: int, index: int
) -> tuple[int, list[str | bytes]]:
    """Return where to search next, and the keys of the items that overlap the tokens [start, end) of a block."""
    index, found = make_extra_keys(None, items or []).block_items(start, end, index)
    return index, [(items or [])[position].hash for position in found]


PLACES = [(4, 1), (5, 1), (6, 2)]
EXAMPLE = [item(2, 3, "h0"), item(8, 4, "h1"), item(14, 2, "h2")]


@pytest.mark.parametrize(
    ("items", "start", "end", "mm_idx", "expected"),
    [
        pytest.param(None, 0, 4, 0, (0, []), id="no multimodal data"),
        pytest.param([], 0, 4, 3, (3, []), id="empty list keeps the index"),
        pytest.param([item(0, 4)], 4, 8, 0, (0, []), id="last item ends at start: fast exit"),
        pytest.param([item(0, 2, "a"), item(2, 2, "b")], 8, 12, 1, (1, []), id="fast exit keeps the index"),
        pytest.param(
            [item(0, 4, "a"), item(5, 9, "b")], 4, 8, 0, (1, ["b"]), id="ending at start is skipped"
        ),
        pytest.param([item(0, 5, "a"), item(20, 1, "b")], 4, 8, 0, (1, ["a"]), id="ending past start is in"),
        pytest.param([item(8, 2)], 4, 8, 0, (0, []), id="starting at end stops at this index"),
        pytest.param(
            [item(4, 1, "a"), item(9, 2, "b")], 4, 8, 0, (1, ["a"]), id="starting past end stops there"
        ),
        pytest.param([item(7, 2)], 4, 8, 0, (0, ["h"]), id="crossing the end returns this index"),
        pytest.param(
            [item(4, 2, "a"), item(7, 9, "b"), item(16, 1, "c")], 4, 8, 0, (1, ["a", "b"]), id="several keys"
        ),
        pytest.param(
            [item(4, 4, "a"), item(8, 4, "b")], 4, 8, 0, (1, ["a"]), id="ending at end is inside: continue"
        ),
        pytest.param([item(4, 4)], 4, 8, 0, (0, ["h"]), id="exhausted list returns its last index"),
        pytest.param(
            [item(0, 1, "a"), item(4, 4, "b")], 4, 8, 0, (1, ["b"]), id="exhausted, never the list's length"
        ),
        pytest.param([item(0, 99)], 40, 44, 0, (0, ["h"]), id="an item over many blocks is in each"),
    ],
)
def test_extra_key_boundaries(
    items: list[MultimodalItem] | None, start: int, end: int, mm_idx: int, expected: tuple[int, list[str]]
) -> None:
    assert keys_of_block(items, start, end, mm_idx) == expected


def test_extra_keys_of_the_worked_example() -> None:
    found, index = [], 0
    for start in range(0, 16, 4):
        index, keys = keys_of_block(EXAMPLE, start, start + 4, index)
        found.append((index, keys))
    assert found == [(0, ["h0"]), (1, ["h0"]), (2, ["h1"]), (2, ["h2"])]


def differing_blocks(**options: Any) -> list[int]:
    tokens = list(range(16))
    plain, other = hash_blocks(tokens, 4, parent=ROOT), hash_blocks(tokens, 4, parent=ROOT, **options)
    return [i for i in range(4) if plain[i].tobytes() != other[i].tobytes()]


def test_item_changes_the_hashes_from_its_first_block_on() -> None:
    assert differing_blocks(multimodal=[item(9, 1)]) == [2, 3]
    assert differing_blocks(multimodal=[item(15, 1)]) == [3]
    assert differing_blocks(multimodal=[item(16, 4)]) == []


def test_adapter_changes_all_hashes() -> None:
    assert differing_blocks(adapter_id="lora") == [0, 1, 2, 3]
    assert differing_blocks(adapter_id="") == [0, 1, 2, 3]


def test_tenant_and_fingerprint_change_the_root() -> None:
    fingerprint = bytes(range(32))
    roots = {
        root_hash(fingerprint),
        root_hash(fingerprint, ""),
        root_hash(fingerprint, "a"),
        root_hash(fingerprint, "b"),
        root_hash(bytes(32), "a"),
    }
    assert len(roots) == 5
    assert root_hash(fingerprint, "a") == root_hash(fingerprint, "a")


def test_hash_depends_on_the_position_of_an_item() -> None:
    tokens = [7] * 4
    variants = [[(0, 2), (2, 2)], [(0, 1), (1, 3)], [(0, 1), (1, 2)], [(0, 1), (2, 2)]]
    hashes = {
        hash_blocks(
            tokens, 4, parent=ROOT, multimodal=[item(*place, str(i)) for i, place in enumerate(places)]
        ).tobytes()
        for places in variants
    }
    assert len(hashes) == len(variants)


def test_text_and_bytes_keys_differ() -> None:
    text, data = MultimodalItem(0, 1, "ab"), MultimodalItem(0, 1, b"ab")
    assert (
        hash_blocks([1], 1, parent=ROOT, multimodal=[text]).tobytes()
        != hash_blocks([1], 1, parent=ROOT, multimodal=[data]).tobytes()
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hash_blocks([1], 0, parent=ROOT), "block_size must be at least 1"),
        (lambda: hash_blocks([1], 2**31, parent=ROOT), r"below 2\*\*31"),
        (lambda: hash_blocks([1], 4, parent=ROOT[:31]), "parent must have 32 bytes, got 31"),
        (
            lambda: hash_blocks([1], 4, parent=ROOT, start=6),
            r"multiple of block_size 4 .*, got 6",
        ),
        (lambda: hash_blocks([1], 4, parent=ROOT, start=-4), "start must be"),
        (lambda: hash_blocks([1], 4, parent=ROOT, start=2**62), r"start must be .* below 2\*\*62"),
        (lambda: hash_blocks([1], 4, parent=ROOT, lookahead=-1), "lookahead must be at least 0"),
        (lambda: TokenBlocks(4, ROOT, lookahead=2**31), r"lookahead must be .* below 2\*\*31"),
        (lambda: TokenBlocks(4, b""), "root must have 32 bytes, got 0"),
        (lambda: TokenBlocks(-1, ROOT), "block_size must be at least 1"),
        (lambda: root_hash(b"short"), "fingerprint must have 32 bytes, got 5"),
        (lambda: root_hash(ROOT, "\udc80"), "tenant must be text that UTF-8 can encode"),
        (lambda: root_hash(ROOT, 3), "tenant must be text, got 3"),  # type: ignore[arg-type]
        (lambda: TokenBlocks(4, ROOT, adapter_id=b"x"), "adapter_id must be text"),  # type: ignore[arg-type]
        (lambda: TokenBlocks(4, ROOT, multimodal=[(0, 1, "h")]), "hold MultimodalItem"),  # type: ignore[list-item]
        (
            lambda: TokenBlocks(4, ROOT, multimodal=EXAMPLE[::-1]),
            r"multimodal\[1\]: offset 8 must be at least",
        ),
        (lambda: TokenBlocks(4, ROOT, multimodal=[item(0, 3), item(2, 2)]), "without overlap"),
        (lambda: item(-1, 1), "multimodal offset must be an int of at least 0"),
        (lambda: item(0, 0), "multimodal length must be an int of at least 1"),
        (lambda: item(0, 1, ""), "multimodal hash must be non-empty"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(HashingError, match=message):
        call()


def test_only_full_blocks_have_a_hash() -> None:
    assert hash_blocks([1, 2, 3], 4, parent=ROOT).shape == (0, 32)
    assert hash_blocks([], 4, parent=ROOT).shape == (0, 32)
    blocks = TokenBlocks(4, ROOT)
    assert blocks.hashes.shape == (0, 32)
    assert blocks.tokens.shape == (0,)
    for count in range(1, 13):
        blocks.append(count)
        assert (blocks.num_tokens, blocks.num_blocks) == (count, count // 4)
        assert blocks.hashes.shape == (count // 4, 32)
    assert len(blocks) == 12
    assert blocks.block_size == 4


def test_lookahead_block_has_a_hash_once_the_tokens_after_it_exist() -> None:
    blocks = TokenBlocks(4, ROOT, lookahead=2)
    for count in range(1, 15):
        blocks.append(count)
        assert blocks.num_blocks == max(count - 2, 0) // 4
    assert hash_blocks(range(1, 6), 4, parent=ROOT, lookahead=2).shape == (0, 32)


def test_hash_depends_on_the_lookahead() -> None:
    hashes = {hash_blocks([0] * 8, 4, parent=ROOT, lookahead=ahead)[0].tobytes() for ahead in range(5)}
    assert len(hashes) == 5


def test_item_in_the_lookahead_is_part_of_the_hash() -> None:
    images = [item(*place, name) for place, name in zip(PLACES, "abc", strict=True)]
    tokens = [7] * 10
    seen = hash_blocks(tokens, 4, parent=ROOT, multimodal=images, lookahead=2)
    for position, blocks in enumerate([[0, 1], [0, 1], [1]]):
        changed = [*images[:position], item(*PLACES[position], "other"), *images[position + 1 :]]
        other = hash_blocks(tokens, 4, parent=ROOT, multimodal=changed, lookahead=2)
        assert [i for i in range(2) if (seen[i] != other[i]).any()] == blocks
    # Each of the items is in the second block's own entries, not only in its parent's hash.
    alone = hash_blocks(tokens[4:], 4, parent=seen[0].tobytes(), start=4, multimodal=images, lookahead=2)
    assert (alone[0] == seen[1]).all()


def test_views_stay_valid_while_the_request_grows_and_after_it() -> None:
    blocks = TokenBlocks(4, ROOT)
    snapshots = []
    for first in range(0, 4000, 40):
        blocks.append(list(range(first, first + 40)))
        snapshots.append((blocks.hashes, blocks.tokens))
    expected = hash_blocks(range(4000), 4, parent=ROOT)
    del blocks
    gc.collect()
    for number, (hashes, tokens) in enumerate(snapshots, start=1):
        assert np.array_equal(hashes, expected[: number * 10])
        assert tokens.tolist() == list(range(number * 40))
        with pytest.raises(ValueError, match="read-only"):
            hashes[0, 0] = 0
        with pytest.raises(ValueError, match="read-only"):
            tokens[0] = 0


TOKENS = [5, -1, 0, 2**31 - 1, -(2**31), 150_000, 1, 2]


@pytest.mark.parametrize(
    "convert",
    [
        tuple,
        lambda tokens: np.array(tokens, np.int32),
        lambda tokens: np.array(tokens, np.int64),
        lambda tokens: np.repeat(np.array(tokens, np.int32), 3)[::3],
        lambda tokens: np.array(tokens[::-1], np.int64)[::-1],
        lambda tokens: array("i", tokens),
        lambda tokens: array("q", tokens),
        lambda tokens: memoryview(array("l", tokens)),
        lambda tokens: [np.int64(token) for token in tokens],
        lambda tokens: [np.int16(tokens[0]), *tokens[1:]],
    ],
    ids=[
        "tuple",
        "int32",
        "int64",
        "strided",
        "reversed",
        "array i",
        "array q",
        "view",
        "numpy ints",
        "mixed",
    ],
)
def test_hash_does_not_depend_on_the_form_of_tokens(convert: Callable[[list[int]], Any]) -> None:
    expected = hash_blocks(TOKENS, 4, parent=ROOT)
    assert np.array_equal(hash_blocks(convert(TOKENS), 4, parent=ROOT), expected)
    blocks = TokenBlocks(4, ROOT)
    blocks.append(convert(TOKENS))
    assert np.array_equal(blocks.hashes, expected)
    assert blocks.tokens.tolist() == TOKENS


BAD_TOKENS = [
    pytest.param([1, 2**31], r"tokens\[1\] is 2147483648: a token must fit a 32-bit", id="too large"),
    pytest.param([0, 0, -(2**31) - 1], r"tokens\[2\] is -2147483649", id="too small"),
    pytest.param([2**80], r"tokens\[0\] is 1208925819614629174706176", id="huge"),
    pytest.param(np.array([3, 2**40]), r"tokens\[1\] is 1099511627776", id="int64 array"),
    pytest.param(array("q", [2**31]), r"tokens\[0\] is 2147483648", id="array"),
    pytest.param([1, np.int64(2**33)], r"tokens\[1\] is 8589934592", id="numpy int"),
    pytest.param([1, 2, "3"], r"tokens\[2\] is '3': a token must be an integer", id="text element"),
    pytest.param([1.0], r"tokens\[0\] is 1.0: a token must be an integer", id="float element"),
    pytest.param([True], r"tokens\[0\] is True: a token must be an integer", id="bool element"),
    pytest.param([None], r"tokens\[0\] is None", id="None element"),
    pytest.param([[1, 2]], r"tokens\[0\] is \[1, 2\]", id="nested"),
    pytest.param(np.zeros(3), "int32 or int64 array, got 1 dimensions of format 'd'", id="float array"),
    pytest.param(np.zeros((2, 2), np.int32), "got 2 dimensions of format 'i'", id="two dimensions"),
    pytest.param(np.zeros(3, np.uint32), "format 'I'", id="unsigned"),
    pytest.param(np.zeros(3, ">i4"), "format '>i'", id="big-endian"),
    pytest.param(np.zeros(3, bool), "format '?'", id="bool array"),
    pytest.param(b"abcd", "format 'B'", id="bytes"),
    pytest.param("abcd", "sequence of int, got str", id="text"),
    pytest.param({1, 2}, "sequence of int, got set", id="set"),
    pytest.param(None, "sequence of int, got NoneType", id="None"),
]


@pytest.mark.parametrize(("tokens", "message"), BAD_TOKENS)
def test_bad_tokens_are_named_and_change_nothing(tokens: Any, message: str) -> None:
    with pytest.raises(HashingError, match=message):
        hash_blocks(tokens, 2, parent=ROOT)
    blocks = TokenBlocks(2, ROOT)
    blocks.append([1, 2, 3])
    before = blocks.hashes.tobytes()
    with pytest.raises(HashingError, match=message):
        blocks.append(tokens)
    assert blocks.tokens.tolist() == [1, 2, 3]
    assert blocks.hashes.tobytes() == before
    blocks.append(4)
    assert np.array_equal(blocks.hashes, hash_blocks([1, 2, 3, 4], 2, parent=ROOT))


def test_error_of_an_element_is_raised() -> None:
    class Broken:
        def __index__(self) -> int:
            raise RuntimeError("broken index")

    tokens: Any = [1, Broken()]
    with pytest.raises(RuntimeError, match="broken index"):
        hash_blocks(tokens, 2, parent=ROOT)


def test_elements_that_change_the_tokens_while_read_are_refused() -> None:
    blocks = TokenBlocks(2, ROOT)

    class Appending:
        def __index__(self) -> int:
            blocks.append(list(range(10_000)))
            return 1

    class Clearing:
        def __index__(self) -> int:
            shrinking.clear()
            return 1

    appending: Any = [1, Appending(), 3]
    shrinking: Any = [1, Clearing(), 3]
    with pytest.raises(HashingError, match="appended while others were read"):
        blocks.append(appending)
    assert blocks.num_tokens == 10_000
    assert np.array_equal(blocks.hashes, hash_blocks(range(10_000), 2, parent=ROOT))
    with pytest.raises(HashingError, match="were removed while they were read"):
        hash_blocks(shrinking, 2, parent=ROOT)


def test_reading_tokens_leaks_no_reference() -> None:
    token, tokens = 123_456_789, array("q", [1, 2, 3])
    values = [token] * 100
    before = sys.getrefcount(token), sys.getrefcount(values)
    for _ in range(50):
        hash_blocks(values, 4, parent=ROOT)
        TokenBlocks(4, ROOT).append(values)
        hash_blocks(tokens, 4, parent=ROOT)
    assert (sys.getrefcount(token), sys.getrefcount(values)) == before
    tokens.append(4)  # raises BufferError while anything still looks at the array
