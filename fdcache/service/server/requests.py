"""Requests about blocks: look-ups, the ends of copies and the ends of loads."""

from __future__ import annotations

import time

import numpy as np

from fdcache.errors import ProtocolError, RefusedError
from fdcache.metadata import HashArray, Int32Array
from fdcache.service.server.clients import RegisteredClient
from fdcache.service.server.deletion_log import DeletionLog
from fdcache.service.wire.arrays import hashes_from, int32_from, int64_from, uint8_from, uint64_from
from fdcache.service.wire.protocol import (
    FETCHED,
    FETCHING,
    FETCHING_LAST,
    MAX_BLOCKS,
    MAX_PATHS,
    NOT_FETCHED,
    Answer,
    Describe,
    Done,
    EndFetches,
    FindEnd,
    FindStored,
    FoundEnd,
    FoundStored,
    Hinted,
    Hints,
    LoadEnded,
    Match,
    Matched,
    Missed,
    Prefetch,
    Publish,
    Published,
)
from fdcache.service.wire.views import MissReason
from fdcache.tiers.fetches import OnDevice
from fdcache.tiers.pool import EVENT_CLEARED

_STORED, _DROPPED = 0, 3
_NO_NUMBERS = np.empty(0, np.int64)


def match(client: RegisteredClient, request: Match, *, paused: bool, may_read: bool) -> Matched:
    """Pin the leading run of each path; none while the service is paused.

    With ``may_read``, a path with a number may begin a read from storage, and then has to be looked up again.
    """
    counts = int32_from(request.counts, "counts")
    starts = int32_from(request.starts, "starts", len(counts))
    hashes = hashes_from(request.hashes)
    if len(counts) > MAX_PATHS or len(hashes) > MAX_BLOCKS:
        raise RefusedError("too_many", f"more than {MAX_PATHS} paths or {MAX_BLOCKS} blocks in one look-up")
    if (
        (counts < 0).any()
        or int(counts.sum()) != len(hashes)
        or (starts < 0).any()
        or (starts > counts).any()
    ):
        raise ProtocolError("counts and starts do not fit the hashes")
    numbers = int64_from(request.fetches, "fetches", len(counts)) if request.fetches else _NO_NUMBERS
    fetched, states = np.zeros((len(numbers), 2), np.int32), np.full(len(numbers), NOT_FETCHED, np.uint8)
    runs = int64_from(request.runs, "runs", len(counts)).tolist()
    if len({*runs}) != len(runs) or any(run < 1 or run in client.runs for run in runs):
        raise ProtocolError("runs: numbers that are not above 0, or not new")
    namespace = client.namespace
    paused = paused or time.monotonic() < namespace.draining_until
    lengths: list[int] = []
    slots, generations = [], []
    end = 0
    client.lookups += len(counts)
    for number, request_id in zip(numbers.tolist(), request.requests, strict=False):
        client.fetches.name(number, request_id)
    for i, (size, start) in enumerate(zip(counts.tolist(), starts.tolist(), strict=True)):
        lengths.append(0)
        first, end = end, end + size
        path, number = hashes[first:end], int(numbers[i]) if len(numbers) else 0
        wait = client.fetches.wait(number, path, _constant(start)) if number and may_read else None
        if wait is not None:
            is_last = wait.is_last and (wait.arrived or wait.stop)
            states[i] = FETCHING_LAST if is_last else FETCHING
            fetched[i] = wait.arrived, wait.stop
            continue
        if paused:
            namespace.history.count_refused(size - start, MissReason.PAUSED)
        try:
            run = None if paused else client.pin(runs[i], path, start)
        except ValueError:
            client.unpin(runs)  # the client is not told what is pinned
            raise
        if number in client.fetches:
            states[i] = FETCHED
            fetched[i] = _take_fetched(client, number, start, len(run.slots) if run else 0)
        if run is not None:
            lengths[i] = len(run.slots)
            slots.append(run.slots)
            generations.append(run.generations)
    found = np.concatenate(slots) if slots else np.empty(0, np.int32)
    marks = b""
    if namespace.unverified and len(found):
        unverified = namespace.unverified
        marks = bytes(slot in unverified for slot in found.tolist())
    return Matched(
        runs=np.array([run if run in client.runs else 0 for run in runs], np.int64).tobytes(),
        counts=np.array(lengths, np.int32).tobytes(),
        slots=found.tobytes(),
        generations=(np.concatenate(generations) if slots else found).tobytes(),
        unverified=marks,
        fetched=fetched.tobytes(),
        states=states.tobytes(),
    )


def _take_fetched(client: RegisteredClient, number: int, start: int, size: int) -> tuple[int, int]:
    """Unpin what was read for a request; return first and end of it in the run that the request has pinned."""
    part = client.fetches.fetched(number, start, size)
    client.fetches.unpin(number)
    return part.start, part.stop


def _constant(on_device: int) -> OnDevice:
    """Return the number of blocks on the client's device, as of its message."""
    return lambda hashes: on_device


def missed(client: RegisteredClient, request: Missed) -> Answer:
    """Count look-ups that the client answered itself from the presence table."""
    first = hashes_from(request.first)
    counts = int32_from(request.blocks, "blocks", len(first))
    if (counts < 0).any():
        raise ProtocolError("blocks is below 0")
    client.lookups += request.lookups
    client.namespace.history.count_client_misses(request.lookups, first, counts)
    sample = uint64_from(request.sample, "sample")
    client.namespace.history.count_sample(sample.tolist(), request.below)
    return Done()


def prefetch(client: RegisteredClient, request: Prefetch) -> None:
    """Begin to read the stored blocks of a path."""
    hashes = hashes_from(request.hashes)
    if request.number < 1 or not 0 <= request.start <= len(hashes):
        raise ProtocolError("number is below 1, or start does not fit the hashes")
    client.fetches.name(request.number, request.request)
    client.fetches.begin(request.number, hashes, _constant(request.start))


def stored(client: RegisteredClient, request: FindStored) -> FoundStored:
    """Tell which blocks the storage has."""
    hashes = hashes_from(request.hashes)
    if len(hashes) > MAX_BLOCKS:
        raise RefusedError("too_many", f"more than {MAX_BLOCKS} blocks in one question")
    return FoundStored(client.fetches.stored(hashes).view(np.uint8).tobytes())


def last_end(client: RegisteredClient, request: FindEnd) -> FoundEnd:
    """Tell after how many pages the storage has states."""
    hashes, layout = hashes_from(request.hashes), client.namespace.layout
    if len(hashes) * (layout.page_records + layout.num_states) > MAX_BLOCKS:
        raise RefusedError("too_many", f"more than {MAX_BLOCKS} blocks in one question")
    if not 0 <= request.first <= len(hashes):
        raise ProtocolError("first does not fit the hashes")
    return FoundEnd(client.fetches.last_end(hashes, request.first) if layout.num_states else 0)


def end_fetches(client: RegisteredClient, request: EndFetches) -> Answer:
    """End the storage reads of finished requests."""
    for number in request.numbers:
        client.fetches.leave(number, keep=request.keep)
    return Done()


def describe(client: RegisteredClient, request: Describe) -> Answer:
    """Take what routers are to be told of blocks, and which the client's device has; nothing without routers."""
    hashes = hashes_from(request.hashes)
    kinds = uint8_from(request.kinds, "kinds", len(hashes))
    if (kinds > EVENT_CLEARED).any():
        raise ProtocolError("kinds: only 0, 1 and 2 are sent")
    if (feed := client.namespace.feed) is not None:
        feed.describe(request.paths)
        feed.device_events(client.session, kinds, hashes)
    return Done()


def publish(client: RegisteredClient, request: Publish, deletions: DeletionLog) -> tuple[Answer, HashArray]:
    """Store the blocks that are complete on every rank, unless they were deleted, and free the other slots.

    Return the answer, and the hashes of the blocks stored.
    """
    slots = int32_from(request.slots, "slots")
    hashes = hashes_from(request.hashes)
    parents = hashes_from(request.parents, "parents")
    copied = uint8_from(request.copied, "copied", len(slots))
    checksums = uint64_from(request.checksums, "checksums", len(slots))
    if len(hashes) != len(slots) or len(parents) != len(slots):
        raise ProtocolError("slots, hashes and parents differ in length")
    numbers = slots.tolist()
    if len(set(numbers)) != len(numbers) or not client.stock.keys() >= set(numbers):
        raise RefusedError("not_yours", "slots: some were not granted to this session, or are named twice")
    generations = np.array([client.stock[slot] for slot in numbers], np.uint32)
    namespace = client.namespace
    complete = np.zeros(len(slots), np.bool_)
    wanted = np.flatnonzero(copied)
    if len(wanted):
        complete[wanted] = namespace.memory.are_complete(slots[wanted], generations[wanted], hashes[wanted])
    assert namespace.tier is not None
    if deletions.is_behind(namespace.id, client.forgotten):
        tier, owners = namespace.tier, namespace.tenants
        complete &= ~deletions.deleted(
            namespace.id, client.forgotten, tier, owners, parents, hashes, request.tenants
        )
    tenants = namespace.tenants.numbers(namespace.tier, parents, request.tenants, namespace.storable_slots)
    namespace.tenants.note(parents, hashes, request.tenants, complete)
    status = _end_copies(client, slots, parents, hashes, complete, checksums, tenants)
    client.stored += int((status == _STORED).sum())
    return Published(request.hashes, status.tobytes()), hashes[status == _STORED]


def take_back(client: RegisteredClient, slots: Int32Array) -> None:
    """Free granted slots that the client does not know of."""
    hashes = np.full((len(slots), 32), 255, np.uint8)
    nothing, sums = np.zeros(len(slots), np.bool_), np.zeros(len(slots), np.uint64)
    _end_copies(client, slots, hashes, hashes, nothing, sums, np.zeros(len(slots), np.uint32))


def _end_copies(
    client: RegisteredClient,
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
    client.remove_stock(slots.tolist())
    return status


def load_ended(client: RegisteredClient, request: LoadEnded) -> Answer:
    """Mark loaded blocks as verified, and check those whose load failed."""
    slots = int32_from(request.slots, "slots")
    hashes = hashes_from(request.hashes)
    if len(hashes) != len(slots):
        raise ProtocolError("slots and hashes differ in length")
    client.namespace.finish_loads(slots, hashes, uint8_from(request.copied, "copied", len(slots)))
    return Done()


def hints(client: RegisteredClient, request: Hints) -> Answer:
    """Take what a client knows of the reuse of blocks; the blocks that it has pinned by itself count as used before."""
    client.take_runs()
    return Hinted(client.namespace.hints.take(client.session, request))
