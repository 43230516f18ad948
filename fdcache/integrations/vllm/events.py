"""Events for routers: which blocks entered and left host memory and storage, under vLLM's own hashes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from fdcache.metadata import CacheLevel
from fdcache.settings import Settings
from fdcache.tiers import events

_MEDIUM = {CacheLevel.HOST: "CPU", CacheLevel.STORAGE: "FS"}
_BUFFER = 65536
_MOST_KNOWN = 1 << 20


class _Known(NamedTuple):
    """A block as vLLM's events describe it."""

    hash: Any
    parent: Any
    tokens: list[int]
    adapter: str | None


class EventTranslator:
    """Translates fdcache's events to vLLM's. ``learn`` tells the hashes of blocks before they are stored.

    Blocks whose hashes are not known, such as those restored from storage, have no event. ``_MOST_KNOWN`` blocks are
    remembered, the latest ones.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._resident: dict[CacheLevel, dict[bytes, Any]] = {level: {} for level in _MEDIUM}

    def enable(self, settings: Settings) -> Settings:
        """Return the settings with an event buffer."""
        cache = settings.cache
        if cache.event_buffer:
            return settings
        return settings.model_copy(update={"cache": cache.model_copy(update={"event_buffer": _BUFFER})})

    def learn(self, source: Any, theirs: Sequence[Any], hashes: Any, start: int, block_size: int) -> None:
        """Learn ``theirs``, vLLM's hashes of a request's blocks, from ``start`` on; ``hashes`` are fdcache's."""
        adapter = source.lora_request.lora_name if source.lora_request is not None else None
        for i in range(start, min(len(hashes), len(theirs))):
            parent = maybe_convert_block_hash(theirs[i - 1]) if i else None
            tokens = list(source.all_token_ids[i * block_size : (i + 1) * block_size])
            self._known[hashes[i].tobytes()] = _Known(
                maybe_convert_block_hash(theirs[i]), parent, tokens, adapter
            )
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def translate(self, given: Iterable[events.CacheEvent]) -> Iterator[Any]:
        """Yield vLLM's events for these."""
        for event in given:
            medium = _MEDIUM.get(event.tier)
            if medium is None:
                continue
            resident = self._resident[event.tier]
            if isinstance(event, events.BlockStored):
                known = self._known.get(event.block_hash)
                if known is not None:
                    resident[event.block_hash] = known.hash
                    yield BlockStored(
                        block_hashes=[known.hash],
                        parent_block_hash=known.parent,
                        token_ids=known.tokens,
                        block_size=event.block_size,
                        lora_id=None,
                        medium=medium,
                        lora_name=known.adapter,
                    )
            elif isinstance(event, events.BlockRemoved):
                if (theirs := resident.pop(event.block_hash, None)) is not None:
                    yield BlockRemoved(block_hashes=[theirs], medium=medium)
            elif resident:
                yield BlockRemoved(block_hashes=list(resident.values()), medium=medium)
                resident.clear()
