"""Connector to the host tiers of other nodes: a put lets them read a host record where it is, a get reads theirs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import count

import msgspec
import numpy as np
from numpy.typing import NDArray

from fdcache._core import CancelFlag, RecordTable, SlotHeader, Tier
from fdcache.metadata import SLOT_HEADER_BYTES, HashArray
from fdcache.settings.variable import Group
from fdcache.storage.connector import (
    BatchResult,
    ConnectorContext,
    NodeStats,
    Outcome,
    RecordBatch,
    RunResult,
    StorageCounters,
    StorageState,
    StorageStats,
    last_whole,
)
from fdcache.storage.records import RecordCheck
from fdcache.transfer.nodes.links import NodeLinks
from fdcache.transfer.nodes.messages import (
    MOST_HASHES,
    MOST_READ,
    AskHeld,
    EndLease,
    Held,
    ReadRecords,
    Records,
    Request,
    unpacked,
)
from fdcache.transfer.nodes.node import NODES, require_nodes
from fdcache.transfer.nodes.variables import NodesSettings

_BESIDE_A_RECORD = 1 << 20
"""Bytes of a frame beyond a record: room for other answers, and for what encryption adds."""

_LEASE_SECONDS = 10.0
"""For which a node holds what is read, after each message about it. A reader that has died costs that."""

_TELL_SECONDS = 0.1

Mask = NDArray[np.bool_]
Answers = dict[str, dict[int, Mask]]
"""By address and rank: which of the blocks the node has."""


def _settings(options: Group | None) -> NodesSettings:
    return options if isinstance(options, NodesSettings) else NodesSettings()


class NodesConnector:
    """One rank's view of the host tiers of all nodes. A node that does not answer has nothing.

    Nothing is copied by a put. A block that leaves a host tier is gone; while it is read, its node holds it under a
    lease, as far as there are slots for that. What is read is compared with its checksum in any case. Raises
    ``StorageError`` for wrong settings.
    """

    name = "nodes"

    def __init__(self, context: ConnectorContext) -> None:
        self._layout = context.layout
        self._rank = context.rank
        self._options = _settings(context.options)
        self._check = RecordCheck(context.layout, verify=True)
        self._counters = StorageCounters()
        self._closed = False
        self._node = NODES.open(self._options, context.settings.retry_after)
        try:
            self._own = None if context.rank is None else self._node.join(context.layout, context.rank)
        except BaseException:
            NODES.close(self._options)
            raise
        frame = context.layout.record_bytes + _BESIDE_A_RECORD
        self._links = NodeLinks(self._node.keys, self._node.breaker, frame)
        self._asked: tuple[str, ...] = ()
        self._traffic: dict[str, NodeStats] = {}
        self._leases = count(1)

    @staticmethod
    def require(options: Group | None) -> None:
        """Raise ``StorageError`` early for settings with which no connector can ever be made."""
        require_nodes(_settings(options))

    def register(self, records: RecordTable) -> None:
        """Do nothing: others read what was put."""

    def unregister(self, records: RecordTable) -> None:
        """Serve these records to nobody any more."""
        if self._own is not None:
            self._own.unregister(records)

    # --- look-up --------------------------------------------------------------------------------------------

    def exists(self, hashes: HashArray, timeout: float) -> RunResult:
        """Return the leading run of blocks of which some node has each rank's record."""
        if self._closed:
            return RunResult(0, Outcome.PEER_GONE, "nodes: closed")
        deadline = time.monotonic() + timeout
        length, error = 0, None
        for first in range(0, len(hashes), MOST_HASHES):
            part = hashes[first : first + MOST_HASHES]
            found, error = self._held_by_all(part, deadline)
            run = len(part) if found.all() else int(np.argmin(found))
            length += run
            if run < len(part):
                break
        return RunResult(length) if error is None else RunResult(length, Outcome.TIMEOUT, error)

    def last(self, hashes: HashArray, width: int, timeout: float) -> RunResult:
        """Return how many groups of blocks there are up to the last of which some nodes have all records."""
        if self._closed:
            return RunResult(0, Outcome.PEER_GONE, "nodes: closed")
        deadline, most = time.monotonic() + timeout, MOST_HASHES // width * width
        for first in range((len(hashes) - 1) // most * most, -1, -most):
            found, error = self._held_by_all(hashes[first : first + most], deadline)
            if (groups := last_whole(found, width)) or error is not None:
                length = first // width + groups if groups else 0
                return RunResult(length, Outcome.OK if error is None else Outcome.TIMEOUT, error)
        return RunResult(0)

    def _held_by_all(self, hashes: HashArray, deadline: float) -> tuple[Mask, str | None]:
        """Return which blocks every rank has, and which node has not said so although it was waited for."""
        ranks = np.zeros((self._layout.record_ranks, len(hashes)), np.bool_)
        keys = [row.tobytes() for row in hashes]
        for (layout, rank), (own, _) in self._node.kept.items():
            if layout == self._layout.fingerprint:
                ranks[rank] |= own.has(keys)
        if ranks.all():
            return np.ones(len(hashes), np.bool_), None
        answers, error = self._ask(hashes, deadline)
        holders: dict[bytes, str] = {}
        for address, held in answers.items():
            for rank, mask in held.items():
                if 0 <= rank < len(ranks):
                    ranks[rank] |= mask
                    holders.update((keys[at], address) for at in np.flatnonzero(mask).tolist())
        self._node.whereabouts.saw(keys, holders)
        return np.logical_and.reduce(ranks), error

    def name_source(self, hashes: HashArray, address: str) -> bool:
        """Ask this node first for these blocks. Raises ``StorageError`` for an address that no other node has."""
        self._node.require_other(address)
        return self._node.whereabouts.name_source((row.tobytes() for row in hashes), address)

    def seen(self, hashes: HashArray) -> list[str | None]:
        """Return the node that had each block when it was last asked for."""
        return self._node.whereabouts.seen(row.tobytes() for row in hashes)

    def _ask(self, hashes: HashArray, deadline: float, lease: int = 0) -> tuple[Answers, str | None]:
        """Ask other nodes what they have; return the answers, and the failure of a node that was well before.

        Each block is asked of the node that was named as its source, then of all if that lacks it. With a ``lease``
        they hold what they have.
        """
        others = self._node.members.known(max(deadline - time.monotonic(), 0.0))
        if others != self._asked:
            self._links.forget_others(others)
            self._asked = others
        failed = self._node.failures
        answers: Answers = defaultdict(dict)
        silent: set[str] = set()
        wanted = np.arange(len(hashes))
        sources = self._node.whereabouts.sources([row.tobytes() for row in hashes])
        if named := {each: np.array(places) for each, places in sources.items() if each in others}:
            silent |= self._put(hashes, named, answers, deadline, lease)
            wanted = np.flatnonzero(~self._is_found(answers, len(hashes)))
        if len(wanted):
            silent |= self._put(hashes, dict.fromkeys(others, wanted), answers, deadline, lease)
        new = sorted(silent - failed.keys())
        if not new:
            return answers, None
        return answers, self._node.failures.get(new[0], f"{new[0]}: no answer in time")

    def _put(
        self,
        hashes: HashArray,
        asked: Mapping[str, NDArray[np.intp]],
        answers: Answers,
        deadline: float,
        lease: int,
    ) -> set[str]:
        """Ask nodes, each for some of these blocks; return those that have not answered."""
        nodes = list(asked)
        layout, milliseconds, rank = self._layout.fingerprint, int(_LEASE_SECONDS * 1000), self._rank or 0
        questions = [
            (each, AskHeld(layout, hashes[asked[each]].tobytes(), lease, milliseconds, rank))
            for each in nodes
        ]
        silent = set(nodes)
        for reply in self._links.exchange(questions, deadline):
            if not isinstance(reply.answer, Held):
                continue
            address = nodes[reply.index]
            silent.discard(address)
            for rank, bits in reply.answer.ranks.items():
                mask = answers[address].setdefault(rank, np.zeros(len(hashes), np.bool_))
                mask[asked[address]] = unpacked(bits, hashes[asked[address]])
        return silent

    def _is_found(self, answers: Answers, count: int) -> Mask:
        """Return which blocks some node has: the record of this rank, or those of all ranks for a scheduler."""
        found = np.zeros((self._layout.record_ranks, count), np.bool_)
        for held in answers.values():
            for rank, mask in held.items():
                if 0 <= rank < len(found):
                    found[rank] |= mask
        return np.asarray(found.all(axis=0) if self._rank is None else found[self._rank])

    # --- reads ----------------------------------------------------------------------------------------------

    def get(self, batch: RecordBatch, timeout: float, cancel: CancelFlag | None = None) -> BatchResult:
        """Copy blocks from the nodes that have them, and check each."""
        deadline = time.monotonic() + timeout
        read = _BatchRead(batch, self._check)
        if self._is_refused(read.outcomes, cancel):
            return self._counted(read, writing=False)
        if timeout > 0 and self._own is not None:
            for i in range(len(batch)):
                key, target = batch.hashes[i].tobytes(), batch.records.record(int(batch.host_slots[i]))
                if self._own.has([key]).any():
                    self._check.stamp_writing(batch, i)
                    if (header := self._own.read(key, target)) is not None:
                        read.arrived(i, header)
        if read.wanted and time.monotonic() < deadline:
            self._get_from_others(read, deadline, cancel)
        came = np.flatnonzero(read.outcomes == Outcome.OK).tolist()
        self._node.whereabouts.forget_sources(batch.hashes[i].tobytes() for i in came)
        if self._own is not None:  # what was read can be read by others in turn
            self._own.add(batch, came)
        return self._counted(read, writing=False)

    def _get_from_others(self, read: _BatchRead, deadline: float, cancel: CancelFlag | None) -> None:
        lease, wanted = next(self._leases), read.wanted
        answers, error = self._ask(read.batch.hashes[wanted], deadline, lease)
        try:
            self._read_from(answers, error, read, lease, deadline, cancel)
        finally:
            end = EndLease(lease)
            self._links.tell([(address, end) for address in answers], time.monotonic() + _TELL_SECONDS)

    def _read_from(
        self,
        answers: Answers,
        error: str | None,
        read: _BatchRead,
        lease: int,
        deadline: float,
        cancel: CancelFlag | None,
    ) -> None:
        """Read what nodes have answered that they have."""
        wanted = read.wanted
        read.error = error
        holders: dict[int, list[str]] = {i: [] for i in wanted}
        for address, held in answers.items():
            for at in np.flatnonzero(held.get(self._rank or 0, ())).tolist():
                holders[wanted[at]].append(address)
        if time.monotonic() < deadline:
            read.outcomes[wanted] = Outcome.MISS if error is None else Outcome.PEER_GONE
        while any(holders.values()) and time.monotonic() < deadline:
            if cancel is not None and cancel.is_set:
                read.outcomes[read.wanted] = Outcome.CANCELLED
                return
            self._read_round(read, holders, lease, deadline)

    def _read_round(
        self, read: _BatchRead, holders: dict[int, list[str]], lease: int, deadline: float
    ) -> None:
        """Read every block that is still wanted from one of its holders, which is none of them after that."""
        most = min(max(MOST_READ // self._layout.record_bytes, 1), MOST_HASHES)
        by_node: dict[str, list[int]] = defaultdict(list)
        for i in [each for each in read.wanted if holders[each]]:
            address = holders[i].pop((i // most) % len(holders[i]))
            by_node[address].append(i)
        if not by_node:
            holders.clear()
            return
        requests: list[tuple[str, Request]] = []
        parts: list[list[int]] = []
        for address, blocks in by_node.items():
            for first in range(0, len(blocks), most):
                part = blocks[first : first + most]
                hashes = read.batch.hashes[part].tobytes()
                request = ReadRecords(self._layout.fingerprint, self._rank or 0, hashes, lease)
                requests.append((address, request))
                parts.append(part)
                read.outcomes[part] = Outcome.TIMEOUT
        for reply in self._links.exchange(requests, deadline):
            part, address = parts[reply.index], requests[reply.index][0]
            if isinstance(reply.answer, Records):
                read.take(part, reply.answer.headers, [frame.buffer for frame in reply.frames])
                self._count(address, int((read.outcomes[part] == Outcome.OK).sum()), reply.seconds)
            else:
                read.outcomes[part] = Outcome.PEER_GONE
                read.error = self._node.failures.get(address, f"{address}: failed")

    def _count(self, address: str, blocks: int, seconds: float) -> None:
        """Count an answer with records; one call at a time, on the thread that reads."""
        before = self._traffic.get(address) or NodeStats(address=address)
        self._traffic[address] = msgspec.structs.replace(
            before,
            hits=before.hits + blocks,
            read_bytes=before.read_bytes + blocks * self._layout.record_bytes,
            answers=before.answers + 1,
            seconds=before.seconds + seconds,
        )

    # --- writes ---------------------------------------------------------------------------------------------

    def put(self, batch: RecordBatch, timeout: float, cancel: CancelFlag | None = None) -> BatchResult:
        """Serve these records to other nodes as long as the host tier has them."""
        read = _BatchRead(batch, self._check)
        if self._is_refused(read.outcomes, cancel):
            return self._counted(read, writing=True)
        assert self._own is not None, "a scheduler's connector writes nothing"
        for i in range(len(batch)):
            header = batch.records.header(int(batch.host_slots[i]))
            if self._check.is_source(batch, i, header):
                read.outcomes[i] = Outcome.OK
                read.checksums[i] = header.payload_checksum
            else:
                read.outcomes[i] = Outcome.SOURCE_CHANGED
                read.error = "a host record is not the block that was to be stored"
        self._own.add(batch, np.flatnonzero(read.outcomes == Outcome.OK).tolist())
        return self._counted(read, writing=True)

    def _is_refused(self, outcomes: NDArray[np.uint8], cancel: CancelFlag | None) -> bool:
        if cancel is not None and cancel.is_set:
            outcomes[:] = Outcome.CANCELLED
        elif self._closed:
            outcomes[:] = Outcome.PEER_GONE
        else:
            return False
        return True

    def _counted(self, read: _BatchRead, *, writing: bool) -> BatchResult:
        moved = 0 if writing else int((read.outcomes == Outcome.OK).sum()) * self._layout.record_bytes
        self._counters.add(read.outcomes, moved, writing=writing)
        return BatchResult(read.outcomes, read.checksums, moved, read.error)

    # --- removal --------------------------------------------------------------------------------------------

    def delete(self, hashes: HashArray, timeout: float) -> BatchResult:
        """Serve blocks of this node no more; MISS for blocks that it does not have."""
        result = BatchResult.of(len(hashes), Outcome.MISS)
        if self._own is not None:
            result.outcomes[self._own.drop(row.tobytes() for row in hashes)] = Outcome.OK
        return result

    def clear(self, timeout: float) -> int:
        """Serve nothing of this layout and rank that this node has now; others keep their own."""
        return 0 if self._own is None else self._own.clear()

    def withdraw(self, hashes: HashArray | None) -> None:
        """Serve these blocks no more, or none of those that this node has now."""
        if self._own is not None and hashes is None:
            self._own.clear()
        elif self._own is not None and hashes is not None:
            self._own.drop(row.tobytes() for row in hashes)

    def lend_from(self, host: Tier | None) -> None:
        """Hold records in the slots of this tier while others read them; None: there is none any more."""
        if self._own is not None:
            self._own.lend_from(host)

    # --- state ----------------------------------------------------------------------------------------------

    def stats(self) -> StorageStats:
        """Return counts, and the failure of a node or of the directory."""
        failures = self._node.failures
        error = (
            next(iter(failures.values()), self._node.members.error) if not self._closed else "nodes: closed"
        )
        state = StorageState.OFF if self._closed else StorageState.READY
        return self._counters.stats(
            self.name,
            state,
            error,
            blocks=0 if self._own is None else len(self._own),
            nodes=tuple(map(self._stats_of, self._node.members.addresses)),
        )

    def _stats_of(self, address: str) -> NodeStats:
        breaker = self._node.breaker(address)
        return msgspec.structs.replace(
            self._traffic.get(address) or NodeStats(address=address),
            failure=breaker.reason,
            failures=breaker.failures,
            last_error=breaker.last_failure,
        )

    def close(self) -> None:
        """Serve this rank's records no more, and disconnect."""
        if not self._closed:
            self._closed = True
            self._links.close()
            if self._rank is not None:
                self._node.part(self._layout, self._rank)
            NODES.close(self._options)


class _BatchRead:
    """A batch on its way. ``outcomes`` are TIMEOUT for what was not begun."""

    def __init__(self, batch: RecordBatch, check: RecordCheck) -> None:
        self.batch = batch
        self.outcomes = np.full(len(batch), Outcome.TIMEOUT, np.uint8)
        self.checksums = np.zeros(len(batch), np.uint64)
        self.error: str | None = None
        self._check = check

    @property
    def wanted(self) -> list[int]:
        """The blocks that have not arrived."""
        missing: list[int] = np.flatnonzero(self.outcomes != Outcome.OK).tolist()
        return missing

    def take(self, blocks: Sequence[int], headers: Sequence[bytes], frames: Sequence[memoryview]) -> None:
        """Take the answer of a node: what is not in it is a miss there."""
        self.outcomes[blocks] = Outcome.MISS
        rest = iter(frames)
        for i, data in zip(blocks, headers, strict=False):
            if not data:
                continue
            record = next(rest, None)
            if record is None or len(data) != SLOT_HEADER_BYTES:
                self._is_corrupt(i)
                continue
            target = self.batch.records.record(int(self.batch.host_slots[i]))
            if record.nbytes != target.nbytes:
                self._is_corrupt(i)
                continue
            self._check.stamp_writing(self.batch, i)
            header = SlotHeader.from_bytes(data)
            self._arrived(
                i, header, self._check.deliver(self.batch, i, header, np.frombuffer(record, np.uint8))
            )

    def arrived(self, i: int, header: SlotHeader) -> None:
        """Check a record whose bytes are in its host slot, and stamp that."""
        self._arrived(i, header, self._check.is_intact(self.batch, i, header))

    def _arrived(self, i: int, header: SlotHeader, is_intact: bool) -> None:
        if not is_intact:
            self._is_corrupt(i)
            return
        self._check.stamp_ready(self.batch, i, header.payload_checksum)
        self.outcomes[i] = Outcome.OK
        self.checksums[i] = header.payload_checksum

    def _is_corrupt(self, i: int) -> None:
        self.outcomes[i] = Outcome.CORRUPT
        self.error = "a node sent a record that differs from its checksum"
