"""Calibrations of GPUs in files: what ``fdcache init`` has measured of each, for workers and schedulers."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Protocol

import msgspec

from fdcache.machine.decoding import MALFORMED

logger = logging.getLogger(__name__)

FORMAT = 3
"""Raised when the measurement or its meaning changes; older calibrations are then stale."""

KIB, MIB = 1 << 10, 1 << 20
NEVER = 1 << 62
"""A threshold that no size reaches."""

Limit = Annotated[int, msgspec.Meta(ge=0, le=NEVER)]
Speed = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
ThreadBlocks = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class MeasuredGpu(Protocol):
    """What a calibration is made for, and loaded by."""

    @property
    def uuid(self) -> str:
        """Its UUID, which no other process and no order of devices changes."""

    @property
    def driver(self) -> int:
        """Version of its driver."""

    @property
    def topology(self) -> str:
        """Its place and link."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Sizes in bytes from which on a way of copying is faster, in one direction.

    ``direct_plane``: the copy engine copies planes directly between record and layer. ``staged_column``: columns of a
    record go through the staging ring. ``group_column``: they do so at nearly the link's speed. ``run_copy``: a run of
    records is one strided copy.
    """

    direct_plane: Limit
    staged_column: Limit
    group_column: Limit = 128 * KIB
    run_copy: Limit = 8 * MIB


@dataclass(frozen=True, slots=True)
class Measurement:
    """Speed of ``method`` in GB/s, in pieces of ``piece_bytes``."""

    direction: str
    method: str
    piece_bytes: int
    thread_blocks: int
    gb_per_s: float
    slowdown: float | None = None
    """Slowdown of matrix products on the same GPU, as a fraction; None where it was not measured."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Thresholds and thread blocks for one GPU. The defaults are safe anywhere; they suit a PCIe 5 x16 link.

    ``transpose_ctas`` counts thread blocks of the kernel that works in place; its default is for the 132
    multiprocessors of an H100 or H200 (see ``choose_calibration``).
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
    link_to_device: Speed = 0.0
    link_to_host: Speed = 0.0
    measurements: tuple[Measurement, ...] = field(default=())

    def suits(self, gpu: MeasuredGpu) -> bool:
        """Return True when it was made on this GPU, driver and topology, by this version of the measurement."""
        made_for = (self.format, self.gpu, self.driver, self.topology)
        return made_for == (FORMAT, gpu.uuid, gpu.driver, gpu.topology)

    def made_for(self, gpu: MeasuredGpu) -> Calibration:
        """Return a copy that names this GPU, driver and topology."""
        return replace(self, gpu=gpu.uuid, driver=gpu.driver, topology=gpu.topology)


def calibration_path(gpu: MeasuredGpu, folder: Path) -> Path:
    """Return where the calibration of a GPU is kept in ``folder``: by its UUID."""
    return folder / f"{gpu.uuid}.json"


def save_calibration(calibration: Calibration, gpu: MeasuredGpu, folder: Path) -> Path:
    """Write the calibration atomically; return its path."""
    path = calibration_path(gpu, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=2))
    draft.replace(path)
    return path


def load_calibration(gpu: MeasuredGpu, folder: Path) -> Calibration | None:
    """Return the calibration of a GPU; None when it is missing, stale or unreadable."""
    path = calibration_path(gpu, folder)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except FileNotFoundError:
        return None
    except (OSError, *MALFORMED) as error:
        logger.warning("the calibration %s cannot be read (%s); run `fdcache init`", path, error)
        return None
    if not found.suits(gpu):
        logger.warning(
            "the calibration %s is for another driver, topology or version; run `fdcache init`", path
        )
        return None
    return found


def calibrated_link(folder: Path) -> float:
    """Return the bytes a second from host to device of the slowest GPU that is calibrated here; 0.0 without one.

    For processes that use no GPU themselves, such as a scheduler.
    """
    links = []
    for path in sorted(folder.glob("*.json")):
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Calibration)
        except (OSError, *MALFORMED):
            continue  # load_calibration warns of it in the process that uses this GPU
        link = found.link_to_device * 1e9
        if found.format == FORMAT and link >= 1:
            links.append(link)
    return min(links, default=0.0)
