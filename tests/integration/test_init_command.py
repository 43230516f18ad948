"""``fdcache init`` on a machine without a GPU, and the picture of a calibration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fdcache.devices.calibration import Calibration, Measurement
from fdcache.devices.link_plot import require_plotting, write_plot
from fdcache.errors import ConfigurationError
from tests.gpu.conftest import missing_gpu


def test_without_a_gpu_it_says_so() -> None:
    if missing_gpu() is None:
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [sys.executable, "-c", "from fdcache_cli.main import run; run()", "init"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_a_calibration_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = tuple(
        Measurement(direction, method, 1 << size, 2, 40.0 + size)
        for direction in ("host to device", "device to host")
        for method in ("direct", "staged", "kernel")
        for size in (14, 16)
    )
    write_plot(Calibration(measurements=found), tmp_path / "link.svg")
    text = (tmp_path / "link.svg").read_text()
    assert "<svg" in text and len(text) > 5000


def test_a_picture_that_cannot_be_written_is_refused_before_the_measurement(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigurationError, match="must end in one of"):
        require_plotting(tmp_path / "link.text")
    with pytest.raises(ConfigurationError, match="does not exist"):
        require_plotting(tmp_path / "no" / "link.svg")
