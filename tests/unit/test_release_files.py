"""What a release is made of: licences of all that a wheel carries, and lines that install one of its wheels."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
WHEELS = [
    f"dist/fdcache-0.1.0-cp{python}-cp{python}-manylinux_2_28_{machine}.whl"
    for python in (311, 312, 313, 314)
    for machine in ("x86_64", "aarch64")
]


def test_a_wheel_has_the_notices_of_what_is_compiled_in() -> None:
    compiled = re.findall(r'^    \("(\S+)", \S+, "(\S+)"\),$', (ROOT / "release/sbom.py").read_text(), re.M)
    asked = {name for name, licence in compiled if licence in ("MIT", "BSD-3-Clause")}
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license-files"]
    files = {path.stem: path for pattern in patterns for path in ROOT.glob(pattern)}
    assert asked == {"nanobind", "robin-map"}
    for name in asked:
        assert "Copyright (c)" in files[name].read_text()


def test_each_link_of_the_repository_leads_to_a_file() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
        if "://" not in link
    ]
    assert len(links) > 100
    assert [(str(page), link) for page, link in links if not (page.parent / link).exists()] == []


def test_what_an_index_shows_links_nothing_beside_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / project["readme"]).read_text())
    assert [link for link in links if "://" not in link] == []


def test_each_line_that_installs_from_dist_names_one_wheel() -> None:
    lines = [
        line
        for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        for line in re.findall(r"pip install (dist/[^\s`]+)", page.read_text())
    ]
    assert len(lines) >= 3
    for line in lines:
        assert len([wheel for wheel in WHEELS if fnmatch(wheel, line)]) == 1, line
