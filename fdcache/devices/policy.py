"""From settings and calibration to how a device copies."""

from __future__ import annotations

from fdcache import _core
from fdcache.devices.calibration import MIB, Calibration, Thresholds
from fdcache.settings.transfer import SwapMethod, TransferSettings

STAGING_SLOT_BYTES = 16 * MIB
STAGING_SLOTS = 3
"""A ring has one slot being filled, one being emptied and one ready between them."""

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
        batched=batched,
    )


def min_group_bytes(settings: TransferSettings, calibration: Calibration, *, batched: bool) -> int:
    """Bytes of a record that a group of layers should have for the copy engines to run at full speed."""
    if not batched or settings.swap_sm_budget == 0:
        return 0
    if settings.swap_method in (SwapMethod.AUTO, SwapMethod.STAGED):
        return 2 * calibration.to_device.staged_column
    return 0


def _values(thresholds: Thresholds) -> list[int]:
    return [thresholds.direct_plane, thresholds.staged_column, thresholds.run_copy]
