"""The record checksum against a plain reading of docs/format-record.md, and what it must notice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fdcache import _core

MASK = (1 << 64) - 1


def mix(word: int) -> int:
    word ^= word >> 32
    word = word * 0xD6E8FEB86659FD93 & MASK
    word ^= word >> 29
    word = word * 0xFF51AFD7ED558CCD & MASK
    return word ^ word >> 32


def reference(record: bytes, planes: list[tuple[int, int]]) -> int:
    total = payload = 0
    for offset, size in planes:
        data = record[offset : offset + size]
        payload += size
        for at in range(0, size, 8):
            word = int.from_bytes(data[at : at + 8], "little")
            position = (offset + at) // 8
            total += mix(word + 0x9E3779B97F4A7C15 * (position + 1) & MASK)
    return mix(total + 0xC4CEB9FE1A85EC53 * (payload + 1) & MASK)


def checksum(data: NDArray[np.uint8]) -> int:
    return _core.record_checksum(data, [0], [len(data)])


def words(values: list[int]) -> NDArray[np.uint8]:
    return np.array(values, np.uint64).view(np.uint8)


WORDS = st.lists(st.integers(0, MASK), min_size=2, max_size=40)


@pytest.mark.parametrize(
    "planes", [[(0, 1)], [(0, 8)], [(0, 37), (128, 8)], [(128, 1000), (2048, 7), (2176, 15)]]
)
def test_equals_the_written_definition(planes: list[tuple[int, int]]) -> None:
    record = np.random.default_rng(3).integers(0, 256, 4096, dtype=np.uint8)
    expected = reference(record.tobytes(), planes)
    assert _core.record_checksum(record, [p[0] for p in planes], [p[1] for p in planes]) == expected


def test_has_these_values() -> None:
    """Frozen: a record written by one version is read by the next."""
    assert checksum(np.zeros(8, np.uint8)) == 0x4BB1F5CAA74DCDC6
    assert checksum(np.arange(100, dtype=np.uint8)) == 0x1391615F794A1923


def test_padding_between_planes_does_not_count() -> None:
    record = np.zeros(4096, np.uint8)
    before = _core.record_checksum(record, [0, 128], [100, 100])
    record[100:128] = 255
    record[228:] = 255
    assert _core.record_checksum(record, [0, 128], [100, 100]) == before


def test_a_zero_byte_more_is_another_checksum() -> None:
    assert checksum(np.zeros(9, np.uint8)) != checksum(np.zeros(10, np.uint8))


@given(WORDS, st.data())
def test_notices_swapped_words(values: list[int], data: st.DataObject) -> None:
    first, second = data.draw(st.permutations(range(len(values))))[:2]
    swapped = values.copy()
    swapped[first], swapped[second] = swapped[second], swapped[first]
    same = values[first] == values[second]
    assert (checksum(words(values)) == checksum(words(swapped))) == same


@given(WORDS, st.data())
def test_notices_flipped_bits(values: list[int], data: st.DataObject) -> None:
    payload = words(values).copy()
    before = checksum(payload)
    bits = data.draw(st.sets(st.integers(0, 8 * len(payload) - 1), min_size=1, max_size=8))
    for bit in bits:
        payload[bit // 8] ^= 1 << bit % 8
    assert checksum(payload) != before


@given(WORDS, st.data())
def test_notices_flipped_top_bits(values: list[int], data: st.DataObject) -> None:
    """Top bits cancel in pairs in any sum whose words were not mixed."""
    chosen = data.draw(st.sets(st.integers(0, len(values) - 1), min_size=1))
    flipped = [value ^ (1 << 63 if i in chosen else 0) for i, value in enumerate(values)]
    assert checksum(words(values)) != checksum(words(flipped))


def test_flipped_top_bits_of_two_words_do_not_cancel() -> None:
    rng = np.random.default_rng(7)
    values = rng.integers(0, 1 << 63, 2048, dtype=np.uint64)
    sums = set()
    for position in range(len(values)):
        changed = values.copy()
        changed[position] ^= np.uint64(1 << 63)
        changed[(position * 7 + 1) % len(values)] ^= np.uint64(1 << 63)
        sums.add(checksum(changed.view(np.uint8)))
    assert checksum(values.view(np.uint8)) not in sums
    assert len(sums) == len(values)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 8191, 8192, 8193, 100_003])
def test_copying_gives_the_same_checksum(size: int) -> None:
    source = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    target = np.zeros_like(source)
    assert _core.copy_with_checksum(target, source) == checksum(source)
    assert np.array_equal(target, source)


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [([0], [9000]), ([8, 64, 8200], [50, 8129, 800]), ([], []), ([4096, 0], [100, 4000])],
)
def test_a_copied_record_is_whole_and_has_the_checksum_of_its_planes(
    offsets: list[int], sizes: list[int]
) -> None:
    source = np.random.default_rng(1).integers(0, 256, 9000, dtype=np.uint8)
    target = np.zeros_like(source)
    copied = _core.copy_record_with_checksum(target, source, offsets, sizes)
    assert copied == _core.record_checksum(source, offsets, sizes)
    assert np.array_equal(target, source)


def test_a_copied_record_has_the_size_of_its_place() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        _core.copy_record_with_checksum(np.zeros(64, np.uint8), np.zeros(63, np.uint8), [0], [8])
    with pytest.raises(ValueError, match="beyond the record"):
        _core.copy_record_with_checksum(np.zeros(64, np.uint8), np.zeros(64, np.uint8), [8], [64])


def test_refuses_planes_outside_the_record() -> None:
    record = np.zeros(64, np.uint8)
    with pytest.raises(ValueError, match="beyond the record"):
        _core.record_checksum(record, [8], [64])
    with pytest.raises(ValueError, match="multiple of 8"):
        _core.record_checksum(record, [4], [8])
