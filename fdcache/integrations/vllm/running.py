"""What the scheduler's side follows of vLLM's requests, and how it takes an exception in a hook."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np

from fdcache.hints import HintOutcome
from fdcache.integrations.vllm.keys import known_tokens
from fdcache.integrations.vllm.tables import RequestTable
from fdcache.manager import Request
from fdcache.metadata import Int32Array


class Running:
    """A request between its arrival and its end. ``blocks`` is its block table, empty before it has one.

    The first ``offered`` pages are offered. ``load`` is the number of its load, 0 before. Nothing more is loaded or
    offered for one that ``is_lost``.
    """

    __slots__ = (
        "blocks",
        "device_tokens",
        "is_lost",
        "known_hashes",
        "load",
        "offered",
        "peer_tokens",
        "refused_hints",
        "request",
        "source",
        "stored_tokens",
    )

    def __init__(
        self, source: Any, request: Request, refused_hints: Sequence[HintOutcome], blocks: RequestTable
    ) -> None:
        self.source = source
        self.request = request
        self.refused_hints = refused_hints
        self.blocks = blocks
        self.device_tokens = 0
        self.known_hashes = 0
        self.load = 0
        self.is_lost = False
        self.offered = 0
        self.stored_tokens = self.peer_tokens = 0

    def has_table(self, blocks: RequestTable) -> None:
        """Give the request another block table, of which nothing is offered."""
        self.blocks = blocks
        self.offered = 0

    def learn_tokens(self, num_tokens: int) -> None:
        """Take over vLLM's tokens up to this number of them."""
        have = self.request.num_tokens
        if num_tokens > have:
            self.request.append_tokens(known_tokens(self.source, have)[: num_tokens - have])


Computed = tuple[Running, int, int]
"""A scheduled request, with its tokens before and after the step."""


class Finished(NamedTuple):
    """What a client is told of a request that has ended: outcomes of its hints, and the parameters of a hand-over.

    ``is_kept``: vLLM keeps its blocks until they are handed over.
    """

    hints: Sequence[HintOutcome] = ()
    handed_over: dict[str, Any] | None = None
    is_kept: bool = False


class TakesFailures(Protocol):
    """Takes note of exceptions in hooks."""

    def hook_failed(self, hook: str, *, follows_blocks: bool = True) -> None:
        """Count the exception that is being handled."""


class HookGuard:
    """The context of ``SchedulerSide.guarded``: a class, since each step enters several."""

    __slots__ = ("_follows_blocks", "_hook", "_side")

    def __init__(self, side: TakesFailures, hook: str, follows_blocks: bool) -> None:
        self._side = side
        self._hook = hook
        self._follows_blocks = follows_blocks

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._side.hook_failed(self._hook, follows_blocks=self._follows_blocks)
        return True


def ids_of(blocks: Sequence[int]) -> Int32Array:
    """Return numbers of blocks as an array."""
    return np.array(blocks, np.int32)
