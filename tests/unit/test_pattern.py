"""PatternModel: what it writes depends on the whole prefix, and it sees every byte that differs."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from fdcache._core import PatternModel

BLOCK = 4
PLANE_BYTES = (64, 30, 8, 3)
LAYERS = (0, 0, 1, 1)


def int32(values: Sequence[int]) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


class Rig:
    """A model over small planes, stepped one sequence at a time."""

    def __init__(self, rank: int = 0, slots: int = 8) -> None:
        self.planes = [np.zeros((slots, size), dtype=np.uint8) for size in PLANE_BYTES]
        self.model = PatternModel(self.planes, int32(LAYERS), 2, BLOCK, rank)

    def step(
        self,
        start: int,
        end: int,
        *,
        verify: int = 0,
        keep: int = 0,
        blocks: Sequence[int] = (),
        every: int = 1,
    ) -> list[tuple[int, int]]:
        segment = int32([0, start, end, keep, len(blocks), verify]).reshape(6, 1)
        self.model.prepare(segment, int32(blocks), every)
        return [pair for layer in range(2) for pair in self.model.run_layer(layer)]

    def compute(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        self.model.begin(0, int32(tokens))
        assert self.step(0, len(tokens), blocks=blocks) == []

    def verify(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[tuple[int, int]]:
        self.model.begin(0, int32(tokens))
        return self.step(len(blocks) * BLOCK, len(blocks) * BLOCK, verify=len(blocks), blocks=blocks)


TOKENS = [5, 6, 7, 8, 9, 10, 11, 12]


def test_written_blocks_verify_wherever_their_sequence_begins_again() -> None:
    rig = Rig()
    rig.compute(TOKENS, [3, 1])
    assert rig.verify(TOKENS, [3, 1]) == []


def test_tokens_written_one_by_one_give_the_bytes_of_one_write() -> None:
    whole, stepwise = Rig(), Rig()
    whole.compute(TOKENS, [3, 1])
    stepwise.model.begin(0, int32(TOKENS))
    stepwise.step(0, 3, blocks=[3])
    stepwise.step(3, 4, keep=1)
    for token in range(4, 8):
        stepwise.step(token, token + 1, keep=1, blocks=[1])
    assert all((a == b).all() for a, b in zip(whole.planes, stepwise.planes, strict=True))


@pytest.mark.parametrize("plane", range(len(PLANE_BYTES)))
def test_a_flipped_bit_in_any_byte_of_any_plane_is_found(plane: int) -> None:
    rig = Rig()
    rig.compute(TOKENS, [3, 1])
    for byte in range(PLANE_BYTES[plane]):
        rig.planes[plane][1, byte] ^= 1 << (byte % 8)
        assert rig.verify(TOKENS, [3, 1]) == [(0, 1)], f"byte {byte}"
        rig.planes[plane][1, byte] ^= 1 << (byte % 8)
    assert rig.verify(TOKENS, [3, 1]) == []


@pytest.mark.parametrize("position", range(4))
def test_a_wrong_token_changes_its_block_and_every_one_after(position: int) -> None:
    rig = Rig()
    rig.compute(TOKENS, [3, 1])
    other = list(TOKENS)
    other[position] += 1
    assert {block for _, block in rig.verify(other, [3, 1])} == {0, 1}


def test_swapped_tokens_and_swapped_blocks_are_found() -> None:
    rig = Rig()
    rig.compute(TOKENS, [3, 1])
    assert {block for _, block in rig.verify(TOKENS, [1, 3])} == {0, 1}
    assert {block for _, block in rig.verify([6, 5, *TOKENS[2:]], [3, 1])} == {0, 1}


def test_ranks_write_different_bytes() -> None:
    first, second = Rig(rank=0), Rig(rank=1)
    first.compute(TOKENS, [3, 1])
    second.compute(TOKENS, [3, 1])
    assert all((a[[1, 3]] != b[[1, 3]]).any() for a, b in zip(first.planes, second.planes, strict=True))


def test_nothing_but_the_sequences_own_slots_is_written() -> None:
    rig = Rig()
    rig.compute(TOKENS, [3, 1])
    for plane in rig.planes:
        assert not plane[[0, 2, 4, 5, 6, 7]].any()


def test_a_sequence_with_a_bad_prefix_computes_garbage_until_the_prefix_is_good_again() -> None:
    rig = Rig()
    rig.compute(TOKENS, [3, 1])
    rig.planes[2][3, 0] ^= 1
    rig.model.begin(0, int32(TOKENS))
    assert rig.step(4, 8, verify=1, blocks=[3, 2]) == [(0, 0)]
    rig.planes[2][3, 0] ^= 1
    assert rig.verify(TOKENS, [3, 2]) == [(0, 1)]
    rig.model.begin(0, int32(TOKENS))
    assert rig.step(4, 8, verify=1, blocks=[3, 2]) == []
    assert rig.verify(TOKENS, [3, 2]) == []


def test_sampling_compares_every_nth_block_and_the_last() -> None:
    rig = Rig()
    tokens = list(range(24))
    rig.compute(tokens, [0, 1, 2, 3, 4, 5])
    rig.planes[0][:, 0] ^= 1
    rig.model.begin(0, int32(tokens))
    assert rig.step(24, 24, verify=6, blocks=[0, 1, 2, 3, 4, 5], every=3) == [(0, 0), (0, 3), (0, 5)]
    rig.model.begin(0, int32(tokens))
    assert rig.step(24, 24, verify=6, blocks=[0, 1, 2, 3, 4, 5], every=0) == []


def test_blocks_that_are_given_up_are_neither_compared_nor_written() -> None:
    rig = Rig()
    rig.compute([*TOKENS, 1], [3, 1, 0])
    rig.planes[0][3] ^= 1
    assert rig.verify(TOKENS, [3, 1]) == [(0, 0)]
    rig.model.begin(0, int32([*TOKENS, 1]))
    before = [plane.copy() for plane in rig.planes]
    assert rig.step(8, 9, verify=2, blocks=[-1, 1, 2]) == []
    assert all((a[[0, 1, 3, 7]] == b[[0, 1, 3, 7]]).all() for a, b in zip(before, rig.planes, strict=True))
    assert rig.planes[0][2].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": 0, "end": 9, "blocks": [0, 1, 2]}, "tokens out of range"),
        ({"start": 5, "end": 4, "blocks": [0, 1]}, "tokens out of range"),
        ({"start": 0, "end": 5, "blocks": [0]}, "does not cover"),
        ({"start": 0, "end": 4, "blocks": [8]}, "device slot 8"),
        ({"start": 0, "end": 4, "blocks": [-2]}, "device slot -2"),
        ({"start": 3, "end": 5, "blocks": [0, -1]}, "tokens without a block"),
        ({"start": 0, "end": 4, "keep": 1}, "block table out of range"),
        ({"start": 0, "end": 4, "verify": 2, "blocks": [0]}, "does not cover"),
    ],
)
def test_a_step_out_of_range_is_refused(arguments: dict[str, int], message: str) -> None:
    rig = Rig()
    rig.model.begin(0, int32(TOKENS))
    with pytest.raises(ValueError, match=message):
        rig.step(**arguments)  # type: ignore[arg-type]


def test_an_unknown_sequence_is_refused() -> None:
    rig = Rig()
    rig.model.begin(0, int32(TOKENS))
    rig.model.end(0)
    with pytest.raises(ValueError, match="has no tokens; call begin first"):
        rig.step(0, 4, blocks=[0])
