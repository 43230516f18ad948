"""The storage tier inside the service: what it keeps beyond every process, whoever reads and writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fdcache.replay.report import Report
from fdcache.settings.cache import WritePolicy
from fdcache.settings.storage_tier import PrefetchPolicy, StorageTierSettings
from fdcache.storage.offline import SlabContents, read_file, slab_files
from tests.replay_help import assert_clean, run_chat, small_config
from tests.service_help import ServiceProcess, service_process, until


def storage_settings(folder: Path, **others: str) -> dict[str, str]:
    return {
        "FDCACHE_STORAGE": "local",
        "FDCACHE_STORAGE_DIR": str(folder),
        "FDCACHE_STORAGE_SIZE": "64MiB",
        "FDCACHE_STORAGE_THREADS": "4",
        "FDCACHE_HOST_MEMORY": "4MiB",
        "FDCACHE_EXTENT_SIZE": "256KiB",
        **others,
    }


def chat(service: ServiceProcess, *, ranks: int = 1, requests: int = 100, **tier: Any) -> Report:
    options = {"prefetch_policy": PrefetchPolicy.WAIT_COMPLETE} | tier
    report = run_chat(
        small_config(
            device_blocks=150,
            ranks=ranks,
            host_memory=0,
            cache={
                "server": service.address,
                "rpc_timeout": 10.0,
                "write_policy": WritePolicy.WRITE_THROUGH,
            },
            storage=StorageTierSettings(**options),
        ),
        requests,
    )
    assert_clean(report)
    return report


def contents_of(folder: Path) -> list[SlabContents]:
    found = [read_file(path, verify=True) for path in slab_files(folder)]
    assert all(isinstance(one, SlabContents) for one in found)
    return [one for one in found if isinstance(one, SlabContents)]


def storage_of(service: ServiceProcess) -> dict[str, Any]:
    found = service.ask("stats")["storage"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("policy", WritePolicy)
def test_a_restarted_service_without_its_arena_is_warm(tmp_path: Path, policy: WritePolicy) -> None:
    folder = tmp_path / "storage"
    with service_process(tmp_path / "s", **storage_settings(folder, FDCACHE_WRITE_POLICY=policy)) as service:
        first = chat(service)
        assert service.terminate() == 0
        assert service.leftovers() == []
        (stored,) = contents_of(folder)
        assert len(stored.slots) > 0
        assert len(stored.corrupt) == 0
        assert (stored.depths >= 0).all(), "every block can be reached from the root"
        service.start()
        until(lambda: service.ask("stats")["state"] == "ready", "the index is loaded")
        assert storage_of(service)["blocks"] == len(stored.slots)
        second = chat(service)
        assert second.tally.hit_tokens["storage"] > 0
        assert second.tally.hit_rate > first.tally.hit_rate
        assert service.ask("integrity") == []
