"""RouterFeed: tells routers of the blocks that a layout has on devices, in the host tier and in local storage."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fdcache.groups import CacheGroup, Reach, engine_groups, groups_of_rank
from fdcache.hashing import tenant_key
from fdcache.layout import KVLayout
from fdcache.metadata import CacheLevel, HashArray
from fdcache.service.server.event_publisher import EventPublisher, LayoutEvents
from fdcache.service.server.kept_notes import KeptNotes
from fdcache.service.server.notes_file import NotesFile
from fdcache.service.wire.protocol import DescribedPath, Forget
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
        numbers = engine_groups(layout.groups)
        self._marks = tuple(numbers[at] for at in layout.record_groups)
        self._told = {group: self._marks.index(group) for group in sorted(set(self._marks))}
        self._kinds = [
            (_KINDS[each.reach], each.tokens if each.reach is Reach.LAST else None)
            for each in groups_of_rank(layout.groups, 0) or (CacheGroup(layout.block_size),)
        ]
        self._origins: dict[tuple[str | None, str | None], Origin] = {}
        self._tiers = {level: _Tier(level) for level in MEDIUM}
        self._devices: dict[int, dict[bytes, None]] = {}  # of each client by its session, parents first
        self._silent: dict[int, dict[bytes, None]] = {}  # of clients that are not heard
        self._holders: Counter[bytes] = Counter()  # clients with each block
        self.notes = KeptNotes(layout.block_size, file, self._are_gone)
        self._is_shown = True
        self._source: LayoutEvents = publisher.stream(topic).join(self.snapshot)

    @property
    def model(self) -> str:
        """Name of the model."""
        return self._layout.model

    def show(self, is_shown: bool) -> None:
        """Tell routers of the blocks, or no more of them."""
        if is_shown is not self._is_shown:
            self._is_shown = is_shown
            self._source.begin_again()

    def describe(self, paths: Iterable[DescribedPath]) -> None:
        """Keep what a client says of blocks. Raises ``ProtocolError`` for fields that do not fit."""
        if new := self.notes.add(paths):
            self._tell_described(new)

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

    @contextmanager
    def deleting(self, hashes: HashArray) -> Iterator[None]:
        """Forget the notes of these records, and of those that leave a tier meanwhile, once they are in no tier."""
        with self.notes.deleting(self._page_of(row.tobytes())[0] for row in hashes):
            yield
            self._take_storage_events()

    def _are_gone(self, pages: list[bytes]) -> list[bool]:
        """Return for each page whether no tier has it."""
        hashes = np.frombuffer(b"".join(pages), np.uint8).reshape(-1, 32)
        gone = np.array([page not in self._holders for page in pages], np.bool_)
        for tier in self._tiers.values():
            if tier.pool is not None:
                gone &= tier.pool.contains(hashes) == ABSENT
        found: list[bool] = gone.tolist()
        return found

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
        self._source.begin_again()

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
                self.notes.removed(self._page_of(key)[0] for key in keys)
            first = end
        if self._is_shown:
            self._source.publish(lambda: [event for tell, keys in changes for event in tell(level, keys)])

    # --- devices --------------------------------------------------------------------------------------------

    def device_events(self, session: int, kinds: Any, hashes: HashArray) -> None:
        """Take which blocks came to and left the device of a client.

        Routers are told when the first client has a block, and when the last one has it no more.
        """
        if not len(kinds):
            return
        own = self._devices.setdefault(session, {})
        codes, keys = list[int](), list[bytes]()
        for kind, key in zip(kinds.tolist(), (row.tobytes() for row in hashes), strict=True):
            if kind == EVENT_STORED and key not in own and len(own) < MOST_ON_DEVICE:
                own[key] = None
                self._holders[key] += 1
                is_told = self._holders[key] == 1
            elif kind == EVENT_REMOVED and key in own:
                del own[key]
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
        self.hide_device(session)
        self._silent.pop(session, None)

    def hide_device(self, session: int) -> None:
        """Tell routers no more of the device of a client that is not heard, until ``show_device``."""
        if (own := self._devices.pop(session, None)) is None:
            return
        self._silent[session] = own
        gone = [key for key in own if self._is_last(key)]
        if gone:
            self._change(CacheLevel.DEVICE, [EVENT_REMOVED] * len(gone), gone)

    def show_device(self, session: int) -> None:
        """Tell routers of the device of a client that is heard again."""
        if (own := self._silent.pop(session, None)) is None:
            return
        self._devices[session] = own
        self._holders.update(own.keys())
        new = [key for key in own if self._holders[key] == 1]
        if new:
            self._change(CacheLevel.DEVICE, [EVENT_STORED] * len(new), new)

    def forget_deleted(self, order: Forget) -> None:
        """Tell routers that no device has deleted blocks, nor what is below them.

        Engines find them no longer, though an idle one has them on its device until its next step.
        """
        heard, silent = list(self._devices.values()), list(self._silent.values())
        gone = self._deleted(order, {key for own in heard + silent for key in own})
        left = [[key for key in own if key in gone] for own in heard + silent]
        for own, keys in zip(heard + silent, left, strict=True):
            for key in keys:
                del own[key]
        last = [key for keys in left[: len(heard)] for key in keys if self._is_last(key)]
        if last:
            self._change(CacheLevel.DEVICE, [EVENT_REMOVED] * len(last), last)

    def _deleted(self, order: Forget, keys: set[bytes]) -> set[bytes]:
        """Return which of these blocks an order names, by hash or tenant, or which are below such."""
        if order.everything:
            return keys
        tenants = set(order.tenant_keys)
        rows = (order.hashes[at : at + 32] for at in range(0, len(order.hashes), 32))
        named = {self._page_of(row)[0] for row in rows}
        known = dict.fromkeys(named, True)
        for key in keys:
            page, path = self._page_of(key)[0], list[bytes]()
            while page and page not in known:
                path.append(page)
                note = self.notes.of(page)
                if note is not None and note.salt is not None and tenant_key(note.salt) in tenants:
                    known[page] = True
                else:
                    page = note.parent if note is not None else b""
            known |= dict.fromkeys(path, known.get(page, False))
        return {key for key in keys if known.get(self._page_of(key)[0])}

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
        if self.notes.take_loaded():
            for level in self._tiers:
                self.tell_anew(level)
        if not (self._has_storage and self._tiers[CacheLevel.STORAGE].pool is None):  # it is being opened
            self.notes.tidy(sum(len(tier.blocks) for tier in self._tiers.values()))
        self._take_storage_events()

    def _take_storage_events(self) -> None:
        pool = self._tiers[CacheLevel.STORAGE].pool
        if pool is not None:
            kinds, hashes, _ = pool.take_events()
            if len(kinds):
                self.tier_events(CacheLevel.STORAGE, kinds, hashes)

    # --- events ---------------------------------------------------------------------------------------------

    def snapshot(self) -> Iterator[list[Any]]:
        """Yield the events of all blocks that are there and shown, some at a time."""
        for tier in list(self._tiers.values()) if self._is_shown else ():
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
            if page in self.notes:
                return page, mark
        return key, 0

    def _is_told(self, mark: int) -> bool:
        """Return True for the last record of a group in its page: routers know pages."""
        return self._told[self._marks[mark]] == mark

    def _block(self, key: bytes) -> RouterBlock | None:
        page, mark = self._page_of(key)
        note = self.notes.of(page)
        if note is None or not self._is_told(mark):
            return None
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
        self.notes.close()


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
        self._used: set[RouterFeed] = set()
        self._faults: set[type[Exception]] = set()

    def of(self, layout: KVLayout) -> RouterFeed:
        """Return the feed of a layout, opened under the topic of its model at first."""
        feed = self._feeds.get(layout.fingerprint)
        if feed is None:
            topic = f"kv@{socket.gethostname()}@{layout.model}"
            file = NotesFile(self._path_of(layout))
            feed = self._feeds[layout.fingerprint] = RouterFeed(
                layout, self.publisher, topic, file, has_storage=self._has_storage
            )
            self._choose()
        return feed

    def follow(self, used: set[RouterFeed]) -> None:
        """Show of each model the layouts that engines use now, or used last; before any engine came, all of them.

        No engine of today can read what one with other weights stored.
        """
        if used != self._used:
            models = {feed.model for feed in used}
            self._used = used | {feed for feed in self._used if feed.model not in models}
            self._choose()

    def _choose(self) -> None:
        models = {feed.model for feed in self._used}
        for feed in self._feeds.values():
            feed.show(feed in self._used or feed.model not in models)

    def take_forgetful(self) -> list[RouterFeed]:
        """Return the feeds that have dropped notes since the last call."""
        found = [feed for feed in self._feeds.values() if feed.notes.has_forgotten]
        for feed in found:
            feed.notes.has_forgotten = False
        return found

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
