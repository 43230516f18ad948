"""The native core: block hashing, tiers, block copies."""

import numpy as np
from numpy.typing import NDArray

# --- hashing ---------------------------------------------------------------------------------------

# --- tier ------------------------------------------------------------------------------------------

# --- copy ------------------------------------------------------------------------------------------

# --- pattern ---------------------------------------------------------------------------------------

class PatternModel:
    """The stand-in for a model: computing a token writes bytes derived from its whole prefix."""

    def __init__(
        self,
        planes: list[NDArray[np.uint8]],
        layers: NDArray[np.int32],
        num_layers: int,
        block_size: int,
        rank: int,
    ) -> None:
        """``planes[i]``, shape (device blocks, bytes of a block), rows contiguous, is of layer ``layers[i]``."""

    def begin(self, sequence: int, tokens: NDArray[np.int32]) -> None:
        """Give a sequence its tokens, shape (tokens,), replacing what it had."""

    def end(self, sequence: int) -> None:
        """Forget a sequence."""

    def prepare(
        self,
        sequences: NDArray[np.int32],
        starts: NDArray[np.int32],
        ends: NDArray[np.int32],
        keep: NDArray[np.int32],
        grow: NDArray[np.int32],
        verify: NDArray[np.int32],
        blocks: NDArray[np.int32],
        every: int,
    ) -> int:
        """Take a step's segments: tokens ``[starts[i], ends[i])`` of ``sequences[i]``.

        The sequence's block table keeps ``keep[i]`` entries and grows by the next ``grow[i]`` of ``blocks``; its
        ``verify[i]`` leading blocks (every ``every``-th and the last; none if 0) are compared before anything
        is written. Returns how many blocks will be compared. Raises ``ValueError``, with nothing changed, for
        anything out of range.
        """

    def run_layer(self, layer: int) -> list[tuple[int, int]]:
        """Compare, then write, one layer; layers go in order.

        Returns (segment, block of the sequence) of each block that differs; such a sequence computes garbage
        until a later comparison of its prefix succeeds.
        """
