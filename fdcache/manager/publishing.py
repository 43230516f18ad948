"""When a request's blocks can be found by others: once they are computed, and the load below them is confirmed."""

from __future__ import annotations

import numpy as np

from fdcache.layout import KVLayout
from fdcache.manager.requests import Request
from fdcache.manager.results import LoadOutcome, LoadStatus
from fdcache.manager.tiers import Tiers
from fdcache.metadata import SwapPurpose
from fdcache.plans.blocks import ROOT
from fdcache.plans.ledger import InFlightPlan, LoadRange
from fdcache.tiers.statistics import Counters


class Publisher:
    """Makes full blocks entries of the device tier, and tells requests how their loads ended."""

    def __init__(
        self,
        layout: KVLayout,
        tiers: Tiers,
        counters: Counters,
    ) -> None:
        self._block_size = layout.block_size
        self._device = tiers.device
        self._host = tiers.host
        self._backups = tiers.backups
        self._counters = counters

    def commit(self, request: Request, num_tokens: int) -> None:
        """Publish the full blocks among the first ``num_tokens`` tokens, but none above an unconfirmed load."""
        request._reported_tokens = num_tokens
        if request._publishes and not request._loading:
            self._publish(request)

    def _publish(self, request: Request) -> None:
        if request._blocks is None:
            return
        hashes = request._blocks.hashes
        # A block that looks ahead has no hash before the tokens are known that its KV depends on.
        start = request._committed_blocks
        stop = min(request._reported_tokens // self._block_size, len(hashes))
        if start >= stop:
            return
        parent = hashes[start - 1].tobytes() if start else ROOT
        status = self._device.commit(
            request._lease, parent, hashes[start:stop], request._table.slots[start:stop]
        )
        request._committed_blocks = start + len(status)
        if request._tenant is not None and self._host:
            self._host.own(hashes[0].tobytes(), request._tenant)
        if self._backups and len(status):
            self._backups.on_commit(hashes[start : start + len(status)], status)

    def confirm(self, load: LoadRange, flight: InFlightPlan) -> LoadOutcome:
        """Every rank has reported the request's load."""
        request = load.request
        request._loading = False
        copied = flight.copied[SwapPurpose.LOAD][load.offset : load.offset + load.count]
        good = load.count if copied.all() else int(np.argmin(copied))
        request._committed_blocks += good
        if good < load.count:
            request.num_cached_tokens = request._committed_blocks * self._block_size
            self._counters.loads_failed += 1
            return self._outcome(
                load, LoadStatus.FAILED, good, "; ".join(flight.errors) or "the cache was reset"
            )
        self._counters.loads_confirmed += 1
        if request._publishes:
            self._publish(request)
        return self._outcome(load, LoadStatus.CONFIRMED, good, None)

    def overdue(self, load: LoadRange) -> LoadOutcome:
        """The load's deadline has passed; its slots wait for the report all the same."""
        self._counters.loads_overdue += 1
        load.request.device_only = True
        return self._outcome(load, LoadStatus.OVERDUE, 0, "no report within the plan's deadline")

    def _outcome(self, load: LoadRange, status: LoadStatus, good: int, message: str | None) -> LoadOutcome:
        recompute_from = (load.first_block + good) * self._block_size
        return LoadOutcome(load.request.request_id, status, recompute_from, message)
