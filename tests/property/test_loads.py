"""Loads that go as one batch come out as if each had gone alone."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache.metadata import SwapPurpose, TransferPlan, TransferResult
from fdcache.tasks import CpuEvent
from tests.swaps import PATIENCE, Worker, plan, swap, uniform_layout

SLOTS = 32
HELD = 12
"""Blocks of the load that keeps the stream busy."""


@dataclass(frozen=True)
class Load:
    """Host slots, one for each device slot that is loaded, and positions that name a generation that is gone."""

    sources: tuple[int, ...]
    stale: frozenset[int]


loads = st.builds(
    Load,
    st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=5).map(tuple),
    st.frozensets(st.integers(0, 4), max_size=2),
)


def carry_out(
    wanted: list[Load], corrupt: int | None, queued_bytes: int
) -> tuple[list[TransferResult], list[list[bytes]]]:
    with Worker(
        uniform_layout(), device_blocks=SLOTS, host_blocks=SLOTS, queued_bytes=queued_bytes, verify="all"
    ) as worker:
        worker.run(plan(0, backup=[(slot, slot) for slot in range(SLOTS)]))
        if corrupt is not None:
            worker.record(corrupt)[3] ^= 1
        gate, held = CpuEvent(), worker.controller.device.create_stream()
        held.wait_event(gate)
        worker.controller.submit_swap_tasks(plan(1, load=[(slot, slot) for slot in range(HELD)]), held)
        target = HELD
        for number, load in enumerate(wanted):
            pairs = [(source, target + i) for i, source in enumerate(load.sources)]
            target += len(pairs)
            generations = [2 if i in load.stale else 1 for i in range(len(pairs))]
            made = swap(SwapPurpose.LOAD, pairs, generation=generations)
            worker.controller.submit_swap_tasks(TransferPlan(plan_id=2 + number, loads=made))
        gate.set()
        results: dict[int, TransferResult] = {}
        while len(results) < 1 + len(wanted):
            for report in worker.controller.wait_reports(PATIENCE):
                (results[report.plan_id],) = report.results
        return [results[2 + number] for number in range(len(wanted))], [
            worker.block(slot) for slot in range(SLOTS)
        ]


@settings(max_examples=60)
@given(
    wanted=st.lists(loads, min_size=2, max_size=4),
    corrupt=st.none() | st.integers(0, SLOTS - 1),
    room=st.integers(1, HELD),
)
def test_merged_loads_have_the_results_and_bytes_of_single_ones(
    wanted: list[Load], corrupt: int | None, room: int
) -> None:
    payload = uniform_layout().payload_bytes
    merged, merged_blocks = carry_out(wanted, corrupt, room * payload)
    single, blocks = carry_out(wanted, corrupt, 1 << 30)
    assert merged_blocks == blocks
    for one, other in zip(merged, single, strict=True):
        assert one.failed.tolist() == other.failed.tolist()
        assert one.corrupt.tolist() == other.corrupt.tolist()
        assert (one.error_message, one.copied_bytes) == (other.error_message, other.copied_bytes)
