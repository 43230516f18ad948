"""The Paddle engine with blocks that outlive the process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fdcache.storage.slab_format import SUFFIX, read_superblock
from tests.paddle_help import ENGINE, GQA, MODELS, Server, assert_as_without_cache, prompt, tokens

SMALL = replace(ENGINE, device_blocks=12, host_blocks=24)


def serve_elsewhere(folder: Path, name: str = "gqa") -> None:
    """Another process serves a prompt of 150 tokens and ends; its blocks stay in ``folder``."""
    program = f"""
from dataclasses import replace
from pathlib import Path
from tests.integration.test_paddle_storage import SMALL
from tests.paddle_help import MODELS, Server, prompt, tokens
server = Server(MODELS[{name!r}], replace(SMALL, storage=Path({str(folder)!r})))
server.serve(prompt("before", tokens(0, 150, server.model.vocab)))
server.close()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("name", ["gqa", "mla", "fp8", "mtp"])
def test_a_new_process_reads_what_another_one_stored(tmp_path: Path, name: str) -> None:
    serve_elsewhere(tmp_path, name)
    server = Server(MODELS[name], replace(SMALL, storage=tmp_path))
    assert server.restored == 9
    tasks = server.serve(prompt("again", tokens(0, 150, server.model.vocab)))
    counters = server.fdcache.manager.get_stats().counters
    assert counters.storage_hit_tokens == tasks[0].cached_tokens
    assert tasks[0].cached_tokens >= 96
    assert_as_without_cache(server, tasks)
    server.close()


def test_a_path_that_lies_in_three_tiers(tmp_path: Path) -> None:
    serve_elsewhere(tmp_path)
    server = Server(GQA, replace(SMALL, host_blocks=16, storage=tmp_path))
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


def test_a_block_that_was_damaged_on_disk_is_computed_instead(tmp_path: Path) -> None:
    serve_elsewhere(tmp_path)
    (slab,) = tmp_path.rglob(f"*{SUFFIX}")
    damage_records(slab)
    server = Server(GQA, replace(SMALL, storage=tmp_path))
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
