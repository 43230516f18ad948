"""The guides show the code that is there."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fdcache.integrations import fastdeploy

ROOT = Path(__file__).parent.parent.parent
GUIDES = ["docs/embedding.md", "docs/fastdeploy.md", "docs/architecture.md", "docs/migration.md"]
SOURCES = {
    path.name: [line.strip() for line in path.read_text().splitlines()]
    for path in sorted((ROOT / "examples/paddle_engine").glob("*.py"))
}


def blocks(page: str) -> list[list[str]]:
    text = (ROOT / page).read_text()
    return [
        [line.strip() for line in block.splitlines() if line.strip()]
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    ]


def stands_in(lines: list[str], source: list[str]) -> bool:
    return any(source[i : i + len(lines)] == lines for i in range(len(source)))


@pytest.mark.parametrize("lines", blocks("docs/embedding.md"), ids=lambda lines: lines[0][:40])
def test_every_snippet_of_the_embedding_guide_stands_in_the_example(lines: list[str]) -> None:
    assert any(stands_in(lines, source) for source in SOURCES.values())


@pytest.mark.parametrize("module", ["kv_cache.py", "worker.py"])
def test_the_embedding_guide_shows_every_call_into_fdcache(module: str) -> None:
    shown = {line for lines in blocks("docs/embedding.md") for line in lines}
    pattern = r"self\.(manager|controller)\.\w+\(|= (CacheManager|CacheController|Request|CacheSettings)\("
    calls = [line for line in SOURCES[module] if re.search(pattern, line)]
    assert len(calls) >= 6
    assert not [line for line in calls if line not in shown]


@pytest.mark.parametrize("page", GUIDES)
def test_links_and_pictures_are_there(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target


@pytest.mark.parametrize("picture", sorted((ROOT / "docs/images").glob("*.svg")), ids=lambda path: path.name)
def test_pictures_are_well_formed(picture: Path) -> None:
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("section", "owner"), [("CacheManager", "CacheManager"), ("CacheController", "CacheController")]
)
def test_members_that_the_migration_table_keeps_exist(section: str, owner: str) -> None:
    text = (ROOT / "docs/migration.md").read_text()
    table = re.search(rf"## {section}, (.*?)\n## ", text, re.DOTALL)
    assert table is not None
    rows = [line.split("|")[1:4] for line in table[1].splitlines() if line.startswith("| `")]
    known = getattr(fastdeploy, owner)
    kept = [
        name
        for old, now, _ in rows
        if not now.strip().startswith(("gone", "not used"))
        for name in names(old)
    ]
    assert len(kept) > 10
    instance_only = {"swap_layer_done_counter"}
    matched = {"device_nodes", "device_block_ids"}
    for name in kept:
        found = hasattr(known, name) or name in instance_only
        assert found or (name in matched and hasattr(fastdeploy.MatchedPrefix, name)), name


def names(cell: str) -> list[str]:
    """Members named in a cell of the table."""
    quoted = re.findall(r"`(?:MatchResult\.)?([a-z_]+)(?:\([^`]*\))?`", cell)
    return [name for name in quoted if not name.startswith(("write_through", "write_back"))]
