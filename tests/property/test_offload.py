"""OffloadManager under random interleavings of ``offload_model``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache.groups import CacheGroup
from fdcache.settings.cache import WritePolicy
from tests.offload_engine import BLOCK
from tests.property.offload_model import Engine
from tests.property.offload_play import play
from tests.property.offload_sequences import FULL, MODELS, STATE, window
from tests.seeds import budget
from tests.service_help import TIMEOUT, LocalService, local_service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    with local_service(tmp_path_factory.mktemp("service")) as running:
        yield running


def settings_of(host: str, service: LocalService) -> dict[str, Any]:
    """Return what an engine is told of the owner of its host tier."""
    return {"server": service.address, "rpc_timeout": TIMEOUT} if host == "shared" else {}


@pytest.mark.parametrize("host", ["own", "shared"])
@settings(max_examples=budget(100), deadline=None)
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(WritePolicy), blocks=st.sampled_from([5, 14, 40]))
def test_no_block_of_any_tier_has_wrong_bytes_and_nothing_stays_pinned(
    service: LocalService, host: str, seed: int, policy: WritePolicy, blocks: int
) -> None:
    """The blocks that engines before it have left at the service are there for the next one."""
    engine = Engine(seed, policy, host_blocks=blocks, **settings_of(host, service))
    play(engine, 150)
    assert engine.close() == 0


@pytest.mark.parametrize("host", ["own", "shared"])
@settings(max_examples=budget(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from([WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK]),
    blocks=st.sampled_from([10, 28, 80]),
    groups=st.sampled_from(MODELS),
)
def test_groups_of_layers_read_right_bytes_in_all_blocks_that_they_reach(
    service: LocalService,
    host: str,
    seed: int,
    policy: WritePolicy,
    blocks: int,
    groups: tuple[CacheGroup, ...],
) -> None:
    engine = Engine(seed, policy, host_blocks=blocks, groups=groups, **settings_of(host, service))
    play(engine, 120)
    assert engine.close() == 0


def test_a_withdrawal_that_leaves_a_load_in_the_plan_is_caught() -> None:
    withdrawn = strays = 0
    for seed in range(4):
        engine = Engine(seed, WritePolicy.WRITE_THROUGH)
        play(engine, 120)
        assert engine.close() == 0
        withdrawn += engine.withdrawn
        engine = Engine(seed, WritePolicy.WRITE_THROUGH)
        engine.manager.cancel_load = lambda request: True  # type: ignore[method-assign]
        with contextlib.suppress(AssertionError, KeyError):
            play(engine, 120)
        strays += engine.strays
    assert withdrawn
    assert strays


def test_an_engine_that_gives_back_a_block_too_early_is_caught() -> None:
    wrong = 0
    for seed in range(4):
        engine = Engine(seed, WritePolicy.WRITE_THROUGH, host_blocks=28, groups=(FULL, window(6)), skew=BLOCK)
        play(engine, 120, accidents=False)
        wrong += engine.close()
    assert wrong


def test_an_engine_that_offers_a_state_of_another_position_is_caught() -> None:
    wrong = 0
    for seed in range(4):
        engine = Engine(seed, WritePolicy.WRITE_THROUGH, host_blocks=28, groups=(FULL, STATE))
        offer = engine.manager.offer_states
        engine.manager.offer_states = lambda request, tokens, ids, above, offer=offer: offer(  # type: ignore[method-assign,assignment,misc]
            request, max(tokens - BLOCK, BLOCK), ids, above
        )
        play(engine, 120, accidents=False)
        wrong += engine.close()
    assert wrong


def test_an_engine_that_ignores_after_stores_wrong_bytes() -> None:
    wrong = waited = 0
    for seed in range(24):  # when copies run is chance
        engine = Engine(seed, WritePolicy.WRITE_THROUGH, ignores_after=True)
        play(engine, 150, accidents=False)
        wrong += engine.close()
        waited += engine.waited_for
        if wrong and seed >= 5:
            break
    assert waited
    assert wrong
