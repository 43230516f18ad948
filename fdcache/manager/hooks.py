"""Hooks of a manager for hand-overs between instances, which ``fdcache.transfer`` makes.

A manager does two things for them: it keeps the blocks of a request that is being sent until they are released, and it
promises slots to blocks that a peer will bring. Everything else is decided by the hooks, under the manager's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from fdcache._core import InFlightPlan
from fdcache.layout import KVLayout
from fdcache.manager.keyed import OffloadRequest
from fdcache.manager.offloaded import OffloadedRequests
from fdcache.manager.requests import LiveRequests, Request
from fdcache.metadata import TransferPlan, TransferReport
from fdcache.plans.ledger import PlanLedger
from fdcache.tiers.statistics import Counters, HandoverCount


@dataclass(frozen=True, slots=True)
class HookedParts:
    """What a manager gives to its hooks. ``requests`` holds and promises; ``lock`` guards it, and the hooks.

    ``seconds_to_compute``: of a request beyond its first tokens, as far as the cost model knows.
    """

    lock: AbstractContextManager[object]
    set_time: Callable[[], None]
    layout: KVLayout
    lookahead_tokens: int
    requests: LiveRequests
    counters: Counters
    num_device_blocks: Callable[[], int]
    seconds_to_compute: Callable[[int, int], float | None]


@dataclass(frozen=True, slots=True)
class OffloadParts:
    """What an ``OffloadManager`` gives to its hooks. ``wake`` lets it take plans that the hooks have something for."""

    lock: AbstractContextManager[object]
    requests: OffloadedRequests
    counters: Counters
    wake: Callable[[], None]
    seconds_to_compute: Callable[[int, int], float | None]


class PlanHooks(Protocol):
    """What the plans of a manager call, always under its lock."""

    @property
    def held_blocks(self) -> int:
        """Slots of fetches that no request waits for any more."""

    def attach(self, plan: TransferPlan | None, ledger: PlanLedger, now: float) -> TransferPlan | None:
        """Add the hand-overs to the plan of a step, an empty one if there is none; return it."""

    def record(self, report: TransferReport) -> None:
        """Count the hand-over that a rank has reported, if the report is of one."""

    def stash(self, flight: InFlightPlan) -> bool:
        """Keep a fetch for ``take_stashed`` and return True if the load of the blocks below it is in flight."""

    def take_stashed(self, flight: InFlightPlan) -> list[InFlightPlan]:
        """Return the fetches that waited for this plan, whose loads have ended; others wait no more."""

    def ended(self, flight: InFlightPlan) -> None:
        """End a hand-over that every rank has reported, and that is settled in the tier."""

    def counts(self) -> list[HandoverCount]:
        """Return the hand-overs that have ended, by peer and result."""


class HandoverHooks(PlanHooks, Protocol):
    """What a ``CacheManager`` calls as well."""

    def unmatched(self, request: Request) -> None:
        """Take note that a request found no room, or is not wanted; called before the request is released."""

    def released(self, request: Request) -> None:
        """End what a request fetches, or would fetch; called before the request is released."""

    def committed(self, progress: Iterable[tuple[Request, int]]) -> None:
        """Record the tokens of requests that have their KV."""


class OffloadHooks(PlanHooks, Protocol):
    """What an ``OffloadManager`` calls as well."""

    @property
    def has_work(self) -> bool:
        """True if the next plan has a hand-over to begin or to end."""

    def unwanted(self, request: OffloadRequest) -> None:
        """Tell the peer that a request fetches nothing."""

    def released(self, request: OffloadRequest) -> None:
        """End what a request fetches, or would fetch, as it ends."""
