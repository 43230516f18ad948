"""When vLLM is told of a load that has not ended."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fdcache.integrations.vllm.early import EarlyLoads, LoadClock
from fdcache.metadata import SwapPurpose, TransferReport, TransferResult

MIB = 1 << 20


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ended(
    plan_id: int, nbytes: int, seconds: float, purpose: SwapPurpose = SwapPurpose.LOAD
) -> TransferReport:
    result = TransferResult(
        purpose=purpose,
        failed=np.empty(0, np.int32),
        checksums=np.empty(0, np.uint64),
        copied_bytes=nbytes,
        seconds=seconds,
        error_message=None,
    )
    return TransferReport(plan_id=plan_id, rank=0, results=(result,))


def test_a_load_is_not_expected_to_end_before_a_speed_is_known() -> None:
    clock = Clock()
    loads = LoadClock(MIB, clock)
    loads.began(1, 100)
    assert loads.seconds_left(1) == math.inf
    loads.ended(ended(1, 100 * MIB, 0.01, SwapPurpose.BACKUP))
    loads.began(2, 100)
    assert loads.seconds_left(2) == math.inf
    loads.ended(ended(2, MIB, 0.01))
    loads.began(3, 100)
    assert loads.seconds_left(3) == math.inf


def test_loads_are_expected_one_after_the_other() -> None:
    clock = Clock()
    loads = LoadClock(MIB, clock)
    loads.began(1, 100)
    clock.now += 0.1
    loads.ended(ended(1, 100 * MIB, 0.1))  # a millisecond for each block
    loads.began(2, 50)
    loads.began(3, 10)
    assert loads.seconds_left(2) == pytest.approx(0.05)
    assert loads.seconds_left(3) == pytest.approx(0.06)
    clock.now += 0.02
    assert loads.seconds_left(3) == pytest.approx(0.04)
    loads.ended(ended(2, 50 * MIB, 0.05))  # sooner than expected
    assert loads.seconds_left(3) == pytest.approx(0.01)
    clock.now += 1.0
    assert loads.seconds_left(3) == 0.0


def test_a_load_is_told_early_only_while_nothing_is_computed() -> None:
    early = EarlyLoads()
    early.begins("r", 1)
    told = []
    for num_tokens in (0, 0, 8, 0, 0, 0, 8000):
        _, seconds_left = early.step(num_tokens)
        told.append(seconds_left > 0)
    assert told == [False, True, False, False, True, True, False]
