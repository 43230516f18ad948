"""An oracle of the tier in plain dictionaries and lists: simple, slow, nothing kept that can be recomputed.

The tier chooses free slots and their new generations. The oracle takes its choice, checks that it was allowed, and
continues from there.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fdcache.errors import StaleLeaseError

ROOT = -1
ROOT_HASH = bytes(32)
UNKNOWN_HASH = b"\xff" * 32

RESERVED, READY, PENDING, NO_PARENT = range(4)
STORED, DUPLICATE = range(2)
EVENT_STORED, EVENT_REMOVED, EVENT_CLEARED, EVENT_LOST = range(4)

Event = tuple[int, bytes, bytes]


@dataclass
class Block:
    """A slot in use. Anonymous when it has no hash; pending when it has one but is not ready."""

    generation: int
    owner: int
    hash: bytes | None = None
    parent: int = ROOT
    ready: bool = False
    hits: int = 0
    checksum: int = 0
    holds: int = 0
    unjoined: bool = False


@dataclass
class Lease:
    epoch: int
    pins: list[int] = field(default_factory=list)


class TierOracle:
    """`used` maps slots to blocks; a slot that is not in it is free."""

    def __init__(self, slots: int, spare: float = 0.0) -> None:
        self.slots = slots
        self.spare = spare
        self.used: dict[int, Block] = {}
        self.leases: dict[int, Lease] = {}
        self.opened = 0
        self.epoch = 0
        self.evictions = 0
        self.used_until: dict[int, int] = {}
        self.ticks = 0
        self.seen_generations: set[tuple[int, int]] = set()
        self.events: list[Event] = []
        self.event_capacity = 0
        self.contradictions = 0

    # --- what can be read off the state ---

    def pins(self, slot: int) -> int:
        return sum(lease.pins.count(slot) for lease in self.leases.values())

    def children(self, slot: int) -> list[int]:
        return [s for s, block in self.used.items() if block.hash is not None and block.parent == slot]

    def find(self, digest: bytes) -> int | None:
        return next((s for s, block in self.used.items() if block.hash == digest), None)

    def find_ready(self, digest: bytes) -> int | None:
        slot = self.find(digest)
        return slot if slot is not None and self.used[slot].ready else None

    def hash_of(self, slot: int) -> bytes:
        return ROOT_HASH if slot == ROOT else self.used[slot].hash or ROOT_HASH

    def parent_hash(self, block: Block) -> bytes:
        return UNKNOWN_HASH if block.unjoined else self.hash_of(block.parent)

    def path(self, slot: int) -> list[int]:
        """Return the entries from the root down to `slot`."""
        path: list[int] = []
        while slot != ROOT and self.used[slot].hash is not None:
            path.insert(0, slot)
            slot = self.used[slot].parent
        return path

    def is_unused(self, slot: int) -> bool:
        unused = self.used[slot].ready and not self.pins(slot)
        return unused and all(self.is_unused(child) for child in self.children(slot))

    def is_idle(self, slot: int) -> bool:
        unheld = not self.used[slot].holds and all(self.is_idle(child) for child in self.children(slot))
        return unheld and self.is_unused(slot)

    def free(self) -> int:
        return self.slots - len(self.used)

    def eviction_order(self, kept: Iterable[int] = ()) -> list[int]:
        """Evict the leaf whose last use ended first, `count` times; skip `kept` and busy blocks."""
        left = {slot for slot in self.used if self.is_idle(slot)}
        order: list[int] = []
        while True:
            leaves = [s for s in left if s not in kept and not left & set(self.children(s))]
            if not leaves:
                return order
            order.append(min(leaves, key=self.used_until.__getitem__))
            left.remove(order[-1])

    # --- what every change ends with ---

    def _settle(self) -> None:
        """Free unused anonymous slots; give blocks that are no longer used their place in the order."""
        while abandoned := [s for s, block in self.used.items() if self._is_abandoned(s, block)]:
            del self.used[abandoned[0]]
        unused = [slot for slot in self.used if self.is_unused(slot)]
        self.used_until = {s: tick for s, tick in self.used_until.items() if s in unused}
        for slot in sorted(unused, key=lambda s: -len(self.path(s))):
            if slot not in self.used_until:
                self.ticks += 1
                self.used_until[slot] = self.ticks

    def _is_abandoned(self, slot: int, block: Block) -> bool:
        return block.hash is None and not block.holds and not self.pins(slot) and not self.children(slot)

    def _note(self, kind: int, slot: int) -> None:
        if not self.event_capacity:
            return
        if len(self.events) >= self.event_capacity:
            self.events = [(EVENT_LOST, ROOT_HASH, ROOT_HASH)]
        self.events.append((kind, self.hash_of(slot), self.parent_hash(self.used[slot])))

    def _pin(self, lease: int, slot: int) -> None:
        self.leases[lease].pins.append(slot)
        self._settle()

    def _evict(self, slot: int) -> None:
        self._note(EVENT_REMOVED, slot)
        del self.used[slot]
        self.evictions += 1
        self._settle()

    def _become_ready(self, slot: int, checksum: int = 0) -> None:
        block = self.used[slot]
        block.ready, block.hits, block.checksum = True, 1, checksum
        self._note(EVENT_STORED, slot)

    def _take(
        self, owner: int, count: int, given: Sequence[tuple[int, int]], kept: set[int], evictions: int
    ) -> list[int]:
        """`evictions` is the tier's choice: as few as needed, or some ahead of need."""
        assert len(given) == count
        needed = max(count - self.free(), 0)
        spare = int(self.spare * self.slots)
        assert evictions == needed or needed < evictions <= count + spare - self.free()
        evicted: list[int] = []
        for _ in range(evictions):
            evicted.append(self.eviction_order(kept)[0])
            self._evict(evicted[-1])
        for slot, generation in given:
            assert 0 <= slot < self.slots
            assert slot not in self.used
            assert (slot, generation) not in self.seen_generations
            self.seen_generations.add((slot, generation))
            self.used[slot] = Block(generation, owner, holds=1)  # held until its owner has pinned it
        return evicted

    def _live(self, lease: int) -> Lease:
        if lease not in self.leases:
            raise StaleLeaseError
        return self.leases[lease]

    def _current(self, lease: int) -> None:
        if self._live(lease).epoch != self.epoch:
            raise StaleLeaseError

    def _in_use(self, slot: int) -> Block:
        if slot not in self.used:
            raise IndexError(slot)
        return self.used[slot]

    # --- leases and look-up ---

    def open_lease(self) -> int:
        self.opened += 1
        self.leases[self.opened] = Lease(self.epoch)
        return self.opened

    def release(self, lease: int) -> bool:
        if lease not in self.leases:
            return False
        pins = self.leases[lease].pins
        while pins:
            pins.pop()
            self._settle()
        del self.leases[lease]
        return True

    def match(self, lease: int, hashes: Sequence[bytes], start: int) -> tuple[list[int], bool]:
        self._current(lease)
        run: list[int] = []
        for digest in hashes[start:]:
            slot = self.find_ready(digest)
            if slot is None:
                break
            run.append(slot)
        for above, slot in reversed(list(itertools.pairwise(run))):
            self.join(slot, self.hash_of(above))
            if self.used[slot].parent != above:
                self.contradictions += 1
                return [], False
        if run and start:
            self.join(run[0], hashes[start - 1])
        for slot in run:
            self.used[slot].hits += 1
            self._pin(lease, slot)
        end = start + len(run)
        return run, end < len(hashes) and self.find(hashes[end]) is not None

    def join(self, slot: int, parent: bytes) -> None:
        """Tell a block of unknown parent its parent, which counts as a use of it and of those above."""
        block, above = self.used[slot], self.find_ready(parent)
        if parent == ROOT_HASH and block.unjoined:
            block.unjoined = False
        elif block.unjoined and block.ready and above is not None and slot not in self.path(above):
            lease = self.leases.setdefault(-1, Lease(self.epoch))
            self._pin(-1, slot)
            block.parent, block.unjoined = above, False
            self._settle()
            lease.pins.clear()
            self._settle()
            del self.leases[-1]

    def contains(self, hashes: Sequence[bytes]) -> list[int]:
        presence = {(False, False): 0, (True, True): 1, (True, False): 2}
        return [presence[self.find(h) is not None, self.find_ready(h) is not None] for h in hashes]

    def ancestry(self, slots: Sequence[int], levels: int) -> list[int]:
        listed: list[int] = []
        for slot in slots:
            self._in_use(slot)
            up: list[int] = []
            since = 0
            for above in reversed(self.path(slot)):
                since = 0 if above in slots else since + 1
                if above in listed or since > levels:
                    break
                up.append(above)
            listed += reversed(up)
        return listed

    # --- reserve, commit ---

    def reserve(
        self, lease: int, count: int, given: Sequence[tuple[int, int]], evictions: int = 0
    ) -> tuple[int, list[int]]:
        self._live(lease)
        missing = count - self.free() - len(self.eviction_order())
        if missing > 0:
            return missing, []
        evicted = self._take(lease, count, given, set(), evictions)
        for slot, _ in given:
            self.used[slot].holds = 0
            self.leases[lease].pins.append(slot)
        return 0, evicted

    def commit(self, lease: int, parent: bytes, hashes: Sequence[bytes], slots: Sequence[int]) -> list[int]:
        self._current(lease)
        for slot in slots:
            block = self._in_use(slot)
            if block.hash is not None or block.ready or block.owner != lease:
                raise ValueError("not reserved by this lease for computing")
        if len(set(slots)) < len(slots) or ROOT_HASH in hashes:
            raise ValueError("twice the same slot, or a hash that means the root")
        status: list[int] = []
        above = ROOT if parent == ROOT_HASH else self.find_ready(parent)
        for digest, slot in zip(hashes, slots, strict=True):
            present = self.find(digest)
            if above is None or self.used[slot].holds or self.children(slot):
                break
            if present is None:
                self.used[slot].hash, self.used[slot].parent = digest, above
                self._become_ready(slot)
                above = slot
                status.append(STORED)
            elif self.used[present].ready and self.used[present].parent == above:
                self.leases[lease].pins.append(present)
                above = present
                status.append(DUPLICATE)
            else:
                break
            self._settle()
        return status

    # --- copies ---

    def reserve_copies(
        self,
        lease: int,
        parents: Sequence[bytes],
        hashes: Sequence[bytes],
        given: Sequence[tuple[int, int]],
        evictions: int = 0,
    ) -> tuple[list[int], int, list[int]]:
        if lease:
            self._current(lease)
        if {ROOT_HASH, UNKNOWN_HASH} & set(hashes):
            raise ValueError("a hash that means the root")
        status: list[int] = []
        wanted: dict[bytes, bytes] = {}
        named: list[int] = []
        for parent, digest in zip(parents, hashes, strict=True):
            present, above = self.find_ready(digest), self.find_ready(parent)
            if present is not None:
                self.join(present, parent)
                status.append(READY)
                named.append(present)
            elif digest in wanted or self.find(digest) is not None:
                status.append(PENDING)
            elif parent in wanted or parent in (ROOT_HASH, UNKNOWN_HASH) or above is not None:
                status.append(RESERVED)
                wanted[digest] = parent
                named += [above] if above is not None else []
            else:
                status.append(NO_PARENT)
        kept = {slot for entry in named for slot in self.path(entry)}
        missing = len(wanted) - self.free() - len(self.eviction_order(kept))
        if missing > 0:
            return status, missing, []
        evicted = self._take(lease, len(wanted), given, kept, evictions)
        for (slot, _), (digest, parent) in zip(given, wanted.items(), strict=True):
            found = self.find(parent)
            self.used[slot].hash = digest
            self.used[slot].parent = ROOT if found is None else found
            self.used[slot].unjoined = parent == UNKNOWN_HASH
            self._settle()
            if lease:
                self._pin(lease, slot)
        return status, 0, evicted

    def _check_held(self, slots: Sequence[int], arriving: bool) -> None:
        for index, slot in enumerate(slots):
            block = self._in_use(slot)
            pending = block.hash is not None and not block.ready
            left = block.holds - slots[: index + 1].count(slot)
            if left < (1 if pending and not arriving else 0):
                raise ValueError("no copy holds the slot")

    def complete(self, slots: Sequence[int], copied: Sequence[bool], checksums: Sequence[int]) -> list[int]:
        self._check_held(slots, arriving=True)
        ready: list[int] = []
        for index, slot in enumerate(slots):
            block = self.used[slot]
            block.holds -= 1
            pending = block.hash is not None and not block.ready
            parent_ready = block.parent == ROOT or self.used[block.parent].ready
            becomes_ready = pending and copied[index] and parent_ready
            if becomes_ready:
                self._become_ready(slot, checksums[index] if checksums else 0)
            elif pending:
                block.hash, block.parent, block.unjoined = None, ROOT, False
            ready.append(int(becomes_ready))
            self._settle()
        return ready

    def hold(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._in_use(slot)
        for slot in slots:
            self.used[slot].holds += 1
        self._settle()

    def hold_ready(self, digests: Sequence[bytes], most: int) -> list[int]:
        found = [slot for digest in digests if (slot := self.find_ready(digest)) is not None][:most]
        self.hold(found)
        return found

    def unhold(self, slots: Sequence[int]) -> None:
        self._check_held(slots, arriving=False)
        for slot in slots:
            self.used[slot].holds -= 1
            self._settle()

    # --- the whole tier ---

    def reset(self) -> None:
        self.epoch += 1
        for block in self.used.values():
            block.hash, block.parent, block.ready, block.unjoined = None, ROOT, False, False
        self._settle()
        if self.event_capacity:
            self.events = [(EVENT_CLEARED, ROOT_HASH, ROOT_HASH)]

    def resize(self, slots: int) -> int:
        if slots < 1:
            raise ValueError("no slots")
        standing = [s for s in self.used if s >= slots and not self.is_idle(s)]
        if standing:
            return len(standing)
        gone = [s for s in self.eviction_order() if any(above >= slots for above in self.path(s))]
        for slot in gone:
            self._evict(slot)
        self.slots = slots
        return 0

    def record_events(self, capacity: int) -> None:
        self.event_capacity = capacity
        self.events = []

    def take_events(self) -> list[Event]:
        taken, self.events = self.events, []
        return taken
