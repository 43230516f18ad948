"""The cost model: what it learns from observations, and that its decisions are the best under its own figures."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache.manager.cost import MARGIN, Cached, CostModel, LoadChoice
from fdcache.manager.speeds import LinkSpeed, PrefillSpeed
from tests.seeds import budget

BLOCK = 16
BLOCK_BYTES = 1 << 20

speeds = st.floats(1e-12, 1e-6)  # seconds a byte: 1 MB/s to 1 TB/s
latencies = st.floats(0, 0.1)
counts = st.integers(0, 200)


def link(latency: float, each: float) -> LinkSpeed:
    found = LinkSpeed()
    for size in (1, 3, 10, 40, 7, 25):
        found.observe(size * BLOCK_BYTES, latency + each * size * BLOCK_BYTES, 0.0)
    return found


def prefill(step: float, token: float, pair: float) -> PrefillSpeed:
    found = PrefillSpeed()
    for start, stop in ((0, 64), (0, 512), (512, 1024), (4096, 4608), (0, 2048), (2048, 2064)):
        tokens = stop - start
        found.observe([(start, stop)], step + token * tokens + pair * tokens * (start + tokens / 2))
    return found


@st.composite
def models(draw: st.DrawFn) -> CostModel:
    found = CostModel(
        block_size=BLOCK,
        block_bytes=BLOCK_BYTES,
        stages=draw(st.integers(1, 64)),
        streams=draw(st.booleans()),
        read_seconds=draw(st.floats(0, 0.1)),
    )
    found.prefill = prefill(draw(st.floats(0, 0.1)), draw(st.floats(1e-7, 1e-2)), draw(st.floats(0, 1e-6)))
    found.link = link(draw(latencies), draw(speeds))
    found.storage = link(draw(latencies), draw(speeds))
    return found


@st.composite
def prefixes(draw: st.DrawFn) -> Cached:
    device, host, storage = draw(counts), draw(counts), draw(st.just(0) | counts)
    blocks = device + host + storage
    tokens = blocks * BLOCK + draw(st.integers(1, 4096))
    return Cached(tokens, device, host, storage, draw(counts), draw(counts))


@given(models(), prefixes())
@settings(max_examples=budget(500), deadline=None)
def test_decision_is_the_best_of_all_lengths(model: CostModel, cached: Cached) -> None:
    decision = model.decide(cached)
    lengths = range(cached.on_device, cached.num_blocks + 1)
    best = min(model.seconds(cached, blocks) for blocks in lengths)
    assert decision.num_blocks in lengths
    if decision.seconds is None:
        assert decision.num_blocks == cached.num_blocks
        return
    assert decision.seconds == model.seconds(cached, decision.num_blocks)
    assert decision.seconds_whole is not None and decision.seconds_nothing is not None
    other = min(decision.seconds_whole, decision.seconds_nothing)
    assert decision.seconds <= other
    if decision.choice is LoadChoice.PART:
        assert decision.seconds <= best * (1 + 1e-9) + 1e-12
        assert decision.seconds * (1 + MARGIN) <= other * (1 + 1e-9)
    else:
        assert decision.seconds <= best * (1 + MARGIN) * (1 + 1e-9) + 1e-12


@given(models(), prefixes(), st.sampled_from(LoadChoice))
@settings(max_examples=budget(300), deadline=None)
def test_the_last_choice_costs_no_more_than_the_margin(
    model: CostModel, cached: Cached, last: LoadChoice
) -> None:
    free, kept = model.decide(cached), model.decide(cached, last)
    if free.seconds is None or kept.seconds is None:
        assert free == kept
        return
    assert kept.seconds * (1 - MARGIN) <= free.seconds * (1 + MARGIN) * (1 + 1e-9) + 1e-12
    if free.choice is last:
        assert kept.choice is last


@given(models(), prefixes(), st.floats(1.5, 100))
@settings(max_examples=budget(300), deadline=None)
def test_slower_copies_never_load_more(model: CostModel, cached: Cached, factor: float) -> None:
    before = model.decide(cached).num_blocks
    for part in ("link", "storage"):
        slower = CostModel(
            block_size=BLOCK,
            block_bytes=BLOCK_BYTES,
            stages=model._stages,
            streams=model.streams,
            read_seconds=model._read_seconds,
        )
        slower.prefill, slower.link, slower.storage = model.prefill, model.link, model.storage
        known: LinkSpeed = getattr(model, part)
        setattr(slower, part, link(known.latency * factor, factor / known.bandwidth))
        after = slower.decide(cached).num_blocks
        assert after <= before or math.isclose(
            slower.seconds(cached, after), slower.seconds(cached, before), rel_tol=MARGIN
        )


@given(models(), prefixes(), st.integers(1, 500))
@settings(max_examples=budget(300), deadline=None)
def test_a_longer_queue_never_loads_more(model: CostModel, cached: Cached, more: int) -> None:
    before = model.decide(cached).num_blocks
    for longer in (
        replace(cached, reads_ahead=cached.reads_ahead + more),
        replace(cached, loads_ahead=cached.loads_ahead + more),
    ):
        after = model.decide(longer).num_blocks
        assert after <= before or math.isclose(
            model.seconds(longer, after), model.seconds(longer, before), rel_tol=MARGIN
        )


@given(prefixes(), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=budget(200), deadline=None)
def test_unknown_speeds_load_everything(
    cached: Cached, knows_prefill: bool, knows_link: bool, knows: bool
) -> None:
    model = CostModel(block_size=BLOCK, block_bytes=BLOCK_BYTES)
    if knows_prefill:
        model.prefill = prefill(0.0, 1e-9, 0.0)
    if knows_link:
        model.link = link(1.0, 1e-6)
    if knows:
        model.storage = link(1.0, 1e-6)
    decision = model.decide(cached)
    needed = knows_prefill and knows_link and (knows or not cached.in_storage)
    if not needed or cached.num_blocks == cached.on_device:
        assert (decision.num_blocks, decision.choice) == (cached.num_blocks, LoadChoice.WHOLE)
        assert decision.seconds is None
    else:
        assert decision.num_blocks == cached.on_device


@given(st.lists(st.tuples(st.integers(0, 2**50), st.floats(allow_nan=True)), max_size=30), prefixes())
@settings(max_examples=budget(300), deadline=None)
def test_any_observation_leaves_finite_non_negative_expectations(
    observed: list[tuple[int, float]], cached: Cached
) -> None:
    model = CostModel(block_size=BLOCK, block_bytes=BLOCK_BYTES)
    for size, seconds in observed:
        model.link.observe(size, seconds, 0.0)
        model.storage.observe(size, seconds, 0.0)
        model.prefill.observe([(0, size)], seconds)
    for blocks in range(cached.on_device, cached.num_blocks + 1, 50):
        assert 0 <= model.seconds(cached, blocks) < math.inf
    assert cached.on_device <= model.decide(cached).num_blocks <= cached.num_blocks


@given(latencies, speeds)
@settings(max_examples=budget(200), deadline=None)
def test_a_link_is_learnt_from_exact_observations(latency: float, each: float) -> None:
    known = link(latency, each)
    for size in (1, 12, 300):
        exact = latency + each * size * BLOCK_BYTES
        assert known.seconds(size * BLOCK_BYTES) == pytest.approx(exact, rel=0.3)


def test_prefill_speed_is_learnt_with_its_context() -> None:
    known = prefill(4e-3, 2e-5, 3e-9)
    assert known.coefficients == pytest.approx((4e-3, 2e-5, 3e-9), rel=1e-3)
    assert known.seconds(1000, 2000) == pytest.approx(4e-3 + 1000 * 2e-5 + 1000 * 1500 * 3e-9, rel=1e-3)
    steps = 8000 / 2048  # no step was longer
    exact = steps * 4e-3 + 8000 * 2e-5 + 8000 * 5000 * 3e-9
    assert known.seconds(1000, 9000) == pytest.approx(exact, rel=1e-3)


def test_a_prompt_in_several_steps_teaches_the_speed_of_one() -> None:
    known = PrefillSpeed()
    for steps in (1, 4, 2, 8, 3, 5):
        known.observe([(0, steps * 512)], steps * (4e-3 + 512 * 2e-5), steps)
    assert known.most_tokens == 512
    assert known.seconds(0, 2048) == pytest.approx(4 * (4e-3 + 512 * 2e-5), rel=1e-3)


def test_steps_that_wait_teach_what_a_short_one_takes() -> None:
    """Of whole prompts alone it cannot be told that no step is shorter than 18 ms."""
    model = CostModel(block_size=BLOCK, block_bytes=BLOCK_BYTES, stages=32)
    model.link = link(0.0, 4e-5 / BLOCK_BYTES)
    cached = Cached(8192, 0, 511)

    def truly(blocks: int) -> tuple[float, float]:
        load, compute = 4e-5 * blocks, 0.018 + 27e-6 * (8192 - blocks * BLOCK)
        return load, max(load, compute) + min(load, compute) / 32

    for _ in range(9):
        model.prefill.observe([(0, 8192)], truly(0)[1])
    best = min(truly(blocks)[1] for blocks in range(512))
    before = model.decide(cached).num_blocks
    assert truly(before)[1] > 1.3 * best
    for _ in range(9):
        blocks = model.decide(cached).num_blocks
        model.observe_waiting([(blocks * BLOCK, 8192)], truly(blocks)[1], blocks, 1)
    assert truly(model.decide(cached).num_blocks)[1] < 1.05 * best


def test_short_steps_in_a_row_do_not_hide_what_a_long_one_takes() -> None:
    known, numbers = PrefillSpeed(), np.random.default_rng(0)
    for _ in range(3):
        known.observe([(0, 1024)], 0.66)
    for _ in range(40):
        known.observe([(1008, 1024)], 0.03 * numbers.uniform(0.9, 1.1))
    assert known.seconds(0, 1024) == pytest.approx(0.66, rel=0.15)
    assert known.seconds(1008, 1024) == pytest.approx(0.03, rel=0.15)


def test_a_step_that_took_as_long_as_its_loads_teaches_nothing() -> None:
    model = CostModel(block_size=BLOCK, block_bytes=BLOCK_BYTES)
    model.link = link(0.0, 1e-3 / BLOCK_BYTES)
    for loaded in (0, 80, 100, 200):
        model.observe_waiting([(0, 64)], 0.1, loaded, 1)
    assert model.prefill._fit.observations == 0


def test_noise_of_equal_steps_is_no_speed_that_ignores_the_tokens() -> None:
    known = PrefillSpeed()
    for tokens, seconds in ((64, 0.037), (64, 0.036), (22, 0.035), (64, 0.038), (64, 0.040)):
        known.observe([(0, tokens)], seconds)
    assert known.seconds(0, 640) > 8 * known.seconds(0, 64)


def test_one_size_of_prompt_scales_by_its_tokens() -> None:
    known = PrefillSpeed()
    for _ in range(5):
        known.observe([(0, 1000)], 0.1)
    assert known.seconds(0, 500) == pytest.approx(0.05)


def test_a_new_speed_of_the_disk_is_believed_within_a_few_reads() -> None:
    known = link(0.0, 1e-9)
    for read in range(12):
        known.observe(64 * BLOCK_BYTES, 64 * BLOCK_BYTES * 1e-8, float(read))
    assert known.seconds(64 * BLOCK_BYTES) == pytest.approx(64 * BLOCK_BYTES * 1e-8, rel=0.2)


def test_one_stall_is_no_new_speed() -> None:
    known = link(0.0, 1e-9)
    known.observe(64 * BLOCK_BYTES, 100.0, 0.0)
    assert known.seconds(64 * BLOCK_BYTES) < 2 * 64 * BLOCK_BYTES * 1e-9


@pytest.mark.parametrize("size", [BLOCK_BYTES, 64 * BLOCK_BYTES])
@pytest.mark.parametrize("factor", [1e-4, 0.02, 30.0, 1e4])
def test_a_speed_that_has_become_quite_another_is_believed_after_a_few_reads(
    factor: float, size: int
) -> None:
    """A slow disk that is fast again is read once in ten seconds only."""
    for whole in (0.0, 0.1):
        known = LinkSpeed(whole=whole)
        for _ in range(30):
            known.observe(size, 0.2, 0.0)
        for _ in range(4):
            known.observe(size, 0.2 * factor, 0.0)
        assert known.seconds(size) == pytest.approx(0.2 * factor, rel=0.2)


def test_surprises_of_both_kinds_are_no_new_speed() -> None:
    known = link(0.0, 1e-9)
    for factor in (100, 0.01, 100, 0.01, 100):
        known.observe(64 * BLOCK_BYTES, 64 * BLOCK_BYTES * 1e-9 * factor, 0.0)
    assert known.seconds(64 * BLOCK_BYTES) < 10 * 64 * BLOCK_BYTES * 1e-9


def test_a_first_step_that_compiles_is_forgotten() -> None:
    known = PrefillSpeed()
    for seconds in (30.0, 0.1, 0.1, 0.1, 0.1, 0.1):
        known.observe([(0, 4096)], seconds)
    assert known.seconds(0, 4096) == pytest.approx(0.1)


def test_surprising_steps_of_one_size_change_no_other() -> None:
    known = PrefillSpeed()
    for _ in range(20):
        known.observe([(0, 64)], 0.02)
        known.observe([(0, 8192)], 0.5)
    for _ in range(4):
        known.observe([(0, 8192)], 10.0)
    assert known.seconds(0, 8192) == pytest.approx(10.0, rel=0.2)
    assert known.seconds(0, 64) < 0.1


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_impossible_seconds_teach_nothing(seconds: float) -> None:
    known, copies = prefill(0.01, 1e-4, 0.0), link(0.01, 1e-9)
    expected = known.seconds(0, 8192)
    known.observe([(0, 100_000)], seconds)
    copies.observe(BLOCK_BYTES, seconds, 7.0)
    assert known.seconds(0, 8192) == expected
    assert copies.observed_at == 0.0


def test_calibration_is_believed_until_copies_are_observed() -> None:
    known = LinkSpeed(prior=50e9)
    assert known.is_known
    assert known.seconds(50e9) == pytest.approx(1.0)
    for _ in range(3):
        known.observe(10**9, 1.0, 0.0)
    assert known.bandwidth == pytest.approx(1e9)


def test_noise_does_not_change_the_choice_from_request_to_request() -> None:
    """Loading and computing take the same time within 1%; every observation is off by 2%."""
    rng = np.random.default_rng(5)
    model = CostModel(block_size=BLOCK, block_bytes=BLOCK_BYTES)
    cached = Cached(100 * BLOCK + 1, 0, 100)
    choices, free = [], []
    last = None
    for _ in range(300):
        model.prefill.observe([(0, 1600)], 0.1 * rng.uniform(0.98, 1.02))
        model.link.observe(100 * BLOCK_BYTES, 0.1 * rng.uniform(0.98, 1.02), 0.0)
        last = model.decide(cached, last).choice
        choices.append(last)
        free.append(model.decide(cached).choice)
    changes = sum(a is not b for a, b in pairwise(choices[10:]))
    assert changes <= 1
    assert sum(a is not b for a, b in pairwise(free[10:])) > changes


@given(models(), prefixes())
@settings(max_examples=budget(300), deadline=None)
def test_loads_beside_reads_take_no_longer_than_after_them(model: CostModel, cached: Cached) -> None:
    later = CostModel(block_size=BLOCK, block_bytes=BLOCK_BYTES, stages=model._stages)
    later.prefill, later.link, later.storage = model.prefill, model.link, model.storage
    beside = model.seconds(cached, cached.num_blocks)
    assert beside <= later.seconds(cached, cached.num_blocks) * (1 + 1e-9)
    load = model.link.seconds(BLOCK_BYTES * (cached.num_blocks - cached.on_device))
    read = model.seconds_of_read(cached.in_storage) if cached.in_storage else 0.0
    assert beside >= max(load, read) * (1 - 1e-9)


def test_a_load_beside_reads_leaves_what_is_read_last() -> None:
    model = CostModel(block_size=BLOCK, block_bytes=BLOCK_BYTES, streams=True, read_seconds=0.1)
    model.prefill = prefill(0.0, 1e-9, 0.0)
    model.link, model.storage = link(0.0, 5e-3 / BLOCK_BYTES), link(0.0, 1e-2 / BLOCK_BYTES)
    cached = Cached(100 * BLOCK + 1, 0, 0, 100)
    assert model.seconds(cached, 100) == pytest.approx(1.0 + 0.1 / 2, rel=0.01)
    model.link = link(0.0, 2e-2 / BLOCK_BYTES)  # slower than storage
    assert model.seconds(cached, 100) == pytest.approx(2.0, rel=0.01)


def test_parts_of_a_read_weigh_less_than_a_whole_one() -> None:
    """Ten parts of one slow read are no new speed of the disk."""
    weighed, counted = LinkSpeed(whole=0.1), LinkSpeed()
    for known in (weighed, counted):
        for seconds, parts in ((0.01, 200), (0.02, 10)):
            for _ in range(parts):
                known.observe(BLOCK_BYTES, seconds, 0.0)
    assert weighed.seconds(BLOCK_BYTES) < 0.014
    assert counted.seconds(BLOCK_BYTES) > 0.017


@pytest.mark.parametrize("pages", [1, 3, 4, 5, 400])
def test_blocks_outside_of_their_window_cost_no_load(pages: int) -> None:
    model = CostModel(block_size=BLOCK / 3, block_bytes=BLOCK_BYTES, windows=[0, 4, 4])
    model.prefill, model.link = prefill(0.01, 1e-4, 0.0), link(0.001, 1e-9)
    loaded = pages + 2 * min(pages, 4)
    seconds = model.seconds(Cached(pages * BLOCK, 0, 3 * pages), 3 * pages)
    assert seconds == pytest.approx(model.link.seconds(loaded * BLOCK_BYTES))


def test_a_calibrated_latency_is_believed_until_reads_are_observed() -> None:
    known = LinkSpeed(1e9, 2e-3)
    assert known.seconds(10**9) == pytest.approx(1.002)
    assert known.latency == 2e-3
