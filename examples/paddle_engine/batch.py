"""Input of one forward pass: rows of tokens, the slots of their KV, and the blocks that they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fdcache import MultimodalItem


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + len(tokens)) of one sequence, as the scheduler sends them to every rank.

    ``block_table`` covers them. Rows from ``sample_from`` on are sampled. Later rows hold draft tokens, which count
    only if the row before sampled them. ``next_token`` is the token after a chunk that is not sampled.
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
        """One past the last position of the chunk."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Span:
    """The rows [first, last) of one sequence; they attend to its ``blocks`` under ``mask``: (rows, keys), 0 or -inf."""

    first: int
    last: int
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows computed together: row ``rows[i]`` has the step's token ``source[i]``, whose KV goes to ``slots[i]``.

    All other rows are padding.
    """

    tokens: Tensor
    positions: Tensor
    spans: tuple[Span, ...]
    rows: NDArray[np.int64]
    source: NDArray[np.int64]
    slots: Tensor
    images: tuple[tuple[MultimodalItem, Tensor], ...]

    def lay_out(self, values: NDArray[np.int64]) -> Tensor:
        """Return one value per row, given one per token of the step; 0 for padding."""
        laid = np.zeros(self.tokens.shape[0], np.int64)
        laid[self.rows] = values[self.source]
        return paddle.to_tensor(laid)


def make_batches(chunks: Sequence[Chunk], block_size: int, grid: int, split_kv: int) -> list[Batch]:
    """Return one batch of all rows in ordinary mode, or one per chunk and grid cell in deterministic mode."""
    firsts = np.cumsum([0, *(len(chunk.tokens) for chunk in chunks)])
    numbered = list(zip(chunks, firsts.tolist(), strict=False))
    if not grid:
        pieces = [[(chunk, first, chunk.start, chunk.stop) for chunk, first in numbered]] if chunks else []
    else:
        pieces = [
            [(chunk, first, cell, cell + grid)]
            for chunk, first in numbered
            for cell in range(chunk.start // grid * grid, chunk.stop, grid)
        ]
    return [_make(each, block_size, split_kv) for each in pieces]


def _make(pieces: Sequence[tuple[Chunk, int, int, int]], block_size: int, split_kv: int) -> Batch:
    """Make a batch of pieces: (chunk, index of its first token in the step, first position, one past the last)."""
    tokens, positions, rows, source, slots = [], [], [], [], []
    spans, images = [], []
    row = 0
    for chunk, first, start, stop in pieces:
        at = np.arange(start, stop)
        valid = (at >= chunk.start) & (at < chunk.stop)
        places = at[valid]
        table = chunk.block_table.astype(np.int64)
        keys = -(-stop // split_kv) * split_kv
        blocks = np.resize(table[: places[-1] // block_size + 1], -(-keys // block_size))
        mask = np.where(
            at[:, None] >= np.arange(len(blocks) * block_size), np.float32(0), np.float32(-np.inf)
        )
        spans.append(Span(row, row + len(at), paddle.to_tensor(blocks), paddle.to_tensor(mask)))
        for item in chunk.images:
            seen = row + np.flatnonzero(valid & (at >= item.offset) & (at < item.offset + item.length))
            images.extend([(item, paddle.to_tensor(seen))] if len(seen) else [])
        tokens.append(np.where(valid, chunk.tokens[np.clip(at - chunk.start, 0, len(chunk.tokens) - 1)], 0))
        positions.append(at)
        rows.append(row + np.flatnonzero(valid))
        source.append(first + places - chunk.start)
        slots.append(table[places // block_size] * block_size + places % block_size)
        row += len(at)
    return Batch(
        tokens=paddle.to_tensor(np.concatenate(tokens)),
        positions=paddle.to_tensor(np.concatenate(positions)),
        spans=tuple(spans),
        rows=np.concatenate(rows),
        source=np.concatenate(source),
        slots=paddle.to_tensor(np.concatenate(slots)),
        images=tuple(images),
    )


def find_row(token: int, batches: Sequence[Batch], hidden: Sequence[Tensor]) -> Tensor:
    """Return the hidden state (1, hidden) of the step's token with this index."""
    for batch, states in zip(batches, hidden, strict=True):
        at = np.flatnonzero(batch.source == token)
        if len(at):
            row = int(batch.rows[at[0]])
            return states[row : row + 1]
    raise IndexError(f"token {token} of the step was not computed")
