"""The rules of ``CopyOut`` block by block, over devices and a host tier of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fdcache._core import SLOT_READY
from fdcache.metadata import SwapPurpose
from fdcache.settings.cache import WritePolicy
from fdcache.tiers.host import LocalHostTier
from fdcache.tiers.pool import ABSENT, NO_PARENT, RESERVED, BlockPool
from tests.tier_help import hash_list, hashes, slots

ROOT = bytes(32)
FEW, MOST_WAITS = 32, 16
Pair = tuple[int, int]
"""Device slot and host slot of a planned copy."""


class Known(NamedTuple):
    """A block on the device."""

    slot: int
    generation: int
    hash: bytes
    parent: bytes
    hits: int


class Device(Protocol):
    """What the rules look at in a device cache."""

    num_slots: int
    most_held: int

    def block(self, slot: int) -> Known | None:
        """Return the block in a slot."""

    def above(self, block: Known) -> Known | None:
        """Return the parent of a block, which may just have been evicted, if the device has it."""

    def depth(self, block: Known) -> int:
        """Return the position of a block in its path."""

    def coldest(self, count: int) -> list[Known]:
        """Return the next blocks to be evicted, as far as they are known."""

    def hold(self, held: list[int]) -> None:
        """Keep slots until their copies end."""


class OwnDevice:
    """A tier."""

    def __init__(self, tier: BlockPool) -> None:
        self.tier = tier
        self.num_slots = tier.stats().slots
        self.most_held = max(self.num_slots // 2, 1)

    def block(self, slot: int) -> Known | None:
        node = self.tier.node(slot)
        if node.state != SLOT_READY:
            return None
        (found,) = self.tier.nodes([slot])
        return self._find(found.hash_value)

    def above(self, block: Known) -> Known | None:
        return self._find(block.parent)

    def depth(self, block: Known) -> int:
        return int(self.tier.node(block.slot).depth)

    def coldest(self, count: int) -> list[Known]:
        return known_of(self.tier.coldest(count))

    def hold(self, held: list[int]) -> None:
        self.tier.hold(slots(held))

    def _find(self, block: bytes) -> Known | None:
        found = known_of(self.tier.find(hashes([block])))
        return found[0] if found else None


def known_of(found: object) -> list[Known]:
    """Return the blocks of a ``BlockList``."""
    names = ("slots", "generations", "hashes", "parents", "hits")
    columns = [getattr(found, name) for name in names]
    lists = [hash_list(each) if each.ndim == 2 else each.tolist() for each in columns]
    return [Known(*each) for each in zip(*lists, strict=True)]


@dataclass
class Path:
    """Blocks of a request on an engine's device."""

    hashes: list[bytes] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


class EngineDevice:
    """What an engine has offered, and has not given away."""

    most_held = 1 << 60

    def __init__(self) -> None:
        self.known: dict[int, Known] = {}
        self.places: dict[int, tuple[Path, int]] = {}
        self.generations: dict[int, int] = {}
        self.told: list[Known] = []

    @property
    def num_slots(self) -> int:
        return len(self.generations)

    def offer(self, path: Path, start: int, counted: int) -> list[int]:
        """Enter the blocks of a path from ``start`` on; return their device blocks."""
        for i in range(start, len(path.ids)):
            slot, former = path.ids[i], self.known.get(path.ids[i])
            is_same = former is not None and former.hash == path.hashes[i]
            self.generations[slot] = self.generations.get(slot, 0) + (not is_same)
            hits = former.hits if former is not None and is_same else 0
            parent = path.hashes[i - 1] if i else ROOT
            more = max(hits + (i >= counted), 1)
            self.known[slot] = Known(slot, self.generations[slot], path.hashes[i], parent, more)
            self.places[slot] = path, i
        return path.ids[start:]

    def forget(self, ids: Iterable[int]) -> None:
        for slot in ids:
            self.known.pop(slot, None)

    def tell(self, ids: Sequence[int]) -> None:
        self.told = [block for slot in ids if (block := self.known.get(slot))]

    def block(self, slot: int) -> Known | None:
        return self.known.get(slot)

    def above(self, block: Known) -> Known | None:
        path, depth = self.places[block.slot]
        if not depth:
            return None
        found = self.known.get(path.ids[depth - 1])
        return found if found is not None and found.hash == block.parent else None

    def depth(self, block: Known) -> int:
        return self.places[block.slot][1]

    def coldest(self, count: int) -> list[Known]:
        return [
            block
            for each in self.told
            if (block := self.known.get(each.slot)) and block.generation == each.generation
        ][:count]

    def hold(self, held: list[int]) -> None:
        pass


class CopyOutOracle:
    """Plans like ``CopyOut`` above a tier of this process."""

    def __init__(
        self, policy: WritePolicy, threshold: int, reserve: int, device: Device, host: LocalHostTier
    ) -> None:
        self.writes_back, self.reserve = policy is WritePolicy.WRITE_BACK, reserve
        self.least_hits = {WritePolicy.WRITE_BACK: 0, WritePolicy.WRITE_THROUGH: 1}.get(policy, threshold)
        self.device, self.host = device, host
        self.queue: deque[int] = deque()
        self.evicted = self.cleaned = self.waits = 0
        self.counted: set[tuple[int, int]] = set()
        self.plans: dict[SwapPurpose, list[Pair]] = {SwapPurpose.EVICT: [], SwapPurpose.BACKUP: []}

    @property
    def dropped(self) -> int:
        return len(self.counted)

    def enqueue(self, device_slots: Iterable[int]) -> None:
        self.queue += [slot for slot in dict.fromkeys(device_slots) if slot not in self.queue]

    def offered(self, device_slots: Iterable[int]) -> None:
        blocks = [block for slot in device_slots if (block := self.device.block(slot))]
        if not self.writes_back:
            self.enqueue(block.slot for block in blocks if self._is_wanted(block))

    def evict(self, blocks: Sequence[Known]) -> None:
        self.evicted += len(blocks)
        dirty = [block for block in blocks if self._is_wanted(block)]
        self._copy(self._with_ancestors(from_root(dirty)), SwapPurpose.EVICT)

    def plan(self, in_flight: int, *, is_patient: bool = False) -> None:
        most = max(0, min(1024, self.device.most_held) - in_flight)
        if self.writes_back:
            credit = self.device.num_slots + self.evicted - self.cleaned
            wanted = min(self.reserve - in_flight, credit)
            if wanted > 0 and most:
                cold = [block for block in self.device.coldest(wanted) if self._is_absent(block.hash)]
                before = len(self.plans[SwapPurpose.BACKUP])
                self._copy_first(self._that_fit(from_root(cold)), min(most, wanted))
                self.cleaned += len(self.plans[SwapPurpose.BACKUP]) - before
        elif self.queue and not self._waits_for_more(is_patient):
            wanted_blocks: list[Known] = []
            while self.queue and len(wanted_blocks) < most:
                block = self.device.block(self.queue.popleft())
                if block is not None and self._is_wanted(block):
                    wanted_blocks += self._that_fit([block])
            later = [block.slot for block in self._copy_first(wanted_blocks, most)]
            self.queue.extendleft(slot for slot in reversed(later) if slot not in set(self.queue))

    def _waits_for_more(self, is_patient: bool) -> bool:
        waits = is_patient and len(self.queue) < FEW and self.waits < MOST_WAITS
        self.waits = self.waits + 1 if waits else 0
        return waits

    def _is_absent(self, block: bytes) -> bool:
        return bool(self.host.contains(hashes([block]))[0] == ABSENT)

    def _is_wanted(self, block: Known) -> bool:
        return self._is_absent(block.hash) and block.hits >= self.least_hits

    def _that_fit(self, blocks: list[Known]) -> list[Known]:
        """Leave the blocks of paths that are no longer than the host tier."""
        deep = [each for each in blocks if self.device.depth(each) >= self.host.num_blocks]
        self._drop(deep)
        return [each for each in blocks if each not in deep]

    def _copy_first(self, blocks: list[Known], most: int) -> list[Known]:
        """Plan what there is room for; return the rest, but for what is below a dropped block."""
        blocks = self._with_ancestors(blocks)
        dropped = {each.hash for each in self._copy(blocks[:most], SwapPurpose.BACKUP)}
        later = []
        for block in blocks[most:]:
            if block.parent in dropped:
                self._drop([block])
                dropped.add(block.hash)
            else:
                later.append(block)
        return later

    def _copy(self, blocks: list[Known], purpose: SwapPurpose) -> list[Known]:
        """Plan copies as far as the host has room, and return the blocks that are dropped."""
        dropped: list[Known] = []
        while blocks:
            taken = self.host.reserve_copies(
                0, hashes([each.parent for each in blocks]), hashes([each.hash for each in blocks]), True
            )
            if taken.missing:
                kept = max(0, len(blocks) - taken.missing)
                dropped += blocks[kept:]
                blocks = blocks[:kept]
                continue
            status = taken.status.tolist()
            source = [block.slot for block, each in zip(blocks, status, strict=True) if each == RESERVED]
            dropped += [block for block, each in zip(blocks, status, strict=True) if each == NO_PARENT]
            self.device.hold(source)
            self.plans[purpose] += zip(source, taken.slots.tolist(), strict=True)
            break
        self._drop(dropped)
        return dropped

    def _drop(self, blocks: list[Known]) -> None:
        """Count each block once, as long as it is on the device."""
        self.counted |= {(block.slot, block.generation) for block in blocks}

    def _with_ancestors(self, blocks: list[Known]) -> list[Known]:
        """Return the blocks and their ancestors on the device that the host lacks, path by path from the root."""
        hashes_of = [each.hash for each in blocks]
        heads = [i for i, each in enumerate(blocks) if i == 0 or each.parent != hashes_of[i - 1]]
        if not any(blocks[i].parent != ROOT and self._is_absent(blocks[i].parent) for i in heads):
            return blocks
        own = set(hashes_of)
        listed: dict[bytes, Known] = {}
        for block in blocks:
            above: list[Known] = []
            at = block
            while at.parent not in own and at.parent not in listed and at.parent != ROOT:
                found = self.device.above(at) if self._is_absent(at.parent) else None
                if found is None:
                    break
                above.append(found)
                at = found
            listed.update((each.hash, each) for each in reversed(above))
        return from_root(blocks + list(listed.values()))


def from_root(blocks: list[Known]) -> list[Known]:
    """Return blocks as paths, each from its root, in the order of the first block of each path."""
    by_hash = {block.hash: block for block in blocks}
    ordered: dict[Known, None] = {}
    for start in blocks:
        path, at = [], start
        while at is not None and at not in ordered and at not in path:
            path.append(at)
            at = by_hash.get(at.parent)  # type: ignore[assignment]
        ordered.update(dict.fromkeys(reversed(path)))
    return list(ordered)
