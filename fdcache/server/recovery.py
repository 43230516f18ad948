"""What a dead service left in the extents of a layout."""

from __future__ import annotations

import numpy as np

from fdcache.hashing import NO_TENANT
from fdcache.metadata import UInt32Array
from fdcache.server.layout_memory import READY_HEADER
from fdcache.server.namespace import Namespace


def recover(namespace: Namespace) -> int:
    """Take over every block that stands whole in the extents of all ranks; how many.

    Their checksums are verified when they are first read. Slots with broken headers are free.
    """
    assert namespace.tier is not None
    slots = np.arange(namespace.num_slots, dtype=np.int32)
    headers = [namespace.memory.headers(rank, slots) for rank in range(namespace.ranks)]
    first = headers[0]
    good = first["state"] == READY_HEADER
    payload = namespace.layout.payload_bytes
    for each in headers:
        for name in ("state", "generation"):
            good &= each[name] == first[name]
        for name in ("hash", "parent"):
            good &= (each[name] == first[name]).all(axis=1)
        good &= (each["fingerprint"] == np.frombuffer(namespace.layout.fingerprint[:16], np.uint8)).all(
            axis=1
        )
        good &= each["payload_bytes"] == payload
    candidates = [
        slot
        for slot in np.flatnonzero(good).tolist()
        if all(table.header(slot).is_valid for table in namespace.memory.tables)
    ]
    newest = max(int(each["generation"].max(initial=0)) for each in headers)
    ordered = _parents_first(candidates, first)
    chosen = first[ordered]
    taken = namespace.tier.restore(
        np.array(ordered, np.int32),
        np.ascontiguousarray(chosen["generation"]),
        np.ascontiguousarray(chosen["hash"]),
        np.ascontiguousarray(chosen["parent"]),
        np.ascontiguousarray(chosen["payload_checksum"]),
        generation=min(newest + 1, 0xFFFFFFFF),
        tenants=_tenants(namespace, chosen),
    )
    kept = [slot for slot, was_taken in zip(ordered, taken.tolist(), strict=True) if was_taken]
    namespace.unverified = set(kept)
    namespace.history.counts.recovered = len(kept)
    return len(kept)


def _tenants(namespace: Namespace, headers: np.ndarray) -> UInt32Array:
    """Whose the blocks below the root are, as the earlier service wrote it down."""
    assert namespace.tier is not None
    parents, hashes = np.ascontiguousarray(headers["parent"]), np.ascontiguousarray(headers["hash"])
    owners = namespace.tenants.restore()
    rooted = hashes[~parents.any(axis=1)]
    keys = b"".join(owners.get(row.tobytes(), NO_TENANT) for row in rooted)
    numbers = namespace.tenants.numbers(namespace.tier, parents, keys, namespace.storable_slots)
    namespace.tenants.note(parents, hashes, keys, np.ones(len(hashes), np.bool_))
    return numbers


def _parents_first(slots: list[int], headers: np.ndarray) -> list[int]:
    """Those of ``slots`` that hang together from the root, each after its parent."""
    children: dict[bytes, list[int]] = {}
    for slot in slots:
        children.setdefault(headers[slot]["parent"].tobytes(), []).append(slot)
    ordered: list[int] = []
    level = children.pop(bytes(32), [])
    while level:
        ordered += level
        level = [child for slot in level for child in children.pop(headers[slot]["hash"].tobytes(), [])]
    return ordered
