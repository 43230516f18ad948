"""``fdcache env diff``, ``template`` and ``migrate``: commands that read and write files."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

from tests.commands import FDCACHE, everything, fdcache

SECRET = "hunter2-and-more"


def test_diff_of_two_files_and_of_a_file_and_the_environment(tmp_path: Path) -> None:
    one, two = tmp_path / "one.env", tmp_path / "two.env"
    one.write_text(f"FD_DEBUG=1\nFDCACHE_RANKS=2\nFD_API_KEY={SECRET}\n")
    two.write_text("FD_DEBUG=yes\nFDCACHE_RANKS=4\n")
    done = fdcache("env", "diff", one, two, "--json")
    differences = {told["name"]: told for told in json.loads(done.stdout)["differences"]}
    assert done.returncode == 1
    assert set(differences) == {"FDCACHE_RANKS", "FD_API_KEY"}
    assert (differences["FDCACHE_RANKS"]["a"], differences["FDCACHE_RANKS"]["b"]) == (2, 4)
    assert SECRET not in everything(done)
    same = fdcache("env", "diff", two, FD_DEBUG="1", FDCACHE_RANKS="4")
    assert (same.returncode, same.stdout) == (0, "")
    table = fdcache("env", "diff", one)
    assert table.returncode == 1
    assert "environment" in table.stdout
    assert SECRET not in everything(table)


def test_diff_accepts_settings_that_only_a_service_rejects(tmp_path: Path) -> None:
    done = fdcache("env", "check", "--strict", FDCACHE_WRITE_POLICY="write_back")
    assert done.returncode == 0
    assert done.stdout.startswith("note: FDCACHE_WRITE_POLICY (environment), FDCACHE_HOST_MEMORY (default): ")
    file = tmp_path / "a.env"
    file.write_text("FDCACHE_WRITE_POLICY=write_back\nFDCACHE_HOST_MEMORY=0\n")
    given = {"FDCACHE_STORAGE": "local", "FDCACHE_HOST_MEMORY": "0"}
    done = fdcache("env", "diff", file, "--json", **given)
    assert done.returncode == 1
    assert [each["name"] for each in json.loads(done.stdout)["differences"]] == [
        "FDCACHE_WRITE_POLICY",
        "FDCACHE_STORAGE",
    ]


def test_diff_names_the_file_with_the_error(tmp_path: Path) -> None:
    bad = tmp_path / "bad.env"
    bad.write_text("FDCACHE_RANKS=2\nwhat is this\n")
    done = fdcache("env", "diff", bad)
    assert done.returncode == 78
    assert done.stderr.startswith(f"error: {bad} ({bad}:2): it is not of the form NAME=value")
    assert "FDCACHE_ENV_FILE" not in done.stderr


def test_diff_of_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    assert fdcache("env", "diff", tmp_path / "none.env").returncode == 2


def test_template_writes_and_checks_a_file(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    template = ("env", "template", "--format", "markdown", "--output", page)
    assert fdcache(*template, "--check").returncode == 1
    assert fdcache(*template).returncode == 0
    assert fdcache(*template, "--check").returncode == 0
    page.write_text(page.read_text() + "x")
    done = fdcache(*template, "--check")
    assert done.returncode == 1
    assert str(page) in done.stderr
    done = fdcache(*template)
    assert done.returncode == 1
    assert "--force" in done.stderr
    assert page.read_text().endswith("x"), "an edited file is not overwritten unasked"
    assert fdcache(*template, "--force").returncode == 0
    assert fdcache(*template, "--check").returncode == 0
    assert fdcache(*template).returncode == 0, "a file that is right already is no mistake"
    assert fdcache("env", "template", "--check").returncode == 2
    assert fdcache("env", "template", "--output", tmp_path / "no" / "page").returncode == 1


def test_migrate_writes_only_on_request(tmp_path: Path) -> None:
    file = tmp_path / "old.env"
    gone = "FDCACHE_COPY_THREADS=2\nFDCACHE_EXTENT_SIZE_FILE=size # mine\n"
    kept = f"# mine\nFD_API_KEY={SECRET}\nexport FD_NVFP4_MOE_BACKEND=flashinfer-cudnn # keep\n"
    file.write_text(before := gone + kept)
    dry = fdcache("env", "migrate", file)
    assert dry.returncode == 0
    assert dry.stdout.startswith(
        f"{file}:1: FDCACHE_COPY_THREADS dropped, the setting is gone; its default is fixed\n"
        f"{file}:2: FDCACHE_EXTENT_SIZE_FILE dropped, the setting is gone; FDCACHE_HOST_MEMORY decides it\n"
    )
    assert f"{file}:5: FD_NVFP4_MOE_BACKEND becomes FD_NVFP4_GEMM_BACKEND" in dry.stdout
    assert SECRET not in everything(dry)
    assert file.read_text() == before
    assert fdcache("env", "migrate", file, "--write").returncode == 0
    assert file.read_text() == kept.replace("MOE", "GEMM")
    assert "no deprecated names" in fdcache("env", "migrate", file).stdout


def without_room(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a command where no file can grow beyond 1 KiB; byte code would be cut off there, for all who import it."""
    script = 'ulimit -f 1; exec "$@"'
    return subprocess.run(
        ["bash", "-c", script, "bash", str(FDCACHE), *map(str, words)],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path) -> None:
    kept, new = tmp_path / "kept.env", tmp_path / "new.env"
    text = "# a comment\n" * 100 + "FD_NVFP4_MOE_BACKEND=x\n"
    kept.write_text(text)
    for words in (("template", "--force", "--output", kept), ("template", "--output", new)):
        done = without_room("env", *words)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"error: {words[-1]} cannot be written: File too large\n"
    done = without_room("env", "migrate", "--write", kept)
    assert done.returncode == 1
    assert done.stderr == f"error: {kept} cannot be written: File too large\n"
    assert kept.read_text() == text
    assert not new.exists()


def test_a_file_is_written_in_place(tmp_path: Path) -> None:
    file, link = tmp_path / "a.env", tmp_path / "link.env"
    file.write_text("FDCACHE_RANKS=2\n" * 5000)
    file.chmod(0o640)
    link.symlink_to(file)
    assert fdcache("env", "template", "--force", "--output", link).returncode == 0
    assert file.read_text() == fdcache("env", "template").stdout
    assert link.is_symlink() and stat.S_IMODE(file.stat().st_mode) == 0o640


def test_a_template_goes_to_a_pipe() -> None:
    command = [FDCACHE, "env", "template", "--output", "/dev/stdout"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == fdcache("env", "template").stdout


def test_init_without_room_for_the_settings_makes_no_file_and_names_no_line(tmp_path: Path) -> None:
    file = tmp_path / "a.env"
    done = without_room("init", "--yes", "--env-file", file)
    assert done.returncode == 1
    assert f"--env-file: {file} cannot be written: File too large; choose another" in done.stdout
    assert "FDCACHE_ENV_FILE=" not in done.stdout and "needs the settings file" in done.stdout
    assert not file.exists()
