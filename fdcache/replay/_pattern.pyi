"""The stand-in for a model's KV cache in replays."""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray

class PatternModel:
    """
    A stand-in for a model: computing a token writes bytes derived from its whole prefix.
    """

    def __init__(
        self,
        planes: Sequence[Annotated[NDArray[numpy.uint8], dict(shape=(None, None), device="cpu")]],
        layers: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        num_layers: int,
        block_size: int,
        rank: int,
    ) -> None:
        """
        ``planes[i]``, of shape (device blocks, bytes of a block) with contiguous rows, belongs to
        layer ``layers[i]``.
        """

    def begin(
        self,
        sequence: int,
        tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """Set the tokens of a sequence, replacing earlier ones."""

    def end(self, sequence: int) -> None:
        """Forget a sequence."""

    def prepare(
        self,
        segments: Annotated[
            NDArray[numpy.int32], dict(shape=(6, None), order="C", device="cpu", writable=False)
        ],
        blocks: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        every: int,
    ) -> int:
        """
        Prepare a step; return how many blocks it will compare.

        ``segments`` has the rows sequence, start, end, keep, grow, verify: the step computes
        tokens [start, end) of the sequence. Its block table keeps ``keep`` entries and grows by
        the next ``grow`` of ``blocks``. Of its ``verify`` leading blocks, every ``every``-th and
        the last are compared before anything is written; none if ``every`` is 0. -1 stands for
        a block that is given up, and is neither compared nor written. Raises ValueError, and
        changes nothing, for values out of range.
        """

    def run_layer(self, layer: int) -> list[tuple[int, int]]:
        """
        Compare, then write, one layer; layers come in order.

        Returns (segment, block of the sequence) of each block that differs. Such a sequence
        computes garbage until a later comparison of its prefix succeeds.
        """
