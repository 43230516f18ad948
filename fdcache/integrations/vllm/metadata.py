"""Records between vLLM's scheduler and its workers. vLLM pickles them for workers in processes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from fdcache.metadata import Int32Array, TransferPlan, TransferReport, decode_plan, decode_report, encode
from fdcache.tiers.host import HostCache


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Copies of one step, for every rank.

    ``plans``: in order. ``loads``: ids of the requests that wait for a plan, by its number; True if it is the last one
    that they wait for. ``unloaded``: device blocks of requests whose load could not be planned, which they compute;
    they wait for no other plan. ``unordered``: numbers of plans that only load, into blocks that no step in flight
    uses.
    ``is_late``: a step has gone without its plan, this or the one before. Its blocks may be overwritten: plans are
    refused, and what earlier plans copy out of the device does not count. ``host_cache``: with the first step.
    ``overwritten``: device blocks that vLLM fills before the plans are executed. ``sends``: ids of the requests whose
    blocks are handed over, by the number of the hand-over, once vLLM waits for its end; ``sends_over``: of those
    that have ended without that. ``computed``: blocks that are computed by the end of the step, as the number of the
    hand-over, the first of them, and their places. ``timed``: number under which workers report the step's seconds, 0
    for none. ``received``: requests of which all ranks have told since the last step. ``seconds_left``: a
    load that ends within this time may be told.
    """

    plans: list[TransferPlan] = field(default_factory=list)
    loads: dict[int, dict[str, bool]] = field(default_factory=dict)
    sends: dict[int, str] = field(default_factory=dict)
    sends_over: Sequence[int] = ()
    computed: list[tuple[int, int, Int32Array]] = field(default_factory=list)
    unloaded: dict[str, list[int]] = field(default_factory=dict)
    unordered: set[int] = field(default_factory=set)
    is_late: bool = False
    host_cache: HostCache | None = None
    timed: int = 0
    overwritten: Sequence[int] = ()
    received: Sequence[str] = ()
    seconds_left: float = 0.0

    def __bool__(self) -> bool:
        """Return True unless workers have nothing to do."""
        return bool(
            self.plans
            or self.computed
            or self.sends
            or self.sends_over
            or self.unloaded
            or self.is_late
            or self.host_cache
            or self.timed
            or self.overwritten
            or self.received
            or self.seconds_left
        )

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self is NOTHING:
            return "NOTHING"
        return StepMetadata, (), {**self.__dict__, "plans": list(map(encode, self.plans))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, plans=list(map(decode_plan, state["plans"])))


NOTHING = StepMetadata()
"""Of steps for which workers have nothing to do."""


@dataclass
class WorkerReports(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Reports of one rank, or of all once they are aggregated.

    ``seconds``: of timed steps, by number.
    """

    reports: list[TransferReport] = field(default_factory=list)
    seconds: dict[int, float] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return {"reports": list(map(encode, self.reports)), "seconds": self.seconds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.reports, self.seconds = list(map(decode_report, state["reports"])), state["seconds"]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReports:
        """Return the reports of both."""
        assert isinstance(other, WorkerReports)
        numbers = self.seconds.keys() | other.seconds.keys()
        slowest = {each: max(self.seconds.get(each, 0.0), other.seconds.get(each, 0.0)) for each in numbers}
        return WorkerReports(self.reports + other.reports, slowest)


@dataclass
class WorkerStorage(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Blocks that one rank's local storage held at the start: an encoded ``StorageScan``, or None.

    ``address``: at which the rank answers peers, None if it hands nothing over.
    """

    scan: bytes | None = None
    rank: int = 0
    address: str | None = None
