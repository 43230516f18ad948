"""What the connector offers of the blocks that a step has computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fdcache.groups import engine_groups
from fdcache.integrations.vllm.events import EventTranslator
from fdcache.integrations.vllm.running import Computed, Running, ids_of
from fdcache.integrations.vllm.tables import pages_of_offer
from fdcache.manager import OffloadManager


class StepOffers:
    """StepOffers blocks to the manager as their tokens become known, and tells vLLM's events their hashes.

    ``count`` takes the line of an inconsistency.
    """

    def __init__(
        self, manager: OffloadManager, events: EventTranslator | None, count: Callable[..., None]
    ) -> None:
        self._manager = manager
        self._events = events
        self._count = count
        self._block_size = manager.layout.block_size
        numbers = engine_groups(manager.layout.groups)
        self._states = [numbers[group] for group in manager.layout.state_groups]
        self._lookahead = manager.settings.lookahead_tokens
        self._blocks_of_offer = pages_of_offer(manager.layout)

    def step(self, computed: Iterable[Computed]) -> None:
        """Offer what a step computes of its requests."""
        for known, start, num_tokens in computed:
            if num_tokens - start > self._block_size or self._has_enough(known, num_tokens):
                self.blocks(known, num_tokens, start)

    def _has_enough(self, known: Running, num_tokens: int) -> bool:
        """Return True if enough blocks were generated for an offer before the request ends."""
        whole = num_tokens // self._block_size
        return whole >= known.offered + self._blocks_of_offer or self._events is not None

    def blocks(self, known: Running, num_tokens: int, start: int = 0) -> None:
        """Offer whole blocks of known tokens: those that drafts or steps in flight add are offered later.

        So are those whose key takes in a token that is not known yet.

        ``start``: the tokens that the request had when its step was scheduled, 0 if vLLM has told the table since.
        """
        if known.is_lost:
            return
        num_tokens = min(num_tokens, known.source.num_tokens - self._lookahead)
        whole = num_tokens // self._block_size
        if whole == known.offered and (self._events is None or known.known_hashes >= whole):
            return
        if whole > known.blocks.num_pages:
            self._count("%d blocks are computed, %d are known", whole, known.blocks.num_pages)
        elif whole:
            known.learn_tokens(num_tokens + self._lookahead)
            self._learn_hashes(known)
            self._manager.offer(known.request, num_tokens, known.blocks.page_ids(0, whole, start))
            known.offered = whole

    def states(self, kept: Any, running: Mapping[str, Running]) -> None:
        """Offer the states that vLLM keeps after a step, after all pages before them."""
        if kept is None or not self._states:
            return
        for request_id, entries in kept.boundary_state_offloads.items():
            known = running.get(request_id)
            if known is None or known.is_lost or not known.blocks:
                continue
            by_end: dict[int, dict[int, int]] = {}
            for group, block, tokens in entries:
                if block and not tokens % self._block_size:
                    by_end.setdefault(tokens, {})[group] = block
            for tokens, blocks in sorted(by_end.items()):
                if tokens <= known.source.num_tokens and blocks.keys() >= set(self._states):
                    self._state(known, tokens, [blocks[group] for group in self._states])

    def _state(self, known: Running, tokens: int, blocks: Sequence[int]) -> None:
        pages = tokens // self._block_size
        if pages > known.offered:
            self.blocks(known, tokens)
        known.learn_tokens(min(tokens + self._lookahead, known.source.num_tokens))
        above = known.blocks.page_ids(pages - 1, pages)[-1:] if known.blocks.num_pages >= pages else ()
        self._manager.offer_states(known.request, tokens, ids_of(blocks), *map(int, above))

    def _learn_hashes(self, known: Running) -> None:
        if self._events is not None:
            self._manager.prepare([known.request])
            hashes = known.request.block_hashes
            start, size = known.known_hashes, self._block_size
            known.known_hashes = self._events.learn_new(known.source, hashes, start, size)
