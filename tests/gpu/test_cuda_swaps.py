"""Block copies on a GPU have the bytes, headers and checksums of the CPU, in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache.layout import KVLayout
from fdcache.layout_planes import Plane
from fdcache.metadata import TransferReport
from tests.gpu.workers import GpuWorker
from tests.property.test_round_trips import COMMON, LAYOUTS
from tests.swaps import Worker, plan

WIDE = {
    "128 KiB": KVLayout.uniform(
        **COMMON, num_layers=9, block_size=64, kv_heads=8, head_dim=128, dtype="bfloat16"
    ),
    "512 KiB": KVLayout.uniform(
        **COMMON, num_layers=5, block_size=64, kv_heads=32, head_dim=128, dtype="bfloat16"
    ),
    "4 KiB": KVLayout.uniform(
        **COMMON, num_layers=24, block_size=16, kv_heads=1, head_dim=128, dtype="float16"
    ),
    "mla 72 KiB": KVLayout.mla(
        **COMMON, num_layers=6, block_size=64, latent_dim=576, dtype="bfloat16", indexer_dim=132
    ),
    "fp8": KVLayout.block_fp8(**COMMON, num_layers=6, block_size=64, kv_heads=4, head_dim=128),
    "float32": KVLayout.uniform(
        **COMMON, num_layers=3, block_size=16, kv_heads=2, head_dim=64, dtype="float32"
    ),
}
ALL = LAYOUTS | WIDE
METHODS = ("auto", "dma", "staged", "kernel")


def shuffled(count: int, seed: int) -> list[int]:
    return [int(each) for each in np.random.default_rng(seed).permutation(count)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ALL)
def test_a_permuted_round_trip_matches_the_cpu(name: str, method: str) -> None:
    layout, blocks = ALL[name], 13
    out, host, back = (shuffled(blocks, seed) for seed in (1, 2, 3))
    options: dict[str, Any] = {"device_blocks": blocks, "host_blocks": blocks, "seed": 5, "group_layers": 2}
    with (
        GpuWorker(layout, swap_method=method, verify="all", **options) as gpu,
        Worker(layout, **options) as cpu,
    ):
        assert [gpu.block(slot) for slot in range(blocks)] == [cpu.block(slot) for slot in range(blocks)]
        evict = plan(1, evict=list(zip(out, host, strict=True)))
        (saved,), (expected,) = gpu.run(evict).results, cpu.run(evict).results
        assert saved.success, saved.error_message
        assert saved.checksums.tolist() == expected.checksums.tolist()
        assert saved.copied_bytes == expected.copied_bytes
        for slot in range(blocks):
            assert np.array_equal(gpu.record(slot), cpu.record(slot))
            headers = [worker.controller.host_arena.table.header(slot) for worker in (gpu, cpu)]  # type: ignore[union-attr]
            assert headers[0].to_bytes() == headers[1].to_bytes()
        load = plan(2, load=list(zip(host, back, strict=True)))
        (loaded,) = gpu.run(load).results
        cpu.run(load)
        assert loaded.success, loaded.error_message
        assert [gpu.block(slot) for slot in range(blocks)] == [cpu.block(slot) for slot in range(blocks)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [0, 1, 8])
def test_no_block_one_block_and_all_blocks(count: int, method: str) -> None:
    with GpuWorker(WIDE["fp8"], swap_method=method) as worker:
        before = [worker.block(slot) for slot in range(8)]
        assert all(
            result.success for result in worker.run(plan(1, evict=[(i, 7 - i) for i in range(count)])).results
        )
        for slot in range(count):
            worker.scramble(slot)
        assert all(
            result.success for result in worker.run(plan(2, load=[(7 - i, i) for i in range(count)])).results
        )
        assert [worker.block(slot) for slot in range(8)] == before


@pytest.mark.parametrize("method", METHODS)
def test_runs_span_staging_slots_and_extents(method: str) -> None:
    layout, blocks = WIDE["512 KiB"], 40
    with GpuWorker(
        layout, device_blocks=blocks, host_blocks=blocks, swap_method=method, verify="all"
    ) as worker:
        before = [worker.block(slot) for slot in range(blocks)]
        host = [*range(10, 40), *range(10)]
        (saved,) = worker.run(plan(1, evict=list(enumerate(host)))).results
        assert saved.success, saved.error_message
        back = shuffled(blocks, 4)
        (loaded,) = worker.run(plan(2, load=list(zip(host, back, strict=True)))).results
        assert loaded.success, loaded.error_message
        assert [worker.block(slot) for slot in back] == before


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("gap", [1, 3, 4, 8, 24])
def test_blocks_may_be_any_distance_apart(gap: int, method: str) -> None:
    layout = LAYOUTS["odd tails"]
    planes = tuple(
        Plane(p.layer, p.kind, p.dtype, p.shape, p.nbytes, p.offset, p.nbytes + gap) for p in layout.planes
    )
    spread = KVLayout(
        model="m", revision="r", block_size=3, num_layers=3, num_draft_layers=0, planes=planes,
        record_bytes=layout.record_bytes,
    )  # fmt: skip
    with GpuWorker(spread, swap_method=method, verify="all") as worker:
        before = [worker.block(slot) for slot in range(8)]
        pairs = list(zip(shuffled(8, 1), shuffled(8, 2), strict=True))
        (saved,) = worker.run(plan(1, evict=pairs)).results
        for slot in range(8):
            worker.scramble(slot)
        (loaded,) = worker.run(plan(2, load=[(host, device) for device, host in pairs])).results
        assert saved.success and loaded.success
        assert [worker.block(slot) for slot in range(8)] == before


@settings(max_examples=25)
@given(data=st.data())
def test_any_plan_matches_the_cpu(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(LAYOUTS)))
    options: dict[str, Any] = {
        "device_blocks": 6,
        "host_blocks": 6,
        "seed": data.draw(st.integers(0, 1000)),
        "first_group_layers": data.draw(st.integers(1, 3)),
        "group_layers": data.draw(st.integers(1, 3)),
    }
    method = data.draw(st.sampled_from(METHODS))
    slots = st.permutations(range(6))
    with (
        GpuWorker(LAYOUTS[name], swap_method=method, **options) as gpu,
        Worker(LAYOUTS[name], **options) as cpu,
    ):
        for plan_id in range(data.draw(st.integers(1, 5))):
            count = data.draw(st.integers(0, 6))
            pairs = list(zip(data.draw(slots), data.draw(slots), strict=True))[:count]
            kind = data.draw(st.sampled_from(["evict", "load", "backup"]))
            made = plan(plan_id, **{kind: pairs})  # type: ignore[arg-type]
            (result,), (expected,) = gpu.run(made).results, cpu.run(made).results
            assert result.failed.tolist() == expected.failed.tolist()
            assert result.error_message == expected.error_message
            assert result.checksums.tolist() == expected.checksums.tolist()
        assert [gpu.block(slot) for slot in range(6)] == [cpu.block(slot) for slot in range(6)]
        assert all(np.array_equal(gpu.record(slot), cpu.record(slot)) for slot in range(6))


def test_a_load_of_another_block_fails_alone() -> None:
    with GpuWorker() as worker:
        worker.run(plan(1, evict=[(slot, slot) for slot in range(4)]))
        wanted = plan(2, load=[(0, 4), (1, 5), (2, 6)])
        assert wanted.loads is not None
        wanted.loads.src_generations[1] += 1
        before = worker.block(5)
        (result,) = worker.run(wanted).results
        assert result.failed.tolist() == [1]
        assert "host slot 1 was given to new content" in str(result.error_message)
        assert worker.block(5) == before
        assert worker.block(4) == worker.block(0) and worker.block(6) == worker.block(2)


def test_loads_are_verified_on_the_device_when_asked() -> None:
    with GpuWorker(verify="all") as worker:
        worker.run(plan(1, evict=[(0, 0), (1, 1)]))
        worker.record(1)[40] ^= 1
        (result,) = worker.run(plan(2, load=[(0, 4), (1, 5)])).results
        assert result.failed.tolist() == [1]
        assert "checksum" in str(result.error_message)


def test_concurrent_plans_are_independent() -> None:
    layout, blocks = WIDE["128 KiB"], 24
    with GpuWorker(layout, device_blocks=blocks, host_blocks=blocks) as worker:
        before = [worker.block(slot) for slot in range(blocks)]
        worker.run(plan(0, evict=[(slot, slot) for slot in range(8)]))
        plans = [
            plan(1 + i, load=[(i, 8 + i)], backup=[(16 + i, 8 + i)], evict=[(i, 16 + i)]) for i in range(8)
        ]
        for each in plans:
            worker.controller.submit_swap_tasks(each, worker.idle)
        reports: list[TransferReport] = []
        while len(reports) < len(plans):
            reports += worker.controller.wait_reports(10.0)
        assert all(result.success for report in reports for result in report.results)
        assert [worker.block(8 + i) for i in range(8)] == before[:8]
        for i in range(8):
            assert worker.record(16 + i).tobytes() == worker.record(i).tobytes()
        worker.run(plan(99, load=[(8 + i, i) for i in range(8)]))
        assert [worker.block(i) for i in range(8)] == before[16:]
