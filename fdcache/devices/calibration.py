"""What was measured to be fastest on a machine, kept from one start to the next."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import msgspec

from fdcache.devices.topology import Gpu

logger = logging.getLogger(__name__)

FORMAT = 3
"""Raised when the measurement or its meaning changes; older calibrations are then stale."""

KIB, MIB = 1 << 10, 1 << 20
NEVER = 1 << 62
"""A threshold that no size reaches."""

Limit = Annotated[int, msgspec.Meta(ge=0, le=NEVER)]
ThreadBlocks = Annotated[int, msgspec.Meta(ge=1, le=1024)]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Bytes from which on a way of copying pays, in one direction.

    ``direct_plane``: planes go straight between record and layer by the copy engine. ``staged_column``:
    columns of a record go through the staging ring. ``group_column``: they do so at nearly the link's speed.
    ``run_copy``: a run is one strided copy by itself.
    """

    direct_plane: Limit
    staged_column: Limit
    group_column: Limit = 128 * KIB
    run_copy: Limit = 8 * MIB


@dataclass(frozen=True, slots=True)
class Measurement:
    """One figure: ``gb_per_s`` of ``method`` in pieces of ``piece_bytes``."""

    direction: str
    method: str
    piece_bytes: int
    thread_blocks: int
    gb_per_s: float
    slowdown: float | None = None
    """What it cost a neighbour that multiplies matrices, as a fraction; None where that was not measured."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Which way to copy on one GPU. The defaults are safe anywhere: they suit a PCIe 5 x16 link.

    ``transpose_ctas`` is counted in thread blocks of the kernel that works in place; the default is for the 132
    multiprocessors of an H100 or H200 (see ``policy.choose_calibration``).
    """

    format: int = FORMAT
    gpu: str = ""
    driver: int = 0
    topology: str = ""
    measured_at: str = ""
    to_device: Thresholds = Thresholds(direct_plane=32 * KIB, staged_column=32 * KIB)
    to_host: Thresholds = Thresholds(direct_plane=256 * KIB, staged_column=128 * KIB)
    kernel_ctas: ThreadBlocks = 2
    transpose_ctas: ThreadBlocks = 33
    link_to_device: float = 0.0
    link_to_host: float = 0.0
    measurements: tuple[Measurement, ...] = field(default=())

    def suits(self, gpu: Gpu) -> bool:
        """Whether it was made on this GPU, driver and topology, by this version of the measurement."""
        made_for = (self.format, self.gpu, self.driver, self.topology)
        return made_for == (FORMAT, gpu.uuid, gpu.driver, gpu.topology)

    def made_for(self, gpu: Gpu) -> Calibration:
        """The same, as one of this GPU."""
        return replace(self, gpu=gpu.uuid, driver=gpu.driver, topology=gpu.topology)


def calibration_path(gpu: Gpu, folder: Path) -> Path:
    """Where the calibration of a GPU is kept in ``folder``."""
    return folder / f"{gpu.uuid}.json"


def save_calibration(calibration: Calibration, gpu: Gpu, folder: Path) -> Path:
    """Write it so that a reader sees the old or the new one, never a part; where it is now."""
    path = calibration_path(gpu, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=2))
    draft.replace(path)
    return path


def load_calibration(gpu: Gpu, folder: Path) -> Calibration | None:
    """The calibration of a GPU; None when there is none that suits, or none that can be read."""
    path = calibration_path(gpu, folder)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("the calibration %s cannot be read (%s); run `fdcache init`", path, error)
        return None
    if not found.suits(gpu):
        logger.warning(
            "the calibration %s is of another driver, topology or version; run `fdcache init`", path
        )
        return None
    return found
