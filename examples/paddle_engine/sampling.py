"""Greedy and seeded sampling that depends on nothing but the logits, the request's seed and the position."""

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
    """A token, and by how much its score beat the second best."""

    token: int
    margin: float


def sample(logits: NDArray[np.float32], temperature: float, seed: int, position: int) -> Sample:
    """The best token, or with ``temperature`` > 0 a random one: the best after Gumbel noise keyed by (seed, position).

    ``position`` is that of the new token, so a request that is preempted and resumed samples the same again.
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
