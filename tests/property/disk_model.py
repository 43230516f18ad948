"""A model of one rank's storage: a file of slots, and the queues of reads and writes that use it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field, replace

import numpy as np

from fdcache.metadata import (
    CacheSwapMetadata,
    StorageScan,
    StorageTask,
    SwapPurpose,
    TransferPlan,
    TransferReport,
    TransferResult,
)

Prefix = tuple[int, ...]
HostBlocks = MutableMapping[int, tuple[int, Prefix]]


@dataclass(frozen=True)
class Stored:
    """One slot of the file. ``rotten``: its bytes do not have its checksum."""

    generation: int
    block: bytes
    parent: bytes
    value: Prefix
    rotten: bool = False


@dataclass
class Found:
    """Failed positions of a task, by cause."""

    lost: set[int] = field(default_factory=set)
    corrupt: set[int] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)
    no_room: set[int] = field(default_factory=set)


class Disk:
    """Stored blocks, bad slots and the room on the disk outlive the rank; queued tasks do not.

    ``room`` is how many slots the disk has room for, None for all.
    """

    def __init__(self) -> None:
        self.slots: dict[int, Stored] = {}
        self.bad: set[int] = set()
        self.room: int | None = None
        self.placed: set[int] = set()
        self.told_bad: set[int] = set()
        self._queues: dict[SwapPurpose, deque[StorageTask | None]] = {
            SwapPurpose.STORE: deque(),
            SwapPurpose.PREFETCH: deque(),
        }

    def reopened(self) -> Disk:
        """Open the same file in another process."""
        disk = Disk()
        disk.slots, disk.bad, disk.room, disk.placed = self.slots, self.bad, self.room, self.placed
        return disk

    @property
    def is_busy(self) -> bool:
        """True if anything is queued."""
        return any(self._queues.values())

    def submit(self, rank: int, plan: TransferPlan) -> list[TransferReport]:
        """Queue the storage tasks of a plan; return the reports of tasks that it cancels."""
        reports = [
            _report(rank, task, set(range(len(task.swap))))
            for task in self._queues[SwapPurpose.PREFETCH]
            if task is not None and task.plan_id in plan.cancelled
        ]
        left = [
            task
            for task in self._queues[SwapPurpose.PREFETCH]
            if task is None or task.plan_id not in plan.cancelled
        ]
        self._queues[SwapPurpose.PREFETCH] = deque(left)
        if plan.clear_storage:
            self._queues[SwapPurpose.STORE].append(None)
        for task in plan.storage:
            self._queues[task.swap.purpose].append(task)
        return reports

    def execute_next(
        self, rank: int, purpose: SwapPurpose, host: HostBlocks, fails: frozenset[int]
    ) -> list[TransferReport]:
        """Execute the oldest task of one direction; the positions ``fails`` (modulo the size) fail."""
        if not self._queues[purpose]:
            return []
        task = self._queues[purpose].popleft()
        if task is None:
            self.slots.clear()
            return []
        failed = {position % len(task.swap) for position in fails}
        move = self._write if purpose is SwapPurpose.STORE else self._read
        found = Found()
        for i in range(len(task.swap)):
            move(task.swap, i, host, failed, found)
        return [_report(rank, task, failed, found)]

    def _write(
        self,
        swap: CacheSwapMetadata,
        i: int,
        host: HostBlocks,
        failed: set[int],
        found: Found,
    ) -> None:
        slot = int(swap.dst_block_ids[i])
        self.slots.pop(slot, None)
        generation, value = host.get(int(swap.src_block_ids[i]), (-1, ()))
        assert generation == int(swap.src_generations[i]), "a record is stored that nothing holds any more"
        assert -1 not in value, "garbage is stored"
        if i in failed:
            return
        if slot in self.bad:
            found.bad.add(i)
            self.told_bad.add(slot)
        elif slot not in self.placed and self.room is not None and len(self.placed) >= self.room:
            found.no_room.add(i)
        else:
            self.placed.add(slot)
            self.slots[slot] = Stored(
                int(swap.dst_generations[i]),
                swap.hash_values[i].tobytes(),
                swap.parent_hashes[i].tobytes(),
                value,
            )

    def _read(
        self,
        swap: CacheSwapMetadata,
        i: int,
        host: HostBlocks,
        failed: set[int],
        found: Found,
    ) -> None:
        slot, generation = int(swap.dst_block_ids[i]), int(swap.dst_generations[i])
        host[slot] = (generation, (-1,))
        if i in failed:
            return
        stored = self.slots.get(int(swap.src_block_ids[i]))
        wanted = (int(swap.src_generations[i]), swap.hash_values[i].tobytes())
        if stored is None or (stored.generation, stored.block) != wanted:
            found.lost.add(i)
        elif int(swap.src_block_ids[i]) in self.bad:
            found.bad.add(i)
            self.told_bad.add(int(swap.src_block_ids[i]))
            del self.slots[int(swap.src_block_ids[i])]
        elif stored.rotten:
            found.corrupt.add(i)
            del self.slots[int(swap.src_block_ids[i])]
        else:
            host[slot] = (generation, stored.value)

    def rot(self, pick: int) -> None:
        """Damage the bytes of a stored block."""
        if self.slots:
            slot = sorted(self.slots)[pick % len(self.slots)]
            self.slots[slot] = replace(self.slots[slot], rotten=True)

    def scan(self, rank: int, capacity: int) -> StorageScan:
        """Return the scan of the headers, which does not see damaged bytes."""
        slots = sorted(self.slots)
        found = [self.slots[slot] for slot in slots]
        return StorageScan(
            rank=rank,
            capacity=capacity,
            slots=np.array(slots, np.int32),
            generations=np.array([each.generation for each in found], np.uint32),
            hashes=_rows([each.block for each in found]),
            parents=_rows([each.parent for each in found]),
            checksums=np.zeros(len(slots), np.uint64),
            written_ms=np.arange(len(slots), dtype=np.uint64),
        )


def _rows(blocks: list[bytes]) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.frombuffer(b"".join(blocks), np.uint8).reshape(len(blocks), 32)


def _report(rank: int, task: StorageTask, failed: set[int], found: Found | None = None) -> TransferReport:
    found = found or Found()
    result = TransferResult(
        purpose=task.swap.purpose,
        failed=_positions(failed | found.lost | found.corrupt | found.bad | found.no_room),
        checksums=np.empty(0, np.uint64),
        copied_bytes=0,
        seconds=0.0,
        error_message="injected" if failed else None,
        lost=_positions(found.lost),
        corrupt=_positions(found.corrupt),
        bad_slots=_positions(found.bad),
        no_room=_positions(found.no_room),
    )
    return TransferReport(plan_id=task.plan_id, rank=rank, results=(result,))


def _positions(found: Iterable[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(sorted(found), np.int32)
