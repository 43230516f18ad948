"""The rules of ``BackupPlanner`` block by block, over tiers of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from fdcache._core import BlockList
from fdcache.metadata import SwapPurpose
from fdcache.plans.blocks import Block
from fdcache.settings.cache import WritePolicy
from fdcache.tiers.host import LocalHostTier
from fdcache.tiers.pool import ABSENT, NO_PARENT, RESERVED, BlockPool
from tests.tier_help import hash_list, hashes, slots

ROOT = bytes(32)
Pair = tuple[int, int]
"""Device slot and host slot of a planned copy."""


def blocks_of(found: BlockList) -> list[Block]:
    fields = (
        found.slots.tolist(),
        found.generations.tolist(),
        hash_list(found.hashes),
        hash_list(found.parents),
    )
    return [Block(*each) for each in zip(*fields, strict=True)]


class BackupOracle:
    """Plans like a ``BackupPlanner`` with at most a quarter of the device tier in flight."""

    def __init__(self, policy: WritePolicy, threshold: int, reserve: int, device: int, host: int) -> None:
        self.policy, self.threshold, self.reserve = policy, threshold, reserve
        self.credit = self.slots = device
        self.queue: deque[bytes] = deque()
        self.dropped = self.withheld = 0
        self.plans: dict[SwapPurpose, list[Pair]] = {SwapPurpose.EVICT: [], SwapPurpose.BACKUP: []}

    def attach(self, device: BlockPool, host: LocalHostTier) -> None:
        """Use these tiers from now on."""
        self.device, self.host = device, host

    def on_commit(self, committed: Iterable[bytes], stored: Iterable[bool]) -> None:
        if self.policy is WritePolicy.WRITE_THROUGH:
            self.queue += [block for block, is_new in zip(committed, stored, strict=True) if is_new]

    def on_match(self, matched: Iterable[bytes], hits: Iterable[int]) -> None:
        if self.policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            self.queue += [
                block for block, count in zip(matched, hits, strict=True) if count == self.threshold
            ]

    def on_evict(self, lists: Sequence[BlockList]) -> None:
        least = {WritePolicy.WRITE_BACK: 0, WritePolicy.WRITE_THROUGH: 1}.get(self.policy, self.threshold)
        evicted = [block for each in lists for block in blocks_of(each)]
        hits = [count for each in lists for count in each.hits.tolist()]
        self.credit += len(evicted)
        dirty = [
            block
            for block, count in zip(evicted, hits, strict=True)
            if self._is_absent(block.hash) and count >= least
        ]
        orphans = self._copy(self._with_ancestors(from_root(dirty)), SwapPurpose.EVICT)
        self.dropped += len(orphans)

    def plan_background(self, in_flight: int) -> None:
        if not in_flight:
            self.withheld = 0
        room = max(0, max(1, self.slots // 4) - in_flight)
        if self.policy is not WritePolicy.WRITE_BACK:
            wanted = [self.queue.popleft() for _ in range(min(room, self.host.num_blocks, len(self.queue)))]
            found = self._find([block for block in wanted if self._is_absent(block)])
            self.queue.extendleft(reversed(self._back_up(found, room, in_flight)))
            return
        count = min(self.reserve - in_flight, self.credit)
        if count > 0:
            cold = [block for block in blocks_of(self.device.coldest(count)) if self._is_absent(block.hash)]
            before = len(self.plans[SwapPurpose.BACKUP])
            self._back_up(from_root(cold[:room]), room, in_flight)
            self.credit -= len(self.plans[SwapPurpose.BACKUP]) - before

    def _back_up(self, blocks: list[Block], room: int, in_flight: int) -> list[bytes]:
        blocks = self._with_ancestors(blocks)
        count = self._spared(blocks[:room], in_flight)
        before, rest = self.dropped, [block.hash for block in blocks[count:]]
        later = self._copy(blocks[:count], SwapPurpose.BACKUP)
        if self.dropped > before:
            self.dropped += len(rest)
            return later
        return later + rest

    def _spared(self, blocks: list[Block], in_flight: int) -> int:
        count = len(blocks)
        while count:
            chosen = slots(block.slot for block in blocks[:count])
            before = self.device.available
            self.device.hold(chosen)
            withheld = before - self.device.available
            self.device.unhold(chosen)
            spare = max(0, self.slots // 4 - self.withheld)
            if withheld <= spare or (count == 1 and not in_flight):
                self.withheld += withheld
                return count
            count //= 2
        return 0

    def _copy(self, blocks: list[Block], purpose: SwapPurpose) -> list[bytes]:
        while blocks:
            parents = hashes([block.parent for block in blocks])
            taken = self.host.reserve_copies(0, parents, hashes([block.hash for block in blocks]))
            if taken.missing:
                self.dropped += min(taken.missing, len(blocks))
                blocks = blocks[: max(0, len(blocks) - taken.missing)]
                continue
            status = taken.status.tolist()
            source = [block.slot for block, each in zip(blocks, status, strict=True) if each == RESERVED]
            self.device.hold(slots(source))
            self.plans[purpose] += zip(source, taken.slots.tolist(), strict=True)
            return [block.hash for block, each in zip(blocks, status, strict=True) if each == NO_PARENT]
        return []

    def _with_ancestors(self, blocks: list[Block]) -> list[Block]:
        """Return the blocks and their ancestors on the device that the host lacks, path by path from the root."""
        own = {block.hash for block in blocks}
        listed: dict[bytes, Block] = {}
        for block in blocks:
            above: list[Block] = []
            parent = block.parent
            while parent not in own and parent not in listed and parent != ROOT and self._is_absent(parent):
                found = self._find([parent])
                if not found:
                    break
                above += found
                parent = found[0].parent
            listed.update((each.hash, each) for each in reversed(above))
        return from_root(blocks + list(listed.values())) if listed else blocks

    def _find(self, wanted: list[bytes]) -> list[Block]:
        return blocks_of(self.device.find(hashes(wanted))) if wanted else []

    def _is_absent(self, block: bytes) -> bool:
        return bool(self.host.contains(hashes([block]))[0] == ABSENT)


def from_root(blocks: list[Block]) -> list[Block]:
    """Return blocks as paths, each from its root, in the order of the first block of each path."""
    by_hash = {block.hash: block for block in blocks}
    ordered: dict[Block, None] = {}
    for start in blocks:
        path, at = [], start
        while at is not None and at not in ordered:
            path.append(at)
            at = by_hash.get(at.parent)  # type: ignore[assignment]
        ordered.update(dict.fromkeys(reversed(path)))
    return list(ordered)
