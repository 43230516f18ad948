"""OffloadManager: host and storage tier for an engine that owns its device cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from uuid import uuid4

import numpy as np

from fdcache._core import DeviceContents, Loads
from fdcache.block_owners import BlockOwners
from fdcache.errors import ConfigurationError
from fdcache.hints import Hint, HintOutcome
from fdcache.layout import KVLayout
from fdcache.manager import story
from fdcache.manager.hooks import OffloadHooks, OffloadParts
from fdcache.manager.keyed import OffloadRequest
from fdcache.manager.loads import count_of, device_ids_of, table_of
from fdcache.manager.lookups import OffloadLookups
from fdcache.manager.offers import OfferEnd, Offers
from fdcache.manager.offloaded import OffloadedRequests
from fdcache.manager.results import LoadOutcome
from fdcache.metadata import NO_BLOCK, HashArray, Int32Array, TransferPlan
from fdcache.settings import Settings
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.tiers.host import Deleted, PathNote
from fdcache.tiers.statistics import TierUsage


class OffloadManager(OffloadLookups):
    """Host and storage tier of one engine that has a prefix cache of its own on the device, for all its ranks.

    ::

        with OffloadManager.from_settings(layout) as manager:
            manager.begin([request])                                  # it arrives
            found = manager.match(request, device_tokens)             # again in each step until it is admitted
            manager.load(request, device_ids)                         # of the blocks that were found
            manager.evicted(ids)                                      # blocks that get another content in this step
            plans = manager.take_plans()                              # send them to every rank, then compute the step
            manager.offer(request, num_tokens, block_table)           # what the request has after that step
            outcomes = manager.apply(reports)                         # of every rank
            manager.finish([request])

    No device block is held. Every rank submits the plans in order, each before the step computes: a plan's copies run
    behind the steps before it. Calls are thread-safe and take requests that are unknown or have ended. Arguments of
    other types raise ``RequestStateError`` or ``PlanError`` naming them.

    ``settings`` to ``priors``: as for ``TierManager``; the device blocks of the settings have no effect.
    ``loads_ahead=True``: a match also promises blocks that are still being read from storage, once the first have
    come. ``load`` then loads those that are there, and each ``take_plans`` others, while the engine computes other
    requests: a request that loads is computed after its ``LoadOutcome``. It has no effect with groups of layers.
    Raises ``ConfigurationError`` without a host tier, and for windows and states with the write
    policy ``write_through_selective``.
    """

    loads_ahead_by_default = False

    _contents: DeviceContents

    def _check(self, settings: CacheSettings, layout: KVLayout) -> None:
        keeps_parts = layout.has_gaps or layout.num_states
        if keeps_parts and settings.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            raise ConfigurationError(
                "FDCACHE_WRITE_POLICY=write_through_selective: with sliding windows and states a prefix has left the "
                "device in part when it is reused, and could not be stored then; use write_through"
            )
        if settings.server is None and not settings.host_memory:
            raise ConfigurationError(
                "an engine with a device cache of its own needs a host tier; set FDCACHE_HOST_MEMORY or FDCACHE_SERVER"
            )

    @staticmethod
    def _cache_settings(
        settings: Settings, layout: KVLayout, device_bytes: int | Callable[[], int] | None
    ) -> CacheSettings:
        return settings.cache

    def _stages_of_a_load(self, loads_ahead: bool) -> int:
        return 1 if loads_ahead else self.layout.num_layers

    def _make_contents(self) -> DeviceContents:
        return DeviceContents()

    def _make_requests(self, loads_ahead: Callable[[], bool] | bool) -> Loads:
        tiers = self._tiers
        assert tiers.copies is not None
        self._owners = BlockOwners(self.layout)
        self._copies = tiers.copies
        self._hooks: OffloadHooks | None = None
        self._looks_always = tiers.storage is not None or tiers.service is not None
        self._has_planned = False
        self._requests = OffloadedRequests(
            self.settings,
            self.layout,
            self._host,
            self._counters,
            self._clock,
            self._choices,
            streams=bool(loads_ahead),
        )
        self._loads = self._requests.native_loads
        self._offers = Offers(
            self.layout,
            self._requests,
            self._contents,
            self._host,
            self._counters,
            self.settings.state_positions,
        )
        return self._loads

    def attach_hooks(self, hooks: OffloadHooks) -> OffloadParts:
        """Call these hooks from now on; return what they work with. ``EngineHandovers`` does so."""
        with self._lock:
            self._hooks = self._plans.hooks = hooks
            self._requests.released = hooks.released
        seconds = self._choices.seconds_to_compute
        return OffloadParts(self._lock, self._requests, self._counters, self._look, seconds)

    def _look(self) -> None:
        self._must_look = True

    @property
    def store_room(self) -> int:
        """Most blocks that plans may copy to the host tier now; a service grants slots in the background."""
        return self._host.index.room

    @property
    def decides_loads(self) -> bool:
        """True if ``observe_prefill`` has a use: loads are compared with computing."""
        return self._choices.is_auto

    @property
    def has_queued_copies(self) -> bool:
        """True if the next plan may have copies of blocks that were offered."""
        with self._lock:
            return self._contents.has_offers or self._copies.has_queue

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

    def offer(
        self, request: OffloadRequest, num_tokens: int, device_ids: Int32Array, *, tells_end: bool = False
    ) -> int:
        """Offer the whole blocks of the first ``num_tokens`` tokens of a request, which lie in ``device_ids``.

        Call it after ``take_plans`` of the step that computes the last of them, or any time later, with the request's
        block table: the next plan may copy them. Repeated offers extend the first; one with nothing new is cheap. With
        groups of layers the table is that of the pages, as for ``load``, with ``NO_BLOCK`` for blocks that the engine
        has given up: a page is stored if the host tier has those already. Raises ``PlanError`` for ids of no device
        block.

        ``tells_end``: return the number by which ``take_offer_ends`` tells what became of the blocks that are new in
        this offer; else 0. The engine keeps those blocks until then.
        """
        num_tokens = count_of("num_tokens", num_tokens)
        table = self._owners.shared(table_of(device_ids))
        with self._lock:
            offered = self._offers.offer(self._requests.track(request), num_tokens, table)
            if offered is not None:
                self._describe([request])
            return self._offers.number(offered) if tells_end else 0

    def describe(self, keys: HashArray, tokens: Int32Array, parent: bytes, note: PathNote) -> None:
        """Tell a service that asks for it the tokens of blocks with keys of the engine, so that it can tell routers.

        ``parent``: the key of the block before them, empty for the beginning of a prompt.
        """
        with self._lock:
            if self._service is not None and self._service.notes.is_wanted:
                self._service.notes.describe_path(keys.tobytes(), tokens.tobytes(), parent, note)

    def take_offer_ends(self) -> list[OfferEnd]:
        """Return the ends of offers that were asked for, in the order of the offers: one that goes on holds up others.

        A block ends when it is in the host tier, is found to be there, or is dropped. Without a service that can be
        reached the offers end, and what was offered has to be forgotten.
        """
        with self._lock:
            return self._offers.take_ends(self._copies)

    def offer_states(
        self, request: OffloadRequest, num_tokens: int, device_ids: Int32Array, above: int = NO_BLOCK
    ) -> None:
        """Offer the states after the first ``num_tokens`` tokens, one device block for each of ``state_groups``.

        Call it once these tokens are offered, as often as you like: those at the end of the prompt and at growing
        distances are stored, and the last ones when the request ends (``settings.state_positions``). ``above``: the
        device block of the last record of their pages, without which the states are stored only if the host tier has
        that record already. States in the middle of a page, and those of a layout without states, are of no use.
        Raises ``PlanError`` for ids of no device block, or another number of them.
        """
        num_tokens, ids = count_of("num_tokens", num_tokens), self._owners.path(device_ids_of(device_ids))
        above = int(self._owners.shared(np.array([above], np.int32))[0])
        with self._lock:
            self._offers.offer_states(self._requests.track(request), num_tokens, ids, above)

    def evicted(self, device_ids: Int32Array) -> None:
        """Take the device blocks that get another content in the step whose plans are taken next.

        Wanted blocks in them are copied out first, and copies of them in flight are waited for by that step. Call it
        for every block that the step gives to a request, before ``take_plans``.
        """
        ids = self._owners.every(device_ids_of(device_ids))
        with self._lock:
            self._give_away(ids)

    def forget(self, device_ids: Int32Array) -> None:
        """Forget what was offered in these device blocks: it has gone, or is not wanted below."""
        ids = self._owners.every(device_ids_of(device_ids))
        with self._lock:
            self._offers.states.given_away(ids)
            self._contents.forget(ids)

    def next_evicted(self, device_ids: Int32Array) -> None:
        """Take the device blocks that the engine gives away next, coldest first: write_back keeps them clean."""
        ids = self._owners.every(device_ids_of(device_ids))
        if self.settings.write_policy is not WritePolicy.WRITE_BACK:
            return
        with self._lock:
            self._contents.next_evicted(ids)
            self._must_look = True

    def _release(self, requests: list[OffloadRequest]) -> None:
        """Forget requests; ``begin``, ``match`` and ``offer`` begin one anew, and it has to be finished again."""
        for request in requests:
            self._offers.end(request)
            self._requests.finish(request)

    def _give_away(self, ids: Int32Array) -> None:
        self._offers.states.given_away(ids)
        if self._copies.give_away(ids, self._contents, self._plans.open, self._plans.ledger):
            self._has_planned = True

    def _take_hints(self, request: OffloadRequest, hints: Iterable[Hint]) -> Sequence[HintOutcome]:
        self._requests.prepare(request)
        return super()._take_hints(request, hints)

    # --- plans and reports --------------------------------------------------------------------------------

    def take_plans(self, *, is_patient: bool = False) -> list[TransferPlan]:
        """Close the step and return its plans. Every rank has to submit them in this order before it computes.

        ``is_patient``: more steps are sure to follow, so that a few blocks to copy may wait for others.
        """
        with self._lock:
            if self._deletions is not None:
                self._deletions.take()
            has_copies = self._contents.has_offers or self._copies.has_queue
            if not (has_copies or self._has_planned or self._must_look):
                return []
            self._set_time()
            self._copies.is_patient = is_patient
            if self._hints.open:
                self._hints.settle()
            self._requests.loads.plan_parts(self._plans.ahead, self._requests.look)
            self._plans.plan_background()
            plans = self._close_step()
            for plan in plans:
                for swap in (plan.evictions, plan.backups):
                    if swap is not None:
                        self._contents.sent(plan.plan_id, swap.src_block_ids)
            self._has_planned = False
            self._must_look = self._looks_always or bool(self._loads.open) or bool(self._hints.open)
            return plans

    def loads_of(self, plan_id: int) -> dict[tuple[str, int], bool]:
        """Return (request id, number) of the loads whose blocks a plan in flight loads; True if these are their last.

        So a rank can tell by itself when all plans of a load have ended.
        """
        with self._lock:
            return self._requests.loads.loads_of(plan_id)

    def expire(self) -> list[LoadOutcome]:
        """Return the loads whose deadline has passed, each once, and unpin matches that nothing has asked for lately.

        The host blocks of an overdue load stay held until the reports.
        """
        with self._lock:
            self._requests.expire()
            self._plans.expire()
            return self._outcomes()

    @property
    def has_pending_work(self) -> bool:
        """True while plans are in flight, or blocks wait to be copied to the host, to storage or to the device.

        The engine has to go on taking plans.
        """
        with self._lock:
            storage = self._tiers.storage
            has_copies = self._copies.has_work or (storage is not None and storage.writes.has_work)
            has_loads = self._loads.has_ended or bool(self._loads.open)
            has_handovers = self._hooks is not None and self._hooks.has_work
            return bool(self._plans.unfinished) or has_copies or has_loads or has_handovers

    # --- the whole cache ----------------------------------------------------------------------------------

    def weights_changed(self, version: str | None = None) -> int:
        """Forget every block after the engine has loaded other weights in place; return the number in this process.

        What is stored from now on has a revision of its own: of engines and later processes with the weights that the
        layout names, those find it that were told of the same ``version`` of them, without one none. Requests that have
        arrived find and leave nothing. The next plan clears the workers' local storage; a service and a store keep
        their blocks for others. Raises ``LayoutError`` for the version that is there.
        """
        with self._lock:
            named = self.layout.revision.partition("+")[0]
            what = uuid4().bytes if version is None else sha256(version.encode()).digest()
            return self._change_layout(self.layout.with_revision(f"{named}+{what[:8].hex()}"))

    def _forget_on_device(self, deleted: Deleted) -> None:
        self._offers.states.clear()
        if deleted.everything:
            self._tiers.reset_device()
        else:
            self._tiers.delete_from_device(deleted.hashes)

    def take_device_reset(self) -> bool:
        """Return True if an operator of the service asked since the last call to reset the device cache."""
        return self._service is not None and self._service.take_device_reset()

    def _device_usage(self) -> TierUsage:
        return TierUsage(blocks=self._owners.count(self._contents.num_blocks), ready=self._contents.num_known)
