"""DeletionLog: what was deleted lately, until the engines have forgotten it on their devices, too."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec
import numpy as np

from fdcache.hashing import TENANT_BYTES
from fdcache.machine.decoding import MALFORMED
from fdcache.metadata import HashArray
from fdcache.service.server.tenants import Tenants
from fdcache.service.wire.protocol import Forget
from fdcache.tiers.pool import BlockPool

log = logging.getLogger("fdcache.service.server")

MOST_DELETED = 16384
"""Hashes and tenants that are kept, about 0.5 MiB. Engines that have not heard of older ones forget everything."""
_HASH_BYTES = 32


class _Deletion(msgspec.Struct, frozen=True, array_like=True):
    """One deletion in a namespace: blocks with all below them, a tenant's blocks, or everything."""

    number: int
    namespace: str
    hashes: bytes = b""
    tenant: bytes = b""
    everything: bool = False

    def __len__(self) -> int:
        return len(self.hashes) // _HASH_BYTES + 1


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    since: int
    deletions: list[_Deletion]


_decoder = msgspec.msgpack.Decoder(_Kept)


class DeletionLog:
    """The latest deletions of a service, by growing numbers.

    An engine whose device still has deleted blocks would copy them into the host tier again. It is told what to forget,
    and answers with the number once nothing of it is being copied any more. Until then the service takes none of these
    blocks from it, nor what is below them. The file ``path`` keeps this for the next service.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._since = 0
        self._deletions: list[_Deletion] = []
        self._last: dict[str, int] = {}  # by namespace

    @property
    def latest(self) -> int:
        """Number of the last deletion, 0 before the first."""
        return self._deletions[-1].number if self._deletions else self._since

    def add(
        self, namespace: str, hashes: HashArray, tenant: bytes = b"", *, everything: bool = False
    ) -> None:
        """Record a deletion, before its blocks leave the tiers."""
        number = max(self.latest + 1, time.time_ns())  # above those of a service whose file is lost
        self._deletions.append(_Deletion(number, namespace, hashes.tobytes(), tenant, everything))
        self._last[namespace] = number
        while sum(map(len, self._deletions)) > MOST_DELETED:
            self._since = self._deletions.pop(0).number
        self._save()

    def is_behind(self, namespace: str, number: int) -> bool:
        """Return True if blocks of a namespace were deleted since the deletion with a number."""
        return number < max(self._since, self._last.get(namespace, 0))

    def after(self, namespace: str, number: int) -> Forget:
        """Return what an engine that has heard of the deletions up to ``number`` is to forget."""
        if number < self._since:
            return Forget(self.latest, everything=True)
        new = [each for each in self._deletions if each.namespace == namespace and each.number > number]
        return Forget(
            self.latest,
            b"".join(each.hashes for each in new),
            b"".join(dict.fromkeys(each.tenant for each in new)),
            any(each.everything for each in new),
        )

    def deleted(
        self,
        namespace: str,
        number: int,
        tier: BlockPool,
        tenants: Tenants,
        parents: HashArray,
        hashes: HashArray,
        keys: bytes,
    ) -> np.ndarray:
        """Return which of an engine's blocks, parents first, were deleted since the deletion with a number.

        Such are all below deleted ones, too; those above them may be there again, by another engine. ``keys``: of the
        tenants of those below the root.
        """
        forget = self.after(namespace, number)
        if forget.everything:
            return np.ones(len(hashes), np.bool_)
        gone = {forget.hashes[at : at + _HASH_BYTES] for at in range(0, len(forget.hashes), _HASH_BYTES)}
        rooted = hashes[~parents.any(axis=1)] if keys else hashes[:0]
        for key in forget.tenant_keys:
            gone.update(row.tobytes() for row in tenants.rooted(key))
            owners = (keys[at : at + TENANT_BYTES] for at in range(0, len(keys), TENANT_BYTES))
            gone.update(row.tobytes() for row, owner in zip(rooted, owners, strict=False) if owner == key)
        above = tier.ancestry(tier.find(parents).slots)
        for parent, block in zip(above.parents, above.hashes, strict=True):
            if parent.tobytes() in gone:
                gone.add(block.tobytes())
        out = np.zeros(len(hashes), np.bool_)
        for i, (parent, block) in enumerate(zip(parents, hashes, strict=True)):
            if block.tobytes() in gone or parent.tobytes() in gone:
                out[i] = True
                gone.add(block.tobytes())
        return out

    def load(self) -> None:
        """Go on with the deletions of an earlier service."""
        try:
            kept = _decoder.decode(self._path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, *MALFORMED) as error:
            log.warning(
                "%s: cannot be read; engines forget what they have on their devices: %s", self._path, error
            )
            self._since = time.time_ns()
            return
        self._since, self._deletions = kept.since, kept.deletions
        self._last = {each.namespace: each.number for each in kept.deletions}

    def _save(self) -> None:
        fresh = self._path.with_name(self._path.name + ".new")
        try:
            fresh.write_bytes(msgspec.msgpack.encode(_Kept(self._since, self._deletions)))
            fresh.rename(self._path)
        except OSError as error:
            log.warning("%s: the next service will not know of a deletion: %s", self._path, error)
