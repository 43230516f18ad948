"""The decode side of transfers as a state machine without I/O.

    side = DecodeSide(num_planes=4, lease=10.0, renew=1.0, verifies=True)
    side.fetch(Fetch(plan_id=3, peer=peer, transfer="request-1", attempt=1, first=0, ...), now)
    side.receive(peer, message, now)
    for effect in side.take_effects(): ...

A fetch is reported once no read into its slots is in flight, and never before. Cancelling it, its deadline and a
failure of the peer only end the wait: no further read begins.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fdcache.metadata import HashArray, Int32Array, UInt64Array
from fdcache.transfer.messages import (
    AskForBlocks,
    BlocksGranted,
    End,
    EndReason,
    Failed,
    FromPrefill,
    Last,
    Ready,
    Renew,
)
from fdcache.transfer.prefill import Peer


@dataclass(frozen=True, slots=True)
class PeerFetch:
    """Blocks that a decode plan reads: block ``first + i`` of the transfer, of hash i, into slot i.

    Without slots it only keeps prefill from giving up the transfer, until it is cancelled.
    """

    plan_id: int
    peer: Peer
    transfer: str
    attempt: int
    first: int
    hashes: HashArray
    slots: Int32Array
    timeout: float

    @property
    def is_hold(self) -> bool:
        """True if nothing is read yet."""
        return not len(self.slots)


_MOST_DONE = 1024


class FetchEnd(StrEnum):
    """How a fetch ended."""

    DONE = "done"
    CORRUPT = "corrupt"
    """The bytes of some block differ from what prefill computed."""
    FAILED = "failed"
    """Prefill could not hand over, or a read failed."""
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    PEER_GONE = "peer_gone"
    REFUSED = "refused"
    DECLINED = "declined"
    """The blocks were not wanted; prefill was told."""


class SendToPrefill(NamedTuple):
    """Effect: send a message to a peer."""

    peer: Peer
    message: AskForBlocks | Renew | End


class BeginRead(NamedTuple):
    """Effect: read ``take`` blocks of a part, from its block ``skip`` on, into ``slots``; then call ``read_ended``."""

    plan_id: int
    read_id: int
    peer: Peer
    ready: Ready
    skip: int
    take: int
    slots: Int32Array


class ComputeTargetSums(NamedTuple):
    """Effect: sum planes of these slots, after what is read, and pass the sums to ``sums``."""

    plan_id: int
    blocks: slice
    planes: slice
    slots: Int32Array


class FetchEnded(NamedTuple):
    """Effect: report the plan; nothing accesses its slots any more. The first ``whole`` blocks are whole."""

    plan_id: int
    end: FetchEnd
    whole: int
    corrupt: tuple[int, ...]
    error: str | None


Effect = SendToPrefill | BeginRead | ComputeTargetSums | FetchEnded


@dataclass(slots=True)
class _State:
    fetch: PeerFetch
    deadline: float
    next_renewal: float
    arrived: NDArray[np.bool_]
    """Planes of blocks that were read."""
    begun: NDArray[np.bool_]
    next_seq: int = 0
    reads: dict[int, tuple[int, slice, slice]] = field(default_factory=dict)
    """Reads in flight: number of the answer, blocks, planes."""
    arrived_reads: set[int] = field(default_factory=set)
    """Those that need the places of prefill no more."""
    limit: int = 0
    """Blocks from here on are lost: no read into them begins."""
    unread: list[Ready] = field(default_factory=list)
    """Parts whose reads wait until fewer slots are being read into."""
    last: Last | None = None
    sums: UInt64Array = field(default_factory=lambda: np.empty(0, np.uint64))
    summing: int = 0
    """Parts that were read and not summed yet."""
    end: FetchEnd | None = None
    error: str | None = None

    @property
    def size(self) -> int:
        return len(self.fetch.slots)

    @property
    def num_read(self) -> int:
        """Answers that need no read any more."""
        unread = [ready.seq for ready in self.unread]
        reading = [seq for read_id, (seq, _, _) in self.reads.items() if read_id not in self.arrived_reads]
        return min((*unread, *reading), default=self.next_seq)


class DecodeSide:
    """Fetches of one rank.

    ``lease``: seconds for which prefill is asked to hold its blocks after each message. ``renew``: seconds between
    messages of a fetch that waits. Without ``verifies`` the sums are not compared. With ``acknowledges`` prefill is
    told at once what was read, as it has no other room for what comes next. ``most_read``: slots of the fetches that
    are being read at a time; one alone may have more. So many are held if peers stop.
    """

    def __init__(
        self,
        num_planes: int,
        *,
        lease: float,
        renew: float,
        verifies: bool,
        acknowledges: bool = False,
        most_read: int | None = None,
    ) -> None:
        self._num_planes = num_planes
        self._lease_ms = int(lease * 1000)
        self._renew = renew
        self._verifies = verifies
        self._acknowledges = acknowledges
        self._most_read = most_read
        self._reading: dict[int, int] = {}
        """Slots of the fetches of which a read has begun, by plan."""
        self._waiting: OrderedDict[int, None] = OrderedDict()
        """Fetches that wait to read, in order."""
        self._fetches: dict[int, _State] = {}
        self._by_transfer: dict[tuple[Peer, str, int], int] = {}
        self._by_read: dict[int, int] = {}
        self._done: OrderedDict[tuple[Peer, str, int], None] = OrderedDict()
        """The last attempts that were whole: if the message that said so is lost, a repeated answer gets another."""
        self._read_ids = count(1)
        self._effects: list[Effect] = []

    def __len__(self) -> int:
        return len(self._fetches)

    @property
    def reads_in_flight(self) -> int:
        """Reads that were begun and have not ended."""
        return len(self._by_read)

    @property
    def blocks_in_flight(self) -> int:
        """Slots of fetches that were not reported."""
        return sum(state.size for state in self._fetches.values())

    @property
    def blocks_held(self) -> int:
        """Slots of fetches that have ended and wait for reads in flight."""
        return sum(state.size for state in self._fetches.values() if state.end is not None)

    def is_reading(self, plan_id: int) -> bool:
        """Return True while a read into slots of a fetch is in flight."""
        return plan_id in self._by_read.values()

    def take_effects(self) -> list[Effect]:
        """Remove and return what is to be done, in order."""
        effects, self._effects = self._effects, []
        return effects

    # --- this instance ----------------------------------------------------------------------------------------

    def fetch(self, fetch: PeerFetch, now: float) -> None:
        """Ask a peer, which was accepted, for blocks. An attempt that is being fetched is refused."""
        key = fetch.peer, fetch.transfer, fetch.attempt
        if key in self._by_transfer:
            reason = f"attempt {fetch.attempt} of transfer {fetch.transfer!r} is being fetched already"
            self._effects.append(FetchEnded(fetch.plan_id, FetchEnd.REFUSED, 0, (), reason))
            return
        shape = (len(fetch.slots), self._num_planes)
        state = _State(fetch, now + fetch.timeout, now, np.zeros(shape, np.bool_), np.zeros(shape, np.bool_))
        state.limit = state.size
        state.sums = np.zeros(state.size, np.uint64)
        self._fetches[fetch.plan_id] = state
        self._by_transfer[key] = fetch.plan_id
        self._tell(state, now)

    def decline(self, peer: Peer, transfer: str, attempt: int) -> None:
        """Tell a peer that a transfer is not wanted."""
        self._effects.append(SendToPrefill(peer, End(transfer, attempt, EndReason.NOT_WANTED)))

    def cancel(self, plan_id: int, reason: str = "cancelled") -> None:
        """End the wait of a fetch. It is reported once its reads have ended. Idempotent."""
        if (state := self._fetches.get(plan_id)) is not None:
            told = None if state.fetch.is_hold else EndReason.NOT_WANTED
            self._end(state, FetchEnd.CANCELLED, reason, told)

    def reads_arrived(self, read_ids: Sequence[int]) -> None:
        """Tell prefill that the places of reads are free, while they are copied into their slots."""
        for read_id in read_ids:
            state = self._fetches[self._by_read[read_id]]
            state.arrived_reads.add(read_id)
            state.next_renewal = 0.0

    def read_ended(self, read_id: int, error: str | None) -> None:
        """Take the end of a read: nothing writes for it any more."""
        state = self._fetches[self._by_read.pop(read_id)]
        _, blocks, planes = state.reads.pop(read_id)
        told = read_id in state.arrived_reads
        state.arrived_reads.discard(read_id)
        if error is None:
            state.arrived[blocks, planes] = True
            if self._verifies and state.end is None:
                state.summing += 1
                slots = state.fetch.slots[blocks]
                self._effects.append(ComputeTargetSums(state.fetch.plan_id, blocks, planes, slots))
        elif state.end is None:
            state.error = state.error or error
            state.limit = min(state.limit, blocks.start)
        if self._acknowledges and not told:
            state.next_renewal = 0.0
        self._advance(state)

    def sums(self, plan_id: int, blocks: slice, sums: UInt64Array) -> None:
        """Take the sums of a part; those of a block's parts add up. Ignored once the fetch has ended."""
        state = self._fetches.get(plan_id)
        if state is not None and state.end is None:
            state.summing -= 1
            state.sums[blocks] += sums
            self._advance(state)

    # --- peers ------------------------------------------------------------------------------------------------

    def receive(self, peer: Peer, message: FromPrefill, now: float) -> None:
        """Take a message of a peer. One of another attempt or of a fetch that has ended changes nothing."""
        plan_id = self._by_transfer.get((peer, message.transfer, message.attempt))
        if plan_id is None:
            if not isinstance(message, Failed):
                key = peer, message.transfer, message.attempt
                reason = EndReason.DONE if key in self._done else EndReason.NOT_WANTED
                self._effects.append(SendToPrefill(peer, End(message.transfer, message.attempt, reason)))
            return
        state = self._fetches[plan_id]
        if state.end is not None:
            return
        if isinstance(message, Failed):
            self._end(state, FetchEnd.FAILED, f"prefill: {message.reason}", None)
        elif message.seq == state.next_seq:
            self._take(state, message)

    def peer_gone(self, peer: Peer, reason: str) -> None:
        """End the wait of every fetch from a peer. Reads in flight end by ``read_ended``, as always."""
        for state in list(self._fetches.values()):
            if state.fetch.peer == peer:
                self._end(state, FetchEnd.PEER_GONE, reason, None)

    def repeat(self, peer: Peer) -> None:
        """Send a peer the state of each fetch at once: messages may have been lost with a connection."""
        for state in self._fetches.values():
            if state.fetch.peer == peer:
                state.next_renewal = 0.0

    def take_unanswered(self, peer: Peer) -> list[int]:
        """Forget the fetches that a peer has not answered, without a report; return their plans."""
        found = [
            each.fetch
            for each in self._fetches.values()
            if each.fetch.peer == peer and not each.next_seq and each.end is None
        ]
        for fetch in found:
            del self._fetches[fetch.plan_id]
            del self._by_transfer[fetch.peer, fetch.transfer, fetch.attempt]
        return [fetch.plan_id for fetch in found]

    def tick(self, now: float) -> None:
        """Give up what is late, and renew the leases of the others."""
        for state in list(self._fetches.values()):
            if state.end is not None:
                continue
            if now > state.deadline and not state.fetch.is_hold:
                self._end(state, FetchEnd.TIMEOUT, "not handed over in time", EndReason.NOT_WANTED)
            elif now >= state.next_renewal:
                self._tell(state, now)

    def _tell(self, state: _State, now: float) -> None:
        """Ask, or renew the lease once the ask was answered."""
        fetch = state.fetch
        state.next_renewal = now + self._renew
        if state.next_seq or fetch.is_hold:
            message: AskForBlocks | Renew = Renew(
                fetch.transfer, fetch.attempt, state.next_seq, state.num_read, self._lease_ms
            )
        else:
            hashes = np.ascontiguousarray(fetch.hashes).tobytes()
            message = AskForBlocks(fetch.transfer, fetch.attempt, fetch.first, hashes, self._lease_ms)
        self._effects.append(SendToPrefill(fetch.peer, message))

    def _take(self, state: _State, message: BlocksGranted | Ready | Last) -> None:
        state.next_seq += 1
        if isinstance(message, Ready):
            self._begin(state, message)
        elif isinstance(message, Last):
            state.last = message
            self._advance(state)

    def _begin(self, state: _State, ready: Ready) -> None:
        """Read the blocks of a part that are wanted, each plane of each block once."""
        if not ready.first_plane < ready.last_plane <= self._num_planes:
            self._end(
                state,
                FetchEnd.FAILED,
                f"planes {ready.first_plane} to {ready.last_plane} do not exist",
                EndReason.FAILED,
            )
            return
        blocks, planes = self._wanted_of(state, ready)
        if blocks.start >= blocks.stop:
            return
        if state.begun[blocks, planes].any():
            self._end(state, FetchEnd.FAILED, "prefill announced a plane twice", EndReason.FAILED)
            return
        state.begun[blocks, planes] = True
        if self._may_read(state):
            self._read(state, ready, blocks, planes)
        else:
            state.unread.append(ready)
            self._waiting[state.fetch.plan_id] = None

    def _may_read(self, state: _State) -> bool:
        """Return True if reads of a fetch may begin now: those of peers that stop hold its slots."""
        plan_id = state.fetch.plan_id
        if plan_id not in self._reading:
            taken = sum(self._reading.values())
            if self._most_read is not None and taken and taken + state.size > self._most_read:
                return False
            self._reading[plan_id] = state.size
        return True

    def _read_waiting(self) -> None:
        """Begin the reads that have waited and may begin now, in order."""
        while self._waiting:
            plan_id = next(iter(self._waiting))
            state = self._fetches.get(plan_id)
            if state is None or state.end is not None:
                del self._waiting[plan_id]
            elif self._may_read(state):
                del self._waiting[plan_id]
                unread, state.unread = state.unread, []
                for ready in unread:
                    self._read(state, ready, *self._wanted_of(state, ready))
                self._advance(state)
            else:
                return

    def _wanted_of(self, state: _State, ready: Ready) -> tuple[slice, slice]:
        """Return the blocks and planes of a part that a fetch reads."""
        first = max(ready.first - state.fetch.first, 0)
        last = min(ready.first + ready.count - state.fetch.first, state.limit)
        return slice(first, last), slice(ready.first_plane, ready.last_plane)

    def _read(self, state: _State, ready: Ready, blocks: slice, planes: slice) -> None:
        if blocks.start >= blocks.stop:  # given up meanwhile
            return
        read_id = next(self._read_ids)
        state.reads[read_id] = (ready.seq, blocks, planes)
        self._by_read[read_id] = state.fetch.plan_id
        fetch, take = state.fetch, blocks.stop - blocks.start
        skip = fetch.first + blocks.start - ready.first
        self._effects.append(
            BeginRead(fetch.plan_id, read_id, fetch.peer, ready, skip, take, fetch.slots[blocks])
        )

    def _advance(self, state: _State) -> None:
        """Check or report a fetch whose reads have all ended."""
        if state.reads:
            return
        if state.end is not None:
            self._report(state, 0)
            return
        if state.summing or state.unread:
            return
        if state.last is None:
            if state.limit == 0:
                self._end(state, FetchEnd.FAILED, state.error, EndReason.FAILED)
            return
        if (len(state.last.hashes), len(state.last.sums)) != (32 * state.size, 8 * state.size):
            self._end(state, FetchEnd.FAILED, "prefill ended with other blocks", EndReason.FAILED)
            return
        hashes = np.frombuffer(state.last.hashes, np.uint8).reshape(-1, 32)
        sound = (hashes == state.fetch.hashes).all(axis=1) & state.arrived.all(axis=1)
        state.limit = min(state.limit, _leading(sound))
        if state.limit < state.size:
            state.error = state.error or f"block {state.fetch.first + state.limit} was not handed over"
        differs = np.zeros(state.size, np.bool_)
        if self._verifies:
            differs = state.sums != np.frombuffer(state.last.sums, "<u8")
        self._complete(state, differs[: state.limit])

    def _complete(self, state: _State, differs: NDArray[np.bool_]) -> None:
        whole = _leading(~differs)
        corrupt = tuple(np.flatnonzero(differs).tolist())
        fetch = state.fetch
        if corrupt:
            state.end = FetchEnd.CORRUPT
            state.error = f"the bytes of block {fetch.first + corrupt[0]} differ from those of prefill"
        else:
            state.end = FetchEnd.DONE if whole == state.size else FetchEnd.FAILED
        reason = EndReason.DONE if state.end is FetchEnd.DONE else EndReason.FAILED
        self._effects.append(SendToPrefill(fetch.peer, End(fetch.transfer, fetch.attempt, reason)))
        self._report(state, whole, corrupt)

    def _end(self, state: _State, end: FetchEnd, error: str | None, reason: EndReason | None) -> None:
        if state.end is not None:
            return
        state.end, state.error = end, error
        state.unread = []
        fetch = state.fetch
        if reason is not None:
            self._effects.append(SendToPrefill(fetch.peer, End(fetch.transfer, fetch.attempt, reason)))
        self._advance(state)

    def _report(self, state: _State, whole: int, corrupt: Sequence[int] = ()) -> None:
        fetch = state.fetch
        assert state.end is not None and not state.reads
        del self._fetches[fetch.plan_id]
        key = fetch.peer, fetch.transfer, fetch.attempt
        del self._by_transfer[key]
        if state.end is FetchEnd.DONE:
            self._done[key] = None
            if len(self._done) > _MOST_DONE:
                self._done.popitem(last=False)
        self._effects.append(FetchEnded(fetch.plan_id, state.end, whole, tuple(corrupt), state.error))
        if self._reading.pop(fetch.plan_id, None) is not None:
            self._read_waiting()


def _leading(flags: NDArray[np.bool_]) -> int:
    return len(flags) if flags.all() else int(np.argmin(flags))
