"""DecodeReserve: blocks that new requests leave to the running ones after a preemption."""

from __future__ import annotations

from fdcache.settings.engine_serving import SchedulingSettings


class DecodeReserve:
    """How many free blocks a new request must leave.

    None before the first preemption. Each one sets the reserve to ``prefill_reserve`` blocks for each running request;
    it decays by ``prefill_reserve_decay`` a step down to ``prefill_reserve_minimum``.
    """

    def __init__(self, settings: SchedulingSettings) -> None:
        self._settings = settings
        self._each = 0.0
        self._is_on = False

    @property
    def blocks_each(self) -> int:
        """Blocks for each running request."""
        return max(int(self._each), self._settings.prefill_reserve_minimum) if self._is_on else 0

    def note_preemption(self) -> None:
        """Start again with the whole reserve."""
        self._is_on = True
        self._each = float(self._settings.prefill_reserve)

    def note_step(self) -> bool:
        """Decay by one step; returns whether a new request must leave fewer blocks now."""
        before = self.blocks_each
        self._each = max(self._each - self._settings.prefill_reserve_decay, 0.0)
        self._is_on &= self.blocks_each > 0
        return self.blocks_each < before
