"""TokenEvents: the tokens of pages, which SGLang tells routers and neither door, for the routers of a service."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium

from fdcache.errors import ConfigurationError
from fdcache.hashing import sglang_keys
from fdcache.manager.offload import OffloadManager
from fdcache.tiers.host import PathNote

MOST_PAGES = 256
"""Pages that one call describes: the scheduler's thread may wait for the interpreter meanwhile."""


class _Pages(NamedTuple):
    """Pages that have come to the device, by SGLang's names of them, below the page ``parent``."""

    names: list[int]
    tokens: list[int]
    parent: int | None
    salt: str | None


class TokenEvents:
    """Follows the events that SGLang records for ``--kv-events-config``, and describes their pages to a service.

    A page's key is computed from its tokens, below the key of the page that is named as its parent. Pages of adapters,
    whose part of the key no event has, and of pairs of tokens are not described, nor what is below them.

    SGLang's method is wrapped in this process: it does what it did. ``on_news`` is called in its thread; ``describe``
    belongs to one other. Raises ``ConfigurationError`` if the method is not there.
    """

    def __init__(self, page_size: int, on_news: Callable[[], None]) -> None:
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self._page_size = page_size
        self._on_news = on_news
        self._taken: deque[list[Any]] = deque()
        self._pieces: Iterator[_Pages] = iter(())
        self._keys: dict[int, bytes] = {}  # of the pages on the device, by name
        _follow(UnifiedRadixCache)
        _followers.add(self)

    def take(self, events: list[Any]) -> None:
        """Take what SGLang is about to publish."""
        self._taken.append(events)
        self._on_news()

    def describe(self, manager: OffloadManager) -> None:
        """Describe some pages to the manager's service; ask for another call if there are more."""
        left = MOST_PAGES
        while left > 0:
            pages = next(self._pieces, None)
            if pages is None and not self._taken:
                return
            if pages is None:
                self._pieces = self._pages_of(self._taken.popleft())
            else:
                left -= len(pages.names)
                self._describe(pages, manager)
        self._on_news()

    def close(self) -> None:
        """Follow no longer."""
        _followers.discard(self)

    def _pages_of(self, events: list[Any]) -> Iterator[_Pages]:
        """Yield the pages that have come, some at a time, and forget those that have gone."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._keys.clear()
            elif event.medium != StorageMedium.GPU:
                continue  # what the host pool has was on the device before, or came from here
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    self._keys.pop(name, None)
            elif isinstance(event, BlockStored) and self._is_known(event):
                names, size = event.block_hashes, self._page_size
                for first in range(0, len(names), MOST_PAGES):
                    stop = first + MOST_PAGES
                    parent = names[first - 1] if first else event.parent_block_hash
                    tokens = event.token_ids[first * size : stop * size]
                    yield _Pages(names[first:stop], tokens, parent, event.cache_salt)

    def _is_known(self, event: BlockStored) -> bool:
        """Return True for whole pages of tokens alone."""
        is_whole = len(event.token_ids) == len(event.block_hashes) * self._page_size
        return is_whole and event.lora_name is None and isinstance(event.token_ids[0], int)

    def _describe(self, pages: _Pages, manager: OffloadManager) -> None:
        above = b"" if pages.parent is None else self._keys.get(pages.parent)
        if above is None:
            return
        keys = sglang_keys(pages.tokens, self._page_size, salt=pages.salt, above=above)
        self._keys.update(zip(pages.names, (row.tobytes() for row in keys), strict=True))
        manager.describe(keys, np.asarray(pages.tokens, np.int32), above, PathNote(tenant=pages.salt))


_followers: WeakSet[TokenEvents] = WeakSet()
_followed: set[Callable[..., Any]] = set()


def _follow(owner: type) -> None:
    call = getattr(owner, "take_events", None)
    if call is None:
        raise ConfigurationError(
            f"SGLang's {owner.__name__} has no take_events: its pages could not be told to routers; install a version "
            "of SGLang that is served, or leave out --kv-events-config"
        )
    if call in _followed:
        return

    @functools.wraps(call)
    def taken(cache: Any) -> Any:
        events = call(cache)
        for follower in tuple(_followers) if events else ():
            follower.take(events)
        return events

    _followed.add(taken)
    setattr(owner, "take_events", taken)  # noqa: B010
