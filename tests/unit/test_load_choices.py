"""LoadChoices: what it learns from the ranks' reports."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fdcache.manager import Request
from fdcache.manager.cost import NO_PRIORS, CostModel
from fdcache.manager.load_choices import LoadChoices
from fdcache.metadata import SwapPurpose, TransferReport, TransferResult
from fdcache.settings.cache import LoadOrRecompute
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
    choices = LoadChoices(LoadOrRecompute.AUTO, layout, lambda: 0.0, lambda: 0, NO_PRIORS)
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
