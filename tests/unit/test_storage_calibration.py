"""Calibration of the storage folder: what is measured, kept, and believed only where it was measured."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fdcache.errors import StorageError
from fdcache.manager.base import calibrated_priors
from fdcache.settings import Settings
from fdcache.storage import calibration
from fdcache.storage.calibration import StorageSpeed, load_storage_speed, measure_storage, save_storage_speed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of which little is measured."""
    monkeypatch.setattr(calibration, "_MOST_BYTES", 8 << 20)
    made = tmp_path / "storage"
    made.mkdir()
    return made


def settings_of(tmp_path: Path, folder: Path) -> Settings:
    return Settings.load(
        environ={
            "FDCACHE_STORAGE": "local",
            "FDCACHE_STORAGE_DIR": str(folder),
            "FDCACHE_CALIBRATION_DIR": str(tmp_path / "calibration"),
        }
    )


def test_a_measurement_leaves_no_file(folder: Path) -> None:
    found = measure_storage(folder, threads=2)
    assert found.bytes_per_second > 0
    assert found.latency_seconds > 0
    assert list(folder.iterdir()) == []


def test_a_measurement_that_fails_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(StorageError, match="No space left"):
            measure_storage(folder)
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_missing_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"missing.*make the folder"):
        measure_storage(tmp_path / "missing")


def test_a_file_system_without_direct_reads_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *others: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *others)

    monkeypatch.setattr(os, "open", refuse)
    assert measure_storage(folder, threads=1).bytes_per_second > 0
    assert list(folder.iterdir()) == []


def test_a_measurement_is_the_prior_of_its_folder_only(folder: Path, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, folder)
    assert calibrated_priors(settings).storage == 0.0
    speed = measure_storage(folder, threads=1)
    save_storage_speed(speed, settings.transfer.calibration_dir)
    priors = calibrated_priors(settings)
    assert (priors.storage, priors.storage_latency) == (speed.bytes_per_second, speed.latency_seconds)
    other = tmp_path / "other"
    other.mkdir()
    assert calibrated_priors(settings_of(tmp_path, other)).storage == 0.0


@pytest.mark.parametrize(
    "change",
    [
        {"format": 0},
        {"device": -1},
        {"folder": "/elsewhere"},
        {"bytes_per_second": 0.0},
        {"bytes_per_second": 1e-320},
        {"bytes_per_second": 1e308},
        {"latency_seconds": -1.0},
        {"latency_seconds": 1e308},
    ],
)
def test_a_stale_or_impossible_measurement_is_ignored_and_said(
    folder: Path, tmp_path: Path, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    good = StorageSpeed(calibration.FORMAT, str(folder), folder.stat().st_dev, "2026-01-01", 1e9, 1e-4)
    path = save_storage_speed(good, tmp_path)
    assert load_storage_speed(folder, tmp_path) == good
    path.write_bytes(msgspec.json.encode(replace(good, **change)))
    assert load_storage_speed(folder, tmp_path) is None
    assert "run `fdcache init`" in caplog.text
    path.write_text("{")
    assert load_storage_speed(folder, tmp_path) is None
