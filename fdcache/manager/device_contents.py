"""DeviceContents: which blocks lie in an engine's own device cache, as far as the engine has offered them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fdcache.errors import PlanError
from fdcache.metadata import HashArray, Int32Array
from fdcache.plans.blocks import ROOT, parents_of

NO_BLOCK = -1
"""Stands for a block that the engine does not have on the device, in a layout with windows."""

_NONE = np.empty(0, np.int32)


class DevicePath:
    """The blocks of one request on the device, growing at the end: block i of ``hashes`` lies in ``ids[i]``.

    ``parent`` is the hash before the first one, None if it is unknown: the first block can then not be copied.
    """

    __slots__ = ("_ids", "_size", "hashes", "parent")

    def __init__(self, hashes: HashArray, parent: bytes | None = ROOT) -> None:
        self.hashes = hashes
        self.parent = parent
        self._ids = np.empty(len(hashes) + 64, np.int32)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def ids(self) -> Int32Array:
        """Device blocks in path order."""
        return self._ids[: self._size]

    def extend(self, hashes: HashArray, ids: Int32Array) -> None:
        """Append blocks; ``hashes`` are those of the whole path."""
        end = self._size + len(ids)
        if end > len(self._ids):
            former, self._ids = self._ids, np.empty(2 * end, np.int32)
            self._ids[: self._size] = former[: self._size]
        self._ids[self._size : end] = ids
        self._size = end
        self.hashes = hashes


def device_ids_of(values: object, *, with_none: bool = False) -> Int32Array:
    """Return device blocks as an int32 array; ``with_none``: ``NO_BLOCK`` may be among them.

    Raises ``PlanError`` for anything else.
    """
    try:
        ids = np.ascontiguousarray(values, np.int32)
    except (TypeError, ValueError, OverflowError) as error:
        raise PlanError(
            f"device_ids: {error}; pass the numbers of device blocks as an int32 array"
        ) from error
    least = NO_BLOCK if with_none else 0
    if ids.ndim != 1 or (len(ids) and int(ids.min()) < least):
        raise PlanError(f"device_ids must be a list of device blocks, numbers from {least} on")
    return ids


class Offer(NamedTuple):
    """Blocks ``start`` to ``stop`` of a path; the request has counted as a hit of those before ``counted`` already."""

    path: DevicePath
    start: int
    stop: int
    counted: int

    def parents(self) -> HashArray:
        """Return the parent hash of each block."""
        parents = parents_of(self.path.hashes, self.start, self.stop)
        if not self.start and self.path.parent is not None:
            parents[0] = np.frombuffer(self.path.parent, np.uint8)
        return parents


class DeviceContents:
    """The known blocks of a device cache by device block, and the copies that read them.

    ``hits`` counts the requests that have offered the block. ``read_by`` is the last plan that copies out of the device
    block, 0 for none. Nothing here holds a block: the engine says which ones it gives away.
    """

    def __init__(self) -> None:
        self.known: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.queued: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.hits: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self.hashes: HashArray = np.zeros((0, 32), np.uint8)
        self.parents: HashArray = np.zeros((0, 32), np.uint8)
        self._depths: Int32Array = np.zeros(0, np.int32)
        self._last: NDArray[np.int64] = np.zeros(0, np.int64)  # position in the last batch of offers
        self._read_by: NDArray[np.int64] = np.zeros(0, np.int64)
        self._paths: NDArray[np.object_] = np.zeros(0, np.object_)

    def __len__(self) -> int:
        return int(np.count_nonzero(self.known))

    @property
    def num_blocks(self) -> int:
        """Number of device blocks seen."""
        return len(self.known)

    def add(self, offers: Sequence[Offer]) -> Int32Array:
        """Enter offered blocks; return their device blocks, each once."""
        if not offers:
            return _NONE
        ids = np.concatenate([offer.path.ids[offer.start : offer.stop] for offer in offers])
        self._grow(ids)
        if int(ids.min()) == NO_BLOCK:
            for offer in offers:
                self._enter([offer], offer.path.ids[offer.start : offer.stop], has_gaps=True)
            return self.known_of(ids[ids != NO_BLOCK])
        order = np.arange(len(ids))
        self._last[ids] = order
        if len(offers) == 1 or np.array_equal(self._last[ids], order):
            self._enter(offers, ids)
            return ids
        for offer in offers:  # some share blocks: each is a hit
            self._enter([offer], offer.path.ids[offer.start : offer.stop])
        return self.known_of(ids)

    def _enter(self, offers: Sequence[Offer], ids: Int32Array, *, has_gaps: bool = False) -> None:
        hashes = np.concatenate([offer.path.hashes[offer.start : offer.stop] for offer in offers])
        parents = np.concatenate([offer.parents() for offer in offers])
        depths = np.concatenate([np.arange(offer.start, offer.stop, dtype=np.int32) for offer in offers])
        sizes = [offer.stop - offer.start for offer in offers]
        counted = np.repeat([offer.counted for offer in offers], sizes)
        paths = np.empty(len(offers), np.object_)
        paths[:] = [offer.path for offer in offers]
        paths = np.repeat(paths, sizes)
        if has_gaps:
            rows = ids != NO_BLOCK
            ids, hashes, parents, depths = ids[rows], hashes[rows], parents[rows], depths[rows]
            counted, paths = counted[rows], paths[rows]
        same = self.known[ids]
        if same.any():
            same &= (self.hashes[ids] == hashes).all(axis=1)
        is_hit = depths >= counted
        self.hits[ids] = np.maximum(np.where(same, self.hits[ids], 0) + is_hit, 1)
        self.known[ids] = True
        self.hashes[ids] = hashes
        self.parents[ids] = parents
        self._depths[ids] = depths
        self._paths[ids] = paths

    def forget(self, ids: Int32Array) -> None:
        """Forget the blocks in these device blocks, which have another content now."""
        ids = self.within(ids)
        self.known[ids] = self.queued[ids] = False
        self._paths[ids] = None

    def forget_all(self) -> None:
        """Forget every block; copies in flight still read them."""
        self.known[:] = self.queued[:] = False
        self._paths[:] = None

    def within(self, ids: Int32Array) -> Int32Array:
        """Return those that have been offered at any time."""
        return ids[ids < len(self.known)]

    def known_of(self, ids: Int32Array) -> Int32Array:
        """Return those whose block is known, each once, in order."""
        ids = self.within(ids)
        ids = ids[self.known[ids]]
        if len(ids) > 1:
            _, first = np.unique(ids, return_index=True)
            ids = ids[np.sort(first)]
        return ids

    def reads(self, ids: Int32Array) -> list[int]:
        """Return the plans that read these device blocks last."""
        plans = self._read_by[self.within(ids)]
        return np.unique(plans[plans != 0]).tolist() if plans.any() else []

    def read_in(self, ids: Int32Array, plan_id: int) -> None:
        """Note that a plan copies these device blocks."""
        self._read_by[ids] = plan_id

    def ancestors(self, device_id: int) -> Int32Array:
        """Return the device blocks of a block's path above it, parents first, up to the first that has left."""
        path: DevicePath | None = self._paths[device_id]
        depth = int(self._depths[device_id])
        if path is None or not depth:
            return _NONE
        ids = path.ids[:depth]
        gone = np.flatnonzero(
            (ids == NO_BLOCK) | ~self.known[ids] | (self.hashes[ids] != path.hashes[:depth]).any(axis=1)
        )
        return ids[gone[-1] + 1 :] if len(gone) else ids

    def _grow(self, ids: Int32Array) -> None:
        most = int(ids.max()) + 1 if len(ids) else 0
        if most <= len(self.known):
            return
        size = max(most, 2 * len(self.known), 64)
        for name in (
            "known",
            "queued",
            "hits",
            "hashes",
            "parents",
            "_depths",
            "_last",
            "_read_by",
            "_paths",
        ):
            former = getattr(self, name)
            grown = np.zeros((size, *former.shape[1:]), former.dtype)
            grown[: len(former)] = former
            if name == "_paths":
                grown[len(former) :] = None
            setattr(self, name, grown)
