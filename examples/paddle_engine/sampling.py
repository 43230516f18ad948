"""Sampling that depends only on logits, seed and position, and drafts of the token after the sampled one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from paddle import Tensor

from examples.paddle_engine.batch import Batch, Chunk, find_row
from examples.paddle_engine.model import Model
from examples.paddle_engine.paged_kv import PagedKV


@dataclass(frozen=True, slots=True)
class Sample:
    """A token, and the margin of its score over the second best."""

    token: int
    margin: float


def sample(logits: NDArray[np.float32], temperature: float, seed: int, position: int) -> Sample:
    """Return the best token, with ``temperature`` > 0 after adding Gumbel noise keyed by (seed, position).

    ``position`` is the new token's, so a preempted and resumed request samples the same tokens.
    """
    scores = logits.astype(np.float64)
    if temperature > 0:
        noise = np.random.default_rng([seed, position]).gumbel(size=len(scores))
        scores = scores / temperature + noise
    second, best = np.argpartition(scores, -2)[-2:]
    return Sample(int(best), float(scores[best] - scores[second]))


def propose(
    model: Model,
    kv: PagedKV,
    chunks: Sequence[Chunk],
    batches: Sequence[Batch],
    hidden: Sequence[Tensor],
    accepted: Sequence[tuple[Sample, ...]],
    wait_for_layer: Callable[[int], None],
) -> list[int | None]:
    """Return a draft for each sampled chunk. The draft layer gets each row's hidden state and next token;
    the next step overwrites its KV of rejected tokens, as in the main layers.
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
