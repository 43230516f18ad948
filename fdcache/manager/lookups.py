"""OffloadLookups: what the tiers below an engine's own device cache have for its requests, pinned and loaded."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fdcache.manager import story
from fdcache.manager.base import requests_of
from fdcache.manager.hooks import OffloadHooks
from fdcache.manager.keyed import OffloadRequest
from fdcache.manager.loads import count_of, device_ids_of
from fdcache.manager.offers import OffloadOffers
from fdcache.manager.results import OffloadMatch
from fdcache.manager.states import is_there
from fdcache.metadata import NO_BLOCK, HashArray, Int32Array
from fdcache.plans.ledger import NO_BLOCKS, Blocks
from fdcache.tiers.pool import READY


class OffloadLookups(OffloadOffers):
    """The way in of an ``OffloadManager``: from the arrival of requests to the loads of what ``match`` has pinned."""

    _hooks: OffloadHooks | None

    def begin(self, requests: Iterable[OffloadRequest], *, whole_prompt: bool = False) -> None:
        """Hash requests that have arrived, and start to read their blocks from storage into the host tier.

        ``whole_prompt``: as for ``match``.
        """
        requests = requests_of(requests)
        for request in requests:
            self._requests.prepare(request, keeps_gil=True)
        with self._lock:
            self._set_time()
            for request in requests:
                self._requests.begin_fetch(self._requests.track(request), whole_prompt)

    @property
    def reads_storage(self) -> bool:
        """True if ``begin`` may have something to read: there is storage, here or at the service."""
        fetches = self._host.fetches
        return fetches is not None and fetches.is_on

    def match(
        self, request: OffloadRequest, device_tokens: int, *, whole_prompt: bool = False
    ) -> OffloadMatch:
        """Pin what can be loaded beyond the first ``device_tokens`` tokens, which the engine has on the device.

        The answer is kept until ``load``, ``unmatch`` or ``finish``: asking again with as many tokens or more costs
        nothing. The last token is left to compute unless ``whole_prompt``. Blocks that are sooner computed than loaded
        are left out; see ``observe_prefill``. Nothing is found for ``device_tokens`` in the middle of a block. Raises
        ``HashingError`` for tokens that cannot be hashed; keys of the engine that contradict those stored find nothing;
        ``RequestStateError`` if ``device_tokens`` is not a non-negative int.
        """
        device_tokens = count_of("device_tokens", device_tokens)
        self._requests.prepare(request, keeps_gil=True)
        with self._lock:
            self._set_time()
            began = story.match_begins((request,)) if story.audience.ask() else 0
            found = self._requests.match(request, device_tokens, whole_prompt)
            return story.offload_matched(found, began) if story.audience.listens else found

    def num_copied(self, keys: HashArray) -> int:
        """Return how many leading blocks of a run the host tier has, or gets: this engine has copied them there.

        A service makes such blocks findable a moment later, or drops them, as when a tenant is over its quota.
        """
        with self._lock:
            there = self._host.index.contains(keys) == READY
            return len(there) if there.all() else int(there.argmin())

    def host_has(self, keys: HashArray) -> NDArray[np.bool_]:
        """Return a mask of the blocks that the host tier has."""
        with self._lock:
            return np.asarray(self._host.index.contains(keys) == READY)

    def storage_has(self, keys: HashArray) -> NDArray[np.bool_]:
        """Return a mask of the blocks that the storage may have: a service and a store tell in look-ups alone."""
        with self._lock:
            storage = self._tiers.storage
            if storage is not None:
                return np.asarray(storage.has(keys), np.bool_)
            return np.full(len(keys), self._service is not None)

    def has(self, keys: HashArray) -> NDArray[np.bool_]:
        """Return a mask of the blocks that the tiers have or get; a service is asked what its storage has."""
        with self._lock:
            return is_there(keys, self._host)

    def touch(self, keys: HashArray) -> NDArray[np.bool_]:
        """Return a mask as ``has`` does; what the storage of this process has of these counts as used now."""
        with self._lock:
            if (storage := self._tiers.storage) is not None:
                for i in range(len(keys)):
                    storage.index.run(keys[i : i + 1], 0)
            return is_there(keys, self._host)

    def write(self, keys: HashArray) -> None:
        """Have blocks of the host tier written that are not on their way to this process's storage, with any policy."""
        with self._lock:
            if (storage := self._tiers.storage) is not None:
                storage.write(keys)
                self._must_look = True

    def writes_ended(self, keys: HashArray) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which blocks wait for no write to this process's storage, and which of all are stored there.

        A block that has ended and is not stored was dropped: there was no room, the write failed, or it left the host
        tier before. While the storage takes nothing, nothing waits for it.
        """
        with self._lock:
            if (storage := self._tiers.storage) is not None:
                return storage.writes_ended(keys)
            return np.ones(len(keys), np.bool_), np.zeros(len(keys), np.bool_)

    def found_blocks(self, request: OffloadRequest) -> Blocks:
        """Return the host blocks that ``match`` has pinned for a request."""
        with self._lock:
            tracked = self._requests.get(request)
            return NO_BLOCKS if tracked is None or tracked.found is None else tracked.found.blocks

    def keep_intact(self, request: OffloadRequest, intact: NDArray[np.bool_]) -> int:
        """Forget the records among ``found_blocks`` that are not intact, in the tier too; return the tokens left."""
        with self._lock:
            tracked = self._requests.get(request)
            if tracked is None or tracked.found is None:
                return 0
            found, index, bad = tracked.found, self._host.index, ~intact
            blocks = found.blocks
            self._counters.blocks_corrupt_in_host += int(np.count_nonzero(bad))
            index.begin_load(found.lease, blocks.slots)
            index.end_load(blocks.slots, blocks.hashes, intact.view(np.uint8), bad.view(np.uint8))
            tracked.found = found.part(0, len(found) if intact.all() else int(intact.argmin()))
            return self._requests.tokens(tracked, tracked.remaining)

    @property
    def plan_arena(self) -> str | None:
        """Name of the shared arena that host slots refer to; None if every worker has its own."""
        with self._lock:
            return self._service.plan_arena if self._service is not None else None

    def leave_reads(self, request: OffloadRequest) -> None:
        """Have what is being read for a request read to its end, for requests to come."""
        with self._lock:
            if (tracked := self._requests.get(request)) is not None:
                self._requests.leave_fetch(tracked)

    def unmatch(self, requests: Iterable[OffloadRequest]) -> None:
        """Unpin what ``match`` has found, and tell peers that nothing is fetched; reads from storage go on."""
        with self._lock:
            for request in requests_of(requests):
                if (tracked := self._requests.get(request)) is not None:
                    self._requests.unpin(tracked)
                if self._hooks is not None:
                    self._hooks.unwanted(request)

    def load(self, request: OffloadRequest, device_ids: Int32Array) -> int:
        """Plan to load the blocks found, or the first of them, into these device blocks; return how many.

        Until the next ``take_plans`` the load can be withdrawn by ``cancel_load``.

        With groups of layers ``device_ids`` has for each page the device blocks of its records, in the order of the
        layout's ``page_groups``; ``NO_BLOCK`` stands for a block that the engine does not need. With states it has
        the blocks of all pages found, then one for each of ``state_groups``: fewer load nothing. States that each rank
        has of its own lie in the same device block on all.

        The device blocks count as given away, as by ``evicted``. The load ends with a ``LoadOutcome`` of ``apply`` or
        ``expire``. Return 0 if nothing was found, or it was unpinned since by ``expire``, a reset or the end of the
        session at a service: nothing will be loaded then. Raises ``PlanError`` for ids of no device block, or that are
        listed twice.
        """
        ids = device_ids_of(
            device_ids, with_none=bool(self.layout.groups), distinct=not self._owners.are_apart
        )
        if self._owners.are_apart:
            ids = device_ids_of(self._owners.path(ids), with_none=True, distinct=True)
        with self._lock:
            self._set_time()
            tracked = self._requests.get(request)
            ids = self._requests.loadable(tracked, ids)
            wanted = ids[ids != NO_BLOCK] if self.layout.groups else ids
            if tracked is not None and len(ids):
                tracked.count_lookup(self._counters, self.layout)
            has_load = tracked is not None and len(wanted) > 0
            if tracked is not None and has_load:
                self._give_away(self._owners.every(self._owners.blocks(wanted)))
                planned = self._requests.load(tracked, ids, self._plans.open)
                if story.audience.listens:
                    story.load_planned(request.request_id, planned)
                self._has_planned = True
            if not has_load or self._hooks is not None:
                self.unmatch([request])
            return len(ids) if len(wanted) else 0

    def cancel_load(self, request: OffloadRequest) -> bool:
        """Withdraw the load that is planned for a request, as when it is not scheduled after all.

        True: nothing is copied, no ``LoadOutcome`` follows, and the device blocks are free for others in the same step.
        The request has what it had after ``unmatch``. False if no load is planned, or ``take_plans`` has returned it:
        then it ends with its outcome, and its device blocks stay in use until then.
        """
        with self._lock:
            tracked = self._requests.get(request)
            if tracked is None or not self._requests.withdraw(tracked, self._plans.open, self._plans.ahead):
                return False
            story.load_withdrawn(request.request_id)
            return True

    def loads_of(self, plan_id: int) -> dict[tuple[str, int], bool]:
        """Return (request id, number) of the loads whose blocks a plan in flight loads; True if these are their last.

        So a rank can tell by itself when all plans of a load have ended.
        """
        with self._lock:
            return self._requests.loads.loads_of(plan_id)
