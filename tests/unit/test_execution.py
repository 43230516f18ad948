"""Plans in flight: waits for events of device and storage."""

from __future__ import annotations

from collections.abc import Sequence

from fdcache.controller.shares import CopyShares
from fdcache.controller.submission import PlansInFlight
from fdcache.devices.cpu import CpuDevice
from fdcache.tasks import CpuEvent, Event
from tests.swaps import uniform_layout


class ForeignDevice(CpuDevice):
    """A device that waits for its own events only, as a GPU does."""

    def wait_any(self, events: Sequence[Event], timeout: float | None = None) -> bool:
        raise TypeError(f"expected an event of this device, got {type(events[0]).__name__}")


def test_storage_events_are_not_passed_to_a_device_that_does_not_know_them() -> None:
    plans = PlansInFlight(ForeignDevice(), CopyShares(uniform_layout(), 0))
    ended, running = CpuEvent(), CpuEvent()
    ended.set()
    assert plans.wait_any([running, ended], 10)
    assert not plans.wait_any([running], 0.01)
