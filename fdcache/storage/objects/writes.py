"""Writes of a batch: neighbouring records in one object each, stored unless they are there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fdcache._core import CancelFlag, SlotHeader
from fdcache.storage.connector import Outcome
from fdcache.storage.objects.backend import DamagedObjectError, ObjectExistsError, ObjectMissingError
from fdcache.storage.objects.calls import CallPool
from fdcache.storage.objects.catalogue import Pack
from fdcache.storage.objects.locator import Locator
from fdcache.storage.objects.outcomes import BatchInObjects
from fdcache.storage.objects.pack import PAGE

_FRESH_SECONDS = 10.0
"""Age up to which it is believed that an object is still there."""


@dataclass(slots=True)
class _Stored:
    """Outcomes of some blocks, by their index in the batch."""

    outcomes: dict[int, Outcome]
    used: list[Pack]
    nbytes: int = 0


class BatchWrite(BatchInObjects):
    """One batch on its way to the store; ``nbytes`` of new objects were written."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.nbytes = 0
        self._headers: list[SlotHeader] = []

    def run(
        self, pool: CallPool, locator: Locator, most_records: int, deadline: float, cancel: CancelFlag | None
    ) -> None:
        """Store the batch until the deadline."""
        batch = self._batch
        self._headers = [batch.records.header(int(slot)) for slot in batch.host_slots]
        good = [i for i, header in enumerate(self._headers) if self._check.is_source(batch, i, header)]
        self.outcomes[:] = Outcome.SOURCE_CHANGED
        self.outcomes[good] = Outcome.TIMEOUT
        groups = self._groups(good, most_records)
        calls = [partial(self._store, locator, group) for group in groups]
        for group, answer in zip(groups, pool.results(calls, deadline, cancel), strict=True):
            if isinstance(answer, Exception):
                self.outcomes[group], message = self._judge(answer)
                self.error = self.error or message
            else:
                self.used += answer.used
                self.nbytes += answer.nbytes
                for i, outcome in answer.outcomes.items():
                    self.outcomes[i] = outcome
        for i in np.flatnonzero(self.outcomes == Outcome.OK).tolist():
            self.checksums[i] = self._headers[i].payload_checksum

    def _groups(self, blocks: Sequence[int], most: int) -> list[list[int]]:
        """Return neighbours on one path, up to ``most`` in each group."""
        groups: list[list[int]] = []
        for i in blocks:
            parent = self._batch.parents[i].tobytes()
            if groups and len(groups[-1]) < most and self._hashes[groups[-1][-1]] == parent:
                groups[-1].append(i)
            else:
                groups.append([i])
        return groups

    def _store(self, locator: Locator, group: Sequence[int]) -> _Stored:
        """Store what of a group is not there. An object that begins with the same block may hold some of it."""
        done = _Stored({}, [])
        left = list(group)
        for _ in range(2 * len(group) + 2):  # an object may come and go meanwhile, but not for ever
            if not left:
                break
            name = locator.name(self._hashes[left[0]])
            pack, is_damaged = self._known(locator, left[0], name)
            if pack is None:
                left = self._write(locator, name, left, done, replace=is_damaged)
                continue
            held = {header.hash for header in pack.headers}
            run = next((at for at, i in enumerate(left) if self._hashes[i] not in held), len(left))
            done.outcomes.update(dict.fromkeys(left[:run], Outcome.OK))
            done.used.append(pack)
            left = left[run:]
        return done

    def _known(self, locator: Locator, block: int, name: str) -> tuple[Pack | None, bool]:
        """Return the object that holds a block, and True for an object of this name that is of no use."""
        block_hash = self._hashes[block]
        place = locator.catalogue.find(block_hash)
        if place is not None and time.monotonic() - place[0].seen_at < _FRESH_SECONDS:
            return place[0], False
        is_damaged = False
        for each in dict.fromkeys((locator.catalogue.last_seen(block_hash) or name, name)):
            try:
                pack = locator.look_at(each)
            except ObjectMissingError:
                continue
            except DamagedObjectError:
                is_damaged = each == name
                continue
            if any(header.hash == block_hash for header in pack.headers):
                return pack, False
            is_damaged = each == name
        return None, is_damaged

    def _write(
        self, locator: Locator, name: str, blocks: list[int], done: _Stored, *, replace: bool
    ) -> list[int]:
        """Store the leading blocks whose host records are sound, as one object; return those after them."""
        buffer = np.empty(self._objects.size(len(blocks)), np.uint8)
        sound = self._copy(blocks, buffer)
        if not sound:
            done.outcomes[blocks[0]] = Outcome.SOURCE_CHANGED
            return blocks[1:]
        headers = tuple(self._headers[i] for i in blocks[:sound])
        self._objects.write_page(buffer[:PAGE], headers)
        content = buffer[: self._objects.size(sound)]
        try:
            (self._backend.replace if replace else self._backend.create)(name, content)
        except ObjectExistsError:
            return blocks  # another node was faster
        pack = locator.catalogue.enter(name, headers)
        pack.used_at = pack.seen_at
        done.nbytes += len(content)
        done.outcomes.update(dict.fromkeys(blocks[:sound], Outcome.OK))
        return blocks[sound:]

    def _copy(self, blocks: Sequence[int], buffer: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
        """Copy records behind the page of an object; return how many are sound until the first that is not."""
        batch = self._batch
        for position, i in enumerate(blocks):
            slot = int(batch.host_slots[i])
            record = buffer[self._objects.offset(position) : self._objects.offset(position + 1)]
            record[:] = batch.records.record(slot)
            if not self._check.has_bytes_of(self._headers[i], record):
                return position
            if batch.records.header(slot).to_bytes() != self._headers[i].to_bytes():
                return position
        return len(blocks)
