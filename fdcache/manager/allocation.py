"""Device blocks for a request: those to be loaded, whose copies are planned here, and those to be computed."""

from __future__ import annotations

from fdcache._core import BlockList
from fdcache.errors import IntegrityError
from fdcache.layout import KVLayout
from fdcache.manager.live_requests import LiveRequests
from fdcache.manager.requests import HostRun, Request
from fdcache.manager.results import NO_BLOCKS, Allocation, AllocationFailure
from fdcache.manager.tiers import Tiers
from fdcache.metadata import SwapPurpose
from fdcache.plans.blocks import Blocks, parents_of
from fdcache.plans.ledger import LoadRange, OpenPlan
from fdcache.tiers.statistics import Counters


class BlockAllocator:
    """Grows block tables, all or nothing per request."""

    def __init__(
        self,
        layout: KVLayout,
        tiers: Tiers,
        live: LiveRequests,
        counters: Counters,
    ) -> None:
        self._block_size = layout.block_size
        self._tiers = tiers
        self._device = tiers.device
        self._host = tiers.host
        self._backups = tiers.backups
        self._live = live
        self._counters = counters

    def allocate(self, request: Request, num_tokens: int, plan: OpenPlan) -> Allocation:
        """Grow the block table to ``num_tokens`` tokens; the first time, plan the loads as well."""
        if request._host_run and not self._host_run_is_loadable(request):
            self._live.defer(request)
            self._counters.deferred_lookups += 1
            return Allocation(request.request_id, failure=AllocationFailure.DEFERRED)
        wanted = -(-num_tokens // self._block_size) - len(request._table)
        if wanted > 0 and (missing := wanted - self._device.available) > 0:
            self._counters.allocation_failures += 1
            if self._backups:
                self._backups.give_way()
            return Allocation(request.request_id, NO_BLOCKS, AllocationFailure.NO_BLOCKS, missing)
        if not request._counted:
            self._count_hits(request)
        if wanted > 0:
            self._take_blocks(request, wanted, plan)
        told, request._told_blocks = request._told_blocks, len(request._table)
        added = request._table.slots[told:] if request._told_blocks > told else NO_BLOCKS
        return Allocation(request.request_id, added)

    def _take_blocks(self, request: Request, wanted: int, plan: OpenPlan) -> None:
        """Extend the block table by so many available blocks, those to be loaded first."""
        # Copies out hold blocks that were evictable, so every slot is taken before the first of them is planned.
        stop = len(request._table) + wanted
        evicted = [self._plan_loads(request, request._host_run, plan)] if request._host_run else []
        if fresh := stop - len(request._table):
            taken = self._device.reserve(request._lease, fresh)
            if taken.missing:
                raise IntegrityError(
                    f"request {request.request_id!r}: {taken.missing} available blocks are gone"
                )
            request._table.extend(taken.slots)
            evicted.append(taken.evicted)
        if self._backups:
            self._backups.on_evict(evicted, plan)

    def _count_hits(self, request: Request) -> None:
        request._counted = True
        on_host = len(request._host_run or ())
        counters = self._counters
        counters.lookups += 1
        counters.lookup_tokens += request.num_tokens
        counters.device_hit_tokens += request._committed_blocks * self._block_size
        from_storage = min(request._fetched_blocks, on_host)
        counters.host_hit_tokens += (on_host - from_storage) * self._block_size
        counters.storage_hit_tokens += from_storage * self._block_size

    def _host_run_is_loadable(self, request: Request) -> bool:
        """Since the match, others may have brought blocks of the run to the device: those are device hits now.

        False: another request is loading the next one, or a reset took the run away; match again later.
        """
        run = request._host_run
        tokens = request._blocks
        if run is None or tokens is None or not request._publishes:
            return False
        found = self._tiers.match(request, tokens.hashes[: run.start + len(run)], run.start)
        if len(found):
            request._table.extend(found.slots)
            request._committed_blocks += len(found)
            if len(found) < len(run):
                request._host_run = run.without(len(found))
            else:
                self._live.drop_host_run(request)
        return not found.pending

    def _plan_loads(self, request: Request, run: HostRun, plan: OpenPlan) -> BlockList:
        """Reserve device blocks for the run and plan its copies; returns what was evicted for them."""
        assert self._host and request._blocks
        stop = run.start + len(run)
        hashes = request._blocks.hashes
        source = Blocks(
            run.slots, run.generations, hashes[run.start : stop], parents_of(hashes, run.start, stop)
        )
        taken = self._device.reserve_copies(request._lease, source.parents, source.hashes)
        if len(taken) != len(run):
            raise IntegrityError(
                f"request {request.request_id!r}: {len(run)} loads got {len(taken)} device blocks"
            )
        self._host.begin_load(request._host_lease, run.slots)
        self._live.drop_host_run(request)
        offset = plan.add(SwapPurpose.LOAD, source, taken.slots, taken.generations, unverified=run.unverified)
        plan.loads.append(LoadRange(request, request._incarnation, offset, len(run), run.start))
        request._loading = True
        request._table.extend(taken.slots)
        return taken.evicted
