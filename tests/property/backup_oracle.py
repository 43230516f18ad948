"""The rules of ``BackupPlanner`` block by block, over tiers of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from fdcache._core import SLOT_READY, BlockList
from fdcache.metadata import BlockNode, SwapPurpose
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
    """Plans like a ``BackupPlanner`` with at most half of the device tier in flight."""

    def __init__(self, policy: WritePolicy, threshold: int, reserve: int, device: int, host: int) -> None:
        self.policy, self.reserve = policy, reserve
        self.least_hits = {WritePolicy.WRITE_BACK: 0, WritePolicy.WRITE_THROUGH: 1}.get(policy, threshold)
        self.credit = self.slots = device
        self.queue: deque[int] = deque()
        self.counted: set[tuple[int, int]] = set()
        self.plans: dict[SwapPurpose, list[Pair]] = {SwapPurpose.EVICT: [], SwapPurpose.BACKUP: []}

    @property
    def dropped(self) -> int:
        return len(self.counted)

    def attach(self, device: BlockPool, host: LocalHostTier) -> None:
        """Use these tiers from now on."""
        self.device, self.host = device, host

    def on_commit(self, committed: Iterable[int], stored: Iterable[bool]) -> None:
        if self.policy is WritePolicy.WRITE_THROUGH:
            self._enqueue([slot for slot, is_new in zip(committed, stored, strict=True) if is_new])

    def on_match(self, matched: Iterable[int], hits: Iterable[int]) -> None:
        if self.policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            reached = [slot for slot, count in zip(matched, hits, strict=True) if count == self.least_hits]
            self._enqueue(reached)

    def on_evict(self, lists: Sequence[BlockList]) -> None:
        evicted = [block for each in lists for block in blocks_of(each)]
        hits = [count for each in lists for count in each.hits.tolist()]
        self.credit += len(evicted)
        dirty = [
            block
            for block, count in zip(evicted, hits, strict=True)
            if self._is_absent(block.hash) and count >= self.least_hits
        ]
        self._copy(self._with_ancestors(from_root(dirty)), SwapPurpose.EVICT)

    def plan_background(self, in_flight: int) -> None:
        room = min(max(0, max(1, self.slots // 2) - in_flight), self.host.num_blocks)
        if self.policy is not WritePolicy.WRITE_BACK:
            taken = [self.queue.popleft() for _ in range(min(room, len(self.queue)))]
            wanted = [node for node in self.device.nodes(self._ready(taken)) if self._is_wanted(node)]
            later = self._back_up(self._that_fit([self._block(node) for node in wanted]), room)
            self.queue.extendleft(
                block.slot for block in reversed(later) if block.slot not in set(self.queue)
            )
            return
        count = min(self.reserve - in_flight, self.credit)
        if count > 0:
            cold = [block for block in blocks_of(self.device.coldest(count)) if self._is_absent(block.hash)]
            before = len(self.plans[SwapPurpose.BACKUP])
            self._back_up(self._that_fit(from_root(cold[:room])), room)
            self.credit -= len(self.plans[SwapPurpose.BACKUP]) - before

    def _enqueue(self, device_slots: list[int]) -> None:
        self.queue += [slot for slot in device_slots if slot not in self.queue]

    def _ready(self, device_slots: list[int]) -> list[int]:
        return [slot for slot in device_slots if self.device.node(slot).state == SLOT_READY]

    def _is_wanted(self, node: BlockNode) -> bool:
        return self._is_absent(node.hash_value) and node.hit_count >= self.least_hits

    def _block(self, node: BlockNode) -> Block:
        (block,) = self._find([node.hash_value])
        return block

    def _that_fit(self, blocks: list[Block]) -> list[Block]:
        """Leave the blocks of paths that are no longer than the host tier."""
        deep = [each for each in blocks if self.device.node(each.slot).depth >= self.host.num_blocks]
        self._drop(deep)
        return [each for each in blocks if each not in deep]

    def _back_up(self, blocks: list[Block], room: int) -> list[Block]:
        """Plan what there is room for; return the rest, but for what is below a dropped block."""
        blocks = self._with_ancestors(blocks)
        dropped = {each.hash for each in self._copy(blocks[:room], SwapPurpose.BACKUP)}
        later = []
        for block in blocks[room:]:
            if block.parent in dropped:
                self._drop([block])
                dropped.add(block.hash)
            else:
                later.append(block)
        return later

    def _copy(self, blocks: list[Block], purpose: SwapPurpose) -> list[Block]:
        """Plan copies as far as the host has room, and return the blocks that are dropped."""
        dropped: list[Block] = []
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
            self.device.hold(slots(source))
            self.plans[purpose] += zip(source, taken.slots.tolist(), strict=True)
            break
        self._drop(dropped)
        return dropped

    def _drop(self, blocks: list[Block]) -> None:
        """Count each block once, as long as it is on the device."""
        self.counted |= {(block.slot, block.generation) for block in blocks}

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
        return from_root(blocks + list(listed.values()))

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
