"""A ``CacheManager`` and an ``OffloadManager`` with one history have the same blocks on the host once it is quiet."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest

from fdcache.controller.cache_controller import CacheController
from fdcache.devices.cpu import CpuDevice
from fdcache.manager import CacheManager, OffloadManager, Request
from fdcache.metadata import SLOT_HEADER_BYTES, CacheLevel, SwapPurpose, TransferPlan, TransferReport
from fdcache.settings.cache import CacheSettings, CopySettings, EvictionPolicy, WritePolicy
from tests.seeds import budget
from tests.swaps import PATIENCE, uniform_layout

BLOCK = 4
LAYOUT = uniform_layout(block_size=BLOCK, num_layers=1)
Path = tuple[int, ...]
"""A prompt by its blocks, each a number."""


class Side:
    """An engine with one manager and its worker. Requests are served alone, one after the other."""

    manager: CacheManager | OffloadManager

    def __init__(self, device: int, host: int, policy: WritePolicy) -> None:
        self.device = device
        self.settings = CacheSettings(
            device_blocks=device,
            host_memory=host * (LAYOUT.record_bytes + SLOT_HEADER_BYTES),
            write_policy=policy,
            write_through_threshold=2,
            eviction=EvictionPolicy.LRU,
            clean_reserve=8,
        )
        self.manager = self.make_manager()
        transfer = CopySettings(drain_timeout=PATIENCE, layer_timeout=PATIENCE)
        self.worker = CacheController(transfer, LAYOUT, rank=0, device=CpuDevice())
        self.worker.initialize_kv_cache(device)
        self.worker.initialize_host_cache(self.manager.host_cache)
        self.unreported: list[TransferReport] = []
        self.backups: set[int] = set()
        self.names = count()

    def make_manager(self) -> CacheManager | OffloadManager:
        raise NotImplementedError

    def compute(self, request: Request) -> list[TransferPlan]:
        """Serve a request from start to end, without loads; return the plans of its step."""
        raise NotImplementedError

    def serve(self, path: Path) -> list[TransferPlan]:
        tokens = np.repeat(np.array(path, np.int32), BLOCK)
        return self.compute(Request(f"request {next(self.names)}", tokens, device_only=True))

    def step(self) -> list[TransferPlan]:
        """Take the plans and copy them; the reports of backups are kept back."""
        plans = self.manager.take_plans()
        for plan in plans:
            self.worker.submit_swap_tasks(plan).wait_all()
        copied = len(plans)
        while copied:
            reports = self.worker.wait_reports(PATIENCE)
            assert reports
            copied -= len(reports)
            self.unreported += reports
        self.backups |= {plan.plan_id for plan in plans if plan.backups is not None}
        self.manager.apply([each for each in self.unreported if each.plan_id not in self.backups])
        self.unreported = [each for each in self.unreported if each.plan_id in self.backups]
        return plans

    def report(self, most: int | None = None) -> None:
        """Pass the oldest reports on."""
        most = len(self.unreported) if most is None else most
        self.manager.apply(self.unreported[:most])
        del self.unreported[:most]

    def rest(self) -> int:
        """Step without requests until nothing is left to copy; return how many steps had plans."""
        for steps in count():
            self.report()
            if not self.step():
                return steps
        raise AssertionError

    def on_host(self, path: Path) -> int:
        """Return how many blocks of a path the host has."""
        tokens = np.repeat(np.array(path, np.int32), BLOCK)
        return len(self.manager.find_blocks(Request("probe", tokens))[CacheLevel.HOST])

    @property
    def dropped(self) -> int:
        return self.manager.get_stats().counters.backups_dropped

    def close(self) -> None:
        self.rest()
        self.manager.check_integrity()
        self.worker.shutdown()
        self.manager.close()


class OwnDevice(Side):
    """The manager owns the device cache."""

    manager: CacheManager

    def make_manager(self) -> CacheManager:
        return CacheManager(self.settings, LAYOUT)

    def compute(self, request: Request) -> list[TransferPlan]:
        self.manager.match_prefix([request])
        while not self.manager.allocate_device_blocks([(request, request.num_tokens)])[0].ok:
            assert self.unreported, "blocks are missing though nothing is in flight"
            self.report(1)
        plans = self.step()
        self.manager.commit([(request, request.num_tokens)])
        self.manager.finish([request])
        return plans


class EngineDevice(Side):
    """The engine owns the device cache, and gives away the blocks that it has used longest ago, leaves first."""

    manager: OffloadManager

    def make_manager(self) -> OffloadManager:
        self.blocks: OrderedDict[bytes, int] = OrderedDict()
        self.free = list(range(self.device))
        return OffloadManager(self.settings, LAYOUT)

    def compute(self, request: Request) -> list[TransferPlan]:
        self.manager.prepare([request])
        path = [row.tobytes() for row in request.block_hashes]
        have = next((i for i, block in enumerate(path) if block not in self.blocks), len(path))
        for block in path[:have]:
            self.blocks.move_to_end(block)
        given = [self._take() for _ in path[have:]]
        self.manager.evicted(np.array(given, np.int32))
        plans = self.step()
        ids = [self.blocks.pop(block) for block in path[:have]] + given
        self.manager.offer(request, request.num_tokens, np.array(ids, np.int32))
        self.blocks.update(zip(reversed(path), reversed(ids), strict=True))
        self.manager.finish(request)
        return plans

    def _take(self) -> int:
        return self.free.pop() if self.free else self.blocks.popitem(last=False)[1]


Sides = Callable[..., tuple[Side, Side]]


@pytest.fixture
def sides() -> Iterator[Sides]:
    made: list[Side] = []

    def make(device: int, host: int, policy: WritePolicy = WritePolicy.WRITE_THROUGH) -> tuple[Side, Side]:
        made.extend((OwnDevice(device, host, policy), EngineDevice(device, host, policy)))
        return made[-2], made[-1]

    yield make
    for side in made:
        side.close()


def blocks_copied(plans: Sequence[TransferPlan], purpose: SwapPurpose) -> int:
    swaps: list[Any] = [swap for plan in plans for swap in plan.swaps() if swap.purpose is purpose]
    return sum(map(len, swaps))


@pytest.mark.parametrize(("blocks", "device"), [(768, 1024), (2048, 5120)])
def test_an_idle_engine_has_a_prompt_on_the_host_after_two_steps(
    sides: Sides, blocks: int, device: int
) -> None:
    prompt = tuple(range(blocks))
    for side in sides(device, 2 * device):
        side.serve(prompt)
        assert side.rest() <= 2
        assert (side.on_host(prompt), side.dropped) == (blocks, 0)


def test_blocks_given_away_while_their_parents_are_copied_are_kept(sides: Sides) -> None:
    prompt, other = tuple(range(768)), tuple(range(1000, 1512))
    for side in sides(1024, 4096):
        side.serve(prompt)
        side.step()
        plans = side.serve(other)
        side.rest()
        assert blocks_copied(plans, SwapPurpose.EVICT) in (0, 256), "all were in flight, or these were not"
        assert (side.on_host(prompt), side.on_host(other), side.dropped) == (768, 512, 0)


def test_a_prompt_of_a_quarter_million_tokens_is_kept_and_so_are_those_before_it(sides: Sides) -> None:
    earlier, prompt = tuple(range(100_000, 100_300)), tuple(range(16_385))
    for side in sides(17_000, 20_000):
        side.serve(earlier)
        side.serve(prompt)
        side.rest()
        assert (side.on_host(earlier), side.on_host(prompt), side.dropped) == (300, 16_385, 0)
        plans = side.serve(tuple(range(200_000, 201_000)))
        assert blocks_copied(plans, SwapPurpose.EVICT) == 0


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_a_path_longer_than_the_host_tier_counts_each_block_as_dropped_once(
    sides: Sides, policy: WritePolicy
) -> None:
    for side in sides(64, 8, policy):
        prompt = tuple(range(24))
        for grown in range(24, 32):
            side.serve((*prompt, *range(1000, 1000 + grown - 24)))
            side.rest()
        assert side.on_host(prompt) == (8 if policy is WritePolicy.WRITE_THROUGH else side.on_host(prompt))
        assert side.dropped <= 32


@pytest.mark.parametrize(("blocks", "copied", "dropped"), [(2000, 2000, 0), (10_000, 0, 100)])
def test_an_eviction_takes_a_bounded_number_of_ancestors_along(
    sides: Sides, blocks: int, copied: int, dropped: int
) -> None:
    """The host has none of a path that the next prompt evicts from its end."""
    for side in sides(blocks, 2 * blocks, WritePolicy.WRITE_BACK):
        side.serve(tuple(range(blocks)))
        plans = side.serve(tuple(range(20_000, 20_100)))
        assert (blocks_copied(plans, SwapPurpose.EVICT), side.dropped) == (copied, dropped)


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize("seed", range(budget(40)))
def test_one_history_leaves_the_same_blocks_on_the_host(sides: Sides, policy: WritePolicy, seed: int) -> None:
    """Paths that share prefixes, reports that come late; nothing that the policy wants is lost."""
    draw = random.Random(seed)
    selective = policy is WritePolicy.WRITE_THROUGH_SELECTIVE
    device = 400 if selective else 40
    own, engine = sides(device, 1000, policy)
    paths: list[Path] = []
    for number in range(30):
        prefix: Path = ()
        if paths and draw.random() < 0.6:
            prefix = draw.choice(paths)
            prefix = prefix[: draw.randrange(len(prefix) + 1)]
        more = draw.randrange(1, 12)
        paths.append((*prefix, *range(100 * number, 100 * number + more))[:30])
        late = draw.randrange(3)
        for side in (own, engine):
            side.serve(paths[-1])
            side.report(max(len(side.unreported) - late, 0))
    for side in (own, engine):
        side.rest()
        if policy is WritePolicy.WRITE_BACK:  # all that was there is evicted
            side.serve(tuple(range(10_000, 10_000 + device)))
            side.rest()
        assert side.dropped == 0
    on_host = [[side.on_host(path) for path in paths] for side in (own, engine)]
    assert on_host[0] == on_host[1]
    if not selective:
        assert on_host[0] == [len(path) for path in paths]
