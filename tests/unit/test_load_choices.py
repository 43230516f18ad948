"""LoadChoices: what it learns from the ranks' reports."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fdcache.layout import KVLayout
from fdcache.manager import OffloadManager, Request
from fdcache.manager.cost import NO_PRIORS, CostModel
from fdcache.manager.load_choices import LoadChoices
from fdcache.metadata import SwapPurpose, TransferReport, TransferResult
from fdcache.settings.cache import CacheSettings, LoadOrRecompute
from tests.storage_engine import LAYOUT, tokens_of

BYTES = 4 * LAYOUT.payload_bytes


def report(plan: int, rank: int, seconds: float, *purposes: SwapPurpose) -> TransferReport:
    nothing = np.empty(0, np.int32)
    results = [
        TransferResult(
            purpose=purpose,
            failed=nothing,
            checksums=np.empty(0, np.uint64),
            copied_bytes=BYTES,
            seconds=seconds,
        )
        for purpose in purposes
    ]
    return TransferReport(plan_id=plan, rank=rank, results=tuple(results))


def choices_of(ranks: int) -> LoadChoices:
    layout = replace(LAYOUT, tp_size=ranks)
    choices = LoadChoices(
        LoadOrRecompute.AUTO, layout, lambda: 0.0, lambda: 0, NO_PRIORS, stages=layout.num_layers
    )
    request = Request("observed", tokens_of(99, 4))
    for _ in range(3):
        choices.observe_prefill([(request, 0, request.num_tokens)], 1.0, waited=False, steps=1)
    return choices


@pytest.mark.parametrize("purpose", [SwapPurpose.LOAD, SwapPurpose.PREFETCH])
def test_a_copy_takes_as_long_as_that_of_the_slowest_rank(purpose: SwapPurpose) -> None:
    choices = choices_of(4)
    model: CostModel = choices.model
    speed = model.link if purpose is SwapPurpose.LOAD else model.storage
    for plan in range(3):
        for rank, seconds in enumerate((0.1, 0.8, 0.1, 0.1)):
            assert speed._fit.observations == plan
            choices.record([report(plan, rank, seconds, SwapPurpose.STORE, purpose)])
    assert speed.seconds(float(BYTES)) == pytest.approx(0.8)


def test_plans_that_a_rank_never_reports_are_forgotten() -> None:
    choices = choices_of(2)
    for plan in range(5000):
        choices.record([report(plan, 0, 0.1, SwapPurpose.LOAD)])
    assert len(choices._unreported) < 2000
    assert choices.model.link.observed_at is None


def test_the_reports_of_one_rank_are_observed_at_once() -> None:
    choices = choices_of(1)
    for plan in range(3):
        choices.record([report(plan, 0, 0.3, SwapPurpose.LOAD)])
    assert choices.model.link.seconds(float(BYTES)) == pytest.approx(0.3)
    assert not choices._unreported


@pytest.mark.parametrize("computed_after", [True, False])
def test_computing_hides_a_load_only_if_it_does_not_wait_for_its_end(computed_after: bool) -> None:
    """An 8B model on an H100 of which only long prompts were seen: 27 us a token, 40 us to load a block of 16."""
    layout = KVLayout.uniform(
        model="m", revision="1", num_layers=32, block_size=16, kv_heads=1, head_dim=8, dtype="bfloat16"
    )
    manager = OffloadManager(
        CacheSettings(host_memory=1 << 22), layout, clock=lambda: 0.0, loads_ahead=computed_after
    )
    request = Request("observed", np.arange(8193, dtype=np.int32))
    for _ in range(3):
        manager.observe_prefill([(request, 0, 8192)], 27e-6 * 8192, waited=False, steps=1)
    choices = manager._choices
    for _ in range(3):
        for blocks in (128, 512):
            choices.model.link.observe(blocks * layout.payload_bytes, 4e-5 * blocks, 0.0)
    loaded = choices.worth_loading("again", 8193, 0, 512, bytes(32))
    assert loaded == 512 if computed_after else 400 < loaded < 500
    manager.close()
