"""Two engines on two nodes, each a process of its own, with a bucket or a folder between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.object_help import Bucket

REPLAY = (
    *("replay", "--requests", "30", "--device-blocks", "150", "--host-memory", "2MiB", "--json"),
    *("--write-policy", "write_through"),
)


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The variables that a node has. It waits for a slow server rather than compute."""
    patient = {"FDCACHE_PREFETCH_POLICY": "wait_complete"}
    if request.param == "folder":
        return patient | {"FDCACHE_STORAGE": "shared", "FDCACHE_STORAGE_DIR": str(tmp_path)}
    bucket: Bucket = request.getfixturevalue("s3")
    return patient | bucket.environment


def start(store: dict[str, str]) -> subprocess.Popen[str]:
    program = "from fdcache_cli.main import run; run()"
    return subprocess.Popen(
        [sys.executable, "-c", program, *REPLAY],
        env={**os.environ, **store},
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    report: dict[str, Any] = json.loads(output)
    assert report["corrupt_blocks"] == report["leaked_slots"] == report["leaked_pins"] == 0
    assert report["verified_blocks"] > 0
    assert report["storage"]["corrupt"] == 0
    return report


def test_a_second_node_finds_what_the_first_stored(store: dict[str, str]) -> None:
    first = finish(start(store))
    assert first["storage"]["stored"] > 0
    killed = start(store)
    assert finish(start(store))["hit_tokens"]["storage"] > first["hit_tokens"]["storage"]
    killed.kill()
    killed.communicate()
    assert finish(start(store))["storage"]["misses"] == 0
