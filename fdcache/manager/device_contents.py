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


def table_of(values: object) -> Int32Array:
    """Return a block table as an array, of which only the part that is used is looked at. Raises ``PlanError``."""
    return values if isinstance(values, np.ndarray) else device_ids_of(values, with_none=True)


def require_distinct(ids: Int32Array) -> None:
    """Raise ``PlanError`` if a device block is listed twice."""
    some = ids[ids != NO_BLOCK]
    if len(np.unique(some)) < len(some):
        raise PlanError("device_ids: each device block can take one block; one is listed twice")


class Offer(NamedTuple):
    """Blocks ``start`` to ``stop`` of a path; the request has counted as a hit of those before ``counted`` already."""

    path: DevicePath
    start: int
    stop: int
    counted: int

    @property
    def ids(self) -> Int32Array:
        """Device blocks in path order."""
        return self.path.ids[self.start : self.stop]

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
        self._last: NDArray[np.int64] = np.zeros(0, np.int64)  # position in the last blocks compared
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
        ids = offers[0].ids if len(offers) == 1 else np.concatenate([offer.ids for offer in offers])
        ids = ids[ids != NO_BLOCK]
        self._grow(ids)
        for offer in offers:  # some share blocks: each is a hit
            self._enter(offer)
        return self.known_of(ids) if len(offers) > 1 else ids

    def _enter(self, offer: Offer) -> None:
        ids, hashes, parents = offer.ids, offer.path.hashes[offer.start : offer.stop], offer.parents()
        depths = np.arange(offer.start, offer.stop, dtype=np.int32)
        there = ids != NO_BLOCK
        if not there.all():
            ids, hashes, parents, depths = ids[there], hashes[there], parents[there], depths[there]
        hits = np.zeros(len(ids), np.uint32)
        known = self.known[ids]
        if known.any():
            known &= (self.hashes.take(ids, axis=0).view(np.uint64) == hashes.view(np.uint64)).all(axis=1)
            hits[known] = self.hits[ids[known]]
        hits += depths >= offer.counted
        self.hits[ids] = np.maximum(hits, 1)
        self.known[ids] = True
        self.hashes[ids] = hashes
        self.parents[ids] = parents
        self._depths[ids] = depths
        path = np.empty(1, np.object_)
        path[0] = offer.path
        self._paths[ids] = path

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
        if len(ids) > 1 and not self._are_distinct(ids):
            _, first = np.unique(ids, return_index=True)
            ids = ids[np.sort(first)]
        return ids

    def _are_distinct(self, ids: Int32Array) -> bool:
        order = np.arange(len(ids))
        self._last[ids] = order
        return bool((self._last[ids] == order).all())

    def reads(self, ids: Int32Array, plans: Sequence[int]) -> list[int]:
        """Return those of the plans that were the last to read one of these device blocks."""
        if not plans:
            return []
        last = self._read_by[self.within(ids)]
        return [plan for plan in plans if (last == plan).any()]

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
            (ids == NO_BLOCK)
            | ~self.known[ids]
            | (self.hashes.take(ids, axis=0) != path.hashes[:depth]).any(axis=1)
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
