"""What all ranks hold alike is kept once: in memory that they share, in a service, in storage, at every parallelism."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from fdcache.controller.cache_controller import CacheController
from fdcache.devices.cpu import CpuDevice
from fdcache.errors import CacheNotReadyError, DeviceError, HostMemoryError
from fdcache.layout import KVLayout
from fdcache.machine.shared_files import JoinedMemory
from fdcache.manager import LoadStatus, MatchStatus, OffloadManager, Request
from fdcache.metadata import TransferPlan
from fdcache.replay.config import LayoutName
from fdcache.settings.cache import CacheSettings, CopySettings, WritePolicy
from fdcache.tiers.host import HostCache
from tests.offload_engine import BLOCK, OffloadEngine, begun, ids, prompt
from tests.replay_help import assert_clean, run_chat, small_config
from tests.service_engine import ready_blocks
from tests.service_help import TIMEOUT, local_service, until
from tests.storage_help import MIB

PROMPT = prompt(*range(1, 8))
BLOCKS = len(PROMPT) // BLOCK


def latent(tp_size: int) -> KVLayout:
    return KVLayout.mla(
        model="m",
        revision="1",
        num_layers=3,
        block_size=BLOCK,
        latent_dim=24,
        dtype="bfloat16",
        tp_size=tp_size,
    )


def loads(engine: OffloadEngine) -> bool:
    """Load the prompt; return True if the device blocks hold its bytes on every rank."""
    request, into = Request("again", PROMPT), list(range(8, 8 + BLOCKS))
    engine.manager.begin([request])
    while (found := engine.manager.match(request, 0)).status is MatchStatus.DEFERRED:
        engine.step()
        engine.collect()
    assert found.num_tokens == BLOCKS * BLOCK
    assert engine.manager.load(request, ids(*into)) == BLOCKS
    (outcome,) = engine.settle()
    assert outcome.status is LoadStatus.CONFIRMED
    engine.manager.finish([request])
    return engine.holds(request, into)


# --- ranks of one engine ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
def test_processes_copy_each_block_out_once_and_each_reads_all_of_them(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FDCACHE_ARENA_DIR", str(tmp_path))
    config = small_config(
        ranks=ranks,
        layout=LayoutName.MLA,
        device_blocks=100,
        host_memory=1 << 20,
        cache={"write_policy": WritePolicy.WRITE_THROUGH},
    )
    report = run_chat(config, 40)  # compares every byte that is reused, on every rank
    assert_clean(report)
    counters, record = report.stats.counters, config.layout.payload_bytes
    stored = counters.blocks_backed_up + counters.blocks_evicted_to_host
    assert report.tally.d2h.bytes == stored * record > 0
    assert report.tally.h2d.bytes == ranks * counters.blocks_loaded * record > 0
    assert not list(tmp_path.iterdir())


def test_as_many_blocks_fit_at_every_parallelism() -> None:
    managers = [OffloadManager(CacheSettings(host_memory=MIB), latent(ranks)) for ranks in (1, 2, 4, 8)]
    assert {manager.host_cache.num_blocks for manager in managers} == {MIB // (4096 + 128)}
    assert {manager.layout.fingerprint for manager in managers} == {latent(1).fingerprint}
    for manager in managers:
        manager.close()


def planned(engine: OffloadEngine) -> TransferPlan:
    """Compute the prompt; return the plan that copies it to the host."""
    request = begun(engine, "first", PROMPT)
    engine.step()
    engine.manager.offer(request, len(PROMPT), ids(*range(BLOCKS)))
    engine.compute(request, range(BLOCKS))
    engine.manager.finish([request])
    (plan,) = engine.manager.take_plans()
    assert plan.backups is not None and len(plan.backups) == BLOCKS
    return plan


def test_each_rank_copies_its_share_and_all_report_the_whole_plan() -> None:
    engine = OffloadEngine(layout=latent(2))
    plan = planned(engine)
    copied = []
    for rank in engine.ranks:
        rank.submit_swap_tasks(plan)
        (result,) = rank.handler(plan.plan_id).get_result(TIMEOUT).results
        copied.append(set((result.checksums != 0).nonzero()[0].tolist()))
    assert copied[0] | copied[1] == set(range(BLOCKS))
    assert sorted(map(len, copied)) == [BLOCKS // 2, BLOCKS - BLOCKS // 2]
    engine.collect()
    assert loads(engine)
    engine.close()


def test_a_rank_whose_copies_fail_loses_the_blocks_of_its_share_alone() -> None:
    engine = OffloadEngine(layout=latent(2), device=CpuDevice)
    with pytest.MonkeyPatch.context() as patch:  # of rank 0, whose share of plan 1 is the second half
        patch.setattr(engine.devices[0], "copy_blocks", Mock(side_effect=DeviceError("no memory")))
        engine.submit([planned(engine)])
    engine.collect()
    host = engine.manager._host.pool
    assert host is not None and host.stats().ready == BLOCKS // 2
    engine.close()


# --- engines of unequal parallelism -----------------------------------------------------------------------


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 4), (4, 2)])
def test_engines_of_unequal_parallelism_share_a_service(tmp_path: Path, first: int, then: int) -> None:
    with local_service(tmp_path) as service:
        writer, reader = (
            OffloadEngine(layout=latent(ranks), server=service.address, rpc_timeout=TIMEOUT)
            for ranks in (first, then)
        )
        until(lambda: writer.manager._host.index.room, "slots are granted")
        writer.stored("first", PROMPT, list(range(BLOCKS)))
        until(lambda: ready_blocks(service) == BLOCKS, "the blocks are stored")
        (namespace,) = service.ask("namespaces")
        assert namespace["ranks"] == 1
        assert loads(reader)
        for engine in (writer, reader):
            engine.close()


@pytest.mark.parametrize(("first", "then"), [(2, 2), (2, 1), (1, 4)])
def test_storage_has_each_block_once_for_every_parallelism(tmp_path: Path, first: int, then: int) -> None:
    writer = OffloadEngine(layout=latent(first), folder=tmp_path)
    writer.stored("first", PROMPT, list(range(BLOCKS)))
    writer.settle()
    assert writer.manager.get_stats().counters.blocks_stored == BLOCKS
    writer.close()
    assert len(list(tmp_path.glob("*.slab"))) == 1
    reader = OffloadEngine(layout=latent(then), folder=tmp_path)
    assert reader.restored == BLOCKS
    assert loads(reader)
    reader.close()


# --- the memory that ranks share --------------------------------------------------------------------------


def test_memory_without_a_name_is_refused() -> None:
    controller = CacheController(CopySettings(), latent(2), rank=1)
    for host in (4, HostCache(4)):
        with pytest.raises(CacheNotReadyError, match="pass the manager's host_cache"):
            controller.initialize_host_cache(host)
    controller.shutdown()


def test_ranks_that_name_another_size_are_refused(tmp_path: Path) -> None:
    first = JoinedMemory(tmp_path / "name", 1 << 16)
    with pytest.raises(HostMemoryError, match="65536 bytes, not 8192; give every rank the same"):
        JoinedMemory(tmp_path / "name", 1 << 13)
    first.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(HostMemoryError, match="set FDCACHE_ARENA_DIR to a folder"):
        JoinedMemory(tmp_path / "missing" / "name", 1 << 13)


def test_memory_of_killed_ranks_is_removed_by_the_next(tmp_path: Path) -> None:
    dead = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, sys; from pathlib import Path; from fdcache.machine.shared_files import JoinedMemory\n"
            f"memory = JoinedMemory(Path({str(tmp_path)!r}) / 'dead', 1 << 16)\n"
            "os.kill(os.getpid(), 9)",
        ],
        check=False,
        timeout=TIMEOUT,
    )
    assert dead.returncode == -9
    assert [path.name for path in tmp_path.iterdir()] == [f"{JoinedMemory.PREFIX}dead"]
    first, second = (JoinedMemory(tmp_path / "alive", 1 << 16) for _ in range(2))
    assert [path.name for path in tmp_path.iterdir()] == [f"{JoinedMemory.PREFIX}alive"]
    first.data[:4] = (1, 2, 3, 4)
    assert second.data[:5].tolist() == [1, 2, 3, 4, 0]
    first.close()
    assert list(tmp_path.iterdir())
    second.close()
    assert not list(tmp_path.iterdir())
