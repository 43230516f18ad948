"""Folders of csrc include only the folders below them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"

BELOW = {
    "hash": set[str](),
    "tier": {"hash"},
    "scheduler": {"hash", "tier"},
    "copy": {"hash"},
    "slab": {"hash", "copy"},
    "swap": set[str](),
    "cuda": {"hash", "copy", "swap"},
    "replay": set[str](),
}


def test_every_folder_has_its_place() -> None:
    assert {folder.name for folder in CSRC.iterdir() if folder.is_dir()} == set(BELOW)


@pytest.mark.parametrize("folder", BELOW)
def test_a_folder_includes_only_what_is_below_it(folder: str) -> None:
    for source in (CSRC / folder).iterdir():
        included = set(re.findall(r'^#include "(\w+)/', source.read_text(), re.MULTILINE))
        assert included <= BELOW[folder] | {folder}, source


def test_headers_for_all_folders_know_none_but_hash() -> None:
    for source in CSRC.glob("*.?pp"):
        included = set(re.findall(r'^#include "(\w+)/', source.read_text(), re.MULTILINE))
        assert included <= {"hash"}, source
