"""When vLLM is told of a load that has not ended, and how its step waits for the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from fdcache.controller.layers import LaunchedLayers, LayerDoneCounter
from fdcache.devices.cpu import CpuDevice, CpuStream
from fdcache.integrations.vllm.early import IDLE_SECONDS, LayerHooks, LoadClock, StepPace
from fdcache.machine.process_guard import ProcessGuard
from fdcache.metadata import SwapPurpose, TransferReport, TransferResult
from fdcache.tasks import CpuEvent

MIB = 1 << 20
LAYERS = {"model.0": 0, "model.1": 1, "model.2": 2}


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


@pytest.mark.parametrize(("steps_ahead", "share"), [(1, 0.5), (2, 1.5)])
def test_a_load_is_told_that_ends_before_the_next_step_begins(steps_ahead: int, share: float) -> None:
    clock = Clock()
    pace = StepPace(steps_ahead, clock)
    assert pace.seconds_left == IDLE_SECONDS
    pace.step(8)
    assert pace.seconds_left == 0.0, "the time of a step is not known yet"
    for _ in range(5):
        clock.now += 0.01
        pace.step(8)
    assert pace.seconds_left == pytest.approx(share * 0.01)
    clock.now += 0.2  # a long prompt is computed beside
    pace.step(8000)
    assert pace.seconds_left == pytest.approx(share * 0.01)
    pace.step(0)
    assert pace.seconds_left == IDLE_SECONDS
    clock.now += 5.0
    pace.step(8)
    assert pace.seconds_left == pytest.approx(share * 0.01), "a pause is no step"


class Load:
    """A load of three layers, each of which ends when it is told to."""

    def __init__(self) -> None:
        self.ends = [CpuEvent() for _ in LAYERS]
        device = CpuDevice()
        self.counter = LayerDoneCounter(
            1,
            3,
            LaunchedLayers(self.ends),
            default_timeout=5.0,
            as_stream=device.as_stream,
            guard=ProcessGuard("test"),
        )


@pytest.fixture
def stream() -> Iterator[CpuStream]:
    made = CpuDevice().create_stream()
    yield made
    made.close()


def reached(stream: CpuStream) -> CpuEvent:
    """Return an event that the stream reaches after what it has waited for."""
    event = CpuEvent()
    event.record(stream)
    return event


def trusted(stream: CpuStream) -> LayerHooks:
    hooks = LayerHooks(LAYERS, lambda: stream)
    hooks.begin([], layers_ask=True)
    for name in LAYERS:
        hooks.layer(name)
    assert hooks.end()
    assert hooks.is_trusted
    return hooks


def test_a_step_waits_for_whole_loads_before_the_layers_are_known_to_ask(stream: CpuStream) -> None:
    load = Load()
    hooks = LayerHooks(LAYERS, lambda: stream)
    hooks.begin([load.counter], layers_ask=True)
    step = reached(stream)
    for end in load.ends[:2]:
        end.set()
    assert not step.wait(0.05)
    load.ends[2].set()
    assert step.wait(5.0)
    assert hooks.end()


def test_each_layer_waits_for_its_part_of_a_load(stream: CpuStream) -> None:
    load = Load()
    hooks = trusted(stream)
    hooks.begin([load.counter], layers_ask=True)
    steps = []
    for name in LAYERS:
        hooks.layer(name)
        steps.append(reached(stream))
    assert hooks.end()
    for number, end in enumerate(load.ends):
        assert not steps[number].wait(0.02)
        end.set()
        assert steps[number].wait(5.0)


def test_a_step_that_is_one_graph_waits_for_whole_loads(stream: CpuStream) -> None:
    load = Load()
    hooks = trusted(stream)
    hooks.begin([load.counter], layers_ask=False)
    step = reached(stream)
    assert not step.wait(0.05)
    for end in load.ends:
        end.set()
    assert step.wait(5.0)
    assert hooks.end()
    assert hooks.is_trusted


def test_the_step_after_one_without_a_forward_pass_waits_for_its_loads(stream: CpuStream) -> None:
    load = Load()
    hooks = trusted(stream)
    hooks.begin([load.counter], layers_ask=True)
    hooks.begin([], layers_ask=True)
    step = reached(stream)
    assert not step.wait(0.05)
    for end in load.ends:
        end.set()
    assert step.wait(5.0)


@pytest.mark.parametrize("asked", [(), ("model.0", "model.2"), ("other",)])
def test_layers_of_which_some_do_not_ask_are_not_trusted(stream: CpuStream, asked: tuple[str, ...]) -> None:
    hooks = LayerHooks(LAYERS, lambda: stream)
    hooks.begin([], layers_ask=True)
    for name in asked:
        hooks.layer(name)
    assert hooks.end()
    assert not hooks.is_trusted


def test_a_layer_that_did_not_ask_is_told_and_ends_the_trust(stream: CpuStream) -> None:
    load = Load()
    hooks = trusted(stream)
    hooks.begin([load.counter], layers_ask=True)
    hooks.layer("model.0")
    assert not hooks.end()
    assert not hooks.is_trusted
    step = reached(stream)
    assert not step.wait(0.05)
    for end in load.ends:
        end.set()
    assert step.wait(5.0)
