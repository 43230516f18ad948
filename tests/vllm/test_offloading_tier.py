"""FdcacheTier below vLLM's own tiering manager: its factory, its host memory, its bookkeeping of jobs."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.tiering.backpressure", reason="this vLLM has other tiers")

from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from fdcache.errors import ConfigurationError, StorageBusyError
from tests import preload
from tests.mounts import file_system, fill_up, freezable, frozen
from tests.service_help import until
from tests.vllm.offloading import CHUNK_BYTES, Offloading, content, counted, fill, keys_of


@pytest.fixture
def offloading(tmp_path: Path) -> Iterator[Offloading]:
    offloading = Offloading(tmp_path)
    yield offloading
    offloading.close()


def test_chunks_that_left_the_host_come_back(offloading: Offloading) -> None:
    fill(offloading, range(8))  # twice as much as the host has
    for prompt in range(8):
        assert offloading.load(keys_of(prompt, 8)) == 8


def test_without_the_tier_they_do_not(tmp_path: Path) -> None:
    offloading = Offloading(tmp_path, tiers=[])
    fill(offloading, range(8))
    assert offloading.load(keys_of(0, 8)) == 0
    offloading.close()


def test_groups_of_one_hash_are_apart(tmp_path: Path) -> None:
    offloading = Offloading(tmp_path, groups=2)
    first, second = keys_of(1, 4, group=0), keys_of(1, 4, group=1)
    offloading.store(first)
    offloading.settle()
    fill(offloading, range(10, 16))
    assert offloading.load(second) == 0
    assert offloading.load(first) == 4
    offloading.close()


def test_a_new_engine_starts_warm(tmp_path: Path) -> None:
    first = Offloading(tmp_path)
    fill(first, range(4))
    first.close()
    second = Offloading(tmp_path)
    assert [second.load(keys_of(prompt, 8)) for prompt in range(4)] == [8] * 4
    second.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.vllm.offloading import Offloading, fill
offloading = Offloading(Path(sys.argv[1]))
fill(offloading, range(4))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_engine_that_was_killed_starts_warm(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    offloading = Offloading(tmp_path)
    assert [offloading.load(keys_of(prompt, 8)) for prompt in range(4)] == [8] * 4
    offloading.close()


@pytest.mark.parametrize("change", [{"model": "another"}, {"groups": 2}, {"FDCACHE_WEIGHTS": "tuned"}])
def test_chunks_of_another_model_are_not_found(tmp_path: Path, change: dict[str, Any]) -> None:
    first = Offloading(tmp_path)
    fill(first, range(2))
    first.close()
    other = Offloading(tmp_path, **change)
    assert other.load(keys_of(0, 8)) == 0
    other.close()


def test_flipped_bytes_are_computed_not_served(tmp_path: Path) -> None:
    first = Offloading(tmp_path, FDCACHE_STORAGE_SIZE="8MiB")
    fill(first, range(32))
    first.close()
    (slab,) = tmp_path.glob("*.slab")
    stored = bytearray(slab.read_bytes())
    keys = [key for prompt in range(32) for key in keys_of(prompt, 8)]
    for number, key in enumerate(keys[:200]):
        place = stored.find(content(key).tobytes())
        stored[place + number * 31 % CHUNK_BYTES] ^= 1 << number % 8
    slab.write_bytes(stored)
    offloading = Offloading(tmp_path, FDCACHE_STORAGE_SIZE="8MiB")
    assert [offloading.load(keys_of(prompt, 8)) for prompt in range(32)] == [0] * 25 + [8] * 7
    fill(offloading, [0])  # computed and stored again
    fill(offloading, range(100, 104))
    assert offloading.load(keys_of(0, 8)) == 8
    offloading.close()


def test_the_file_never_grows_beyond_its_size(tmp_path: Path) -> None:
    offloading = Offloading(tmp_path)
    for prompt in range(60):  # 4 times as much as the tier has room for
        offloading.store(keys_of(prompt, 8))
        offloading.settle()
        used = sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir())
        assert used <= 1 << 20
    assert offloading.load(keys_of(59, 8)) == 8
    assert offloading.load(keys_of(0, 8)) == 0
    offloading.close()


def test_a_reset_keeps_what_is_stored(offloading: Offloading) -> None:
    fill(offloading, range(4))
    offloading.store(keys_of(9, 8))
    offloading.manager.reset_cache()
    offloading.manager.on_reset_flushed()
    assert [offloading.load(keys_of(prompt, 8)) for prompt in (0, 9)] == [8, 8]


def test_metrics_and_events_tell_of_it(tmp_path: Path) -> None:
    offloading = Offloading(tmp_path, events=True)
    fill(offloading, range(40))
    (tier,) = offloading.manager.secondary_tiers
    stats = offloading.manager.get_stats()
    assert stats is not None
    values = stats.data["data"]
    assert values["vllm:fdcache_tier_stored"][("FdcacheTier",)] == 320
    assert values["vllm:fdcache_tier_blocks"] == values["vllm:fdcache_tier_capacity_blocks"]
    defined = TieringOffloadingSpec.build_metric_definitions(tier._offloading_spec.extra_config)
    assert set(values) <= set(defined)
    told = [event for event in offloading.manager.take_events() if event.ownership == "FdcacheTier"]
    stored = {key for event in told if not event.removed for key in event.keys}
    removed = {key for event in told if event.removed for key in event.keys}
    assert stored == {key for prompt in range(40) for key in keys_of(prompt, 8)}
    assert len(stored - removed) == values["vllm:fdcache_tier_blocks"][("FdcacheTier",)]
    offloading.close()


SLOW = """
import ctypes, sys
from pathlib import Path
from tests.vllm.offloading import Offloading, fill, keys_of
offloading = Offloading(Path(sys.argv[1]), FDCACHE_STORAGE_TIMEOUT="1")
fill(offloading, range(8))
ctypes.CDLL(None).setenv(b"SLOW_DISK_MS", b"6000", 1)
assert offloading.load(keys_of(0, 8)) == 0, "the deadline passes"
assert offloading.load(keys_of(1, 8)) == 0, "nobody waits for a disk that hangs"
assert len(offloading.store(keys_of(20, 8))) == 8
assert offloading.load(keys_of(20, 8)) == 8
ctypes.CDLL(None).setenv(b"SLOW_DISK_MS", b"0", 1)
from tests.service_help import until
until(lambda: offloading.step() or offloading.load(keys_of(2, 8)) == 8, "the disk is used again")
offloading.close()
print("right")
"""


def test_a_disk_that_hangs_costs_the_deadline(tmp_path: Path) -> None:
    done = preload.run("slow_disk", SLOW, tmp_path, SLOW_DISK_MS="0")
    assert done.stdout.endswith("right\n"), done.stderr


@pytest.mark.parametrize("fsync", ["always", "never"])
def test_a_frozen_mount_costs_the_deadline(tmp_path: Path, fsync: str) -> None:
    with freezable(tmp_path / "disk", 32) as disk:
        offloading = Offloading(disk, FDCACHE_STORAGE_TIMEOUT="1", FDCACHE_STORAGE_FSYNC=fsync)
        fill(offloading, range(8))
        with frozen(disk, 60):
            assert len(offloading.store(keys_of(20, 8))) == 8
            assert offloading.load(keys_of(20, 8)) == 8, "the host has it"
            fill(offloading, range(21, 26))
            until(lambda: counted(offloading, "timeouts") > 0, "what was not written in time is counted")
            assert offloading.load(keys_of(25, 8)) == 8, "vLLM's memory is used as before"
        prompts = itertools.count(100, 8)

        def stores_again() -> bool:
            first = next(prompts)
            fill(offloading, range(first, first + 8))
            return offloading.load(keys_of(first, 8)) == 8

        until(stores_again, "the disk is used again")
        assert offloading.load(keys_of(3, 8)) in (0, 8), "what was stored before is whole, or made room"
        offloading.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    yield from file_system(tmp_path / "disk", "1m")


def test_a_full_disk_keeps_what_it_has_and_is_used_again_when_there_is_room(disk: Path) -> None:
    offloading = Offloading(disk)
    fill(offloading, range(6))
    ballast = fill_up(disk)
    assert offloading.load(keys_of(0, 8)) == 8, "what is stored is served"
    fill(offloading, range(10, 16))
    assert counted(offloading, "no_room") > 0
    assert counted(offloading, "blocks") <= 48, "the places that had room are used again"
    assert [offloading.load(keys_of(prompt, 8)) for prompt in (15, 11)] == [8, 8]
    ballast.unlink()
    prompts = itertools.count(100)

    def stores_more() -> bool:
        fill(offloading, [next(prompts)])
        return counted(offloading, "blocks") > 48

    until(stores_more, "the room is used")
    offloading.close()


BAD_SECTORS = """
import os, sys
from pathlib import Path
from tests.service_help import until
from tests.vllm.offloading import CHUNK_BYTES, Offloading, content, counted, fill, keys_of
folder, sectors = Path(sys.argv[1]), Path(os.environ["FAILING_DISK"])
offloading = Offloading(folder)
fill(offloading, range(8))
(slab,) = folder.glob("*.slab")
place = slab.read_bytes().find(content(keys_of(0, 8)[3]).tobytes())
assert place > 0
sectors.write_text(f"r {place} {place + CHUNK_BYTES - 1}")
assert [offloading.load(keys_of(prompt, 8)) for prompt in (0, 1)] == [3, 8], "one chunk is lost"
sectors.write_text("")
assert offloading.load(keys_of(0, 8)) == 3, "nobody asks for it again"
offloading.store(keys_of(0, 8))
offloading.settle()
fill(offloading, range(20, 24))
assert offloading.load(keys_of(0, 8)) == 8, "computed and stored elsewhere"
sectors.write_text("w 0 1000000000\\nr 0 1000000000")
fill(offloading, range(30, 35))
assert offloading.load(keys_of(34, 8)) == 8, "the host has it"
assert [offloading.load(keys_of(prompt, 8)) for prompt in (30, 2)] == [0, 0], "the disk fails"
assert counted(offloading, "errors") > 0
sectors.write_text("")
until(lambda: offloading.load(keys_of(3, 8)) == 8, "the disk is used again")
offloading.close()
print("right")
"""


def test_sectors_that_fail_cost_their_chunks_and_a_disk_that_fails_is_tried_again(tmp_path: Path) -> None:
    sectors = str(tmp_path / "sectors")
    done = preload.run("failing_disk", BAD_SECTORS, tmp_path, FAILING_DISK=sectors)
    assert done.stdout.endswith("right\n"), done.stderr


def test_a_file_is_used_by_one_engine(offloading: Offloading, tmp_path: Path) -> None:
    with pytest.raises(StorageBusyError):
        Offloading(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"FDCACHE_STORAGE_SIZ": "1GiB"}, "FDCACHE_STORAGE_SIZE"),
        ({"FDCACHE_STORAGE_SIZE": "much"}, "FDCACHE_STORAGE_SIZE"),
        ({"FDCACHE_STORAGE": "none"}, "FDCACHE_STORAGE=local"),
        (
            {"FDCACHE_SERVER": "ipc:///run/fdcache.sock"},
            "FDCACHE_STORAGE_DIR.*the storage belongs to the service",
        ),
    ],
)
def test_wrong_settings_are_refused_by_name(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Offloading(tmp_path, **wrong)


def test_random_prompts_get_their_own_bytes(tmp_path: Path) -> None:
    chosen = random.Random(1)
    offloading = Offloading(tmp_path)
    for turn in range(300):
        keys = keys_of(chosen.randrange(30), chosen.randrange(1, 17))
        if chosen.random() < 0.5:
            offloading.store(keys)
        else:
            offloading.load(keys)
        if turn % 3 == 0:
            offloading.step()
    offloading.settle()
    offloading.close()
