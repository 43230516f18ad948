"""Recovery: the blocks that an earlier service left in the extents of a namespace."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fdcache.hashing import NO_TENANT
from fdcache.metadata import UInt32Array
from fdcache.plans.ledger import ROOT, UNKNOWN
from fdcache.service.server.eviction_order import places_of
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.namespace_memory import READY_HEADER

_LAST_GENERATION = 0xFFFFFFFF


def recover_blocks(namespace: Namespace, places: NDArray[np.uint64]) -> int:
    """Restore every block whose header is valid and equal on all ranks. Return how many.

    ``places``: the place of each slot's block in the eviction order. Checksums are verified by the first load. Slots
    with broken headers become free.
    """
    assert namespace.tier is not None
    slots = np.arange(namespace.num_slots, dtype=np.int32)
    headers = [namespace.memory.headers(rank, slots) for rank in range(namespace.ranks)]
    first = headers[0]
    good = first["state"] == READY_HEADER
    payload = namespace.layout.payload_bytes
    fingerprint = np.frombuffer(namespace.layout.fingerprint[:16], np.uint8)
    for each in headers:
        for name in ("state", "generation"):
            good &= each[name] == first[name]
        for name in ("hash", "parent"):
            good &= (each[name] == first[name]).all(axis=1)
        good &= (each["fingerprint"] == fingerprint).all(axis=1)
        good &= each["payload_bytes"] == payload
    candidates = [
        slot
        for slot in np.flatnonzero(good).tolist()
        if all(table.header(slot).is_valid for table in namespace.memory.tables)
    ]
    ordered = _parents_first(candidates, first)
    chosen = first[ordered]
    taken = namespace.tier.restore(
        np.array(ordered, np.int32),
        np.ascontiguousarray(chosen["generation"]),
        np.ascontiguousarray(chosen["hash"]),
        np.ascontiguousarray(chosen["parent"]),
        np.ascontiguousarray(chosen["payload_checksum"]),
        places[ordered],
        _next_generation(namespace),
        tenants=_recover_tenants(namespace, chosen),
    )
    kept = np.flatnonzero(taken)
    namespace.set_unverified(np.array(ordered)[kept].tolist(), np.ascontiguousarray(chosen["hash"][kept]))
    namespace.history.totals.recovered = len(kept)
    return len(kept)


def _recover_tenants(namespace: Namespace, headers: np.ndarray) -> UInt32Array:
    """Return the tenant numbers of recovered blocks, from the file that the earlier service wrote."""
    assert namespace.tier is not None
    parents, hashes = np.ascontiguousarray(headers["parent"]), np.ascontiguousarray(headers["hash"])
    owners = namespace.tenants.restore()
    roots = hashes[~parents.any(axis=1)]
    keys = b"".join(owners.get(row.tobytes(), NO_TENANT) for row in roots)
    numbers = namespace.tenants.numbers(namespace.tier, parents, keys, namespace.storable_slots)
    namespace.tenants.note(parents, hashes, keys, np.ones(len(hashes), np.bool_))
    return numbers


def _parents_first(slots: list[int], headers: np.ndarray) -> list[int]:
    """Return the slots that are connected to the beginning of a run, each after its parent."""
    children: dict[bytes, list[int]] = {}
    for slot in slots:
        children.setdefault(headers[slot]["parent"].tobytes(), []).append(slot)
    ordered: list[int] = []
    level = children.pop(ROOT, []) + children.pop(UNKNOWN, [])
    while level:
        ordered += level
        level = [child for slot in level for child in children.pop(headers[slot]["hash"].tobytes(), [])]
    return ordered


# --- less memory --------------------------------------------------------------------------------------------


def shrink_recovered(namespace: Namespace, extents: int, *, has_writers: bool) -> int:
    """Reduce a recovered namespace to ``extents`` extents of each rank; return how many blocks are left.

    The blocks that would be evicted last stay.

    ``has_writers``: as for ``Namespaces.recover``. Then blocks move only into slots that held one, which nobody writes.
    """
    assert namespace.tier is not None
    if not extents:
        namespace.reset()
        while namespace.shrink():
            pass
        return 0
    kept_slots = extents * namespace.geometry.records_per_extent
    order = namespace.tier.coldest(namespace.num_slots).slots
    places = places_of(namespace.tier, namespace.num_slots)
    usable = order[order < kept_slots] if has_writers else np.arange(kept_slots, dtype=np.int32)
    staying = order[max(len(order) - len(usable), 0) :]
    sources = staying[staying >= kept_slots]
    targets = np.setdiff1d(usable, staying)[: len(sources)].astype(np.int32)
    namespace.memory.move(sources, targets, generation=_next_generation(namespace))
    places[targets] = places[sources]
    namespace.renew(extents)
    return recover_blocks(namespace, places[:kept_slots])


def _next_generation(namespace: Namespace) -> int:
    """Return a generation that no slot of a namespace has had: a plan that names an earlier one finds another block."""
    slots = np.arange(namespace.num_slots, dtype=np.int32)
    newest = max(
        int(namespace.memory.headers(rank, slots)["generation"].max()) for rank in range(namespace.ranks)
    )
    return min(newest + 1, _LAST_GENERATION)
