"""Folders of csrc include only the folders below them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"

BELOW = {
    "hash": set[str](),
    "tier": {"hash"},
    "plan": {"hash", "tier"},
    "scheduler": {"hash", "tier", "plan"},
    "copy": {"hash"},
    "slab": {"hash", "copy"},
    "swap": set[str](),
    "cuda": {"hash", "copy", "swap"},
    "replay": set[str](),
}


def test_every_folder_has_its_place() -> None:
    assert {source.parent.name for source in CSRC.glob("*/*.?pp")} == set(BELOW)


@pytest.mark.parametrize("folder", BELOW)
def test_a_folder_includes_only_what_is_below_it(folder: str) -> None:
    for source in (CSRC / folder).iterdir():
        included = set(re.findall(r'^#include "(\w+)/', source.read_text(), re.MULTILINE))
        assert included <= BELOW[folder] | {folder}, source


def test_headers_for_all_folders_know_none_but_hash() -> None:
    for source in CSRC.glob("*.?pp"):
        included = set(re.findall(r'^#include "(\w+)/', source.read_text(), re.MULTILINE))
        assert included <= {"hash"}, source


def test_no_two_types_of_a_namespace_have_one_name() -> None:
    """The linker would take the functions of either for both."""
    found: dict[tuple[str, str], Path] = {}
    for source in sorted(CSRC.rglob("*.[ch]pp")):
        namespace = ""
        for line in source.read_text().splitlines():
            if opened := re.match(r"namespace ([\w:]*) ?{", line):
                namespace = opened[1] or f"{source}"  # an unnamed one is the file's own
            if named := re.match(r"(?:struct|class) (\w+)(?: final)?(?: :.*)? {", line):
                assert found.setdefault((namespace, named[1]), source) == source


def test_no_two_sources_have_a_function_of_their_own_with_one_name() -> None:
    """Sources are compiled in tens as one; which ones these are changes with each new file."""
    own_function = re.compile(r"(?! |template|struct|class|using)[\w:<>,&* ]+[ &*>](\w+)\(")
    found: dict[tuple[str, str], Path] = {}
    for source in sorted(CSRC.rglob("*.cpp")):
        within: list[str] = []
        for line in source.read_text().splitlines():
            if opened := re.match(r"namespace ([\w:]*) ?{", line):
                within.append(opened[1])
            elif line.startswith("}  // namespace"):
                within.pop()
            elif within and not within[-1] and (named := own_function.match(line)):
                assert found.setdefault((" ".join(within), named[1]), source) == source, named[1]
