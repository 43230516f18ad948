"""The rules of ``CopyOut`` block by block, over a host tier of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from fdcache.settings.cache import WritePolicy
from fdcache.tiers.host import LocalHostTier
from fdcache.tiers.pool import ABSENT, NO_PARENT, PENDING, RESERVED
from tests.tier_help import hashes

ROOT = bytes(32)
FEW, MOST_WAITS = 32, 16
Pair = tuple[int, int]
"""Device block and host slot of a planned copy."""


@dataclass
class Path:
    """Blocks of a request on the device."""

    hashes: list[bytes] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


@dataclass
class Known:
    """The content of a device block."""

    hash: bytes
    path: Path
    depth: int
    hits: int
    is_queued: bool = False
    is_dropped: bool = False

    @property
    def parent(self) -> bytes:
        return self.path.hashes[self.depth - 1] if self.depth else ROOT


class CopyOutOracle:
    """Plans like ``CopyOut`` above a tier of this process."""

    def __init__(self, policy: WritePolicy, threshold: int, reserve: int, host: LocalHostTier) -> None:
        self.writes_back = policy is WritePolicy.WRITE_BACK
        self.least_hits = threshold if policy is WritePolicy.WRITE_THROUGH_SELECTIVE else 1
        self.reserve = reserve
        self.host = host
        self.known: dict[int, Known] = {}
        self.read_by: dict[int, int] = {}
        self.offers: list[tuple[Path, int, int, int]] = []
        self.queue: list[list[int]] = []
        self.waiting: list[list[int]] = []
        self.coldest: list[int] = []
        self.may_retry = False
        self.waits = self.dropped = 0

    def offered(self, path: Path, start: int, counted: int) -> None:
        self.offers.append((path, start, len(path.ids), counted))

    def take_offers(self) -> None:
        entered: dict[int, None] = {}
        for path, start, stop, counted in self.offers:
            for i in range(start, stop):
                device_id, former = path.ids[i], self.known.get(path.ids[i])
                is_same = former is not None and former.hash == path.hashes[i]
                hits = former.hits if former is not None and is_same else 0
                is_queued = former is not None and former.is_queued
                is_dropped = former is not None and is_same and former.is_dropped
                self.known[device_id] = Known(
                    path.hashes[i], path, i, max(hits + (i >= counted), 1), is_queued, is_dropped
                )
                entered[device_id] = None
        self.offers = []
        if not self.writes_back:
            wanted = [each for each in entered if not self.known[each].is_queued and self.is_wanted(each)]
            self.enqueue(self.queue, wanted)

    def given_away(self, ids: Sequence[int], in_flight: Collection[int]) -> tuple[list[Pair], set[int]]:
        self.take_offers()
        after = {self.read_by[each] for each in ids if self.read_by.get(each) in in_flight}
        known = [each for each in dict.fromkeys(ids) if each in self.known]
        wanted = [each for each in known if self.is_wanted(each)]
        copies = self.copy(self.with_ancestors(wanted), is_backup=False)[0]
        for each in known:
            del self.known[each]
        return copies, after

    def plan(self, in_flight: int, *, is_patient: bool) -> list[Pair]:
        self.take_offers()
        if self.may_retry:
            self.queue, self.waiting, self.may_retry = [*self.waiting, *self.queue], [], False
        if not self.queue and not self.coldest:
            return []
        is_few = sum(map(len, self.queue)) < FEW and not self.coldest
        if is_few and is_patient and self.waits < MOST_WAITS:
            self.waits += 1
            return []
        self.waits = 0
        most = max(max(self.host.num_blocks // 4, 1) - in_flight, 0)
        copies: list[Pair] = []
        if self.queue and most:
            ids = list(dict.fromkeys(each for part in self.queue for each in part if self.is_queued(each)))
            self.queue = [ids[most:]] if ids[most:] else []
            for each in ids[:most]:
                self.known[each].is_queued = False
            copies, waits = self.copy(self.with_ancestors(ids[:most]), is_backup=True)
            self.enqueue(self.waiting, waits)
        coldest, self.coldest = self.coldest, []
        known = [each for each in dict.fromkeys(coldest) if each in self.known][: self.reserve]
        dirty = [each for each in known if self.is_wanted(each)][
            : max(min(most, self.reserve - in_flight), 0)
        ]
        return copies + self.copy(self.with_ancestors(dirty), is_backup=True)[0]

    @property
    def queued(self) -> int:
        self.take_offers()
        return sum(self.is_queued(each) for part in (*self.queue, *self.waiting) for each in part)

    def sent(self, plan: int, copies: Sequence[Pair]) -> None:
        self.read_by |= {device_id: plan for device_id, _ in copies}

    def is_queued(self, device_id: int) -> bool:
        return device_id in self.known and self.known[device_id].is_queued

    def enqueue(self, queue: list[list[int]], ids: list[int]) -> None:
        for each in ids:
            self.known[each].is_queued = True
        if ids:
            queue.append(ids)

    def presence(self, block: bytes) -> int:
        return int(self.host.contains(hashes([block]))[0])

    def is_wanted(self, device_id: int) -> bool:
        known = self.known[device_id]
        return self.presence(known.hash) == ABSENT and known.hits >= self.least_hits

    def with_ancestors(self, ids: list[int]) -> list[int]:
        """Return blocks, each after those ancestors on the device that the host lacks."""
        found: dict[int, None] = {}
        for i, device_id in enumerate(ids):
            known = self.known[device_id]
            follows = i > 0 and self.known[ids[i - 1]].hash == known.parent
            if known.parent == ROOT or follows or self.presence(known.parent) != ABSENT:
                found[device_id] = None
                continue
            above: list[int] = []
            for depth in range(known.depth - 1, -1, -1):
                there = self.known.get(known.path.ids[depth])
                if there is None or there.hash != known.path.hashes[depth]:
                    break
                above.insert(0, known.path.ids[depth])
            uncovered = [each for each in above if self.presence(self.known[each].hash) == ABSENT]
            found |= dict.fromkeys([each for each in [*uncovered, device_id] if each not in found])
        return list(found)

    def drop(self, ids: list[int]) -> None:
        """Count each block once, as long as it is on the device."""
        for each in ids:
            self.dropped += not self.known[each].is_dropped
            self.known[each].is_dropped = True

    def copy(self, ids: list[int], *, is_backup: bool) -> tuple[list[Pair], list[int]]:
        count = len(ids)
        while count:
            blocks = [self.known[each] for each in ids[:count]]
            taken = self.host.reserve_copies(
                0,
                hashes([each.parent for each in blocks]),
                hashes([each.hash for each in blocks]),
                below_pending=not is_backup,
            )
            if not taken.missing:
                break
            count = max(count - taken.missing, 0)
        self.drop(ids[count:])
        if not count:
            return [], []
        status = taken.status.tolist()
        chosen = [each for each, state in zip(ids, status, strict=False) if state == RESERVED]
        for each in chosen:
            self.known[each].is_queued = False
        below = [each for each, state in zip(ids, status, strict=False) if state == NO_PARENT]
        waits: list[int] = []
        for each in below if is_backup else ():
            parent = self.known[each].parent
            if self.presence(parent) == PENDING or parent in {self.known[other].hash for other in waits}:
                waits.append(each)
        self.drop([each for each in below if each not in waits])
        return list(zip(chosen, taken.slots.tolist(), strict=True)), waits
