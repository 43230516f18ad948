"""Pinned host memory: extents, progress, refusals, and copies by drivers without batches."""

from __future__ import annotations

from typing import Any

import pytest

from fdcache import _core
from fdcache.controller import arena as arena_module
from fdcache.controller.arena import HostArena
from fdcache.devices.cuda import CudaDevice
from tests.gpu.test_cuda_device import run_python
from tests.gpu.test_cuda_swaps import ALL, METHODS, WIDE, shuffled
from tests.gpu.workers import GpuWorker
from tests.swaps import Worker, plan
from tests.unit.test_host_arena import memory_policy


def test_an_arena_is_pinned_extent_by_extent_with_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = WIDE["128 KiB"]
    monkeypatch.setattr(arena_module, "EXTENT_BYTES", 4 * layout.record_bytes)
    told: list[tuple[int, int]] = []
    arena = HostArena(layout, 18, CudaDevice(), lambda ready, total: told.append((ready, total)))
    total = 5 * 4 * layout.record_bytes
    assert told == [(total * (i + 1) // 5, total) for i in range(5)]
    assert [each.device_address for each in arena.pinned] == [each.address for each in arena.extents]


def test_extents_prefer_the_node_of_the_gpu() -> None:
    device = CudaDevice()
    if device.numa_node is None:
        pytest.skip("the machine does not say on which NUMA node the GPU is")
    arena = HostArena(WIDE["128 KiB"], 4, device)
    for extent in arena.extents:
        assert f"prefer:{device.numa_node}" in memory_policy(extent.address)


REFUSED = """
    import resource
    from fdcache.devices.cuda import CudaDevice
    from fdcache.errors import HostMemoryError

    device = CudaDevice()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    try:
        device.pin_memory(4096, 1 << 20, object())
    except HostMemoryError as error:
        print(error)
"""


def test_a_low_limit_on_locked_memory_is_named_with_the_remedy() -> None:
    done = run_python(REFUSED)
    assert "1048576 bytes of host memory could not be pinned: cuMemHostRegister" in done.stdout, done.stderr
    assert "this process may lock 65536 bytes" in done.stdout and "ulimit -l unlimited" in done.stdout


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["128 KiB", "4 KiB", "mla 72 KiB", "odd tails"])
def test_a_driver_without_batched_copies_matches_the_cpu(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core, "has_batched_copies", lambda: False)
    layout, blocks = ALL[name], 13
    out, host, back = (shuffled(blocks, seed) for seed in (1, 2, 3))
    options: dict[str, Any] = {"device_blocks": blocks, "host_blocks": blocks, "seed": 5, "group_layers": 2}
    with (
        GpuWorker(layout, swap_method=method, verify="all", **options) as gpu,
        Worker(layout, **options) as cpu,
    ):
        assert not gpu.gpu._policy.batched
        for made in (
            plan(1, evict=list(zip(out, host, strict=True))),
            plan(2, load=list(zip(host, back, strict=True))),
        ):
            (result,), (expected,) = gpu.run(made).results, cpu.run(made).results
            assert result.success, result.error_message
            assert result.checksums.tolist() == expected.checksums.tolist()
        assert [gpu.block(slot) for slot in range(blocks)] == [cpu.block(slot) for slot in range(blocks)]
        assert all((gpu.record(slot) == cpu.record(slot)).all() for slot in range(blocks))
