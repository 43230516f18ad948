"""FdcacheTier below vLLM's own tiering manager: its factory, its host memory, its bookkeeping of jobs."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.v1.kv_offload.tiering.backpressure", reason="this vLLM has other tiers")

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from fdcache.errors import ConfigurationError, StorageBusyError
from tests import preload
from tests.mounts import file_system, fill_up
from tests.service_help import TIMEOUT, LocalService, local_service, until

CHUNK_BYTES = 8192
CHUNKS = 32


def fdcache_tier(folder: Path, **settings: Any) -> dict[str, Any]:
    settings = {"FDCACHE_STORAGE_DIR": str(folder), "FDCACHE_STORAGE_SIZE": "1MiB", **settings}
    return {"type": "FdcacheTier", "module_path": "fdcache.integrations.vllm.tier", **settings}


def config_of(
    tiers: list[dict[str, Any]],
    *,
    events: bool = False,
    groups: int = 1,
    model: str = "model",
    chunk_bytes: int = CHUNK_BYTES,
    chunks: int = CHUNKS,
) -> OffloadingConfig:
    return OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(tokens_per_block=16, layer_names=(f"layer.{index}",), group_id=index)
            for index in range(groups)
        ),
        worker_kv_bytes_per_block=chunk_bytes,
        enable_kv_cache_events=events,
        extra_config={"cpu_bytes_to_use": chunks * chunk_bytes, "secondary_tiers": tiers},
        engine_id=uuid.uuid4().hex,
        model=OffloadingModelConfig(name=model, dtype="float16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )


def content(key: bytes, nbytes: int = CHUNK_BYTES) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(np.random.default_rng(list(key)).bytes(nbytes), np.uint8)


def keys_of(prompt: int, count: int, group: int = 0) -> list[Any]:
    parent, keys = b"", []
    for _ in range(count):
        parent = hashlib.sha256(parent + prompt.to_bytes(4, "little")).digest()
        keys.append(make_offload_key(parent, group))
    return keys


class Offloading:
    """vLLM's manager, and in place of its GPU worker bytes that follow from the key."""

    def __init__(self, folder: Path, *, tiers: list[dict[str, Any]] | None = None, **changes: Any) -> None:
        settings = {name: changes.pop(name) for name in list(changes) if name.startswith("FDCACHE_")}
        config = config_of([fdcache_tier(folder, **settings)] if tiers is None else tiers, **changes)
        self.manager = TieringOffloadingSpec(config).get_manager()
        self.memory = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self._numbers = itertools.count()

    def close(self) -> None:
        del self.memory
        self.manager.shutdown()

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> None:
        """Run steps until no tier has work."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            self.step()
            if not self.manager._jobs:
                return
            assert time.monotonic() < deadline, "the tiers' jobs do not end"
            time.sleep(0.0005)

    def request(self) -> ReqContext:
        context = ReqContext(f"request-{next(self._numbers)}")
        self.manager.on_new_request(context)
        return context

    def store(self, keys: Sequence[Any]) -> list[Any]:
        """Copy the chunks of a prompt to the host, as its worker would; return those that were stored."""
        context = self.request()
        out = self.manager.prepare_store(keys, context)
        stored = [] if out is None else list(out.keys_to_store)
        if out is not None and stored:
            for key, chunk in zip(stored, out.store_spec.chunk_ids, strict=True):
                self.memory[chunk] = content(key, self.memory.shape[1])
            self.filled = time.perf_counter()
            self.manager.complete_store(stored, context)
        self.manager.on_request_finished(context)
        return stored

    def match(self, keys: Sequence[Any], context: ReqContext) -> int:
        """Return how many leading chunks vLLM finds, after it has brought them to the host."""
        for _ in range(1000):
            found = [self.manager.lookup(key, context) for key in keys]
            self.step()
            waits = {LookupResult.RETRY, LookupResult.HIT_PENDING}
            leading = list(itertools.takewhile(lambda each: each is not LookupResult.MISS, found))
            if not waits & set(leading):
                return len(leading)
            self.settle()
        raise AssertionError("the look-up does not end")

    def check(self, keys: Sequence[Any], context: ReqContext) -> None:
        """Compare the bytes of chunks that a look-up has found, and end the request."""
        if keys:
            spec = self.manager.prepare_load(keys, context)
            for key, chunk in zip(keys, spec.chunk_ids, strict=True):
                assert (self.memory[chunk] == content(key, self.memory.shape[1])).all(), "wrong bytes"
            self.manager.complete_load(keys, context)
        self.manager.on_request_finished(context)

    def load(self, keys: Sequence[Any]) -> int:
        """Return how many leading chunks are found, after a look at their bytes."""
        context = self.request()
        found = self.match(keys, context)
        self.check(keys[:found], context)
        return found


@pytest.fixture
def offloading(tmp_path: Path) -> Iterator[Offloading]:
    offloading = Offloading(tmp_path)
    yield offloading
    offloading.close()


def fill(offloading: Offloading, prompts: Sequence[int], count: int = 8) -> None:
    for prompt in prompts:
        assert len(offloading.store(keys_of(prompt, count))) == count
        offloading.settle()


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
from tests.vllm.test_offloading_tier import Offloading, fill
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
from tests.vllm.test_offloading_tier import Offloading, fill, keys_of
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
    library = preload.build("slow_disk", tmp_path)
    environment = {**os.environ, "LD_PRELOAD": str(library), "SLOW_DISK_MS": "0"}
    (tmp_path / "files").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SLOW, str(tmp_path / "files")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("right\n"), done.stderr


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    yield from file_system(tmp_path / "disk", "1m")


def counted(offloading: Offloading, name: str) -> int:
    """Return what the tier has counted since the last look."""
    stats = offloading.manager.get_stats()
    found = {} if stats is None else stats.data["data"].get(f"vllm:fdcache_tier_{name}", {})
    return int(found.get(("FdcacheTier",), 0))


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
from tests.vllm.test_offloading_tier import CHUNK_BYTES, Offloading, content, counted, fill, keys_of
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
    (tmp_path / "files").mkdir()
    library = preload.build("failing_disk", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", BAD_SECTORS, str(tmp_path / "files")],
        env={**os.environ, "LD_PRELOAD": str(library), "FAILING_DISK": str(tmp_path / "sectors")},
        capture_output=True,
        text=True,
        check=False,
    )
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


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    with local_service(tmp_path / "service", FDCACHE_HOST_MEMORY="4MiB") as service:
        yield service


def below(service: LocalService, **settings: Any) -> list[dict[str, Any]]:
    """The tier over the service of the node, and no folder."""
    named = {"FDCACHE_SERVER": service.address, "FDCACHE_RPC_TIMEOUT": "5", **settings}
    return [{"type": "FdcacheTier", "module_path": "fdcache.integrations.vllm.tier", **named}]


def joined(service: LocalService, **changes: Any) -> Offloading:
    """An engine that has begun its session: its first chunks are stored and gone from its memory."""
    offloading = Offloading(Path(), tiers=below(service), **changes)
    prompts = itertools.count(os.getpid() << 8)

    def stores() -> bool:
        fill(offloading, [next(prompts)])
        return counted(offloading, "stored") > 0

    until(stores, "the service takes chunks")
    return offloading


def test_two_engines_find_each_others_chunks_in_the_service_of_the_node(service: LocalService) -> None:
    first, second = joined(service), joined(service)
    fill(first, range(8))
    assert [second.load(keys_of(prompt, 8)) for prompt in range(8)] == [8] * 8
    fill(second, range(20, 28))
    assert [first.load(keys_of(prompt, 8)) for prompt in (*range(20, 28), 3)] == [8] * 9
    first.close()
    assert second.load(keys_of(1, 8)) == 8
    second.close()


def pushed_out(offloading: Offloading, prompt: int) -> int:
    """Store a prompt and others that push it out of vLLM's memory; return how many of its chunks are found."""
    fill(offloading, range(prompt, prompt + 8))
    return offloading.load(keys_of(prompt, 8))


def test_chunks_that_left_the_services_memory_come_from_its_storage(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    storage = {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_DIR": str(tmp_path / "files")}
    settings = {"FDCACHE_HOST_MEMORY": "2MiB", "FDCACHE_STORAGE_SIZE": "16MiB", **storage}
    with local_service(tmp_path / "service", **settings) as service:
        first, second = joined(service), joined(service)
        fill(first, range(100))  # three times as much as the memory of the service
        until(lambda: all(second.load(keys_of(prompt, 8)) == 8 for prompt in range(60)), "all are found")
        first.close()
        second.close()


def test_without_the_service_chunks_are_computed_and_found_once_it_is_back(tmp_path: Path) -> None:
    service = LocalService(tmp_path / "service")
    offloading = joined(service)
    fill(offloading, range(8))
    service.crash()
    prompts = itertools.count(1000, 8)
    until(lambda: pushed_out(offloading, next(prompts)) == 0, "nothing is found without it")
    assert offloading.load(keys_of(next(prompts) - 1, 8)) == 8, "vLLM's own memory has the last prompt"
    with local_service(tmp_path / "service"):
        until(lambda: pushed_out(offloading, next(prompts)) == 8, "chunks are stored and found again")
        offloading.close()


@pytest.mark.parametrize("change", [{"model": "another"}, {"groups": 2}, {"FDCACHE_WEIGHTS": "tuned"}])
def test_engines_of_other_models_find_nothing_in_the_service(
    service: LocalService, change: dict[str, Any]
) -> None:
    first = joined(service)
    fill(first, range(4))
    weights = {name: change[name] for name in change if name.startswith("FDCACHE_")}
    others = {name: change[name] for name in change if name not in weights}
    other = Offloading(Path(), tiers=below(service, **weights), **others)
    prompts = itertools.count(1000, 8)
    until(lambda: pushed_out(other, next(prompts)) == 8, "its own chunks are found")
    assert other.load(keys_of(0, 8)) == 0
    first.close()
    other.close()


def test_random_prompts_of_two_engines_get_their_own_bytes(service: LocalService) -> None:
    chosen = random.Random(2)
    engines = [joined(service), joined(service)]
    found = 0
    for turn in range(400):
        offloading, keys = chosen.choice(engines), keys_of(chosen.randrange(60), chosen.randrange(1, 17))
        if chosen.random() < 0.5:
            offloading.store(keys)
        else:
            found += offloading.load(keys)
        if turn % 3 == 0:
            offloading.step()
    assert found > 0
    for offloading in engines:
        offloading.settle()
        offloading.close()
