"""One history of a device cache that is the manager's own or an engine's, above an own or a service's host tier.

Once it is quiet the same blocks are on the host, a request finds the same prefixes, and its load has the same outcome.
"""

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
from fdcache.manager import CacheManager, LoadOutcome, LoadStatus, MatchStatus, OffloadManager, Request
from fdcache.metadata import SLOT_HEADER_BYTES, SwapPurpose, TransferPlan, TransferReport
from fdcache.settings.cache import CacheSettings, CopySettings, EvictionPolicy, WritePolicy
from fdcache.tiers.pool import READY
from tests.seeds import budget
from tests.service_help import LocalService, local_service, until
from tests.swaps import PATIENCE, uniform_layout

BLOCK = 4
Path = tuple[int, ...]
"""A prompt by its blocks, each a number."""
Told = list[tuple[LoadStatus, int]]
"""The outcomes of a request's loads: status, and the first token to compute."""
_revisions = count()


class Side:
    """An engine with one manager and its worker. Requests are served alone, one after the other."""

    manager: CacheManager | OffloadManager

    def __init__(
        self,
        device: int,
        host: int,
        policy: WritePolicy,
        eviction: EvictionPolicy = EvictionPolicy.LRU,
        service: LocalService | None = None,
    ) -> None:
        self.device, self.service = device, service
        self.layout = uniform_layout(block_size=BLOCK, num_layers=1, revision=f"{next(_revisions)}")
        memory = host * (self.layout.record_bytes + SLOT_HEADER_BYTES)
        place = (
            {"host_memory": memory}
            if service is None
            else {"server": service.address, "rpc_timeout": PATIENCE}
        )
        self.settings = CacheSettings.model_validate(
            {
                "device_blocks": device,
                "write_policy": policy,
                "write_through_threshold": 2,
                "eviction": eviction,
                "clean_reserve": 8,
                **place,
            }
        )
        self.manager = self.make_manager()
        transfer = CopySettings(drain_timeout=PATIENCE, layer_timeout=PATIENCE)
        self.worker = CacheController(transfer, self.layout, rank=0, device=CpuDevice())
        self.worker.initialize_kv_cache(device)
        self.worker.initialize_host_cache(self.manager.host_cache)
        self.unreported: list[TransferReport] = []
        self.outcomes: list[LoadOutcome] = []
        self.backups: set[int] = set()
        self.names = count()

    def make_manager(self) -> CacheManager | OffloadManager:
        raise NotImplementedError

    def compute(self, request: Request) -> list[TransferPlan]:
        """Serve a request from start to end; return the plans of its step."""
        raise NotImplementedError

    def empty_device(self) -> None:
        """Forget what the device has."""
        raise NotImplementedError

    def serve(self, path: Path) -> list[TransferPlan]:
        """Serve a prompt without loads."""
        tokens = np.repeat(np.array(path, np.int32), BLOCK)
        return self.compute(Request(f"request {next(self.names)}", tokens, device_only=True))

    def load(self, path: Path) -> tuple[int, Told]:
        """Serve a prompt that loads what the host has of it; return how many blocks, and what was told of it."""
        tokens = np.append(np.repeat(np.array(path, np.int32), BLOCK), np.int32(-1))
        request = Request(f"request {next(self.names)}", tokens)
        plans = self.compute(request)
        told, self.outcomes = self.outcomes, []
        assert {each.request_id for each in told} <= {request.request_id}
        loaded = blocks_copied(plans, SwapPurpose.LOAD)
        return loaded, [(each.status, each.recompute_from) for each in told]

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
        self.outcomes += self.manager.apply(
            [each for each in self.unreported if each.plan_id not in self.backups]
        )
        self.unreported = [each for each in self.unreported if each.plan_id in self.backups]
        return plans

    def report(self, most: int | None = None) -> None:
        """Pass the oldest reports on."""
        most = len(self.unreported) if most is None else most
        self.manager.apply(self.unreported[:most])
        del self.unreported[:most]

    def rest(self) -> int:
        """Step without requests until nothing is left to copy; return how many steps had plans."""
        steps = 0
        while True:
            self.report()
            self.await_stock(1)
            plans = self.step()
            steps += bool(plans)
            if not plans and not self.manager.get_stats().queued_backups:
                return steps

    def await_stock(self, blocks: int) -> None:
        """Wait until the service has granted slots for so many copies."""
        if self.service is None:
            return
        host: Any = self.manager._host

        def has_stock() -> bool:
            if (session := host.sessions.session) is not None:
                session._expect(blocks)
            return bool(host.index.room >= blocks)

        until(has_stock, "slots are granted")

    def on_host(self, path: Path) -> int:
        """Return how many leading blocks of a path the host has, once it has heard of every copy."""
        request = Request("probe", np.repeat(np.array(path, np.int32), BLOCK))
        self.manager.prepare([request])
        tier: Any = self.manager._host
        if self.service is not None:
            self.await_publication()
            tier = self.service.service.namespaces[self.layout.fingerprint].tier
        return int((tier.contains(request.block_hashes) == READY).cumprod().sum())

    def await_publication(self) -> None:
        """Wait until a service has heard of every copy."""
        counters = self.manager.get_stats().counters
        copied = counters.blocks_evicted_to_host + counters.blocks_backed_up

        def heard() -> bool:
            assert self.service is not None
            totals = self.service.service.namespaces[self.layout.fingerprint].history.totals
            return bool(totals.stored + totals.duplicates + totals.orphans + totals.dropped >= copied)

        if self.service is not None:
            host: Any = self.manager._host
            host.service.flush()
            until(heard, "the service has heard of every copy")

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
        return CacheManager(self.settings, self.layout)

    def compute(self, request: Request) -> list[TransferPlan]:
        while not self.begin(request):
            assert self.unreported, "blocks are missing though nothing is in flight"
            self.report(1)
        plans = self.step()
        self.manager.commit([(request, request.num_tokens)])
        self.manager.finish([request])
        return plans

    def begin(self, request: Request) -> bool:
        if not request.num_blocks:
            (found,) = self.manager.match_prefix([request])
            if found.status is not MatchStatus.MATCHED:
                return False
        return self.manager.allocate_device_blocks([(request, request.num_tokens)])[0].ok

    def empty_device(self) -> None:
        self.manager.sleep()
        self.manager.wakeup()


class EngineDevice(Side):
    """The engine owns the device cache, and gives away the blocks that it has used longest ago, leaves first."""

    manager: OffloadManager

    def make_manager(self) -> OffloadManager:
        self.blocks: OrderedDict[bytes, int] = OrderedDict()
        self.free = list(range(self.device))
        return OffloadManager(self.settings, self.layout)

    def compute(self, request: Request) -> list[TransferPlan]:
        self.manager.prepare([request])
        path = [row.tobytes() for row in request.block_hashes]
        have = next((i for i, block in enumerate(path) if block not in self.blocks), len(path))
        for block in path[:have]:
            self.blocks.move_to_end(block)
        found = 0 if request.device_only else self.found(request, have)
        given = [self._take() for _ in path[have:]]
        if found:
            assert self.manager.load(request, np.array(given[:found], np.int32)) == found
        self.manager.evicted(np.array(given[found:], np.int32))
        tail = self._take() if request.num_tokens % BLOCK else None
        if tail is not None:
            self.manager.evicted(np.array([tail], np.int32))
        plans = self.step()
        ids = [self.blocks.pop(block) for block in path[:have]] + given
        self.manager.offer(request, request.num_tokens, np.array(ids, np.int32))
        self.blocks.update(zip(reversed(path), reversed(ids), strict=True))
        self.manager.finish([request])
        if tail is not None:
            self.free.append(tail)
        return plans

    def found(self, request: Request, have: int) -> int:
        while (match := self.manager.match(request, have * BLOCK)).status is not MatchStatus.MATCHED:
            assert self.unreported, "the host waits for nothing"
            self.report(1)
        return match.num_tokens // BLOCK

    def empty_device(self) -> None:
        self.manager.forget(np.arange(self.device, dtype=np.int32))
        self.blocks.clear()
        self.free = list(range(self.device))

    def _take(self) -> int:
        return self.free.pop() if self.free else self.blocks.popitem(last=False)[1]


Sides = Callable[..., tuple[Side, Side]]


@pytest.fixture
def sides() -> Iterator[Sides]:
    made: list[Side] = []

    def make(
        device: int, host: int, policy: WritePolicy = WritePolicy.WRITE_THROUGH, *more: Any
    ) -> tuple[Side, Side]:
        made.append(OwnDevice(device, host, policy, *more))
        made.append(EngineDevice(device, host, policy, *more))
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


@pytest.mark.parametrize(("blocks", "copied", "dropped"), [(2000, 2000, 0), (2_500, 0, 100)])
def test_an_eviction_takes_a_bounded_number_of_ancestors_along(
    sides: Sides, blocks: int, copied: int, dropped: int
) -> None:
    """The host has none of a path that the next prompt evicts from its end."""
    for side in sides(blocks, 2 * blocks, WritePolicy.WRITE_BACK):
        side.serve(tuple(range(blocks)))
        plans = side.serve(tuple(range(20_000, 20_100)))
        assert (blocks_copied(plans, SwapPurpose.EVICT), side.dropped) == (copied, dropped)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    with local_service(tmp_path_factory.mktemp("service"), FDCACHE_HOST_MEMORY="64MiB") as running:
        yield running


def random_paths(draw: random.Random, first: int, paths: list[Path]) -> list[Path]:
    """Return prompts that share prefixes with earlier ones and with each other."""
    made: list[Path] = []
    for number in range(first, first + 12):
        prefix: Path = ()
        if (earlier := [*paths, *made]) and draw.random() < 0.6:
            prefix = draw.choice(earlier)
            prefix = prefix[: draw.randrange(len(prefix) + 1)]
        more = draw.randrange(1, 12)
        made.append((*prefix, *range(100 * number, 100 * number + more))[:30])
    return made


@pytest.mark.parametrize("eviction", [EvictionPolicy.LRU, EvictionPolicy.LEARNED])
@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize("host", ["own", "service"])
@pytest.mark.parametrize("seed", range(budget(15)))
def test_one_history_has_one_end(
    sides: Sides,
    request: pytest.FixtureRequest,
    host: str,
    policy: WritePolicy,
    eviction: EvictionPolicy,
    seed: int,
) -> None:
    """Prompts come while reports are late. In each quiet moment the device forgets, and some prompts are loaded."""
    draw = random.Random(seed)
    selective = policy is WritePolicy.WRITE_THROUGH_SELECTIVE
    device = 400 if selective else 40
    service = request.getfixturevalue("service") if host == "service" else None
    both = sides(device, 1000, policy, eviction, service)
    paths: list[Path] = []
    for phase in range(3):
        for path in (more := random_paths(draw, 12 * phase, paths)):
            late = draw.randrange(3)
            for side in both:
                side.await_stock(64)
                side.serve(path)
                side.report(max(len(side.unreported) - late, 0))
        paths += more
        for side in both:
            side.rest()
            if policy is WritePolicy.WRITE_BACK:  # all that was there is evicted
                side.await_stock(64)
                side.serve(tuple(range(10_000 + 100 * phase, 10_000 + 100 * phase + device)))
                side.rest()
            side.empty_device()
        on_host = [[side.on_host(path) for path in paths] for side in both]
        assert on_host[0] == on_host[1]
        assert [side.dropped for side in both] == [0, 0]
        if not selective:
            assert on_host[0] == [len(path) for path in paths]
        chosen = draw.sample(range(len(paths)), 4)
        loaded = [[side.load(paths[i]) for i in chosen] for side in both]
        assert loaded[0] == loaded[1]
        for told in (told for _, told in loaded[0]):
            assert [status for status, _ in told] in ([], [LoadStatus.CONFIRMED])
