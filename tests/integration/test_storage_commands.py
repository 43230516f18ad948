"""``fdcache inspect storage`` and ``fdcache reset storage`` on files, without a server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdcache.errors import StorageError
from fdcache.storage.slab_format import read_superblock
from fdcache_cli.slab_files import Selection, remove
from tests.commands import everything
from tests.service_help import run
from tests.storage_help import Records, open_store, path_hashes, storage_layout
from tests.terminals import on_terminal

LAYOUT = storage_layout(model="one")
OTHER = storage_layout(model="two", tp_size=2)


def fdcache(*arguments: object, status: int = 0) -> str:
    done = run(*arguments)
    assert done.returncode == status, everything(done)
    return everything(done)


def inspect(folder: Path, *options: str, status: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        fdcache("inspect", "storage", folder, "--json", *options, status=status)
    )
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten blocks of one model, four on each rank of another, and a file of another program."""
    for layout, rank, count in ((LAYOUT, 0, 10), (OTHER, 0, 4), (OTHER, 1, 4)):
        store = open_store(tmp_path, layout, rank=rank)
        records = Records(layout)
        assert store.put(records.full_batch(path_hashes(count), slots=range(count)), 10).ok.all()
        store.close()
    (tmp_path / "notes.txt").write_text("other")
    return tmp_path


def damage(folder: Path, *slots: int) -> None:
    path = next(path for path in folder.glob("*.slab") if fingerprint_of(path) == LAYOUT.fingerprint)
    with path.open("r+b") as file:
        block = read_superblock(file.fileno(), path)
        for slot in slots:
            os.pwrite(file.fileno(), b"\x99" * 64, block.record_offset + slot * block.record_bytes)


def fingerprint_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return read_superblock(file.fileno(), path).fingerprint


def test_inspect_counts_by_namespace(folder: Path) -> None:
    found = inspect(folder)
    assert (found["blocks"], found["corrupt_blocks"], found["verified"]) == (18, 0, False)
    assert found["bytes"] == 10 * LAYOUT.record_bytes + 8 * OTHER.record_bytes
    by_model = {one["model"]: one for one in found["namespaces"]}
    assert by_model["one"]["blocks"] == 10
    assert by_model["one"]["deepest"] == 9
    assert by_model["two"]["ranks"] == [0, 1]
    assert by_model["one"]["namespace"] == LAYOUT.fingerprint.hex()
    text = fdcache("inspect", "storage", folder)
    assert "18 blocks" in text
    assert "--verify" in text


def test_verify_finds_damaged_records_and_exits_with_1(folder: Path) -> None:
    damage(folder, 3, 7)
    assert inspect(folder)["corrupt_blocks"] == 0
    found = inspect(folder, "--verify", status=1)
    assert found["corrupt_blocks"] == 2
    assert sorted(slot for file in found["files"] for slot in file["corrupt_slots"]) == [3, 7]


def test_inspect_works_while_an_engine_has_the_file(folder: Path) -> None:
    store = open_store(folder, LAYOUT)
    assert inspect(folder)["blocks"] == 18
    assert "an engine is using it" in fdcache(
        "reset", "storage", folder, "--namespace", "one", "--yes", status=1
    )
    store.close()


def test_inspect_reports_a_damaged_file_and_corrupt_removes_it(folder: Path) -> None:
    path = sorted(folder.glob("*.slab"))[0]
    with path.open("r+b") as file:
        file.write(b"\xff" * 8192)
    found = inspect(folder, status=1)
    assert [one["path"] for one in found["damaged_files"]] == [str(path)]
    fdcache("reset", "storage", folder, "--yes", "--corrupt")
    assert not path.exists()
    assert not inspect(folder)["damaged_files"]


def test_a_dry_run_changes_nothing(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.glob("*.slab")}
    assert "would remove" in fdcache("reset", "storage", folder, "--all", "--dry-run")
    assert {path: path.read_bytes() for path in folder.glob("*.slab")} == before


def test_all_removes_slab_files_and_no_others(folder: Path) -> None:
    fdcache("reset", "storage", folder, "--yes", "--all")
    assert not list(folder.glob("*.slab"))
    assert (folder / "notes.txt").read_text() == "other"


def test_reset_without_a_terminal_needs_yes(folder: Path) -> None:
    before = inspect(folder)["blocks"]
    assert "give --yes" in fdcache("reset", "storage", folder, "--all", status=2)
    assert inspect(folder)["blocks"] == before


@pytest.mark.parametrize(("answer", "status"), [("n\n", 1), ("y\n", 0)])
def test_reset_on_a_terminal_names_the_files_and_asks(folder: Path, answer: str, status: int) -> None:
    before = len(list(folder.glob("*.slab")))
    code, asked, output = on_terminal("reset", "storage", str(folder), "--all", "--json", answer=answer)
    assert code == status
    assert "would remove the file and its" in asked
    assert "Remove them? [y/N]" in asked
    assert len(list(folder.glob("*.slab"))) == (0 if status == 0 else before)
    assert output.strip() == "" if status else len(json.loads(output)["files"]) == before


def test_a_namespace_is_a_model_or_the_beginning_of_a_fingerprint(folder: Path) -> None:
    fdcache("reset", "storage", folder, "--yes", "--namespace", "two")
    assert [one["model"] for one in inspect(folder)["namespaces"]] == ["one"]
    fdcache("reset", "storage", folder, "--yes", "--namespace", LAYOUT.fingerprint.hex()[:10])
    assert inspect(folder)["blocks"] == 0


def test_corrupt_removes_damaged_blocks_and_their_descendants(folder: Path) -> None:
    damage(folder, 7)
    fdcache("reset", "storage", folder, "--yes", "--corrupt")
    found = inspect(folder, "--verify")
    assert found["corrupt_blocks"] == 0
    assert {one["model"]: one["blocks"] for one in found["namespaces"]} == {"one": 7, "two": 8}
    store = open_store(folder, LAYOUT)
    assert store.scan().slots.tolist() == list(range(7))
    store.close()


def test_older_than_removes_blocks_by_age(folder: Path) -> None:
    removed = json.loads(fdcache("reset", "storage", folder, "--yes", "--older-than", "1h", "--json"))
    assert removed["blocks"] == 0
    removed = json.loads(fdcache("reset", "storage", folder, "--yes", "--older-than", "0s", "--json"))
    assert removed["blocks"] == 18
    assert inspect(folder)["blocks"] == 0


def test_wrong_usage_is_refused_with_the_reason(folder: Path) -> None:
    assert "say what to remove" in fdcache("reset", "storage", folder, status=2)
    assert "say what to remove" in fdcache("reset", "storage", folder, "--all", "--corrupt", status=2)
    assert "not a duration" in fdcache("reset", "storage", folder, "--older-than", "soon", status=2)
    assert "no such folder" in fdcache("inspect", "storage", folder / "nowhere", status=1)


def test_nothing_to_verify_is_no_success(tmp_path: Path) -> None:
    for options in ((), ("--json",)):
        said = fdcache("inspect", "storage", tmp_path, "--verify", *options, status=1)
        assert said == (
            f"error: {tmp_path}: there are no storage files to verify; give the FDCACHE_STORAGE_DIR of the engine\n"
        )
    assert fdcache("inspect", "storage", tmp_path) == f"{tmp_path}: there are no storage files\n"


def test_a_file_that_never_ends_is_no_prompt(tmp_path: Path) -> None:
    said = fdcache("inspect", "explain", "--tokens", "/dev/zero", status=2)
    assert "/dev/zero has more than 64MiB, which is no prompt" in said


def test_inspect_counts_unreachable_blocks(folder: Path) -> None:
    store = open_store(folder, LAYOUT)
    store.erase(np.array([4], np.int32))
    store.close()
    one = next(each for each in inspect(folder)["namespaces"] if each["model"] == "one")
    assert (one["blocks"], one["unreachable_blocks"], one["deepest"]) == (9, 5, 3)


ALL = Selection(everything=True)


class TestFileByName:
    @pytest.mark.parametrize("selection", [ALL, Selection(corrupt=True)])
    @pytest.mark.parametrize("name", ["thesis.txt", "thesis.slab", "fdcache-notes.slab"])
    def test_a_foreign_file_is_refused_and_gets_no_lock_file(
        self, tmp_path: Path, name: str, selection: Selection
    ) -> None:
        file = tmp_path / name
        file.write_text("a thesis")
        with pytest.raises(StorageError, match="not a slab file of fdcache, nothing is removed"):
            remove(file, selection, dry_run=False)
        assert list(tmp_path.iterdir()) == [file]
        assert file.read_text() == "a thesis"

    def test_the_command_names_a_refused_file(self, folder: Path) -> None:
        notes = folder / "notes.txt"
        told = fdcache("reset", "storage", notes, "--all", "--yes", status=1)
        assert told.startswith(f"error: {notes}: not a slab file of fdcache")
        assert notes.read_text() == "other"

    def test_a_renamed_slab_file_is_refused(self, folder: Path) -> None:
        kept = sorted(folder.glob("*.slab"))[0].rename(folder / "backup.slab")
        with pytest.raises(StorageError, match="not a slab file of fdcache"):
            remove(kept, ALL, dry_run=False)
        assert kept.exists()

    def test_a_link_is_refused_with_its_target(self, folder: Path) -> None:
        slab = sorted(folder.glob("*.slab"))[0]
        link = folder / "links" / slab.name
        link.parent.mkdir()
        link.symlink_to(slab)
        for path in (link, link.parent):
            with pytest.raises(StorageError, match=f"{link}: a link to {slab}; nothing is removed"):
                remove(path, ALL, dry_run=False)
        assert list(link.parent.iterdir()) == [link]
        assert slab.exists()

    def test_slab_files_are_removed_intact_or_damaged(self, folder: Path) -> None:
        whole, damaged, other = sorted(folder.glob("*.slab"))
        damaged.write_bytes(b"\xff" * 8192)
        for path in (whole, damaged):
            assert [one.path for one in remove(path, ALL, dry_run=False)] == [path]
        assert list(folder.glob("*.slab")) == [other]


def test_a_file_with_a_similar_name_stays_in_the_folder(folder: Path) -> None:
    (folder / "fdcache-notes.slab").write_text("other")
    remove(folder, ALL, dry_run=False)
    assert [path.name for path in folder.glob("*.slab")] == ["fdcache-notes.slab"]
