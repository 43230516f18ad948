"""``fdcache env diff``, ``template`` and ``migrate``: commands that read and write files."""

from __future__ import annotations

import json
from pathlib import Path

from tests.commands import everything, fdcache

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
    before = f"# mine\nFD_API_KEY={SECRET}\nexport FD_NVFP4_MOE_BACKEND=flashinfer-cudnn # keep\n"
    file.write_text(before)
    dry = fdcache("env", "migrate", file)
    assert dry.returncode == 0
    assert f"{file}:3: FD_NVFP4_MOE_BACKEND becomes FD_NVFP4_GEMM_BACKEND" in dry.stdout
    assert SECRET not in everything(dry)
    assert file.read_text() == before
    assert fdcache("env", "migrate", file, "--write").returncode == 0
    assert file.read_text() == before.replace("MOE", "GEMM")
    assert "no deprecated names" in fdcache("env", "migrate", file).stdout
