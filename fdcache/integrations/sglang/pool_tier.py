"""PoolTier: look-ups that pin, loads and offers of the pages of one device pool of SGLang."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdcache.controller.layers import LayerDoneCounter
from fdcache.errors import DeviceLostError, FdcacheError
from fdcache.integrations.opening import open_tiers
from fdcache.integrations.sglang.device_pools import DevicePages
from fdcache.integrations.torch_devices import device_of
from fdcache.layout import KVLayout
from fdcache.manager.keyed import KeyedRequest
from fdcache.manager.offers import OfferEnd
from fdcache.manager.results import LoadOutcome, LoadStatus
from fdcache.metadata import HashArray, Int32Array, TransferPlan
from fdcache.settings import Settings
from fdcache.tiers.statistics import CacheStats

logger = logging.getLogger(__name__)

_LOOK_AGAIN = 0.005
"""Seconds between two looks at what others do, such as the service or the storage."""

_POLL = 0.05

_LONG_WAIT = 1.0
"""Seconds of waiting for copies after which the log says so, once."""

COPIES_END_WITHIN = 60.0
"""Seconds within which copies under way end, unless the device is lost: far longer than those of a whole pool take."""


class PoolTier:
    """The pages of one pool, by keys of SGLang; no call waits but ``outcome`` and ``drain``.

    Look-ups may run beside the other calls, of which one runs at a time.

    ``verifies_all``: compare every record with its checksum before it is promised, not only those recovered.
    ``stores``: False for a rank whose pages another rank stores.
    """

    def __init__(
        self, pages: DevicePages, layout: KVLayout, settings: Settings, *, verifies_all: bool, stores: bool
    ) -> None:
        self.pages = pages
        self.layout = layout
        self.stores = stores
        self._verifies_all = verifies_all
        # Only a service recovers records that nobody has read.
        self._may_be_bad = verifies_all or settings.cache.server is not None
        self._names = count(1)
        self._in_flight = 0
        self._copying: set[int] = set()  # plans whose copies use device pages
        self._looked_at = 0.0
        self._outcomes: dict[str, LoadOutcome] = {}
        self._awaited: set[str] = set()
        self.manager, self.controller = open_tiers(
            layout, settings, pages.planes, lambda copies: device_of(pages.device, copies)
        )

    @property
    def stats(self) -> CacheStats:
        """The figures of the tiers, and what was copied."""
        return self.manager.get_stats()

    # --- look-ups -------------------------------------------------------------------------------------------

    def look(self, keys: HashArray) -> KeyedRequest:
        """Begin to look a run up; what is stored of it is read for look-ups to come."""
        name = f"{self.pages.name} {next(self._names)}"
        request = KeyedRequest(name, keys, self.layout.block_size, parent=None)
        if self.manager.reads_storage:
            self.manager.begin([request])
        return request

    def found(self, request: KeyedRequest) -> int:
        """Pin what the host tier has of a run, unless that is pinned; return how many leading pages."""
        found = self.manager.match(request, 0, whole_prompt=True).num_tokens // self.layout.block_size
        return self._verified(request, found) if found and self._may_be_bad else found

    def look_again(self, request: KeyedRequest) -> int:
        """Do so once more, as others may have come."""
        self.manager.unmatch([request])
        return self.found(request)

    def has(self, keys: HashArray) -> NDArray[np.bool_]:
        """Return a mask of the pages that the host tier has."""
        return self.manager.host_has(keys)

    def may_have(self, keys: HashArray) -> NDArray[np.bool_]:
        """Return a mask of the pages that host tier or storage may have."""
        return self.manager.host_has(keys) | self.manager.storage_has(keys)

    def read(self, keys: HashArray) -> None:
        """Have what is stored of a run read, for look-ups to come."""
        request = self.look(keys)
        self.found(request)
        self.end([request])

    def end(self, requests: Iterable[KeyedRequest]) -> None:
        """Unpin, and forget these requests; what is read for them is read to its end."""
        requests = list(requests)
        for request in requests:
            self.manager.leave_reads(request)
            self._awaited.discard(request.request_id)
            self._outcomes.pop(request.request_id, None)
        self.manager.finish(requests)

    def _verified(self, request: KeyedRequest, found: int) -> int:
        """Compare records with their checksums that nobody has verified; those that differ are forgotten."""
        blocks = self.manager.found_blocks(request)
        if blocks.unverified is None and not self._verifies_all:
            return found
        doubtful = (
            np.ones(len(blocks), np.bool_)
            if blocks.unverified is None or self._verifies_all
            else blocks.unverified != 0
        )
        if not doubtful.any():
            return found
        intact = ~doubtful
        intact[doubtful] = self.controller.intact(blocks.select(doubtful), self.manager.plan_arena)
        return self.manager.keep_intact(request, intact) // self.layout.block_size

    # --- loads ----------------------------------------------------------------------------------------------

    def plan_load(self, request: KeyedRequest, slots: Int32Array) -> bool:
        """Plan to load the first pages of what was found into these slots; False if they are gone."""
        planned = self.manager.load(request, slots)
        if planned:
            self._awaited.add(request.request_id)
        return planned == len(slots)

    def cancel_load(self, request: KeyedRequest) -> None:
        """Withdraw a load that is planned and not submitted."""
        self.manager.cancel_load(request)
        self._awaited.discard(request.request_id)

    def submit(self, loads_after: Any, stores_after: Any) -> list[LayerDoneCounter]:
        """Submit what is planned: loads behind one stream, stores behind another; return the counters of the loads."""
        counters = []
        for plan in self.manager.take_plans():
            self._in_flight += 1 + len(plan.tasks)
            self._copying.add(plan.plan_id)
            counter = self._submit(plan, stores_after if plan.loads is None else loads_after)
            if counter is not None and plan.loads is not None:
                counters.append(counter)
        self._looked_at = time.monotonic()
        return counters

    def _submit(self, plan: TransferPlan, after: Any) -> LayerDoneCounter | None:
        try:
            return self.controller.submit_swap_tasks(plan, after)
        except FdcacheError as error:  # the controller reports such a plan as failed
            logger.warning("plan %d is not executed: %s", plan.plan_id, error)
            return None

    def outcome(self, request: KeyedRequest, deadline: float) -> bool:
        """Wait for the end of a load; True if all of it has landed by then. No copy writes its slots afterwards.

        Raises ``DeviceLostError`` for copies that do not end: the engine cannot go on with right bytes then.
        """
        name = request.request_id
        while name not in self._outcomes and name in self._awaited:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._take(self.controller.wait_reports(min(left, _POLL)))
        outcome = self._outcomes.get(name)
        if outcome is not None and outcome.status is LoadStatus.CONFIRMED:
            return True
        self._end_copies()
        return False

    # --- offers ---------------------------------------------------------------------------------------------

    def offer(self, keys: HashArray, slots: Int32Array, above: bytes | None = None) -> int:
        """Offer pages in these slots, below the page ``above`` if that is known; return the number of the offer."""
        name = f"{self.pages.name} offer {next(self._names)}"
        request = KeyedRequest(name, keys, self.layout.block_size, parent=above)
        number = self.manager.offer(request, request.num_tokens, slots, tells_end=True)
        self.manager.finish([request])
        return number

    def take_ends(self) -> list[OfferEnd]:
        """Return the offers that have ended, in their order."""
        return self.manager.take_offer_ends()

    # --- turns ----------------------------------------------------------------------------------------------

    def take_reports(self) -> bool:
        """Take the reports of copies that have ended; return True if there were some."""
        reports = self.controller.poll() if self._in_flight else []
        if reports:
            self._take(reports)
        return bool(reports)

    @property
    def is_due(self) -> bool:
        """True if ``turn`` may have something to do although nothing was offered or has ended."""
        return time.monotonic() - self._looked_at >= _LOOK_AGAIN

    def turn(self, stores_after: Any) -> None:
        """Submit what is to be copied, read or written next."""
        is_due = self.is_due
        if is_due and self._in_flight:
            self._take([])  # plans may be overdue
        if is_due or self.manager.has_queued_copies:
            self.submit(stores_after, stores_after)

    def _take(self, reports: Sequence[Any]) -> None:
        self._in_flight -= len(reports)
        self._copying.difference_update(report.plan_id for report in reports)
        outcomes = self.manager.apply(reports) if reports else []
        for outcome in (*outcomes, *self.manager.expire()):
            self._outcomes[outcome.request_id] = outcome
            if outcome.request_id not in self._awaited:  # asked for last: a look-up may end beside this
                del self._outcomes[outcome.request_id]

    def drain(self, timeout: float) -> bool:
        """Wait until no copy is in flight, and so long for storage; return False if that has not ended.

        Raises ``DeviceLostError`` as ``outcome`` does.
        """
        deadline = time.monotonic() + timeout
        self._end_copies()
        while self._in_flight and time.monotonic() < deadline:
            self._take(self.controller.wait_reports(_POLL))
        return not self._in_flight

    def _end_copies(self) -> None:
        """Wait until no copy reads or writes device pages: the engine gives them to others then."""
        began, is_told = time.monotonic(), False
        while self._copying:
            self._take(self.controller.wait_reports(_POLL))
            waited = time.monotonic() - began
            if self._copying and waited >= COPIES_END_WITHIN:
                raise DeviceLostError(
                    f"copies of the pool {self.pages.name} have not ended within {COPIES_END_WITHIN:g} s: the device "
                    "does not answer, and its pages cannot be given to others; restart the engine"
                )
            if self._copying and waited >= _LONG_WAIT and not is_told:
                is_told = True
                logger.warning(
                    "waiting for copies of the pool %s, %g s at most: they use pages that the engine gives to others",
                    *(self.pages.name, COPIES_END_WITHIN),
                )

    def close(self) -> None:
        """End the copies in flight, free the host memory and leave the service."""
        self.controller.shutdown()
        self.manager.close()
