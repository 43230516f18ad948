"""What is in the place of one object, and cannot be read, costs that object alone."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fdcache.storage.connector import Outcome, StorageState
from fdcache.storage.objects.connector import FolderConnector
from fdcache.testing.storage import KnownRecords, conformance_layout, path_of
from tests.object_help import open_folder
from tests.service_help import run

PATIENCE = 60.0
LAYOUT = conformance_layout("strangers")
COUNT, IN_ONE = 8, 4
ALL = [Outcome.OK] * COUNT


def node(folder: Path) -> FolderConnector:
    return open_folder(folder, LAYOUT, object_bytes=IN_ONE * LAYOUT.record_bytes)


def read(connector: FolderConnector, records: KnownRecords, name: str) -> list[Outcome]:
    hashes = path_of(COUNT, name)
    records.wipe()
    found = connector.get(records.batch(hashes), PATIENCE).outcomes.tolist()
    assert all(
        records.holds(slot, hashes[slot].tobytes()) == (outcome == Outcome.OK)
        for slot, outcome in enumerate(found)
    )
    return [Outcome(value) for value in found]


def write(connector: FolderConnector, records: KnownRecords, name: str) -> list[Outcome]:
    found = connector.put(records.fill(path_of(COUNT, name)), PATIENCE).outcomes.tolist()
    return [Outcome(value) for value in found]


def first_object(folder: Path, name: str) -> Path:
    (path,) = folder.rglob(path_of(COUNT, name)[0].tobytes().hex())
    return path


def in_place(make: Callable[[Path], Any]) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def put(path: Path, patch: pytest.MonkeyPatch) -> None:
        path.unlink()
        make(path)

    return put


def failing(number: int) -> Callable[[Path, pytest.MonkeyPatch], None]:
    """Return what makes reads of one file fail, until another one has its name."""

    def fail(path: Path, patch: pytest.MonkeyPatch) -> None:
        real, bad = os.open, path.stat().st_ino

        def opened(name: Any, flags: int, *rest: Any, **named: Any) -> int:
            if str(name) == str(path) and not flags & os.O_WRONLY and path.stat().st_ino == bad:
                raise OSError(number, os.strerror(number), str(name))
            return real(name, flags, *rest, **named)

        patch.setattr(os, "open", opened)

    return fail


STRANGERS = {
    "folder": in_place(Path.mkdir),
    "filled folder": in_place(lambda path: (path / "below").mkdir(parents=True)),
    "pipe": in_place(os.mkfifo),
    "link to itself": in_place(lambda path: path.symlink_to(path)),
}


@pytest.mark.parametrize("kind", [*STRANGERS, "EIO", "EACCES"])
def test_an_object_that_cannot_be_read_is_a_miss_and_the_store_goes_on(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    records, connector = KnownRecords(LAYOUT, COUNT), node(tmp_path)
    assert write(connector, records, "one") == write(connector, records, "two") == ALL
    path = first_object(tmp_path, "one")
    (STRANGERS.get(kind) or failing(getattr(errno, kind)))(path, monkeypatch)
    reader = node(tmp_path)
    for _ in range(2):
        assert read(reader, records, "one") == [Outcome.MISS] * IN_ONE + [Outcome.OK] * IN_ONE
        assert read(reader, records, "two") == ALL
    assert reader.exists(path_of(COUNT, "one"), PATIENCE).length == 0
    told = [each.getMessage() for each in caplog.records if str(path) in each.getMessage()]
    assert len(told) == 1
    stays = kind == "filled folder"
    stored = write(reader, records, "one")
    assert (stored == ALL) is not stays
    assert reader.stats().state is StorageState.READY
    assert (read(reader, records, "one") == ALL) is not stays
    assert write(reader, records, "three") == ALL
    assert not list(tmp_path.rglob("*.draft"))


def test_verify_names_what_cannot_be_read_and_reset_removes_it(tmp_path: Path) -> None:
    records, connector = KnownRecords(LAYOUT, COUNT), node(tmp_path)
    paths = {}
    for kind, put in STRANGERS.items():
        assert write(connector, records, kind) == ALL
        paths[kind] = first_object(tmp_path, kind)
        put(paths[kind], pytest.MonkeyPatch())
    (paths["filled folder"] / "below").rmdir()
    paths["in it"] = paths["filled folder"] / "file"
    paths["in it"].touch()
    shown = run("inspect", "storage", str(tmp_path), "--verify")
    assert shown.returncode == 1
    assert all(path.name in shown.stdout.replace("\n", "") for path in paths.values())
    found = json.loads(run("inspect", "storage", str(tmp_path), "--verify", "--json").stdout)
    assert found["corrupt_objects"] == sorted(str(path.relative_to(tmp_path)) for path in paths.values())
    assert run("reset", "storage", str(tmp_path), "--corrupt", "--yes").returncode == 0
    assert not any(path.exists() or path.is_symlink() for path in paths.values())
    assert run("inspect", "storage", str(tmp_path), "--verify").returncode == 0
