"""A slow disk: deadlines hold for each block, and requests continue without it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fdcache.storage.connector import Outcome
from tests import preload

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def slow_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preload.build("slow_disk", tmp_path_factory.mktemp("slow_disk"))


def run(slow_disk: Path, milliseconds: int, *arguments: str, **environment: str) -> str:
    disk = {"LD_PRELOAD": str(slow_disk), "SLOW_DISK_MS": str(milliseconds)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **disk, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


DEADLINES = """
import json, sys
from pathlib import Path
from tests.storage_help import Records, open_store, path_hashes, storage_layout
layout = storage_layout()
hashes, apart = path_hashes(30), range(0, 60, 2)  # slots that no request can take together
store, records = open_store(Path(sys.argv[1]), layout, threads=1), Records(layout, 30)
batch = records.full_batch(hashes, slots=apart)
late = store.put(batch, 0.6).outcomes.tolist()
assert store.put(batch, 60).ok.all()
for slot in range(30):
    records.wipe(slot)
result = store.get(batch, 0.6)
right = [records.holds(slot, row.tobytes()) for slot, row in enumerate(hashes)]
print(json.dumps([late, result.outcomes.tolist(), right]))
store.close()
"""


def test_no_block_begins_after_the_deadline(slow_disk: Path, tmp_path: Path) -> None:
    written, read, right = json.loads(run(slow_disk, 40, "-c", DEADLINES, str(tmp_path)))
    assert set(read) == {Outcome.OK, Outcome.TIMEOUT}
    assert right == [outcome == Outcome.OK for outcome in read], "a block is read as a whole or not at all"
    assert Outcome.TIMEOUT in written


def replay(slow_disk: Path, folder: Path, milliseconds: int, policy: str, timeout: str) -> dict[str, Any]:
    output = run(
        slow_disk,
        milliseconds,
        *("-m", "fdcache_cli.main", "replay", "--json", "--requests", "60", "--device-blocks", "150"),
        *("--host-memory", "2MiB", "--write-policy", "write_through"),
        *("--storage", str(folder), "--storage-size", "64MiB"),
        FDCACHE_STORAGE_TIMEOUT=timeout,
        FDCACHE_PREFETCH_POLICY=policy,
    )
    report: dict[str, Any] = json.loads(output)
    found = [report[name] for name in ("corrupt_blocks", "leaked_slots", "leaked_pins", "integrity_error")]
    assert found == [0, 0, 0, None]
    assert report["finished"] + report["rejected"] == report["requests"] == 60
    assert report["storage"]["corrupt"] == 0
    return report


@pytest.fixture(scope="module")
def stored(slow_disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the blocks of a replay that no disk delayed."""
    folder = tmp_path_factory.mktemp("stored")
    assert replay(slow_disk, folder, 0, "wait_complete", "60s")["storage"]["timeouts"] == 0
    return folder


# With best_effort a request ends its reads itself, so that a deadline matters least.
@pytest.mark.parametrize(
    "policy", [pytest.param("best_effort", marks=pytest.mark.slow), "timeout", "wait_complete"]
)
def test_requests_continue(slow_disk: Path, stored: Path, tmp_path: Path, policy: str) -> None:
    folder = shutil.copytree(stored, tmp_path / "blocks")
    slow = replay(slow_disk, folder, 15, policy, "100ms")
    assert slow["storage"]["restored_blocks"] > 0
    if policy == "wait_complete":
        assert slow["storage"]["timeouts"] > 0, "deadlines passed"
    assert slow["storage"]["states"] == ["ready"], "a slow disk is not a failing one"
