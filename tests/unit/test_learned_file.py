"""LearnedFile: tables that a later tier goes on with, and files that are ignored."""

from __future__ import annotations

import hashlib
import logging
import struct
from pathlib import Path

import numpy as np
import pytest

from fdcache import _core
from fdcache.hashing import hash_blocks
from fdcache.tiers.reuse import LearnedFile

NAME = "host.reuse"


def experienced(policy: str = "learned") -> _core.Tier:
    """A tier that has seen a path used three times within a minute."""
    tier = _core.Tier(8, policy)
    hashes = hash_blocks(list(range(16)), 4, parent=bytes(32))
    for step in range(3):
        tier.set_clock(20_000 * step)
        lease = tier.open_lease()
        if not step:
            tier.commit(lease, bytes(32), hashes, tier.reserve(lease, 4).slots)
        tier.match(lease, hashes)
        tier.finish(lease)
    return tier


@pytest.fixture
def path(tmp_path: Path) -> Path:
    LearnedFile(tmp_path / NAME).save(experienced())
    return tmp_path / NAME


def framed(payload: bytes, version: int = 1) -> bytes:
    header = struct.pack("<16sI4xQ", b"fdcache-reuse\0\0\0", version, len(payload))
    return header + hashlib.sha256(payload).digest() + payload


def test_a_later_tier_goes_on_with_the_tables(path: Path) -> None:
    fresh = _core.Tier(100, "learned")
    assert LearnedFile(path).load(fresh)
    assert fresh.save_reuse() == experienced().save_reuse()
    tables, empty = fresh.reuse(), _core.Tier(100, "learned").reuse()
    assert tables is not None and empty is not None
    assert tables.reused.sum() > 0
    assert not np.array_equal(tables.index, empty.index)
    assert [each.name for each in path.parent.iterdir()] == [NAME]


def test_nothing_is_kept_for_an_order_that_does_not_learn(tmp_path: Path) -> None:
    LearnedFile(tmp_path / NAME).save(experienced("lru"))
    assert not list(tmp_path.iterdir())


def test_an_order_that_does_not_learn_reads_no_file(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not LearnedFile(path).load(_core.Tier(8, "lru"))
    assert not caplog.records


def test_a_missing_file_is_not_worth_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not LearnedFile(tmp_path / NAME).load(_core.Tier(8, "learned"))
    assert not caplog.records


NAN = struct.pack("<d", float("nan"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: b"", "not a file of learned tables"),
        (lambda data: b"PNG" + data, "not a file of learned tables"),
        (lambda data: data[:-8], "damaged"),
        (lambda data: data[:9000] + bytes([data[9000] ^ 1]) + data[9001:], "damaged"),
        (lambda data: framed(data[64:], version=2), "version 2"),
        (lambda data: framed(data[64:-8]), "of another version"),
        (lambda data: framed(data[64:-8] + NAN), "of another version"),
        (lambda data: framed(data[64:-8] + struct.pack("<d", -1.0)), "of another version"),
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_with_a_line_in_the_log(
    path: Path, damage: object, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    tier = _core.Tier(8, "learned")
    before = tier.save_reuse()
    with caplog.at_level(logging.WARNING, "fdcache.tiers"):
        assert not LearnedFile(path).load(tier)
    assert words in caplog.text and str(path) in caplog.text
    assert tier.save_reuse() == before


def test_a_file_that_cannot_be_written_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = LearnedFile(tmp_path / "missing" / NAME)
    tier = experienced()
    for _ in range(3):
        file.save(tier)
    assert len(caplog.records) == 1


def test_the_file_is_written_again_only_after_a_while(tmp_path: Path) -> None:
    now = 0.0
    file = LearnedFile(tmp_path / NAME, lambda: now)
    tier = experienced()
    file.save_if_due(tier)
    assert not file.path.exists()
    now = 16.0
    file.save_if_due(tier)
    file.path.unlink()
    now = 31.0
    file.save_if_due(tier)
    assert not file.path.exists()
