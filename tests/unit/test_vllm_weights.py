"""What local weights are known by: their content, read in part where they are large."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from fdcache.errors import ConfigurationError
from fdcache.integrations.weights import digest_of

_LARGE = 300 << 20
"""Bytes of weights of which only a part is read; most of them are zeros that take no room on the disk."""


def large(folder: Path) -> Path:
    """Write the same large weights into a folder."""
    folder.mkdir()
    with (folder / "model-1.safetensors").open("wb") as file:
        file.write(random.Random(1).randbytes(1 << 20))
        file.truncate(_LARGE)
    (folder / "model-2.bin").write_bytes(b"second")
    (folder / "config.json").write_text("{}")
    return folder


def test_places_and_times_are_not_part_of_the_digest(tmp_path: Path) -> None:
    given, copy = large(tmp_path / "given"), large(tmp_path / "copy")
    os.utime(copy / "config.json", (1, 1))
    (copy / "README.md").write_text("no weights")
    assert digest_of(copy) == digest_of(given) is not None
    (tmp_path / "link").symlink_to(given)
    assert digest_of(tmp_path / "link") == digest_of(given)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """The digest of the large weights."""
    return digest_of(large(tmp_path_factory.mktemp("weights") / "given"))


@pytest.mark.parametrize("place", [0, 1 << 19, _LARGE // 2, _LARGE - 64])
def test_other_weights_of_the_same_size_have_another_digest(
    given: str | None, tmp_path: Path, place: int
) -> None:
    """As much as a single small tensor is seen wherever it is."""
    copy = large(tmp_path / "copy")
    with (copy / "model-1.safetensors").open("r+b") as file:
        file.seek(min(place, _LARGE - (64 << 10)))
        file.write(b"x" * (64 << 10))
    assert (copy / "model-1.safetensors").stat().st_size == _LARGE
    assert given is not None and digest_of(copy) not in (None, given)


def test_names_and_numbers_of_files_are_part_of_the_digest(tmp_path: Path) -> None:
    found = []
    for names in (("a.bin",), ("b.bin",), ("a.bin", "b.bin")):
        folder = tmp_path / "".join(names)
        folder.mkdir()
        for name in names:
            (folder / name).write_bytes(b"weights")
        found.append(digest_of(folder))
    assert len(set(found)) == 3


def test_a_file_of_weights_is_known_by_its_content_and_a_name_by_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"weights")
    assert digest_of(tmp_path / "model.gguf") is not None
    assert digest_of(Path("org/model")) is None
    (tmp_path / "empty").mkdir()
    assert digest_of(tmp_path / "empty") is None


def test_a_file_that_changes_in_place_has_another_digest(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"old")
    before = digest_of(tmp_path)
    weights.write_bytes(b"new")
    os.utime(weights, ns=(1, 1))
    assert digest_of(tmp_path) != before


def test_weights_that_cannot_be_read_are_named() -> None:
    name = "x" * 300
    with pytest.raises(ConfigurationError, match=f"{name} cannot be read: File name too long"):
        digest_of(Path(name))
