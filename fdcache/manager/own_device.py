"""OwnDevice: the device tier of a manager that owns the device blocks, and whether it may be used."""

from __future__ import annotations

from enum import StrEnum

from fdcache._core import SLOT_FREE
from fdcache.errors import RequestStateError
from fdcache.manager.base import TierManager
from fdcache.manager.requests import LiveRequests, Request
from fdcache.tiers.host import Deleted
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.statistics import TierUsage


class ManagerState(StrEnum):
    """State of a ``CacheManager``. It plans new copies only while RUNNING."""

    RUNNING = "running"
    PAUSED = "paused"
    ASLEEP = "asleep"


class OwnDevice(TierManager[Request]):
    """A manager with a device tier: its size, its rest and its reset."""

    _requests: LiveRequests
    _device: BlockPool
    _state: ManagerState

    def resize_device_pool(self, num_blocks: int) -> bool:
        """Change the number of device blocks. Return False, and change nothing, while a block beyond it is in use.

        Raises ``ConfigurationError`` for a number of blocks that no pool can have.
        """
        with self._lock:
            return self._device.resize(num_blocks) == 0

    def pause(self) -> int:
        """Plan nothing until ``wakeup``; return the number of plans that are not reported yet.

        Matches are deferred, allocations fail with PAUSED, backups stop. Commits, reports and finishes go on.
        """
        with self._lock:
            if self._state is ManagerState.RUNNING:
                self._state = ManagerState.PAUSED
            return self._plans.in_flight

    def sleep(self) -> None:
        """Pause and forget the device tier, so that the workers may free its memory.

        Raises ``RequestStateError`` while requests are running or copies are in flight.
        """
        with self._lock:
            plans = self._plans.unfinished
            if self._requests or plans:
                raise RequestStateError(
                    f"cannot sleep with {len(self._requests)} requests and {plans} plans in flight; "
                    "pause, finish the requests, take the last plans, apply the reports, then sleep"
                )
            self._state = ManagerState.ASLEEP
            self._tiers.reset_device()

    def wakeup(self) -> None:
        """Resume after ``pause`` or ``sleep``."""
        with self._lock:
            self._state = ManagerState.RUNNING

    @property
    def state(self) -> ManagerState:
        """RUNNING, PAUSED or ASLEEP."""
        return self._state

    @property
    def num_device_blocks(self) -> int:
        """Blocks of the device tier."""
        return self._device.stats().slots

    @property
    def num_free_device_blocks(self) -> int:
        """Device blocks that are neither held nor cached."""
        return self._device.stats().free

    def _device_usage(self) -> TierUsage:
        return self._device.usage()

    def free_device_blocks(self) -> list[int]:
        """Return the slots of the free device blocks. Visits every block."""
        with self._lock:
            return [
                slot for slot in range(self.num_device_blocks) if self._device.node(slot).state == SLOT_FREE
            ]

    def _forget_on_device(self, deleted: Deleted) -> None:
        if deleted.everything:
            self._reset_device()
        else:
            self._tiers.delete_from_device(deleted.hashes)

    def _reset_device(self) -> None:
        self._tiers.reset_device()
        self._requests.forget_found("the device cache was reset")
