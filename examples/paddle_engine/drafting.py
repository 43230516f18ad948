"""The draft layer proposes the token after the one just sampled; the next step checks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import paddle
from paddle import Tensor

from examples.paddle_engine.batch import Batch, Chunk, find_row
from examples.paddle_engine.model import Model
from examples.paddle_engine.paged_kv import PagedKV
from examples.paddle_engine.sampling import Sample


def propose(
    model: Model,
    kv: PagedKV,
    chunks: Sequence[Chunk],
    batches: Sequence[Batch],
    hidden: Sequence[Tensor],
    accepted: Sequence[tuple[Sample, ...]],
    wait_for_layer: Callable[[int], None],
) -> list[int | None]:
    """Run the draft layer over the rows that count. It is fed each row's hidden state and the token after it; the last
    row of a sampled chunk proposes.
    """
    follows = []
    for chunk, samples in zip(chunks, accepted, strict=True):
        new = [each.token for each in samples] if samples else [chunk.next_token]
        follows.append(
            np.array([*chunk.tokens[1 : chunk.sample_from + 1], *new][: len(chunk.tokens)], np.int64)
        )
    narrowed = [batch.narrow([len(each) for each in follows]) for batch in batches]
    drafted = []
    for batch, states in zip(narrowed, hidden, strict=True):
        tokens = np.zeros(states.shape[0], np.int64)
        for row, owner, column in zip(batch.valid, batch.owner, batch.column, strict=True):
            tokens[row] = follows[owner][column]
        if len(batch.valid):
            states = model.draft(batch, states, paddle.to_tensor(tokens), kv, wait_for_layer)  # noqa: PLW2901
        drafted.append(states)
    return [
        int(model.logits(find_row(number, len(follows[number]) - 1, narrowed, drafted)).argmax())
        if samples
        else None
        for number, samples in enumerate(accepted)
    ]
