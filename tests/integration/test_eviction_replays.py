"""What hints are worth in replays of generated traffic."""

from __future__ import annotations

import numpy as np
import pytest

from fdcache.hints import HintKind
from fdcache.replay.config import VerifyBytes
from fdcache.replay.points import Point, run_point
from fdcache.replay.replay_hints import with_hints
from fdcache.replay.workloads import WorkItem, WorkloadName, generate
from fdcache.settings.cache import WritePolicy
from tests.replay_help import small_config

REQUESTS = 1000


def found(items: list[WorkItem], eviction: str = "learned", in_flight: int = 1) -> float:
    config = small_config(
        device_blocks=800,
        host_memory=0,
        concurrency=in_flight,
        verify=VerifyBytes.OFF,
        cache={"eviction": eviction},
    )
    return run_point(items, config).hit_rate


@pytest.fixture(scope="module")
def chat() -> list[WorkItem]:
    return list(generate(WorkloadName.CHAT, REQUESTS, 5))


def test_many_requests_in_flight_find_hardly_less_than_by_last_use(chat: list[WorkItem]) -> None:
    by_last_use, learned = (found(chat, policy, in_flight=16) for policy in ("lru", "learned"))
    assert learned > by_last_use - 0.003


@pytest.mark.parametrize("policy", WritePolicy)
def test_device_and_host_tier_together_find_hardly_less_than_by_last_use(policy: WritePolicy) -> None:
    mixed = list(generate(WorkloadName.MIXED, 600, 3))
    by_last_use, learned = (
        run_point(
            mixed,
            small_config(
                device_blocks=300,
                host_memory=1200 * 8192,
                verify=VerifyBytes.OFF,
                cache={"eviction": eviction, "write_policy": policy},
            ),
        ).hit_rate
        for eviction in ("lru", "learned")
    )
    assert learned > by_last_use - 0.003


def found_in_tiers(
    items: list[WorkItem], eviction: str, policy: WritePolicy, device: int, host: int
) -> dict[str, float]:
    """Return the share of the prompt tokens found in each tier."""
    config = small_config(
        device_blocks=device,
        host_memory=host * 8192,
        concurrency=1,
        verify=VerifyBytes.OFF,
        cache={"eviction": eviction, "write_policy": policy},
    )
    result = run_point(items, config)
    return {tier: tokens / result.prompt_tokens for tier, tokens in result.hit_tokens.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "policy", "most_lost"),
    [
        (WorkloadName.CHAT, WritePolicy.WRITE_THROUGH, 0.005),
        (WorkloadName.SHIFT, WritePolicy.WRITE_THROUGH_SELECTIVE, 0.0),
    ],
)
def test_two_tiers_of_one_size_find_hardly_less_than_by_last_use(
    workload: WorkloadName, policy: WritePolicy, most_lost: float
) -> None:
    items = list(generate(workload, 1500, 11))
    by_last_use, learned = (found_in_tiers(items, each, policy, 1000, 1000) for each in ("lru", "learned"))
    assert sum(learned.values()) > sum(by_last_use.values()) - most_lost


def test_a_hot_set_stays_on_the_device_though_every_evicted_block_is_copied() -> None:
    """A set of 160 blocks that is asked for between blocks that are read once."""
    random = np.random.default_rng(0)
    items = [
        WorkItem(
            index,
            50.0 * index,
            np.array([1 + random.integers(160) if random.random() < 0.5 else 10**6 + index], np.uint64),
            np.array([65]),
            10**9 + index,
            1,
        )
        for index in range(4000)
    ]
    by_last_use, learned = (
        found_in_tiers(items, each, WritePolicy.WRITE_BACK, 400, 800) for each in ("lru", "learned")
    )
    assert learned["device"] > by_last_use["device"] + 0.03
    assert sum(learned.values()) > sum(by_last_use.values()) - 0.003


def test_hints_say_what_the_workload_does(chat: list[WorkItem]) -> None:
    hinted = with_hints(chat, 0.0, 1)
    follows = {item.after for item in chat}
    for item, before in zip(hinted, chat, strict=True):
        assert item.index == before.index
        first = item.hints[0]
        if item.index in follows:
            assert (first.kind, first.end, len(item.hints)) == (HintKind.RETURN, None, 1)
            (later,) = [each for each in chat if each.after == item.index]
            assert first.seconds == pytest.approx(max((later.timestamp_ms - item.timestamp_ms) / 1000, 1.0))
        else:
            assert item.hints[-1].kind is HintKind.ONCE


def test_a_share_of_the_hints_is_wrong(chat: list[WorkItem]) -> None:
    right, wrong, some = (with_hints(chat, share, 1) for share in (0.0, 1.0, 0.3))
    assert all(a.hints != b.hints for a, b in zip(right, wrong, strict=True))
    differing = np.mean([a.hints != b.hints for a, b in zip(right, some, strict=True)])
    assert differing == pytest.approx(0.3, abs=0.05)
    assert all(each.hints in (a.hints, b.hints) for each, a, b in zip(some, right, wrong, strict=True))


def test_right_hints_find_more_and_wrong_ones_cost_little(chat: list[WorkItem]) -> None:
    without = found(chat)
    rates = {share: found(with_hints(chat, share, 1)) for share in (0.0, 0.3, 0.5, 1.0)}
    assert rates[0.0] > rates[0.3] > rates[0.5] > without + 0.01
    assert rates[0.0] > without + 0.06
    assert rates[1.0] > without - 0.01
    assert found(with_hints(chat, 0.0, 1), "lru") == found(chat, "lru")


def test_hints_of_a_replay_all_have_an_outcome(chat: list[WorkItem]) -> None:
    config = small_config(
        device_blocks=800, host_memory=0, concurrency=1, verify=VerifyBytes.OFF, cache={"eviction": "learned"}
    )
    items = with_hints(chat[:300], 0.3, 1)
    with Point(config) as point:
        for item in items:
            point.serve(item)
        point.end()
        point._seconds += 7 * 3600
        told = point._manager.take_hint_outcomes()
        outcomes = point._manager.get_stats().hints.outcomes
    answered = sum(outcomes.get(name, 0) for name in ("taken", "over_budget", "no_block", "ignored"))
    assert answered == sum(len(item.hints) for item in items)
    assert outcomes["kept"] + outcomes.get("evicted_early", 0) == len(told) > 100
