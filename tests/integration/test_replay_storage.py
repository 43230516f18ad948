"""Replays with storage: blocks of an earlier process hit, byte by byte, and damaged ones are recomputed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdcache.replay.config import ReplayConfig
from fdcache.replay.report import Report
from fdcache.settings.cache import PrefetchPolicy, StorageTierSettings, WritePolicy
from fdcache_cli.slab_files import SlabContents, read_file, slab_files
from tests.replay_help import assert_clean, run_chat, small_config


def config(folder: Path, *, storage: dict[str, Any] | None = None, **options: Any) -> ReplayConfig:
    tier: dict[str, Any] = {"connector": "local", "directory": folder, "size": 64 << 20, "threads": 4}
    tier |= {"prefetch_policy": PrefetchPolicy.WAIT_COMPLETE} | (storage or {})
    defaults: dict[str, Any] = {"device_blocks": 150, "host_memory": 2 << 20}
    return small_config(**(defaults | options), storage=StorageTierSettings(**tier))


def contents_of(folder: Path, *, verify: bool = True) -> list[SlabContents]:
    found = [read_file(path, verify=verify) for path in slab_files(folder)]
    assert all(isinstance(one, SlabContents) for one in found)
    return [one for one in found if isinstance(one, SlabContents)]


def storage_of(report: Report) -> dict[str, Any]:
    storage = report.to_dict()["storage"]
    assert isinstance(storage, dict)
    return storage


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_a_cold_second_run_hits_the_blocks_of_the_first(tmp_path: Path, policy: WritePolicy) -> None:
    first = run_chat(config(tmp_path, cache={"write_policy": policy}))
    assert_clean(first)
    (stored,) = contents_of(tmp_path)
    assert len(stored.slots) > 0
    assert (stored.depths >= 0).all(), "every block can be reached from the root"
    second = run_chat(config(tmp_path, cache={"write_policy": policy}))
    assert_clean(second)
    assert storage_of(second)["restored_blocks"] == len(stored.slots)
    assert second.tally.hit_tokens["storage"] > 0
    assert second.tally.hit_rate > first.tally.hit_rate
    assert storage_of(second)["corrupt"] == 0


@pytest.mark.parametrize("policy", list(PrefetchPolicy))
def test_every_prefetch_policy_is_clean(tmp_path: Path, policy: PrefetchPolicy) -> None:
    tier = {"prefetch_policy": policy, "prefetch_timeout": 5.0}
    for _ in range(2):
        report = run_chat(config(tmp_path, storage=tier))
        assert_clean(report)
    if policy is not PrefetchPolicy.BEST_EFFORT:
        assert report.tally.hit_tokens["storage"] > 0


def test_ranks_agree_on_the_stored_blocks_and_one_that_a_rank_lost_counts_for_none(tmp_path: Path) -> None:
    assert_clean(run_chat(config(tmp_path, ranks=2), requests=60))
    files = contents_of(tmp_path)
    assert len(files) == 2
    assert (files[0].hashes == files[1].hashes).all()
    second = run_chat(config(tmp_path, ranks=2), requests=60)
    assert_clean(second)
    assert second.tally.hit_tokens["storage"] > 0
    slab_files(tmp_path)[1].unlink()
    second = run_chat(config(tmp_path, ranks=2), requests=60)
    assert_clean(second)
    assert storage_of(second)["restored_blocks"] == 0


def test_full_storage_evicts_blocks_and_stays_within_its_size(tmp_path: Path) -> None:
    size = 1 << 20
    report = run_chat(config(tmp_path, storage={"size": size}, cache={"write_policy": "write_through"}))
    assert_clean(report)
    (stored,) = contents_of(tmp_path)
    assert storage_of(report)["stored"] > stored.superblock.slots
    assert stored.path.stat().st_size <= size
    assert len(stored.corrupt) == 0
    assert (stored.depths >= 0).sum() > 0


def test_overwritten_records_are_recomputed_and_the_others_hit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"cache": {"write_policy": "write_through"}, "host_memory": 1 << 20}
    assert_clean(run_chat(config(tmp_path, **settings)))
    (before,) = contents_of(tmp_path)
    assert len(before.corrupt) == 0
    damaged = overwrite(before, places=100, nbytes=1024)
    (after,) = contents_of(tmp_path)
    assert set(after.corrupt.tolist()) == damaged, "a check refuses every damaged block and no other"
    second = run_chat(config(tmp_path, **settings))
    assert_clean(second)
    assert second.tally.corrupt_blocks == 0
    assert 0 < storage_of(second)["corrupt"] <= len(damaged)
    assert second.tally.hit_tokens["storage"] > 0
    assert storage_of(second)["states"] == ["ready"]


def overwrite(contents: SlabContents, places: int, nbytes: int) -> set[int]:
    """Overwrite bytes at random places of the records in use; return the slots whose records changed."""
    random = np.random.default_rng(5)
    block = contents.superblock
    used = {int(slot) for slot in contents.slots}
    changed = set()
    fd = os.open(contents.path, os.O_RDWR)
    for _ in range(places):
        slot = int(random.choice(contents.slots))
        at = slot * block.record_bytes + int(random.integers(0, block.record_bytes))
        data = random.integers(0, 256, nbytes, np.uint8).tobytes()
        os.pwrite(fd, data, block.record_offset + at)
        touched = {at // block.record_bytes, (at + nbytes - 1) // block.record_bytes}
        changed |= touched & used
    os.fsync(fd)
    os.close(fd)
    return changed


def test_failing_loads_and_storage_together_are_clean(tmp_path: Path) -> None:
    for _ in range(2):
        assert_clean(run_chat(config(tmp_path, load_failures=0.3)))


def test_storage_in_use_is_refused_with_the_reason(tmp_path: Path) -> None:
    from fdcache.errors import StorageBusyError
    from fdcache.storage.slab import SlabStore

    settings = config(tmp_path)
    store = SlabStore(tmp_path, settings.layout, rank=0, size=settings.storage.size)
    with pytest.raises(StorageBusyError, match="another process is using it"):
        run_chat(settings)
    store.close()
