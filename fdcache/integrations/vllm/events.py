"""Events for routers: which blocks entered and left host memory and storage, under vLLM's own hashes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
from vllm.distributed import kv_events
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash

from fdcache.groups import record_keys, state_keys
from fdcache.metadata import CacheLevel
from fdcache.service.wire.router_events import MEDIUM, Origin, RouterBlock, fields_of, runs_of
from fdcache.settings import Settings
from fdcache.tiers import events

_BUFFER = 65536
_MOST_KNOWN = 1 << 20
_OWN = (CacheLevel.HOST, CacheLevel.STORAGE)


def _stored_type() -> Any:
    """Return vLLM's event, with the field of Dynamo where events are maps: others read them by position."""
    base: Any = kv_events.BlockStored
    if base.__struct_config__.array_like:
        return base
    return msgspec.defstruct(
        "BlockStored",
        [("cache_salt", str | None, None)],
        bases=(base,),
        tag="BlockStored",
        omit_defaults=True,
    )


_Stored = _stored_type()
_STORED_FIELDS = frozenset(_Stored.__struct_fields__)
_REMOVED_FIELDS = frozenset(kv_events.BlockRemoved.__struct_fields__)
_untagged: Callable[[Any], Any] = getattr(kv_cache_utils, "to_event_extra_keys", lambda keys: keys)


class GroupKind(NamedTuple):
    """vLLM's words for a group of layers."""

    kind: str | None = None
    window: int | None = None


def group_kinds(kv_cache_config: Any) -> list[GroupKind]:
    """Return the kind of each group, as vLLM's own events name it."""
    from vllm.v1 import kv_cache_interface

    kind = getattr(kv_cache_interface, "get_kv_cache_spec_kind", None)
    window = getattr(kv_cache_interface, "get_kv_cache_spec_sliding_window", None)
    if kind is None or window is None:
        return [GroupKind() for _ in kv_cache_config.kv_cache_groups]
    specs = (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
    return [GroupKind(kind(spec).value, window(spec)) for spec in specs]


class EventTranslator:
    """Translates fdcache's events to vLLM's. ``learn`` tells the hashes of blocks before they are stored.

    ``marks`` are the groups of a page's records (``KVLayout.record_groups``), of which ``num_records`` are no states: a
    page is told once for each group, by its last record. Blocks that are not known yet, such as those found on storage
    after a restart, are told once a request has their tokens. ``_MOST_KNOWN`` blocks are remembered, the latest ones.
    ``is_shared``: other nodes use the storage too.
    """

    def __init__(
        self,
        groups: Sequence[GroupKind] = (GroupKind(),),
        *,
        is_shared: bool = False,
        marks: Sequence[int] = (0,),
        num_records: int = 1,
    ) -> None:
        self._groups = list(groups) or [GroupKind()]
        self._told = {group: list(marks).index(group) for group in sorted(set(marks))}
        self._num_records, self._num_marks = num_records, len(marks)
        self.lookahead = 0
        """Tokens beyond each block that vLLM's hash of it covers."""
        self._hashes_of_block = 1
        self._known: OrderedDict[bytes, RouterBlock] = OrderedDict()
        self._resident: dict[CacheLevel, dict[bytes, RouterBlock]] = {level: {} for level in _OWN}
        self._unknown: dict[CacheLevel, dict[bytes, int]] = {level: {} for level in _OWN}
        self._late: list[tuple[CacheLevel, bytes]] = []
        # ownership is left out: Dynamo drops events of owners other than the engine and KVCR.
        self._place = {
            CacheLevel.HOST: {"locality": "LOCAL"},
            CacheLevel.STORAGE: {"locality": "REMOTE" if is_shared else "LOCAL"},
        }

    def enable(self, settings: Settings) -> Settings:
        """Return the settings with an event buffer."""
        cache = settings.cache
        if cache.event_buffer:
            return settings
        return settings.model_copy(update={"cache": cache.model_copy(update={"event_buffer": _BUFFER})})

    def bind_pool(self, pool: Any, block_size: int) -> None:
        """Take how many tokens a hash of vLLM's pool stands for: less than a block with ``prefix_match_unit``."""
        self._hashes_of_block = block_size // pool.hash_block_size
        self.lookahead = getattr(pool, "num_hash_lookahead_tokens", 0)

    def learn_new(self, source: Any, hashes: Any, start: int, block_size: int) -> int:
        """Record vLLM's hashes of a request's blocks from ``start`` on; return where the next call starts."""
        theirs = source.block_hashes
        if self._hashes_of_block > 1:
            theirs = theirs[self._hashes_of_block - 1 :: self._hashes_of_block]
        self.learn(source, theirs, hashes, start, block_size)
        return min(len(hashes), len(theirs))

    def learn(self, source: Any, theirs: Sequence[Any], hashes: Any, start: int, block_size: int) -> None:
        """Record ``theirs``, vLLM's hashes of a request's blocks, from ``start`` on; ``hashes`` are fdcache's."""
        adapter = source.lora_request
        origin = Origin(
            lora_name=adapter.lora_name if adapter is not None else None,
            lora_id=adapter.lora_int_id if adapter is not None else None,
            salt=source.cache_salt,
            session=getattr(source, "session_id", None),
        )
        stop, items = min(len(hashes), len(theirs)), 0
        states = self._num_marks - self._num_records
        of_pages = record_keys(hashes[:stop], self._num_records)
        of_states = state_keys(hashes[:stop], self._num_records, states)
        for i in range(start, stop):
            first, last = i * block_size, (i + 1) * block_size
            extra, items = self._extra_keys(source, first, last, items)
            name, parent = maybe_convert_block_hash(theirs[i]), None
            if i:
                parent = maybe_convert_block_hash(theirs[i - 1])
            untagged = None if extra is None else _untagged([extra])[0]
            tokens = list(source.all_token_ids[first:last])
            ahead = list(source.all_token_ids[last : last + self.lookahead]) if self.lookahead else None
            for group, mark in self._told.items():
                key = (
                    of_pages[(i + 1) * self._num_records - 1 - mark]
                    if mark < self._num_records
                    else of_states[(i + 1) * states - 1 - (mark - self._num_records)]
                ).tobytes()
                self._known[key] = RouterBlock(name, parent, tokens, origin, untagged, group, ahead)
                self._late += [(level, key) for level in _OWN if key in self._unknown[level]]
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def _extra_keys(self, source: Any, first: int, last: int, items: int) -> tuple[Any, int]:
        found: tuple[Any, int]
        if self.lookahead:
            found = kv_cache_utils.generate_lookahead_block_hash_extra_keys(
                source, first, last, last + self.lookahead, items
            )
        else:
            found = generate_block_hash_extra_keys(source, first, last, items)
        return found

    def translate(self, given: Iterable[events.CacheEvent]) -> Iterator[Any]:
        """Yield vLLM's events for these."""
        for level, key in self._late:
            if (size := self._unknown[level].pop(key, None)) is not None and key in self._known:
                yield from self._stored(level, [events.BlockStored(level, key, None, size)])
        self._late.clear()
        own = (event for event in given if event.tier in _OWN)
        for (level, kind), some in groupby(own, key=lambda event: (event.tier, type(event))):
            if kind is events.BlockStored:
                yield from self._stored(level, some)
            elif kind is events.BlockRemoved:
                yield from self._removed(level, some)
            else:
                self._unknown[level].clear()
                gone, self._resident[level] = list(self._resident[level].values()), {}
                yield from self._removals(level, gone)

    def _stored(self, level: CacheLevel, some: Iterable[Any]) -> Iterator[Any]:
        blocks, size = [], 0
        for event in some:
            size, block = event.block_size, self._known.get(event.block_hash)
            if block is None:
                self._unknown[level][event.block_hash] = event.block_size
            else:
                self._resident[level][event.block_hash] = block
                blocks.append(block)
        for run in runs_of(_by_group(blocks)):
            kind = self._groups[run[0].group or 0]
            fields = fields_of(run, MEDIUM[level], size) | self._place[level]
            fields |= {"kv_cache_spec_kind": kind.kind, "kv_cache_spec_sliding_window": kind.window}
            yield _Stored(**{name: value for name, value in fields.items() if name in _STORED_FIELDS})

    def _removed(self, level: CacheLevel, some: Iterable[Any]) -> Iterator[Any]:
        gone = []
        for event in some:
            self._unknown[level].pop(event.block_hash, None)
            if (block := self._resident[level].pop(event.block_hash, None)) is not None:
                gone.append(block)
        yield from self._removals(level, gone)

    def _removals(self, level: CacheLevel, gone: list[RouterBlock]) -> Iterator[Any]:
        for group, blocks in groupby(_by_group(gone), key=lambda block: block.group):
            fields = {
                "block_hashes": [block.name for block in blocks],
                "medium": MEDIUM[level],
                "group_idx": group,
                **self._place[level],
            }
            yield kv_events.BlockRemoved(
                **{name: value for name, value in fields.items() if name in _REMOVED_FIELDS}
            )


def _by_group(blocks: list[RouterBlock]) -> list[RouterBlock]:
    """Return blocks with those of each group together, in their order."""
    return sorted(blocks, key=lambda block: block.group or 0)
