"""From settings and calibration to how a device copies."""

from __future__ import annotations

from fdcache import _core
from fdcache.devices.calibration import KIB, MIB, Calibration, Thresholds
from fdcache.settings.transfer import SwapMethod, TransferSettings

STAGING_SLOT_BYTES = 16 * MIB
STAGING_SLOTS = 3
"""A ring has one slot being filled, one being emptied and one ready between them."""

_MIN_GROUP = 24 * MIB
_MAX_PIECES = 6144
_MAX_DIRECT_PIECES = 8192
_GROUP_GRAIN = 64 * KIB

_CHOICES = {
    SwapMethod.AUTO: _core.SwapChoice.AUTO,
    SwapMethod.DMA: _core.SwapChoice.DIRECT,
    SwapMethod.STAGED: _core.SwapChoice.STAGED,
    SwapMethod.KERNEL: _core.SwapChoice.KERNEL,
}


def make_policy(settings: TransferSettings, calibration: Calibration, *, batched: bool) -> _core.SwapPolicy:
    """How batches are copied. A budget of no multiprocessors leaves them to the copy engines.

    ``batched`` says whether the driver takes many copies in one call.
    """
    budget = settings.swap_sm_budget
    return _core.SwapPolicy(
        choice=_CHOICES[settings.swap_method],
        to_host=_values(calibration.to_host),
        to_device=_values(calibration.to_device),
        staging_bytes=STAGING_SLOT_BYTES,
        kernel_ctas=min(settings.swap_ctas or calibration.kernel_ctas, budget),
        transpose_ctas=min(calibration.transpose_ctas, budget),
        direct_pieces=_MAX_DIRECT_PIECES,
        batched=batched,
    )


def min_group_bytes(
    settings: TransferSettings, calibration: Calibration, num_blocks: int, record_bytes: int, *, batched: bool
) -> int:
    """Bytes of a record that a group of layers should have in a load of so many blocks.

    Enough for the copy engines to run at full speed, for no more pieces than the submitting thread has time
    for, and for each group to be worth its events. Rounded, so that loads of similar sizes have equal groups.
    """
    wanted = max(_MIN_GROUP // max(num_blocks, 1), num_blocks * record_bytes // _MAX_PIECES)
    staged = settings.swap_method in (SwapMethod.AUTO, SwapMethod.STAGED) and settings.swap_sm_budget > 0
    if batched and staged:
        wanted = max(wanted, 2 * calibration.to_device.staged_column)
    return -(-wanted // _GROUP_GRAIN) * _GROUP_GRAIN


def _values(thresholds: Thresholds) -> list[int]:
    return [thresholds.direct_plane, thresholds.staged_column, thresholds.run_copy]
