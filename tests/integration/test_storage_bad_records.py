"""Records that the disk cannot read or write: each costs its own block, in a store, an engine and a service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fdcache.storage.connector import Outcome
from tests import preload

ROOT = Path(__file__).parent.parent.parent

START = """
import json, logging, os, sys
from pathlib import Path
from fdcache.storage.connector import Outcome
from tests.storage_help import Records, open_store, path_hashes, storage_layout
folder, sectors = Path(sys.argv[1]), Path(os.environ["FAILING_DISK"])
layout = storage_layout()
def fail(file, *slots, ways="r"):
    at = [file.superblock.record_offset + slot * file.superblock.record_bytes for slot in slots]
    sectors.write_text("".join(f"{way} {first} {first}\\n" for way in ways for first in at))
def fail_headers(file, way):
    sectors.write_text(f"{way} {file.superblock.header_offset} {file.superblock.header_offset}\\n")
"""

STORE = (
    START
    + """
store, records, hashes = open_store(folder, layout, retry_after=3600.0), Records(layout, 50), path_hashes(50)
batch = records.full_batch(hashes, slots=range(50))
assert store.put(batch, 10).ok.all()
"""
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preload.build("failing_disk", tmp_path_factory.mktemp("failing_disk"))


@pytest.fixture
def run(library: Path, tmp_path: Path) -> Callable[..., Any]:
    """Run a program on a disk whose sectors it makes fail; return the JSON that it prints."""

    def start(program: str) -> Any:
        folder = tmp_path / "files"
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", program, str(folder)],
            cwd=ROOT,
            env={**os.environ, "LD_PRELOAD": str(library), "FAILING_DISK": str(tmp_path / "sectors")},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return start


def test_an_unreadable_record_costs_only_its_block(run: Callable[..., Any]) -> None:
    found = run(
        STORE
        + """
fail(store.file, 17)
outcomes = [int(store.get(batch.select(slice(slot, slot + 1)), 10).outcomes[0]) for slot in range(50)]
together = store.get(batch, 10).outcomes.tolist()
stats = store.stats()
store.close()
reopened = open_store(folder, layout)
print(json.dumps([outcomes, together, stats.state, stats.bad_slots, stats.errors, reopened.scan().slots.tolist()]))
"""
    )
    others = [slot for slot in range(50) if slot != 17]
    one_by_one, together, state, bad, errors, kept = found
    assert [one_by_one[slot] for slot in others] == [Outcome.OK] * 49
    assert one_by_one[17] == Outcome.BAD_SLOT
    assert together[17] == Outcome.MISS, "its slot is emptied"
    assert [together[slot] for slot in others] == [Outcome.OK] * 49
    assert (state, bad, errors) == ("ready", 1, 0)
    assert kept == others, "another process does not ask for it either"


def test_an_unwritable_record_costs_only_its_block(run: Callable[..., Any]) -> None:
    outcomes, state, kept = run(
        STORE
        + """
fail(store.file, 3, 30, ways="w")
outcomes = store.put(batch, 10).outcomes.tolist()
alone = store.put(batch.select(slice(30, 31)), 10).outcomes.tolist()
print(json.dumps([outcomes + alone, store.stats().state, store.scan().slots.tolist()]))
"""
    )
    bad = {3, 30, 50}
    assert outcomes == [Outcome.BAD_SLOT if slot in bad else Outcome.OK for slot in range(51)]
    assert state == "ready"
    assert kept == [slot for slot in range(50) if slot not in bad]


@pytest.mark.parametrize("way", ["r", "w"])
def test_several_failures_in_a_row_turn_the_store_off_and_lose_no_block(
    run: Callable[..., Any], way: str
) -> None:
    failed, state, resting, back, again, at_the_end = run(
        START
        + f"""
store, records, hashes = open_store(folder, layout, retry_after=0.0), Records(layout, 50), path_hashes(50)
batch = records.full_batch(hashes, slots=range(50))
assert store.put(batch, 10).ok.all()
move = store.get if {way!r} == "r" else store.put
fail(store.file, *range(10, 20), ways={way!r})
some = batch.select(slice(10, 20))
store.health.retry_after = 3600.0
failed, state = move(some, 10).outcomes.tolist(), store.stats().state
resting = move(batch.select(slice(0, 1)), 10).outcomes.tolist()
store.health.retry_at = 0.0
fail(store.file, 12, ways={way!r})
back = move(some, 10).outcomes.tolist()
again = store.put(batch.select(slice(40, 50)), 10).ok.all()
print(json.dumps([failed, state, resting, back, bool(again), store.stats().state]))
"""
    )
    assert failed == [Outcome.ERROR] * 10, "nothing is held against the records of a disk that fails"
    assert state == "off"
    assert resting == [Outcome.ERROR], "it is left alone"
    assert back == [Outcome.BAD_SLOT if slot == 12 else Outcome.OK for slot in range(10, 20)]
    assert again
    assert at_the_end == "ready"


def test_failing_headers_turn_the_store_off(run: Callable[..., Any]) -> None:
    outcomes, state, error, refused = run(
        STORE
        + """
from fdcache.errors import StorageDeviceError
fail_headers(store.file, "w")
outcomes = store.put(batch.select(slice(0, 1)), 10).outcomes.tolist()
stats = store.stats()
store.close()
fail_headers(store.file, "r")
try:
    open_store(folder, layout)
except StorageDeviceError as failure:
    refused = str(failure)
print(json.dumps([outcomes, stats.state, stats.error, refused]))
"""
    )
    assert outcomes == [Outcome.ERROR]
    assert state == "off"
    assert "StorageDeviceError" in error
    assert "see the kernel log" in refused


def test_an_engine_drops_a_bad_block_and_its_descendants_and_never_reads_them_again(
    run: Callable[..., Any],
) -> None:
    first, second, quarantined, bad, asked, state = run(
        START
        + """
from tests.storage_engine import Engine, counters, store_a_path, tokens_of
store_a_path(folder)
engine = Engine(folder)
paths = engine.manager._tiers.storage.pool
nodes = sorted(paths.nodes(range(8)), key=lambda node: node.depth)
fail(engine.store.file, nodes[5].block_id)
first = engine.run("first", tokens_of(1, 8))
bad = counters(engine).bad_storage_slots
stats = engine.manager.get_stats().storage
engine.manager._host.reset()
engine.manager._reset_device()
before = sum(engine.store.reads)
second = engine.run("second", tokens_of(1, 8))
asked = sum(engine.store.reads) - before
slots = {node.block_id for node in paths.nodes(range(paths.stats().slots))}
assert nodes[5].block_id not in slots
state = engine.store.stats().state
engine.close()
print(json.dumps([first.num_cached_tokens // 16, second.num_cached_tokens // 16, stats.quarantined, bad, asked, state]))
"""
    )
    assert first == 5, "the blocks above it were read"
    assert second == 8, "what was computed then is stored again, in other slots"
    assert (quarantined, bad) == (1, 1)
    assert asked == 8
    assert state == "ready"


def test_an_engine_writes_the_block_of_a_failed_slot_to_another(run: Callable[..., Any]) -> None:
    stored, quarantined, writing = run(
        START
        + """
from tests.storage_engine import Engine, tokens_of
engine = Engine(folder)
fail(engine.store.file, 2, ways="w")
engine.run("first", tokens_of(1, 8))
engine.settle()
stats = engine.manager.get_stats().storage
print(json.dumps([stats.ready, stats.quarantined, stats.writing]))
engine.close()
"""
    )
    assert stored == 8
    assert quarantined == writing == 1


def test_a_service_loses_only_the_bad_block_and_reports_it(run: Callable[..., Any]) -> None:
    figures, lines = run(
        START
        + """
import tempfile
from fdcache.manager import MatchStatus, Request
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from fdcache.service.server.metrics import render
from fdcache.service.wire.views import (ServiceView)
from fdcache.settings.cache import PrefetchPolicy, StorageTierSettings
from tests.integration.test_serve_storage import BLOCKS, storage_settings
from tests.service_engine import PROMPT, Engine
from tests.service_help import local_service, until
with tempfile.TemporaryDirectory(prefix="fdcache-test") as runtime:
    with local_service(Path(runtime), **storage_settings(folder)) as service:
        stored = lambda: service.ask("stats")["storage"]
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: stored()["blocks"] == BLOCKS, "all is stored")
        (storage,) = service.service.storage.layouts.values()
        nodes = sorted(storage.index.pool.nodes(range(BLOCKS)), key=lambda node: node.depth)
        fail(storage.queues[0].storage.file, nodes[3].block_id)
        service.ask("reset", tier="host")
        engine.close()
        reader = Engine(service.address, fetches=StorageTierSettings(prefetch_policy=PrefetchPolicy.WAIT_COMPLETE))
        request = Request("look", PROMPT)
        until(
            lambda: reader.manager.match_prefix([request])[0].status is not MatchStatus.DEFERRED,
            "what can be read was read",
        )
        reader.manager.finish([request])
        reader.serve(PROMPT)
        until(lambda: stored()["quarantined"], "the bad record was found")
        until(lambda: stored()["blocks"] == BLOCKS, "what was computed again is stored in other slots")
        storage.index.pool.verify()
        stats = service.ask("stats")
        figures = stats["storage"]
        text = render(msgspec.convert(stats, ServiceView)).decode()
        lines = [
            [sample.name, sample.labels.get("reason"), sample.value]
            for metric in text_string_to_metric_families(text)
            for sample in metric.samples
        ]
        reader.close()
print(json.dumps([figures, lines]))
"""
    )
    (layout,) = figures["layouts"]
    assert layout["state"] == "ready"
    assert layout["quarantined"] == 1
    assert (layout["totals"]["bad_slots"], layout["totals"]["errors"]) == (1, 0)
    assert ["fdcache_storage_failed_blocks_total", "bad_slot", 1.0] in lines
    assert ["fdcache_storage_quarantined_blocks", None, 1.0] in lines


def test_verify_counts_an_unreadable_record(run: Callable[..., Any]) -> None:
    corrupt, removed = run(
        STORE
        + """
from fdcache_cli.slab_files import Selection, read_file, remove
fail(store.file, 17)
path = store.path
store.close()
corrupt = read_file(path, verify=True).corrupt.tolist()
(removal,) = remove(folder, Selection(corrupt=True), dry_run=True)
print(json.dumps([corrupt, removal.blocks]))
"""
    )
    assert corrupt == [17]
    assert removed == 50 - 17, "with all that hangs below it"
