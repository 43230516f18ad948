"""The Paddle engine with a storage tier that outlives its process."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fdcache.storage.slab_format import SUFFIX, read_superblock
from tests.paddle_help import ENGINE, GQA, MODELS, Server, assert_as_without_cache, prompt, tokens

SMALL = replace(ENGINE, device_blocks=12, host_blocks=24)


NAMES = ["gqa", "mla", "fp8", "mtp"]
STORAGES = {name: name for name in NAMES} | {"tiers": "gqa", "damaged": "gqa"}
"""Storages by directory, with the model that wrote them; each is for one test."""


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of ``STORAGES``, each written by another process that served a prompt of 150 tokens."""
    folder = tmp_path_factory.mktemp("stored")
    program = f"""
from dataclasses import replace
from pathlib import Path
from tests.integration.test_paddle_storage import SMALL, STORAGES
from tests.paddle_help import MODELS, Server, prompt, tokens
for directory, name in STORAGES.items():
    server = Server(MODELS[name], replace(SMALL, storage=Path({str(folder)!r}) / directory))
    server.serve(prompt("before", tokens(0, 150, server.model.vocab)))
    server.close()
"""
    for directory in STORAGES:
        (folder / directory).mkdir()
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_new_process_reads_the_blocks_of_another_one(storage: Path, name: str) -> None:
    server = Server(MODELS[name], replace(SMALL, storage=storage / name))
    assert server.restored == 9
    tasks = server.serve(prompt("again", tokens(0, 150, server.model.vocab)))
    counters = server.fdcache.manager.get_stats().counters
    assert counters.storage_hit_tokens == tasks[0].cached_tokens
    assert tasks[0].cached_tokens >= 96
    assert_as_without_cache(server, tasks)
    server.close()


def test_a_prefix_is_found_in_three_tiers(storage: Path) -> None:
    server = Server(GQA, replace(SMALL, host_blocks=16, storage=storage / "tiers"))
    shared, whole = prompt("shared", tokens(0, 100)), prompt("whole", tokens(0, 150))
    tasks = server.serve(shared)
    tasks += server.serve(prompt("other", tokens(1, 110)))
    before = server.fdcache.manager.get_stats().counters
    tasks += server.serve(whole)
    after = server.fdcache.manager.get_stats().counters
    for tier in ("device", "host", "storage"):
        name = f"{tier}_hit_tokens"
        assert getattr(after, name) > getattr(before, name), tier
    assert_as_without_cache(server, tasks)
    server.close()


def test_a_block_damaged_on_disk_is_recomputed(storage: Path) -> None:
    (slab,) = (storage / "damaged").rglob(f"*{SUFFIX}")
    damage_records(slab)
    server = Server(GQA, replace(SMALL, storage=storage / "damaged"))
    tasks = server.serve(prompt("again", tokens(0, 150)))
    assert tasks[0].cached_tokens < 128
    assert_as_without_cache(server, tasks)
    server.close()


def damage_records(slab: Path) -> None:
    """Flip a bit in the records of the first slots."""
    with slab.open("r+b") as file:
        superblock = read_superblock(file.fileno(), slab)
        for slot in range(4):
            file.seek(superblock.record_offset + slot * superblock.record_bytes + 100)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))


def test_the_engine_tells_its_speed_and_computes_what_would_load_slower() -> None:
    server = Server(GQA, replace(SMALL, load_or_recompute="auto"))
    server.serve(*(prompt(f"p{seed}", tokens(seed, 150)) for seed in range(3)))
    choices = server.fdcache.manager._choices
    assert choices.figures().prefill_token_seconds > 0
    for _ in range(3):
        choices.model.link.observe(1 << 20, 1000.0, time.monotonic())
    again = server.serve(prompt("again", tokens(0, 150)))
    assert again[0].cached_tokens == 0
    assert choices.figures().nothing == 1
    assert_as_without_cache(server, again)
    server.close()
