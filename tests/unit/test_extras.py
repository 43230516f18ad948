"""Extras and classifiers name what the ordinary package index has for each version of Python."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from fdcache.integrations.mooncake.client import remedy_without_client
from tests.commands import fdcache

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSIONS = [
    found[1]
    for each in PROJECT["classifiers"]
    if (found := re.fullmatch(r"Programming .* :: (3\.\d+)", each))
]
OF_USERS = ("cuda12", "cuda13", "paddle", "paddle-gpu", "gpu", "mooncake", "object", "nixl", "plot")
GPU_BUILDS_OF_PADDLE = {"3.11", "3.12"}


def requirements(extra: str, version: str) -> list[Requirement]:
    """Return what an extra installs on a version of Python."""
    found = map(Requirement, PROJECT["optional-dependencies"][extra])
    return [
        each for each in found if each.marker is None or each.marker.evaluate({"python_version": version})
    ]


def test_the_oldest_version_of_python_is_the_first_classifier() -> None:
    assert PROJECT["requires-python"] == f">={VERSIONS[0]}"
    assert sys.version_info >= tuple(map(int, VERSIONS[0].split(".")))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("extra", ["paddle-gpu", "gpu"])
def test_extras_ask_for_gpu_builds_of_paddle_where_there_are_some(extra: str, version: str) -> None:
    names = {each.name for each in requirements(extra, version)}
    assert ("paddlepaddle-gpu" in names) == (version in GPU_BUILDS_OF_PADDLE)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_missing_mooncake_client_names_the_extra_where_the_extra_has_it(version: str) -> None:
    major, minor = map(int, version.split("."))
    names_extra = "pip install fdcache[mooncake]" in remedy_without_client((major, minor))
    assert names_extra == bool(requirements("mooncake", version))


@pytest.mark.nightly
@pytest.mark.parametrize("version", VERSIONS)
def test_every_extra_has_wheels_for_every_version_of_the_classifiers(version: str, tmp_path: Path) -> None:
    wanted = sorted(
        {f"{each.name}{each.specifier}" for extra in OF_USERS for each in requirements(extra, version)}
    )
    for requirement in wanted:
        found = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--only-binary", ":all:"),
                *("--python-version", version, "--target", str(tmp_path / "nothing"), requirement),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if "connection" in found.stderr.lower():
            pytest.skip("the package index cannot be reached")
        assert "Would install" in found.stdout, f"{requirement} on Python {version}: {found.stderr}"


def test_guides_install_from_a_clone() -> None:
    guides = set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "releasing.md"}
    pages = [ROOT / "README.md", *sorted(guides)]
    wrong = [page.name for page in pages if re.search(r"pip install ['\"]?fdcache", page.read_text())]
    assert wrong == []
    assert "pip install ." in (ROOT / "README.md").read_text()


def test_the_readme_names_every_extra_of_users() -> None:
    (listed,) = re.findall(r"are extras:\s+((?:`[\w-]+`,?\s*)+)", (ROOT / "README.md").read_text())
    of_others = {"peers", "test", "dev", "chart", "docs"}
    assert set(re.findall(r"`([\w-]+)`", listed)) == PROJECT["optional-dependencies"].keys() - of_others


def test_the_help_of_serve_names_every_connector_of_storage() -> None:
    shown = " ".join(fdcache("serve", "--help").stdout.split())
    (listed,) = re.findall(r"or a connector: ([\w, ]+)\.", shown)
    assert set(listed.split(", ")) == {
        "local",
        "none",
        *PROJECT["entry-points"]["fdcache.storage_connectors"],
    }
