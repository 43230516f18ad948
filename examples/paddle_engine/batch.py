"""What one forward pass computes: rows of tokens, where their KV goes, and which blocks each row may read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fdcache import MultimodalItem


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + len(tokens)) of one sequence, as the scheduler sends them to every rank.

    ``block_table`` covers them. Rows from ``sample_from`` on are sampled; those after it hold draft tokens that count
    only if the row before sampled them. ``next_token`` follows a chunk that is not sampled.
    """

    sequence: str
    start: int
    tokens: NDArray[np.int64]
    block_table: NDArray[np.int32]
    sample_from: int
    next_token: int = 0
    temperature: float = 0.0
    seed: int = 0
    images: tuple[MultimodalItem, ...] = ()

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Span:
    """The rows [first, last) of a batch that one sequence has, and what they attend to.

    ``blocks``: the blocks of its tokens so far, in order. ``mask``: (rows, keys), 0 or -infinity.
    """

    chunk: int
    first: int
    last: int
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows computed together. ``valid`` rows have a token, the others are padding; chunk ``owner[i]`` has token
    ``column[i]`` in row ``valid[i]``, whose KV goes to ``slots[i]``.
    """

    tokens: Tensor
    positions: Tensor
    spans: tuple[Span, ...]
    valid: NDArray[np.int64]
    owner: NDArray[np.int64]
    column: NDArray[np.int64]
    slots: NDArray[np.int64]
    images: tuple[tuple[MultimodalItem, NDArray[np.int64]], ...] = ()

    def narrow(self, lengths: Sequence[int]) -> Batch:
        """The same rows, of which only the first ``lengths[i]`` tokens of chunk i are valid."""
        keep = self.column < np.asarray(lengths, np.int64)[self.owner]
        return replace(
            self,
            valid=self.valid[keep],
            owner=self.owner[keep],
            column=self.column[keep],
            slots=self.slots[keep],
        )


def make_batches(chunks: Sequence[Chunk], block_size: int, grid: int, split_kv: int) -> list[Batch]:
    """Ordinary mode: one batch of all rows. Deterministic mode: one batch per chunk and cell of the grid."""
    if not grid:
        pieces = [(number, chunk.start, chunk.stop) for number, chunk in enumerate(chunks)]
        return [_make(chunks, pieces, block_size, 0, split_kv)] if pieces else []
    return [
        _make(
            chunks,
            [(number, max(chunk.start, cell), min(chunk.stop, cell + grid))],
            block_size,
            grid,
            split_kv,
        )
        for number, chunk in enumerate(chunks)
        for cell in range(chunk.start // grid * grid, chunk.stop, grid)
    ]


def _make(
    chunks: Sequence[Chunk], pieces: Sequence[tuple[int, int, int]], block_size: int, grid: int, split_kv: int
) -> Batch:
    """Pieces are (chunk number, first position, one past the last)."""
    positions: list[NDArray[np.int64]] = []
    tokens: list[NDArray[np.int64]] = []
    spans, images, valid, owner, column, slots = [], [], [], [], [], []
    row = 0
    for number, start, stop in pieces:
        chunk = chunks[number]
        cell, end = (start // grid * grid, start // grid * grid + grid) if grid else (start, stop)
        own = np.zeros(end - cell, np.int64)
        own[start - cell : stop - cell] = chunk.tokens[start - chunk.start : stop - chunk.start]
        places = np.arange(start, stop)
        at = np.arange(cell, end)
        rows = row + places - cell
        keys = -(-end // split_kv) * split_kv
        blocks = np.resize(chunk.block_table[: -(-stop // block_size)], -(-keys // block_size)).astype(
            np.int64
        )
        visible = at[:, None] >= np.arange(len(blocks) * block_size)[None, :]
        mask = np.where(visible, np.float32(0), np.float32(-np.inf))
        spans.append(Span(number, row, row + len(own), paddle.to_tensor(blocks), paddle.to_tensor(mask)))
        for item in chunk.images:
            inside = rows[(places >= item.offset) & (places < item.offset + item.length)]
            images.extend([(item, inside)] if len(inside) else [])
        tokens.append(own)
        positions.append(at)
        valid.append(rows)
        owner.append(np.full(len(places), number))
        column.append(places - chunk.start)
        slots.append(
            chunk.block_table[places // block_size].astype(np.int64) * block_size + places % block_size
        )
        row += len(own)
    return Batch(
        tokens=paddle.to_tensor(np.concatenate(tokens)),
        positions=paddle.to_tensor(np.concatenate(positions)),
        spans=tuple(spans),
        valid=np.concatenate(valid),
        owner=np.concatenate(owner),
        column=np.concatenate(column),
        slots=np.concatenate(slots),
        images=tuple(images),
    )


def find_row(number: int, column: int, batches: Sequence[Batch], hidden: Sequence[Tensor]) -> Tensor:
    """The hidden state (1, hidden) of one token of a chunk."""
    for batch, states in zip(batches, hidden, strict=True):
        at = np.flatnonzero((batch.owner == number) & (batch.column == column))
        if len(at):
            row = int(batch.valid[at[0]])
            return states[row : row + 1]
    raise IndexError(f"token {column} of chunk {number} was not computed")
