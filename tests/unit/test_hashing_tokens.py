"""Which tokens are read, in which form, and what becomes of those that cannot be."""

import sys
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fdcache.errors import HashingError
from fdcache.hashing import TokenBlocks, hash_blocks, root_hash

ROOT = root_hash(bytes(range(32)))
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
def test_every_form_of_tokens_hashes_alike(convert: Callable[[list[int]], Any]) -> None:
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


def test_an_element_that_raises_reports_its_own_error() -> None:
    class Broken:
        def __index__(self) -> int:
            raise RuntimeError("broken index")

    tokens: Any = [1, Broken()]
    with pytest.raises(RuntimeError, match="broken index"):
        hash_blocks(tokens, 2, parent=ROOT)


def test_elements_that_change_what_is_read_are_refused() -> None:
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


def test_reading_tokens_leaves_no_reference_behind() -> None:
    token, tokens = 123_456_789, array("q", [1, 2, 3])
    values = [token] * 100
    before = sys.getrefcount(token), sys.getrefcount(values)
    for _ in range(50):
        hash_blocks(values, 4, parent=ROOT)
        TokenBlocks(4, ROOT).append(values)
        hash_blocks(tokens, 4, parent=ROOT)
    assert (sys.getrefcount(token), sys.getrefcount(values)) == before
    tokens.append(4)  # raises BufferError while anything still looks at the array
