"""RouterFeed: tells routers of the blocks that a layout has on devices, in the host tier and in local storage."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fdcache.errors import ProtocolError
from fdcache.groups import CacheGroup, Reach
from fdcache.hashing import tenant_key
from fdcache.layout import KVLayout
from fdcache.metadata import CacheLevel, HashArray
from fdcache.service.server.event_publisher import EventPublisher, EventStream
from fdcache.service.server.notes_file import NotesFile
from fdcache.service.wire.protocol import Describe, hashes_from, int32_from
from fdcache.service.wire.router_events import (
    MEDIUM,
    Origin,
    RouterBlock,
    RouterBlockRemoved,
    RouterBlockStored,
    fields_of,
    runs_of,
)
from fdcache.tiers.pool import ABSENT, EVENT_CLEARED, EVENT_REMOVED, EVENT_STORED, READY, BlockPool

log = logging.getLogger("fdcache.service.server")

MOST_EVENTS = 1 << 18
"""Events of storage between two calls; of more, all blocks are told anew."""
MOST_ON_DEVICE = 1 << 20
"""Blocks of one client's device; of further ones routers are not told."""
_SLACK = 65536
"""Notes of blocks that are in no tier, before they are dropped."""
_AT_ONCE = 4096
"""Blocks of one message."""
_LOCAL: dict[str, Any] = {"locality": "LOCAL"}
"""``ownership`` is left out: Dynamo drops events of owners other than the engine and KVCR."""


_KINDS = {
    Reach.ALL: "full_attention",
    Reach.LAST: "sliding_window",
    Reach.CHUNK: "chunked_local_attention",
    Reach.STATE: "mamba",
}
"""vLLM's words for the reach of a group."""

Change = tuple[Callable[[CacheLevel, list[bytes]], Iterable[Any]], list[bytes]]
"""Blocks that came or left, and what makes their events."""


class Note(msgspec.Struct, frozen=True, array_like=True):
    """A block: hash of the one before it, tokens in int32, and what else its hash covers."""

    parent: bytes
    tokens: bytes
    salt: str | None = None
    adapter: str | None = None
    items: list[tuple[str, int]] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Note).decode


@dataclass(slots=True)
class _Tier:
    """A tier as routers know it: its blocks, parents before children."""

    level: CacheLevel
    pool: BlockPool | None = None
    blocks: dict[bytes, None] = field(default_factory=dict)


class RouterFeed:
    """Events of one layout. It runs in the service's thread; events are made by the publisher's.

    ``file`` keeps the notes; a block without one is in no event until an engine describes it. ``has_storage``: the
    layout has, or will have, local storage.
    """

    def __init__(
        self,
        layout: KVLayout,
        publisher: EventPublisher,
        topic: str,
        file: NotesFile,
        *,
        has_storage: bool = False,
    ) -> None:
        self._layout = layout
        self._has_storage = has_storage
        self._marks = layout.record_groups
        self._told = {group: self._marks.index(group) for group in sorted(set(self._marks))}
        self._kinds = [
            (_KINDS[each.reach], each.tokens if each.reach is Reach.LAST else None)
            for each in layout.groups or (CacheGroup(layout.block_size),)
        ]
        self._file = file
        self._notes: dict[bytes, bytes] = {}
        self._to_sweep: list[bytes] = []
        self._deleted: set[bytes] = set()  # keys of tenants whose notes are to go
        self._origins: dict[tuple[str | None, str | None], Origin] = {}
        self._tiers = {level: _Tier(level) for level in MEDIUM}
        self._devices: dict[int, set[bytes]] = {}  # what each client has, by its session
        self._holders: Counter[bytes] = Counter()  # clients with each block
        self._loading: Future[dict[bytes, bytes]] | None = file.load()
        self._stream: EventStream = publisher.stream(topic, self.snapshot)

    # --- notes ----------------------------------------------------------------------------------------------

    def describe(self, message: Describe) -> None:
        """Keep what a client says of blocks. Raises ``ProtocolError`` for fields that do not fit."""
        hashes, size = hashes_from(message.hashes), self._layout.block_size
        int32_from(message.tokens, "tokens", size * len(hashes))
        if len(message.parent) not in (0, hashes.shape[1]):
            raise ProtocolError("parent: a hash has 32 bytes")
        parent, rows, step = message.parent, [], 4 * size
        for i in range(len(hashes)):
            key = message.hashes[32 * i : 32 * (i + 1)]
            if key not in self._notes:
                tokens = message.tokens[step * i : step * (i + 1)]
                items = _items_in(message, i * size, (i + 1) * size) if message.items else []
                note = _encode(Note(parent, tokens, message.tenant, message.adapter, items))
                self._notes[key] = note
                rows.append((key, note))
            parent = key
        if not rows:
            return
        self._file.add(rows)
        self._tell_described([key for key, _ in rows])

    def _tell_described(self, keys: list[bytes]) -> None:
        """Tell of blocks that were there before their notes, such as those of which the file had none."""
        wanted = np.frombuffer(b"".join(self._keys_of(keys)), np.uint8).reshape(-1, 32)
        for tier in self._tiers.values():
            if tier.pool is not None and (tier.pool.contains(wanted) == READY).any():
                self.tell_anew(tier.level)
        if any(key in self._holders for key in keys):
            self.tell_anew(CacheLevel.DEVICE)

    def _keys_of(self, pages: Iterable[bytes]) -> Iterator[bytes]:
        for page in pages:
            yield from (
                bytes(byte ^ mark for byte in page) if mark else page for mark in range(len(self._marks))
            )

    def forget_tenant(self, key: bytes) -> None:
        """Drop the notes of a tenant's blocks that are in no tier, from the file too, in the next calls of ``work``."""
        self._deleted.add(key)

    def _sweep(self) -> None:
        """Drop the notes of blocks that are in no tier, some at a time.

        That is due once the file has many rows too many; or for a tenant whose blocks were deleted, for these alone.
        """
        resident = sum(len(tier.blocks) for tier in self._tiers.values())
        is_known = self._loading is None and not (
            self._has_storage and self._tiers[CacheLevel.STORAGE].pool is None  # it is being opened
        )
        if self._deleted and is_known and not self._to_sweep:
            self._to_sweep = list(self._notes)
        elif not self._to_sweep and is_known and self._file.rows > 2 * resident + _SLACK:
            self._to_sweep = list(self._notes)[: -_SLACK // 2]  # the newest are perhaps about to be stored
        if not self._to_sweep:
            return
        some, self._to_sweep = self._to_sweep[-_AT_ONCE:], self._to_sweep[:-_AT_ONCE]
        pages = np.frombuffer(b"".join(some), np.uint8).reshape(-1, 32)
        gone = np.array([page not in self._holders for page in some], np.bool_)
        for tier in self._tiers.values():
            if tier.pool is not None:
                gone &= tier.pool.contains(pages) == ABSENT
        for i in np.flatnonzero(gone).tolist():
            if not self._deleted or self._is_deleted(some[i]):
                self._notes.pop(some[i], None)
        if not self._to_sweep:
            self._deleted.clear()
            self._file.rewrite(list(self._notes.items()))

    def _is_deleted(self, page: bytes) -> bool:
        note = self._notes.get(page)
        salt = _decode(note).salt if note is not None else None
        return salt is not None and tenant_key(salt) in self._deleted

    # --- tiers ----------------------------------------------------------------------------------------------

    def attach(self, level: CacheLevel, pool: BlockPool | None) -> None:
        """Follow a tier from now on, with the blocks that it has."""
        if self._tiers[level].pool is not pool:
            self._tiers[level].pool = pool
            self.tell_anew(level)

    def tell_anew(self, level: CacheLevel) -> None:
        """Tell all blocks, those of one tier as its pool has them now."""
        tier = self._tiers[level]
        if level is not CacheLevel.DEVICE:
            tier.blocks = {}
        if tier.pool is not None:
            every = tier.pool.starting_with(b"")
            tier.blocks = {row.tobytes(): None for row in tier.pool.ancestry(every.slots).hashes}
        self._stream.begin_again()

    def tier_events(self, level: CacheLevel, kinds: Any, hashes: HashArray) -> None:
        """Publish the events of a tier, in their order."""
        if (kinds > EVENT_REMOVED).any():  # cleared, or lost
            self.tell_anew(level)
            return
        self._change(level, kinds.tolist(), [row.tobytes() for row in hashes])

    def _change(self, level: CacheLevel, codes: list[int], every: list[bytes]) -> None:
        """Publish which blocks came to a tier and left it, in order."""
        tier, changes = self._tiers[level], list[Change]()
        ends = [*(i for i in range(1, len(codes)) if codes[i] != codes[i - 1]), len(codes)]
        first = 0
        for end in ends:
            keys = every[first:end]
            if codes[first] == EVENT_STORED:
                tier.blocks |= dict.fromkeys(keys)
                changes.append((self._stored, keys))
            else:
                for key in keys:
                    tier.blocks.pop(key, None)
                changes.append((self._removed, keys))
            first = end
        self._stream.publish(lambda: [event for tell, keys in changes for event in tell(level, keys)])

    # --- devices --------------------------------------------------------------------------------------------

    def device_events(self, session: int, kinds: Any, hashes: HashArray) -> None:
        """Take which blocks came to and left the device of a client.

        Routers are told when the first client has a block, and when the last one has it no more.
        """
        own = self._devices.setdefault(session, set())
        codes, keys = list[int](), list[bytes]()
        for kind, key in zip(kinds.tolist(), (row.tobytes() for row in hashes), strict=True):
            if kind == EVENT_STORED and key not in own and len(own) < MOST_ON_DEVICE:
                own.add(key)
                self._holders[key] += 1
                is_told = self._holders[key] == 1
            elif kind == EVENT_REMOVED and key in own:
                own.remove(key)
                is_told = self._is_last(key)
            else:
                is_told = False
            if is_told:
                codes.append(kind)
                keys.append(key)
            if kind == EVENT_CLEARED and own:
                gone = [each for each in own if self._is_last(each)]
                own.clear()
                codes += [EVENT_REMOVED] * len(gone)
                keys += gone
        if codes:
            self._change(CacheLevel.DEVICE, codes, keys)

    def forget_device(self, session: int) -> None:
        """Forget what the device of a client had that has gone."""
        gone = [key for key in self._devices.pop(session, ()) if self._is_last(key)]
        if gone:
            self._change(CacheLevel.DEVICE, [EVENT_REMOVED] * len(gone), gone)

    def on_devices(self, key: bytes) -> int:
        """Return how many clients have a block on their device."""
        return self._holders.get(key, 0)

    def _is_last(self, key: bytes) -> bool:
        """Count a client less for a block; return True if none is left."""
        self._holders[key] -= 1
        if self._holders[key]:
            return False
        del self._holders[key]
        return True

    def work(self) -> None:
        """Take the notes that were read from the file, and the events of storage."""
        if self._loading is not None and self._loading.done():
            self._notes = self._loading.result() | self._notes
            self._loading = None
            for level in self._tiers:
                self.tell_anew(level)
        self._sweep()
        pool = self._tiers[CacheLevel.STORAGE].pool
        if pool is not None:
            kinds, hashes, _ = pool.take_events()
            if len(kinds):
                self.tier_events(CacheLevel.STORAGE, kinds, hashes)

    # --- events ---------------------------------------------------------------------------------------------

    def snapshot(self) -> Iterator[list[Any]]:
        """Yield the events of all blocks that are there, some at a time."""
        for tier in list(self._tiers.values()):
            keys = list(tier.blocks)
            for first in range(0, len(keys), _AT_ONCE):
                yield list(self._stored(tier.level, keys[first : first + _AT_ONCE]))

    def _stored(self, level: CacheLevel, keys: Iterable[bytes]) -> Iterator[RouterBlockStored]:
        blocks = [block for key in keys if (block := self._block(key)) is not None]
        for group in self._told:
            kind, window = self._kinds[group]
            for run in runs_of(block for block in blocks if block.group == group):
                yield RouterBlockStored(
                    **fields_of(run, MEDIUM[level], self._layout.block_size),
                    **_LOCAL,
                    kv_cache_spec_kind=kind,
                    kv_cache_spec_sliding_window=window,
                )

    def _removed(self, level: CacheLevel, keys: list[bytes]) -> Iterator[RouterBlockRemoved]:
        by_group: dict[int, list[int]] = {}
        for key in keys:
            page, mark = self._page_of(key)
            if self._is_told(mark):
                by_group.setdefault(self._marks[mark], []).append(_name(page))
        for group, names in by_group.items():
            yield RouterBlockRemoved(names, MEDIUM[level], group, **_LOCAL)

    def _page_of(self, key: bytes) -> tuple[bytes, int]:
        """Return the hash of a record's page, and the mark in the record's key: 0 if that is the hash."""
        for mark in range(len(self._marks)):
            page = bytes(byte ^ mark for byte in key) if mark else key
            if page in self._notes:
                return page, mark
        return key, 0

    def _is_told(self, mark: int) -> bool:
        """Return True for the last record of a group in its page: routers know pages."""
        return self._told[self._marks[mark]] == mark

    def _block(self, key: bytes) -> RouterBlock | None:
        page, mark = self._page_of(key)
        text = self._notes.get(page)
        if text is None or not self._is_told(mark):
            return None
        note = _decode(text)
        origin = self._origins.get((note.adapter, note.salt))
        if origin is None:
            origin = self._origins.setdefault(
                (note.adapter, note.salt), Origin(lora_name=note.adapter, salt=note.salt)
            )
        extra: list[Any] = [note.adapter] if note.adapter is not None else []
        extra += note.items
        if note.salt is not None and not note.parent:
            extra.append(note.salt)
        return RouterBlock(
            name=_name(page),
            parent=_name(note.parent) if note.parent else None,
            tokens=note.tokens,
            origin=origin,
            extra=tuple(extra) or None,
            group=self._marks[mark],
        )

    def close(self) -> None:
        """Write the notes that wait."""
        self._file.close()


def _items_in(message: Describe, first: int, last: int) -> list[tuple[str, int]]:
    """Return the images and the like in a range of tokens, each with its offset there."""
    return [
        (name, offset - first)
        for offset, length, name in message.items
        if offset < last and offset + length > first
    ]


def _name(page: bytes) -> int:
    """Return the name of a block for routers: 63 bits of its hash, which fit every reader's integer."""
    return int.from_bytes(page[:8], "little") >> 1


class RouterFeeds:
    """The feeds of a service, by layout. ``path_of`` returns the path of a layout's notes."""

    def __init__(
        self, publisher: EventPublisher, path_of: Callable[[KVLayout], Path], *, has_storage: bool
    ) -> None:
        self.publisher = publisher
        self._has_storage = has_storage
        self._path_of = path_of
        self._feeds: dict[bytes, RouterFeed] = {}
        self._topics: set[str] = set()
        self._faults: set[type[Exception]] = set()

    def of(self, layout: KVLayout) -> RouterFeed:
        """Return the feed of a layout, opened under a topic of its own at first."""
        feed = self._feeds.get(layout.fingerprint)
        if feed is None:
            topic = f"kv@{socket.gethostname()}@{layout.model}"
            if topic in self._topics:
                topic = f"{topic}@{layout.fingerprint.hex()[:16]}"
            self._topics.add(topic)
            file = NotesFile(self._path_of(layout))
            feed = self._feeds[layout.fingerprint] = RouterFeed(
                layout, self.publisher, topic, file, has_storage=self._has_storage
            )
        return feed

    def work(self) -> None:
        """Go on with all feeds."""
        for feed in self._feeds.values():
            try:
                feed.work()
            except Exception as error:  # of this feed alone: the service goes on
                if type(error) not in self._faults:
                    self._faults.add(type(error))
                    log.exception("routers cannot be told of blocks")

    def close(self) -> None:
        """Publish what waits, and end."""
        self.publisher.close()
        for feed in self._feeds.values():
            feed.close()
