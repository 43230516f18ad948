"""The calls that every cache manager is measured by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


class OutOfBlocksError(RuntimeError):
    """A manager has no block for a request that fits by the driver's count."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Size of the pool that an adapter manages: its blocks, and the most requests and tokens of one that it serves."""

    block_size: int
    blocks: int
    max_requests: int
    max_tokens: int


class Adapter(ABC):
    """One pool of blocks behind a manager's own calls.

    ``make_request`` and ``make_output`` turn tokens into what the engine's scheduler holds; they are not timed. A
    request then goes through ``hash``, ``match``, ``allocate``, ``commit``, any number of ``decode`` or
    ``decode_step``, and ``free``. After ``allocate`` and ``decode`` its block table can be read. A call that needs a
    block raises ``OutOfBlocksError`` if there is none.

    ``left_out_ns`` grows by the part of these calls that does not count: work that a GPU does in production.
    """

    left_out_ns = 0

    @abstractmethod
    def make_request(self, number: int, prompt: Tokens) -> Any:
        """Return a new request."""

    @abstractmethod
    def make_output(self, tokens: Tokens) -> Any:
        """Return generated tokens of one request."""

    @abstractmethod
    def hash(self, request: Any) -> None:
        """Hash the prompt's full blocks; nothing for a tree that compares tokens."""

    @abstractmethod
    def match(self, request: Any) -> int:
        """Return the number of prompt tokens that are cached."""

    @abstractmethod
    def allocate(self, request: Any) -> None:
        """Pin the cached blocks and take blocks for the rest of the prompt, evicting others."""

    @abstractmethod
    def commit(self, request: Any) -> None:
        """Publish the prompt's full blocks."""

    @abstractmethod
    def decode(self, request: Any, output: Any) -> None:
        """Append generated tokens: take blocks for them, hash and publish those that they fill."""

    @abstractmethod
    def decode_step(self, requests: Sequence[Any], step: list[list[int]]) -> None:
        """Append one token to each request; ``step`` is a list for each, as schedulers get them from their workers."""

    @abstractmethod
    def free(self, request: Any) -> None:
        """End the request; its published blocks stay cached."""

    def entry_bytes(self) -> float | None:
        """Return the bytes for each cached block beside its hash, where the manager counts them."""
        return None

    def check(self) -> None:  # noqa: B027  most managers have nothing to check themselves with
        """Raise an error if the manager finds its own state inconsistent."""
