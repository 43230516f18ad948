"""Hashes and arrays for the tests of the tier."""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from fdcache import _core

ROOT_HASH = bytes(32)


def digest(path: Sequence[int]) -> bytes:
    """Return the hash of the last block of a path of small numbers."""
    chained = ROOT_HASH
    for number in path:
        chained = hashlib.sha256(chained + number.to_bytes(8, "little")).digest()
    return chained


def chain(*path: int) -> list[bytes]:
    """Return the block hashes along a path."""
    return [digest(path[: depth + 1]) for depth in range(len(path))]


def hashes(digests: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), 32)


def hash_list(array: NDArray[np.uint8]) -> list[bytes]:
    return [row.tobytes() for row in array]


def slots(values: Iterable[int]) -> NDArray[np.int32]:
    return np.array(list(values), np.int32)


def flags(values: Iterable[bool]) -> NDArray[np.uint8]:
    return np.array(list(values), np.uint8)


def checksums(values: Iterable[int] = ()) -> NDArray[np.uint64]:
    return np.array(list(values), np.uint64)


def store(tier: _core.Tier, path: Sequence[bytes], parent: bytes = ROOT_HASH) -> list[int]:
    """Store `path` below `parent` without pins; return its slots in path order."""
    lease = tier.open_lease()
    taken = tier.reserve(lease, len(path)).slots
    assert tier.commit(lease, parent, hashes(path), taken).tolist() == [0] * len(path)
    tier.release(lease)
    return [int(slot) for slot in taken]


def copy_in(tier: _core.Tier, path: Sequence[bytes], lease: int = 0) -> list[int]:
    """Reserve slots for a copy of `path` into the tier; return them in path order."""
    taken = tier.reserve_copies(lease, hashes([ROOT_HASH, *path[:-1]]), hashes(path))
    assert taken.status.tolist() == [0] * len(path)
    return [int(slot) for slot in taken.slots]


def report(tier: _core.Tier, planned: Sequence[int], copied: bool = True) -> list[int]:
    """Report a copy into `planned`; return 1 for each block that became ready."""
    ready = tier.complete(slots(planned), flags([copied] * len(planned)), checksums())
    return [int(slot) for slot, done in zip(planned, ready, strict=True) if done]


def ready_run(tier: _core.Tier, path: Sequence[bytes]) -> list[int]:
    """Return the slots that a match of `path` finds; nothing stays pinned."""
    lease = tier.open_lease()
    found = tier.match(lease, hashes(path)).slots
    tier.release(lease)
    return [int(slot) for slot in found]


def eviction_order(tier: _core.Tier) -> list[int]:
    return [int(slot) for slot in tier.coldest(tier.stats().slots).slots]


def assert_sound(tier: _core.Tier) -> None:
    assert tier.check_integrity() == []


def assert_all_given_back(tier: _core.Tier) -> None:
    """Every slot is free or can be evicted."""
    assert_sound(tier)
    stats = tier.stats()
    assert (stats.pins, stats.holds, stats.pending, stats.writing) == (0, 0, 0, 0)
    assert stats.free + stats.evictable == tier.available == stats.slots


def figures(tier: _core.Tier) -> tuple[object, ...]:
    """Return the figures that a refused operation must not change."""
    stats = tier.stats()
    nodes = [tier.node(slot) for slot in range(stats.slots)]
    return (
        (stats.free, stats.writing, stats.ready, stats.pending, stats.pins, stats.holds, stats.evictions),
        [(n.state, n.pins, n.holds, n.hits, n.parent, n.hash, n.generation) for n in nodes],
        eviction_order(tier),
    )


PATH = chain(1, 2, 3, 4)
OTHER = chain(9, 8)
