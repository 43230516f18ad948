"""A request of vLLM's that the connector follows in the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fdcache.hints import HintOutcome
from fdcache.integrations.vllm.tables import RequestTable
from fdcache.manager import Request


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
