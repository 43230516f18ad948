"""What clients ask about blocks: look-ups, the ends of copies, the ends of loads."""

from __future__ import annotations

import time

import numpy as np

from fdcache.errors import ProtocolError
from fdcache.metadata import HashArray, Int32Array
from fdcache.service.server.clients import Client
from fdcache.service.server.history import Reason
from fdcache.service.wire.protocol import (
    FETCHING,
    MAX_BLOCKS,
    MAX_PATHS,
    NOT_FETCHED,
    Answer,
    Done,
    EndFetches,
    LoadEnded,
    Match,
    Matched,
    Missed,
    Prefetch,
    Publish,
    Published,
    RefusalError,
    Release,
    hashes_from,
    int32_from,
    int64_from,
    uint8_from,
    uint64_from,
)

MOST_RUNS = 65536
_STORED, _DROPPED = 0, 3
NO_NUMBERS = np.empty(0, np.int64)


def match(client: Client, request: Match, *, paused: bool, may_read: bool) -> Answer:
    """Pin what is there of each path; nothing while the service is paused. ``may_read``: from storage, meanwhile."""
    counts = int32_from(request.counts, "counts")
    starts = int32_from(request.starts, "starts", len(counts))
    hashes = hashes_from(request.hashes)
    if len(counts) > MAX_PATHS or len(hashes) > MAX_BLOCKS:
        raise RefusalError("too_many", f"more than {MAX_PATHS} paths or {MAX_BLOCKS} blocks in one look-up")
    if (
        (counts < 0).any()
        or int(counts.sum()) != len(hashes)
        or (starts < 0).any()
        or (starts > counts).any()
    ):
        raise ProtocolError("counts and starts do not fit the hashes")
    numbers = int64_from(request.fetches, "fetches", len(counts)) if request.fetches else NO_NUMBERS
    fetched, states = np.zeros((len(numbers), 2), np.int32), np.full(len(numbers), NOT_FETCHED, np.uint8)
    namespace = client.namespace
    paused = paused or time.monotonic() < namespace.held_until
    leases: list[int] = []
    lengths: list[int] = []
    slots, generations = [], []
    end = 0
    client.lookups += len(counts)
    for i, (size, start) in enumerate(zip(counts.tolist(), starts.tolist(), strict=True)):
        first, end = end, end + size
        path, number = hashes[first:end], int(numbers[i]) if len(numbers) else 0
        if number and may_read and client.fetches.must_wait(number, path, start):
            states[i] = FETCHING
            leases.append(0)
            lengths.append(0)
            continue
        full = len(client.runs) >= MOST_RUNS
        if paused or full:
            namespace.history.turned_away(size - start, Reason.PAUSED if paused else Reason.TOO_MANY_RUNS)
        try:
            run = None if paused or full else namespace.match(path, start)
        except ValueError:
            release(client, Release(leases))  # nobody will hear of them
            raise
        if number:
            part, states[i] = client.fetches.matched(number, start, len(run.slots) if run else 0)
            fetched[i] = part.start, part.stop
        if run is None:
            leases.append(0)
            lengths.append(0)
            continue
        client.runs.add(run.lease)
        leases.append(run.lease)
        lengths.append(len(run.slots))
        slots.append(run.slots)
        generations.append(run.generations)
    found = np.concatenate(slots) if slots else np.empty(0, np.int32)
    marks = b""
    if namespace.unverified and len(found):
        unverified = namespace.unverified
        marks = bytes(slot in unverified for slot in found.tolist())
    return Matched(
        leases=leases,
        counts=np.array(lengths, np.int32).tobytes(),
        slots=found.tobytes(),
        generations=(np.concatenate(generations) if slots else found).tobytes(),
        unverified=marks,
        fetched=fetched.tobytes(),
        states=states.tobytes(),
    )


def missed(client: Client, request: Missed) -> Answer:
    """Count what the client saw to be absent without asking."""
    first = hashes_from(request.first)
    counts = int32_from(request.blocks, "blocks", len(first))
    if (counts < 0).any():
        raise ProtocolError("blocks is below 0")
    client.lookups += request.lookups
    client.namespace.history.seen_absent(request.lookups, first, counts)
    return Done()


def prefetch(client: Client, request: Prefetch) -> None:
    """Begin to read what is stored of a path."""
    hashes = hashes_from(request.hashes)
    if request.number < 1 or not 0 <= request.start <= len(hashes):
        raise ProtocolError("number is below 1, or start does not fit the hashes")
    client.fetches.begin(request.number, hashes, request.start)


def end_fetches(client: Client, request: EndFetches) -> Answer:
    """Requests have ended for whose blocks storage was read."""
    client.fetches.end(request.numbers)
    return Done()


def release(client: Client, request: Release) -> Answer:
    """Unpin runs of this client; others' are not touched."""
    tier = client.namespace.tier
    for lease in request.leases:
        if lease in client.runs and tier is not None:
            client.runs.discard(lease)
            tier.release(lease)
    return Done()


def take_back(client: Client, slots: Int32Array) -> None:
    """Slots that were granted and never heard of."""
    hashes = np.full((len(slots), 32), 255, np.uint8)
    nothing, sums = np.zeros(len(slots), np.bool_), np.zeros(len(slots), np.uint64)
    _end_copies(client, slots, hashes, hashes, nothing, sums, np.zeros(len(slots), np.uint32))


def _end_copies(
    client: Client,
    slots: np.ndarray,
    parents: np.ndarray,
    hashes: np.ndarray,
    copied: np.ndarray,
    checksums: np.ndarray,
    tenants: np.ndarray,
) -> np.ndarray:
    status = np.full(len(slots), _DROPPED, np.uint8)
    for lease, positions in client.by_lease(slots.tolist()).items():
        status[positions] = client.namespace.publish(
            lease,
            *(
                np.ascontiguousarray(each[positions])
                for each in (slots, parents, hashes, copied, checksums, tenants)
            ),
        )
    client.ended(slots.tolist())
    return status


def publish(client: Client, request: Publish) -> tuple[Answer, HashArray]:
    """Keep what every rank has whole; the other slots are free again. Also the hashes of what is new."""
    slots = int32_from(request.slots, "slots")
    hashes = hashes_from(request.hashes)
    parents = hashes_from(request.parents, "parents")
    copied = uint8_from(request.copied, "copied", len(slots))
    checksums = uint64_from(request.checksums, "checksums", len(slots))
    if len(hashes) != len(slots) or len(parents) != len(slots):
        raise ProtocolError("slots, hashes and parents differ in length")
    numbers = slots.tolist()
    if len(set(numbers)) != len(numbers) or not client.stock.keys() >= set(numbers):
        raise RefusalError("not_yours", "slots: some were not granted to this session, or are named twice")
    generations = np.array([client.stock[slot] for slot in numbers], np.uint32)
    namespace = client.namespace
    good = np.zeros(len(slots), np.bool_)
    wanted = np.flatnonzero(copied)
    if len(wanted):
        good[wanted] = namespace.memory.arrived(slots[wanted], generations[wanted], hashes[wanted])
    assert namespace.tier is not None
    tenants = namespace.tenants.numbers(namespace.tier, parents, request.tenants, namespace.storable_slots)
    namespace.tenants.note(parents, hashes, request.tenants, good)
    status = _end_copies(client, slots, parents, hashes, good, checksums, tenants)
    client.stored += int((status == _STORED).sum())
    return Published(request.hashes, status.tobytes()), hashes[status == _STORED]


def load_ended(client: Client, request: LoadEnded) -> Answer:
    """Hear what came of loads."""
    slots = int32_from(request.slots, "slots")
    hashes = hashes_from(request.hashes)
    if len(hashes) != len(slots):
        raise ProtocolError("slots and hashes differ in length")
    client.namespace.load_ended(slots, hashes, uint8_from(request.copied, "copied", len(slots)))
    return Done()
