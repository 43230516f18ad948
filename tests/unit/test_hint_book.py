"""Hints in a tier and in a manager: what is evicted first, the budget, what data makes of wrong hints, and outcomes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest

from fdcache import _core
from fdcache.hashing import hash_blocks
from fdcache.hints import Hint, HintKind, HintStatus
from fdcache.layout import KVLayout
from fdcache.manager import CacheManager, Request
from fdcache.replay.points import ImmediateRanks
from fdcache.settings.cache import CacheSettings, EvictionPolicy
from fdcache.tiers.hint_book import MOST_SETTLED, SAMPLE
from tests.tier_help import hash_list

BLOCK = 4


class World:
    """A manager with a clock of its own, whose requests take no time."""

    def __init__(self, blocks: int = 16, policy: EvictionPolicy = EvictionPolicy.LEARNED) -> None:
        layout = KVLayout.uniform(
            model="m", revision="1", num_layers=1, block_size=BLOCK, kv_heads=1, head_dim=8, dtype="bfloat16"
        )
        self.now = 0.0
        settings = CacheSettings(device_blocks=blocks, host_memory=0, eviction=policy)
        self.manager = CacheManager(settings, layout, clock=lambda: self.now)
        self.ranks = ImmediateRanks(1)

    def serve(self, prompt: Sequence[int], *hints: Hint) -> Request:
        request = Request(f"at {self.now}", list(prompt), hints=hints)
        self.manager.match_prefix([request])
        (allocation,) = self.manager.allocate_device_blocks([(request, len(prompt))])
        assert allocation.ok
        self.manager.take_plans()
        self.manager.commit([(request, len(prompt))])
        self.manager.finish([request])
        self.now += 1
        return request

    def cached(self, prompt: Sequence[int]) -> int:
        """Number of blocks of a prompt that are cached."""
        found = self.manager.find_blocks(Request("look", list(prompt)))
        return sum(len(blocks) for blocks in found.values())


def prompt(name: int, blocks: int = 4) -> list[int]:
    return list(range(1000 * name, 1000 * name + blocks * BLOCK))


@pytest.fixture
def world() -> World:
    return World()


class TestOrder:
    @pytest.mark.parametrize("hint", [Hint.once(), Hint.release()])
    def test_what_is_not_needed_again_goes_first(self, world: World, hint: Hint) -> None:
        world.serve(prompt(1))
        world.serve(prompt(2), hint)
        world.serve(prompt(3))
        world.serve(prompt(4))
        world.serve(prompt(5))
        assert [world.cached(prompt(name)) for name in (1, 2, 3, 4, 5)] == [4, 0, 4, 4, 4]

    @pytest.mark.parametrize(
        "hint",
        [Hint.retain(300), Hint.returns(60), Hint(kind=HintKind.PRIORITY, priority=90)],
    )
    def test_what_is_said_to_be_needed_stays(self, world: World, hint: Hint) -> None:
        world.serve(prompt(1), hint)
        for name in (2, 3, 4, 5, 6):
            world.serve(prompt(name))
        assert world.cached(prompt(1)) == 4
        assert world.cached(prompt(2)) == 0

    def test_blocks_that_others_continue_are_not_released(self, world: World) -> None:
        head = prompt(1, 2)
        world.serve([*head, *prompt(2, 2)])
        world.serve([*head, *prompt(3, 2)], Hint.release())
        world.serve(prompt(4, 12))
        assert world.cached([*head, *prompt(2, 2)]) == 4
        assert world.cached([*head, *prompt(3, 2)]) == 2

    @pytest.mark.parametrize("own", [2, 0])
    def test_blocks_that_others_run_on_are_not_released(self, world: World, own: int) -> None:
        head = prompt(1, 2)
        world.serve([*head, *prompt(2, 2)])
        running = Request("running", [*head, *prompt(2, 2), *prompt(4, 1)])
        world.manager.match_prefix([running])
        assert world.manager.allocate_device_blocks([(running, running.num_tokens)])[0].ok
        world.manager.commit([(running, running.num_tokens)])
        (outcome,) = world.serve([*head, *prompt(3, own)], Hint.release()).hint_outcomes
        taken = HintStatus.TAKEN if own else HintStatus.NO_BLOCK
        assert (outcome.status, outcome.blocks) == (taken, own)

    def test_the_last_hint_about_a_block_holds(self, world: World) -> None:
        hints = [Hint.release(), Hint.retain(300), Hint(kind=HintKind.RETAIN, seconds=300, end=2 * BLOCK)]
        request = world.serve(prompt(1), *hints, Hint(kind=HintKind.RELEASE, start=2 * BLOCK))
        assert [(each.status, each.blocks) for each in request.hint_outcomes] == [
            (HintStatus.NO_BLOCK, 0),
            (HintStatus.NO_BLOCK, 0),
            (HintStatus.TAKEN, 2),
            (HintStatus.TAKEN, 2),
        ]
        assert "later hints" in request.hint_outcomes[0].reason
        for name in (2, 3, 4, 5):
            world.serve(prompt(name))
        assert world.cached(prompt(1)) == 2

    def test_a_range_is_taken_as_it_is_said(self, world: World) -> None:
        world.serve(prompt(1), Hint(kind=HintKind.RETAIN, seconds=300, end=2 * BLOCK))
        for name in (2, 3, 4, 5):
            world.serve(prompt(name))
        assert world.cached(prompt(1)) == 2

    def test_a_hint_lasts_until_the_next_use(self, world: World) -> None:
        world.serve(prompt(1), Hint.once())
        world.serve(prompt(2))
        world.serve(prompt(1))
        world.serve(prompt(3, 8))
        world.serve(prompt(4))
        assert world.cached(prompt(1)) == 4

    def test_a_hint_may_come_after_the_request(self, world: World) -> None:
        for name in (1, 2, 3, 4):
            world.serve(prompt(name))
        (outcome,) = world.manager.hint(Request("over", prompt(4)), [Hint.release()])
        assert (outcome.status, outcome.blocks) == (HintStatus.TAKEN, 4)
        world.serve(prompt(5))
        assert world.cached(prompt(4)) == 0

    def test_hints_of_a_preempted_request_wait_for_its_end(self, world: World) -> None:
        request = Request("r", prompt(1), hints=[Hint.once()])
        world.manager.match_prefix([request])
        world.manager.allocate_device_blocks([(request, 16)])
        world.manager.commit([(request, 16)])
        world.manager.finish([request], preempted=True)
        assert not request.hint_outcomes
        world.manager.match_prefix([request])
        world.manager.finish([request])
        assert [each.status for each in request.hint_outcomes] == [HintStatus.TAKEN]


class TestOutcomes:
    def test_a_hint_is_kept_if_its_blocks_were_there_or_used(self, world: World) -> None:
        world.serve(prompt(1), Hint(kind=HintKind.RETAIN, seconds=100, id="a"))
        world.serve(prompt(2), Hint(kind=HintKind.RETURN, seconds=100, id="b"))
        world.serve(prompt(2))
        assert world.manager.take_hint_outcomes() == []
        world.now += 200
        outcomes = {each.id: each for each in world.manager.take_hint_outcomes()}
        assert {name: each.status for name, each in outcomes.items()} == dict.fromkeys("ab", HintStatus.KEPT)
        assert outcomes["a"].blocks == 4 and outcomes["a"].lost == 0
        assert world.manager.take_hint_outcomes() == []

    def test_blocks_evicted_early_are_told_with_the_reason(self, world: World) -> None:
        world.serve(prompt(1), Hint.retain(100))
        running = Request("large", prompt(2, 14))
        world.manager.match_prefix([running])
        assert world.manager.allocate_device_blocks([(running, 14 * BLOCK)])[0].ok
        world.now += 200
        (outcome,) = world.manager.take_hint_outcomes()
        assert outcome.status is HintStatus.EVICTED_EARLY
        assert (outcome.blocks, outcome.lost, outcome.reason) == (4, 2, "room")

    def test_removed_blocks_are_told_as_such(self, world: World) -> None:
        world.serve(prompt(1), Hint.retain(100))
        world.manager.reset_cache()
        world.now += 200
        (outcome,) = world.manager.take_hint_outcomes()
        assert (outcome.status, outcome.lost, outcome.reason) == (HintStatus.EVICTED_EARLY, 4, "removed")

    def test_a_budget_bounds_what_hints_keep(self, world: World) -> None:
        statuses = [world.serve(prompt(name), Hint.retain(300)).hint_outcomes[0].status for name in (1, 2, 3)]
        assert statuses == [HintStatus.TAKEN, HintStatus.TAKEN, HintStatus.OVER_BUDGET]
        world.serve(prompt(1))  # has no hint any more
        assert world.serve(prompt(4), Hint.retain(300)).hint_outcomes[0].status is HintStatus.TAKEN
        assert world.manager.get_stats().hints.outcomes == {"taken": 3, "over_budget": 1}

    def test_when_blocks_return_is_told_of_as_many_as_there_are(self, world: World) -> None:
        seconds = [300, 20, 3000, 10]
        hinted = [
            world.serve(prompt(name), Hint.returns(each)) for name, each in enumerate(seconds)
        ]  # the tier is full of them
        assert [each.hint_outcomes[0].status for each in hinted] == [HintStatus.TAKEN] * 4
        outcomes = [world.serve(prompt(name), Hint.retain(300)).hint_outcomes[0].status for name in range(4)]
        assert outcomes == [HintStatus.TAKEN] * 2 + [HintStatus.OVER_BUDGET] * 2, "they took no room"

    def test_a_watched_hint_takes_no_more_memory_for_a_long_path(self) -> None:
        world = World(blocks=20_000)
        paths = [prompt(1, 8000)[: 4000 * BLOCK], prompt(10_000, 8)]
        for path in paths:
            world.serve(path)
        taken = []
        for path in paths:
            request = Request("over", path)
            world.manager.hint(request, [Hint.retain(300)])
            tracemalloc.start()
            for _ in range(200):
                world.manager.hint(request, [Hint.retain(300)])
            taken.append(tracemalloc.get_traced_memory()[0] / 200)
            tracemalloc.stop()
        assert max(taken) < 4096

    def test_hints_fall_due_a_bounded_number_at_a_step_and_all_are_told(self, world: World) -> None:
        world.serve(prompt(1))
        for number in range(3 * MOST_SETTLED):
            world.manager.hint(Request(str(number), prompt(1)), [Hint.retain(100)])
        world.now += 200
        kept = []
        for _ in range(4):
            world.manager.take_plans()
            kept.append(world.manager.get_stats().hints.outcomes.get("kept", 0))
        assert kept == [MOST_SETTLED, 2 * MOST_SETTLED, 3 * MOST_SETTLED, 3 * MOST_SETTLED]
        told = {each.request_id for each in world.manager.take_hint_outcomes()}
        assert told == {str(number) for number in range(3 * MOST_SETTLED)}

    def test_a_sample_tells_how_many_blocks_of_a_long_path_were_evicted(self) -> None:
        world = World(blocks=1000)
        world.serve(prompt(1, 400)[: 400 * BLOCK], Hint.retain(100))
        running = Request("large", prompt(10_000, 800))
        world.manager.match_prefix([running])
        assert world.manager.allocate_device_blocks([(running, 800 * BLOCK)])[0].ok
        world.now += 200
        (outcome,) = world.manager.take_hint_outcomes()
        assert (outcome.status, outcome.blocks) == (HintStatus.EVICTED_EARLY, 400)
        assert abs(outcome.lost - 200) <= 400 / SAMPLE

    def test_a_policy_that_does_not_learn_ignores_hints(self) -> None:
        world = World(policy=EvictionPolicy.LRU)
        request = world.serve(prompt(1), Hint.once())
        assert [each.status for each in request.hint_outcomes] == [HintStatus.IGNORED]

    def test_a_request_without_a_cached_block_has_none_to_hint_about(self, world: World) -> None:
        (outcome,) = world.manager.hint(Request("new", prompt(1)), [Hint.once()])
        assert (outcome.status, outcome.blocks) == (HintStatus.NO_BLOCK, 0)


def test_data_corrects_hints_that_are_wrong() -> None:
    """Blocks that are said not to be needed again, and come back each time, end above those without a hint."""
    tier = _core.Tier(64, "learned")
    paths = [hash_blocks(prompt(name), BLOCK, parent=bytes(32)) for name in range(1, 9)]
    milliseconds = 0

    def use(path: np.ndarray) -> None:
        tier.set_clock(milliseconds)
        lease = tier.open_lease()
        found = len(tier.match(lease, path))
        if found < len(path):
            taken = tier.reserve(lease, len(path) - found)
            tier.commit(lease, path[found - 1].tobytes() if found else bytes(32), path[found:], taken.slots)
        tier.finish(lease, 16, 20, BLOCK)

    def first_to_go() -> set[bytes]:
        return set(hash_list(tier.coldest(16).hashes))

    for path in paths:
        use(path)
    told, others = paths[:4], paths[4:]
    for path in told:
        tier.hint(path, [(_core.HintKind.ONCE, 0.0, 0, len(path), True)])
    assert first_to_go() == {each for path in told for each in hash_list(path)}
    for _ in range(60):
        milliseconds += 20_000
        for path in told:
            use(path)
            tier.hint(path, [(_core.HintKind.ONCE, 0.0, 0, len(path), True)])
    milliseconds += 20_000
    tier.set_clock(milliseconds)
    use(told[0])
    assert first_to_go() == {each for path in others for each in hash_list(path)}


def test_hints_that_lie_by_turns_lose_few_requests_against_last_use() -> None:
    """Fifteen sessions in room for sixteen; a fifth of the requests end one. What ends is told, or what goes on."""

    def found(policy: str) -> int:
        tier, random = _core.Tier(16 * 4, policy), np.random.default_rng(1)
        sessions, blocks = list(range(15)), 0
        for number in range(1000):
            tier.set_clock(1000 * number)
            place = number % len(sessions)
            path = hash_blocks(prompt(sessions[place]), BLOCK, parent=bytes(32))
            lease = tier.open_lease()
            known = len(tier.match(lease, path))
            blocks += known
            if not known:
                tier.commit(lease, bytes(32), path, tier.reserve(lease, len(path)).slots)
            tier.finish(lease, 16, 20, BLOCK)
            if is_last := random.random() < 0.2:
                sessions[place] = 15 + number
            if is_last != (number // 100 % 2 == 1):
                tier.hint(path, [(_core.HintKind.ONCE, 0.0, 0, len(path), True)])
        return blocks

    assert found("learned") >= found("lru") - 12 * 4
