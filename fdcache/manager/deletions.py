"""Deletions in a service that this engine forgets on its device, where it would copy the blocks from once more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from fdcache.manager.plans import Plans
from fdcache.tiers.host import Deleted, HostService


class Deletions:
    """Forgets on the device what was deleted in the service, and tells the service when nothing is left of it.

    Copies that are planned or in flight then may be of such blocks: the service takes none of these until it hears that
    they have ended.
    """

    def __init__(self, service: HostService, plans: Plans, forget: Callable[[Deleted], None]) -> None:
        self._service = service
        self._plans = plans
        self._forget = forget
        self._new: int | None = None
        self._ending: deque[tuple[int, set[int]]] = deque()

    def take(self) -> None:
        """Forget what the service has named since the last call."""
        if (deleted := self._service.take_deleted()) is not None:
            self._forget(deleted)
            self._new = deleted.number

    def step_closed(self) -> None:
        """Take note of the plans that have to end, once those of this step are in flight, too."""
        if self._new is not None:
            self._ending.append((self._new, {*self._plans.ledger.plans}))
            self._new = None
        self.tell_ended()

    def tell_ended(self) -> None:
        """Tell the service of deletions of which nothing is being copied any more."""
        number = 0
        while self._ending:
            last, plans = self._ending[0]
            plans.intersection_update(self._plans.ledger.plans)
            if plans:
                break
            number = last
            self._ending.popleft()
        if number:
            self._service.forgot(number)
