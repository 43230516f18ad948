"""Nodes as processes: killed while they store, or at work side by side."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fdcache.storage.connector import Outcome
from fdcache.testing.storage import KnownRecords, path_of
from tests.object_help import Bucket
from tests.object_node import BLOCKS, LAYOUT, connect

ROOT = Path(__file__).parent.parent.parent
PATIENCE = 60.0


@pytest.fixture(params=["folder", "local bucket", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "folder":
        return str(tmp_path)
    if request.param == "local bucket":
        return f"file://{tmp_path}"
    bucket: Bucket = request.getfixturevalue("s3")
    monkeypatch.setenv("TEST_ENDPOINT", str(bucket.endpoint))
    return bucket.url


def start(place: str, what: str, first: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.object_node", place, what, str(first), str(count)]
    return subprocess.Popen(command, cwd=ROOT, env=dict(os.environ), stdout=subprocess.PIPE, text=True)


def lines(process: subprocess.Popen[str]) -> list[tuple[int, int]]:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return [(int(number), int(done)) for number, done in map(str.split, output.splitlines())]


def test_a_node_that_is_killed_while_it_stores_leaves_nothing_wrong(place: str) -> None:
    records, reader = KnownRecords(LAYOUT, BLOCKS), connect(place)
    for round_ in range(3):
        first = 1000 * round_
        process = start(place, "write", first, 1000)
        assert process.stdout is not None
        told = [process.stdout.readline().split() for _ in range(2 + 3 * round_)]
        process.kill()
        process.communicate()
        assert all(int(done) == BLOCKS for _, done in told)
        for number in range(first, first + len(told) + 3):
            hashes = path_of(BLOCKS, f"path {number}")
            records.wipe()
            found = reader.get(records.batch(hashes), PATIENCE).outcomes.tolist()
            for slot, outcome in enumerate(found):
                assert outcome in (Outcome.OK, Outcome.MISS)
                assert records.holds(slot, hashes[slot].tobytes()) == (outcome == Outcome.OK)
            if number < first + len(told):
                assert found == [Outcome.OK] * BLOCKS, "what was reported as stored is there"
            assert reader.put(records.fill(hashes), PATIENCE).ok.all(), (
                "nothing is in the way of another node"
            )
            records.wipe()
            assert reader.get(records.batch(hashes), PATIENCE).ok.all()
    reader.close()


@pytest.mark.parametrize("place", ["folder", "s3"], indirect=True)
def test_nodes_read_and_write_side_by_side(place: str) -> None:
    writers = [start(place, "write", 0, 12), start(place, "write", 6, 12)]
    reader = start(place, "read", 0, 18)
    assert [done for each in writers for _, done in lines(each)] == [BLOCKS] * 24
    lines(reader)
    assert lines(start(place, "read", 0, 18)) == [(number, BLOCKS) for number in range(18)]
