"""Commands that know of buckets and shared folders: inspect, doctor, init."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fdcache.manager.base import calibrated_priors
from fdcache.service.server import machine_findings
from fdcache.service.server.preflight import check_storage
from fdcache.settings import Settings
from fdcache.storage import speed
from fdcache.testing.storage import KnownRecords, conformance_layout, path_of
from tests.commands import everything
from tests.object_help import KEY, KEY_ID, Bucket, open_bucket, open_folder
from tests.service_help import run

LAYOUT = conformance_layout("commands")
COUNT = 10


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store with ten blocks, whose keys are in the environment."""
    if request.param == "folder":
        monkeypatch.setenv("FDCACHE_STORAGE", "shared")
        monkeypatch.setenv("FDCACHE_STORAGE_DIR", str(tmp_path))
        connector: Any = open_folder(tmp_path, LAYOUT, object_bytes=4 * LAYOUT.record_bytes)
        where = str(tmp_path)
    else:
        bucket: Bucket = request.getfixturevalue("s3")
        for name, text in bucket.environment.items():
            monkeypatch.setenv(name, text)
        connector, where = open_bucket(bucket, LAYOUT, object_bytes=4 * LAYOUT.record_bytes), bucket.url
    records = KnownRecords(LAYOUT, COUNT)
    assert connector.put(records.fill(path_of(COUNT, "inspected")), 60.0).ok.all()
    connector.close()
    return where


def inspect(place: str, *options: str, status: int = 0) -> dict[str, Any]:
    done = run("inspect", "storage", place, "--json", *options)
    assert done.returncode == status, everything(done)
    assert not any(secret in everything(done) for secret in (KEY, KEY_ID))
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_inspect_tells_what_is_stored(place: str, tmp_path: Path) -> None:
    found = inspect(place, "--verify")
    (namespace,) = found["namespaces"]
    assert (namespace["model"], namespace["tp_size"], namespace["ranks"]) == ("commands", 1, 1)
    assert (namespace["objects"], namespace["blocks"], namespace["corrupt_blocks"]) == (3, COUNT, 0)
    shown = run("inspect", "storage", place)
    assert "3 objects" in shown.stdout
    assert "commands@1" in shown.stdout
    if "://" not in place:
        largest = max(
            (path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
        )
        content = bytearray(largest.read_bytes())
        content[4096 + LAYOUT.record_bytes + 7] ^= 1
        largest.write_bytes(content)
        assert inspect(place, "--verify", status=1)["corrupt_blocks"] == 1


def reset(place: str, *options: str) -> dict[str, Any]:
    done = run("reset", "storage", place, "--json", *options)
    assert done.returncode == 0, everything(done)
    assert not any(secret in everything(done) for secret in (KEY, KEY_ID))
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_blocks_are_removed_for_every_node(place: str) -> None:
    assert reset(place, "--older-than", "1h", "--yes")["namespaces"] == []
    assert reset(place, "--namespace", "others", "--yes")["blocks"] == 0
    assert reset(place, "--corrupt", "--yes")["blocks"] == 0
    planned = reset(place, "--all", "--dry-run")
    assert (planned["dry_run"], planned["blocks"]) == (True, COUNT)
    assert inspect(place)["namespaces"][0]["blocks"] == COUNT
    (removed,) = reset(place, "--namespace", "commands", "--yes")["namespaces"]
    assert (removed["model"], removed["objects"], removed["blocks"]) == ("commands", 3, COUNT)
    assert inspect(place)["objects"] == 0
    assert "nothing to remove" in run("reset", "storage", place, "--all", "--yes").stdout


def test_only_objects_with_a_corrupt_record_are_removed(place: str, tmp_path: Path) -> None:
    if "://" in place:
        pytest.skip("the bytes of a bucket are not at hand")
    damaged = min(path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 4 * 4096)
    content = bytearray(damaged.read_bytes())
    content[4096 + 7] ^= 1
    damaged.write_bytes(content)
    (removed,) = reset(place, "--corrupt", "--yes")["namespaces"]
    assert removed["objects"] == 1
    assert inspect(place, "--verify")["objects"] == 2


def test_the_speed_of_a_store_is_measured_and_believed(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FDCACHE_CALIBRATION_DIR", str(tmp_path / "calibration"))
    monkeypatch.setattr(speed, "_OBJECT_BYTES", 1 << 16)
    monkeypatch.setattr("fdcache.storage.calibration._MOST_BYTES", 8 << 20)
    settings = Settings.load()
    assert calibrated_priors(settings).storage == 0.0
    (before,) = machine_findings.storage_speed(settings)
    assert before.found == f"{place}: not measured"
    (after,) = machine_findings.storage_speed(settings, measure=True)
    assert (after.hint, after.found.startswith(f"{place}: ")) == (None, True)
    priors = calibrated_priors(settings)
    assert priors.storage > 0
    assert priors.storage_latency > 0
    assert inspect(place)["objects"] == 3, "nothing is left of the measurement"


def test_a_folder_that_is_not_there_is_said_to_be_missing_and_not_made(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for command in (("inspect", "storage"), ("reset", "storage", "--all", "--yes")):
        done = run(*command, f"file://{missing}")
        assert done.returncode != 0, everything(done)
        assert "there is no folder" in everything(done)
        assert not missing.exists()


def test_doctor_tells_whether_a_bucket_answers(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in s3.environment.items():
        monkeypatch.setenv(name, text)
    (found,) = machine_findings._bucket(Settings.load())
    assert (found.found, found.hint) == (f"{s3.url}, answers", None)
    monkeypatch.setenv("FDCACHE_OBJECT_ENDPOINT", "http://127.0.0.1:9")
    (found,) = machine_findings._bucket(Settings.load())
    assert found.found == f"{s3.url}, does not answer"
    assert found.problem is None
    assert not any(secret in str(found.hint) for secret in (KEY, KEY_ID))


def test_a_shared_folder_has_to_be_there_before_a_service_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FDCACHE_STORAGE", "shared")
    monkeypatch.setenv("FDCACHE_STORAGE_DIR", str(tmp_path / "none"))
    (problem,) = check_storage(Settings.load())
    assert "does not make a folder that nodes share" in str(problem)
    (tmp_path / "none").mkdir()
    assert list(check_storage(Settings.load())) == []
