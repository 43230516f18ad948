"""Models, requests and plans in flight of an engine that owns its device blocks, as ``offload_model`` plays it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fdcache.groups import CacheGroup, Reach
from fdcache.manager import Request
from fdcache.metadata import TransferPlan, TransferReport
from tests.offload_engine import BLOCK

DEVICE_BLOCKS = 12
CHUNK = 10

FULL, HALVES, STATE = CacheGroup(BLOCK), CacheGroup(BLOCK // 2), CacheGroup(BLOCK, Reach.STATE)


def window(tokens: int, block: int = BLOCK) -> CacheGroup:
    return CacheGroup(block, Reach.LAST, tokens)


MODELS = [
    (window(6),),
    (FULL, window(6)),
    (FULL, FULL),
    (FULL, window(4), window(9)),
    (window(5, BLOCK // 2), FULL),
    (window(7), HALVES),
    (CacheGroup(BLOCK, Reach.CHUNK, 2 * BLOCK), FULL),
    (CacheGroup(BLOCK // 2, Reach.CHUNK, 6), window(3, BLOCK // 4), FULL),
    (STATE, STATE, FULL),
    (STATE,),
    (HALVES, STATE),
    (STATE, window(6)),
]
"""Layers as models have them: a window alone; Gemma 3; MiMo-V2; Gemma 4; Llama 4; Jamba; Mamba; and worse."""


def page_records(groups: tuple[CacheGroup, ...]) -> int:
    """Return the records of a page, those of states included."""
    return sum(BLOCK // group.block_size for group in groups) or 1


@dataclass
class Sequence:
    """A request of the engine: its block table, page by page, and the number of tokens that have KV.

    ``states`` are the blocks of the states after them, if they end a page. ``loading`` are the device blocks of its
    load, those of states last. One that ``aborted`` keeps them until the load has ended.
    """

    request: Request
    goal: int
    prompt: list[int]
    table: list[int] = field(default_factory=list)
    computed: int = 0
    states: list[int] = field(default_factory=list)
    loading: list[int] | None = None
    aborted: bool = False


@dataclass
class Late:
    """Device blocks of a load that is overdue, into which these plans may still write."""

    blocks: list[int]
    plans: set[int]


class PlansInFlight:
    """Which ranks have not reported a plan, and which plans have blocks of a load."""

    def __init__(self) -> None:
        self._ranks: dict[int, set[int]] = {}
        self._of_load: dict[int, set[int]] = {}

    def sent(self, plan: TransferPlan, loads: Iterable[int], ranks: int) -> None:
        self._ranks[plan.plan_id] = set(range(ranks))
        for load in loads:
            self._of_load.setdefault(load, set()).add(plan.plan_id)

    def reported(self, reports: Iterable[TransferReport]) -> None:
        for report in reports:
            self._ranks.get(report.plan_id, set()).discard(report.rank)

    def lost(self, rank: int) -> None:
        for ranks in self._ranks.values():
            ranks.discard(rank)

    def is_known(self, plan: int) -> bool:
        """Return False for a task of storage, which has a number of its own."""
        return plan in self._ranks

    def of_load(self, load: int) -> set[int]:
        return set(self._of_load.get(load, ()))

    def any_in_flight(self, plans: Iterable[int]) -> bool:
        return any(self._ranks[plan] for plan in plans)
