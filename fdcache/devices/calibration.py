"""The fastest way of copying on a GPU: chosen from measurements, used as a policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fdcache import _core
from fdcache.devices.topology import Gpu
from fdcache.machine.calibration import KIB, MIB, NEVER, Calibration, Measurement, Thresholds
from fdcache.settings.cache import CopySettings, SwapMethod

STAGING_SLOT_BYTES = 16 * MIB
STAGING_SLOTS = 3
"""Slots of a staging ring: one is filled, one is emptied, and one is ready between them."""

_MIN_GROUP = 2 * STAGING_SLOT_BYTES
_MAX_PIECES = 6144
_MAX_DIRECT_PIECES = 8192
_SMALL_BATCH_PIECES = 2048
"""Planes of 32 blocks of a model with 32 layers, 256 MiB if a plane has 128 KiB: five milliseconds of the link."""

_GROUP_GRAIN = 64 * KIB
_FULL_SPEED = 0.955
"""Share of the link from which on the copy engines alone, which slow nothing else down, are preferred."""

_CHOICES = {
    SwapMethod.AUTO: _core.SwapChoice.AUTO,
    SwapMethod.DMA: _core.SwapChoice.DIRECT,
    SwapMethod.STAGED: _core.SwapChoice.STAGED,
    SwapMethod.KERNEL: _core.SwapChoice.KERNEL,
}

# --- from measurements to a calibration ---------------------------------------------------------------------


def choose_calibration(
    gpu: Gpu, found: Sequence[Measurement], *, link_to_device: float, link_to_host: float, measured_at: str
) -> Calibration:
    """Choose thresholds and thread blocks from measurements and the link's GB/s in each direction.

    Planes are copied directly from the smallest size that fills the link, columns are staged from the smallest size
    that is faster than the kernel, and the kernel gets the fewest thread blocks that reach 98% of its best speed. The
    transposing kernel gets a quarter as many thread blocks as there are multiprocessors: its small thread blocks then
    share multiprocessors in pairs. One that held more of them would delay other work that needs all.
    """
    kernel = [each for each in found if each.method == "kernel"]
    return Calibration(
        measured_at=measured_at,
        to_device=_thresholds([m for m in found if m.direction == "host to device"], link_to_device),
        to_host=_thresholds([m for m in found if m.direction == "device to host"], link_to_host),
        kernel_ctas=max((_fewest_ctas(kernel, way) for way in {m.direction for m in kernel}), default=2),
        transpose_ctas=-(-gpu.multiprocessors // 4),
        link_to_device=link_to_device,
        link_to_host=link_to_host,
        measurements=tuple(found),
    ).made_for(gpu)


def _thresholds(found: Sequence[Measurement], link: float) -> Thresholds:
    best_kernel = max((m.gb_per_s for m in found if m.method == "kernel"), default=0.0)
    return Thresholds(
        direct_plane=_from_size(found, "direct", _FULL_SPEED * link),
        staged_column=_from_size(found, "staged", best_kernel),
        group_column=_from_size(found, "staged", _FULL_SPEED * link),
    )


def _from_size(found: Iterable[Measurement], method: str, wanted: float) -> int:
    """Return the smallest size from which on every measured size reaches the speed."""
    smallest = NEVER
    for each in sorted((m for m in found if m.method == method), key=lambda m: -m.piece_bytes):
        if each.gb_per_s < wanted:
            break
        smallest = each.piece_bytes
    return smallest


def _fewest_ctas(kernel: Sequence[Measurement], direction: str) -> int:
    rates = {m.thread_blocks: m.gb_per_s for m in kernel if m.direction == direction}
    return min(ctas for ctas, rate in rates.items() if rate >= 0.98 * max(rates.values()))


# --- from a calibration to a policy -------------------------------------------------------------------------


def make_policy(settings: CopySettings, calibration: Calibration, *, batched: bool) -> _core.SwapPolicy:
    """Return the policy by which batches are copied; a budget of no multiprocessors leaves only the copy engines.

    ``batched``: the driver takes many copies in one call.
    """
    budget = settings.swap_sm_budget
    return _core.SwapPolicy(
        choice=_CHOICES[settings.swap_method],
        to_host=_limits(calibration.to_host),
        to_device=_limits(calibration.to_device),
        staging_bytes=STAGING_SLOT_BYTES,
        kernel_ctas=min(calibration.kernel_ctas, budget),
        transpose_ctas=min(calibration.transpose_ctas, budget),
        direct_pieces=_MAX_DIRECT_PIECES,
        small_pieces=_SMALL_BATCH_PIECES,
        batched=batched,
    )


def _limits(thresholds: Thresholds) -> list[int]:
    return [thresholds.direct_plane, thresholds.staged_column, thresholds.run_copy]


def min_group_bytes(
    settings: CopySettings, calibration: Calibration, num_blocks: int, record_bytes: int, *, batched: bool
) -> int:
    """Return the least bytes of a record that a group of layers should have in a load of ``num_blocks`` blocks.

    It suffices for the copy engines to run at full speed, for the submitting thread to keep up, and for each group to
    be worth its events. The result is rounded, so that loads of similar sizes have equal groups.
    """
    wanted = max(_MIN_GROUP // max(num_blocks, 1), num_blocks * record_bytes // _MAX_PIECES)
    staged = settings.swap_method in (SwapMethod.AUTO, SwapMethod.STAGED) and settings.swap_sm_budget > 0
    if batched and staged and calibration.to_device.group_column < NEVER:
        wanted = max(wanted, calibration.to_device.group_column)
    return -(-wanted // _GROUP_GRAIN) * _GROUP_GRAIN
