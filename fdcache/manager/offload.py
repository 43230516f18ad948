"""OffloadManager: host and storage tier for an engine that owns its device cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from uuid import uuid4

from fdcache._core import DeviceContents, Loads
from fdcache.block_owners import BlockOwners
from fdcache.errors import ConfigurationError
from fdcache.hints import Hint, HintOutcome
from fdcache.layout import KVLayout
from fdcache.manager.hooks import OffloadHooks, OffloadParts
from fdcache.manager.keyed import OffloadRequest
from fdcache.manager.lookups import OffloadLookups
from fdcache.manager.offers import Offers
from fdcache.manager.offloaded import OffloadedRequests
from fdcache.manager.results import LoadOutcome
from fdcache.metadata import TransferPlan
from fdcache.settings import Settings
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.tiers.host import Deleted
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
    def decides_loads(self) -> bool:
        """True if ``observe_prefill`` has a use: loads are compared with computing."""
        return self._choices.is_auto

    def _release(self, requests: list[OffloadRequest]) -> None:
        """Forget requests; ``begin``, ``match`` and ``offer`` begin one anew, and it has to be finished again."""
        for request in requests:
            self._offers.end(request)
            self._requests.finish(request)

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
