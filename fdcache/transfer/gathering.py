"""A fetch of one rank from all the prefill ranks that have a part of its planes."""

from __future__ import annotations

from dataclasses import dataclass, field

from fdcache.devices.base import Event
from fdcache.metadata import HandoverEnd, PeerTask
from fdcache.transfer.connector import Pieces
from fdcache.transfer.decode import FetchEnd, FetchEnded
from fdcache.transfer.execution import TransferExecution


@dataclass(slots=True, eq=False)
class Gathering:
    """The fetch of a plan. It ends with its last leg, and a block is whole if all legs have read it whole."""

    execution: TransferExecution
    task: PeerTask
    payload_bytes: int
    after: Event | None = None
    """On a GPU, the work after which its slots may be written."""
    legs: dict[int, Leg] = field(default_factory=dict)
    """The legs that have not ended, by number."""
    ends: list[tuple[str, FetchEnded]] = field(default_factory=list)

    @property
    def is_failing(self) -> bool:
        """True once no block can be whole any more."""
        return any(not end.whole for _, end in self.ends)

    def take(self, leg: Leg, ended: FetchEnded) -> HandoverEnd | None:
        """Take the end of a leg; report the plan and return its end if it was the last."""
        del self.legs[leg.number]
        if leg.wanted or not self.task.wanted:
            self.ends.append((leg.address, ended))
        if any(each.wanted for each in self.legs.values()) or self.execution.has_ended or not self.ends:
            return None
        whole = min(end.whole for _, end in self.ends)
        address, worst = next(
            ((address, end) for address, end in self.ends if end.end is not FetchEnd.DONE), self.ends[-1]
        )
        corrupt = sorted({block for _, end in self.ends for block in end.corrupt})
        result = HandoverEnd(address, worst.end.value, whole)
        self.execution.finish(result, whole, corrupt, whole * self.payload_bytes, worst.error)
        return result


@dataclass(slots=True, eq=False)
class Leg:
    """The part of a fetch that one prefill rank has. One that is not ``wanted`` tells the rank so."""

    number: int
    gathering: Gathering
    address: str
    deadline: float
    wanted: bool
    boot: bytes = b""
    pieces: Pieces | None = None
    """Pieces of the own planes that it reads, None for all."""

    @property
    def task(self) -> PeerTask:
        """The hand-over that it is a part of."""
        return self.gathering.task
