"""One prompt on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from examples.paddle_engine.batch import Chunk
from examples.paddle_engine.kv_cache import Prompt
from examples.paddle_engine.sampling import Sample
from examples.paddle_engine.worker import ChunkResult


@dataclass(eq=False)
class Task:
    """``computed`` of its tokens have KV; ``held`` is a result above a load that is not confirmed."""

    prompt: Prompt
    arrival: float
    samples: list[Sample] = field(default_factory=list)
    computed: int = 0
    draft: int | None = None
    held: ChunkResult | None = None
    first_token: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def name(self) -> str:
        """The prompt's name."""
        return self.prompt.name

    @property
    def tokens(self) -> list[int]:
        """Prompt and accepted tokens."""
        return [*self.prompt.tokens, *(sample.token for sample in self.samples)]

    @property
    def is_done(self) -> bool:
        """Whether all tokens that were asked for are there."""
        return len(self.samples) >= self.prompt.max_tokens

    def next_chunk(self, budget: int, grid: int) -> Chunk:
        """What to compute next of it, at most ``budget`` tokens, up to a place on the grid if more are to follow; the
        block table is still to be put in.
        """
        tokens = self.tokens
        start, stop = self.computed, min(len(tokens), self.computed + budget)
        if grid and stop < len(tokens) and stop // grid * grid > start:
            stop = stop // grid * grid
        ends = stop == len(tokens)
        drafts = [self.draft] if ends and self.draft is not None and budget > stop - start else []
        return Chunk(
            sequence=self.name,
            start=start,
            tokens=np.array(tokens[start:stop] + drafts, np.int64),
            block_table=np.empty(0, np.int32),
            sample_from=stop - start - 1 if ends else stop - start,
            next_token=0 if ends else tokens[stop],
            temperature=self.prompt.temperature,
            seed=self.prompt.seed,
            images=self.prompt.images,
        )
