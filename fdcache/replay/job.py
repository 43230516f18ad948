"""Job: the scheduler's view of one request."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fdcache.manager import Request
from fdcache.replay.items import WorkItem


class Job:
    """A request between arrival and end. Counts are tokens from the start of its prompt.

    ``planned`` tokens are in steps already sent, ``computed`` in steps whose results came back; a higher
    ``epoch`` than a step's makes that step's tokens void. Tokens below ``known`` were there when the request
    was (re)matched and are prefilled in chunks; those above are decoded one a step.
    """

    __slots__ = (
        "begun",
        "block_size",
        "computed",
        "counted",
        "epoch",
        "item",
        "known",
        "loading",
        "num_blocks",
        "planned",
        "prompt_length",
        "request",
        "sent_blocks",
        "suspects",
        "tokens",
        "total",
        "verify_blocks",
    )

    def __init__(self, item: WorkItem, seed: int, block_size: int) -> None:
        tokens = item.tokens(seed)
        self.item = item
        self.block_size = block_size
        self.prompt_length = item.prompt_length
        self.tokens: NDArray[np.int32] = tokens
        self.request = Request(str(item.index), tokens[: self.prompt_length])
        self.total = item.computed_length
        self.known = self.prompt_length
        self.planned = 0
        self.computed = 0
        self.num_blocks = 0
        self.sent_blocks = 0
        self.verify_blocks = 0
        self.epoch = 0
        self.loading = False
        self.begun = False
        self.counted = False
        self.suspects: set[int] = set()

    @property
    def index(self) -> int:
        """The request's number in the workload, and its sequence on the ranks."""
        return self.item.index

    def accepted(self) -> int:
        """Tokens that exist: the prompt, and one more than have KV once the prompt is through."""
        if self.computed < self.prompt_length:
            return self.prompt_length
        return min(self.computed + 1, len(self.tokens))

    @property
    def ended(self) -> bool:
        """Whether it has all its tokens, and none above a load that may yet fail."""
        return self.computed >= self.total and not self.loading

    def append_accepted(self) -> None:
        """Give the cache's view of the request the tokens accepted since the last time."""
        have, accepted = self.request.num_tokens, self.accepted()
        if accepted > have:
            self.request.append_tokens(self.tokens[have:accepted])

    def admit(self, cached: int, loading: bool) -> None:
        """The cache found ``cached`` leading tokens; the rest is to be computed."""
        self.known = min(self.request.num_tokens, self.total)
        self.loading = loading
        self._start_from(cached)

    def rewind(self, tokens: int) -> None:
        """Void what was computed or is being computed above ``tokens``; what is below is compared again."""
        self.epoch += 1
        self.known = min(self.request.num_tokens, self.total)
        self.loading = False
        self.suspects.clear()
        self._start_from(tokens)

    def release(self) -> None:
        """Preempted: the request has no blocks any more and starts from its next match."""
        self.append_accepted()
        self.rewind(0)
        self.num_blocks = self.sent_blocks = 0

    def _start_from(self, tokens: int) -> None:
        self.planned = self.computed = tokens
        self.verify_blocks = tokens // self.block_size
