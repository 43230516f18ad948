"""The draft layer proposes the token after the one just sampled; the next step checks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
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
    """A draft for each chunk that was sampled. The draft layer is fed each row's hidden state and the token after it;
    what it makes of rejected tokens is written over by the next step, as in the layers below.
    """
    follows, last, end = [], [], 0
    for chunk, samples in zip(chunks, accepted, strict=True):
        follow = np.append(chunk.tokens[1:], chunk.next_token)
        follow[chunk.sample_from : chunk.sample_from + len(samples)] = [each.token for each in samples]
        follows.append(follow)
        last.append(end + chunk.sample_from + len(samples) - 1)
        end += len(follow)
    drafted = [
        model.draft(batch, states, batch.lay_out(np.concatenate(follows)), kv, wait_for_layer)
        for batch, states in zip(batches, hidden, strict=True)
    ]
    return [
        int(model.logits(find_row(token, batches, drafted)).argmax()) if samples else None
        for token, samples in zip(last, accepted, strict=True)
    ]
