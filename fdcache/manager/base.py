"""TierManager: the parts of a manager that do not depend on who owns the device cache."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from types import TracebackType
from typing import ClassVar, Self

import msgspec

from fdcache import tracing
from fdcache._core import DeviceContents, Loads
from fdcache.errors import ConfigurationError, PlanError, RequestStateError
from fdcache.groups import record_keys
from fdcache.hints import Hint, HintOutcome
from fdcache.layout import KVLayout
from fdcache.machine.calibration import calibrated_link
from fdcache.manager import story
from fdcache.manager.cost import NO_PRIORS, Priors
from fdcache.manager.load_choices import LoadChoices
from fdcache.manager.plans import Deletions, Plans
from fdcache.manager.requests import Request
from fdcache.manager.results import LoadOutcome
from fdcache.manager.tier_views import RequestT_contra, TierViews
from fdcache.manager.tiers import make_tiers
from fdcache.metadata import StorageScan, SwapPurpose, TransferPlan, TransferReport
from fdcache.settings import Settings, logs
from fdcache.settings.cache import CacheSettings, StorageTierSettings
from fdcache.settings.checks import log_misspelt, require_host_tier
from fdcache.storage.calibration import load_storage_speed
from fdcache.storage.connector import ConnectorContext, StorageConnector
from fdcache.storage.factory import open_lookup
from fdcache.storage.speed import measured_place
from fdcache.tiers.hint_book import RequestHints
from fdcache.tiers.host import Deleted, HostCache, HostTier
from fdcache.tiers.reuse import RecentReuse
from fdcache.tiers.statistics import Counters


class TierManager(TierViews[RequestT_contra]):
    """Base of ``CacheManager`` and ``OffloadManager``: all that does not depend on who owns the device cache.

    ``settings``, ``layout``: tiers and planes; each of the ``layout.tp_size`` ranks has to report every plan.
    ``storage``: turns the storage tier on. Without ``lookup`` it consists of the ranks' local files, which
    ``restore_storage`` has to be called for; with it of a store that ``lookup`` asks and ``close`` closes. ``clock``
    returns seconds; ``reuse_clock``, by default ``clock``, those by which tiers learn of reuse and choose what to
    evict, as the time of a replayed workload. ``priors``: speeds as calibrated; see ``observe_prefill``.

    Raises ``ConfigurationError`` if the host memory is smaller than one block, or storage has no host tier.
    """

    loads_ahead_by_default: ClassVar[bool]

    _host: HostTier | None

    def __init__(
        self,
        settings: CacheSettings,
        layout: KVLayout,
        *,
        storage: StorageTierSettings | None = None,
        lookup: StorageConnector | None = None,
        clock: Callable[[], float] = time.monotonic,
        reuse_clock: Callable[[], float] | None = None,
        priors: Priors = NO_PRIORS,
        loads_ahead: Callable[[], bool] | bool | None = None,
    ) -> None:
        self._check(settings, layout)
        self.settings = settings
        self.layout = layout
        self._storage_lookup = lookup
        self._lock = RLock()
        self._counters = counters = Counters()
        self._clock = clock
        self._hint_clock = reuse_clock or clock
        self._reuse_clock = None if self._hint_clock is time.monotonic else self._hint_clock
        self._must_look = True  # something may follow from what is not in the open plans
        storage = storage or StorageTierSettings()
        self._contents = self._make_contents()
        tiers = self._tiers = make_tiers(settings, layout, storage, lookup, counters, clock, self._contents)
        self._host, self._service = tiers.host, tiers.service
        ahead = self.loads_ahead_by_default if loads_ahead is None else loads_ahead
        streams = bool(ahead) and tiers.fetches is not None and tiers.copies is not None
        mode = settings.load_or_recompute
        self._choices = LoadChoices(
            mode,
            layout,
            clock,
            self._blocks_being_loaded,
            priors,
            stages=self._stages_of_a_load(bool(ahead)),
            streams=streams,
        )
        loads = self._make_requests(ahead)
        self._plans = Plans(layout, settings.plan_timeout, tiers, loads, counters, clock)
        self._deletions: Deletions | None = None
        if tiers.service is not None:
            self._deletions = Deletions(tiers.service, self._plans, self._forget_on_device)
        hints = tiers.service.hints if tiers.service is not None else None
        self._hints = RequestHints(list(tiers.own_pools.values()), hints, layout, self._hint_clock)
        self._reuse = RecentReuse(tiers.reuse)
        self._set_time()
        if tiers.service is not None:
            tiers.service.notes.on_session(self._greet)

    def _stages_of_a_load(self, loads_ahead: bool) -> int:
        """Return the number of groups of layers that are loaded while the layers before them compute."""
        return self.layout.num_layers

    @classmethod
    def from_settings(
        cls,
        layout: KVLayout,
        settings: Settings | None = None,
        *,
        device_bytes: int | Callable[[], int] | None = None,
        lookup: StorageConnector | None = None,
        clock: Callable[[], float] = time.monotonic,
        loads_ahead: Callable[[], bool] | bool | None = None,
    ) -> Self:
        """Make a manager from settings, by default those of the environment.

        ``settings``: ``Settings.load()``, or ``Settings.load(arguments=...)`` with values above the environment.
        ``device_bytes``: memory of one rank's device, used only if ``FDCACHE_DEVICE_MEMORY`` is a share. ``lookup``:
        replaces the connector of the settings.

        Raises ``SettingsError`` for settings that are wrong or do not fit the layout, ``StorageError`` if the
        connector cannot be opened.
        """
        settings = _settings_for(layout, settings)
        with _lookup_for(layout, settings, lookup) as store:
            return cls(
                cls._cache_settings(settings, layout, device_bytes),
                layout,
                storage=settings.storage_tier,
                lookup=store,
                clock=clock,
                priors=calibrated_priors(settings),
                loads_ahead=loads_ahead,
            )

    @staticmethod
    @abstractmethod
    def _cache_settings(
        settings: Settings, layout: KVLayout, device_bytes: int | Callable[[], int] | None
    ) -> CacheSettings:
        """Return the settings of the tiers."""

    @abstractmethod
    def _check(self, settings: CacheSettings, layout: KVLayout) -> None:
        """Raise ``ConfigurationError`` for what this manager cannot do."""

    def _make_contents(self) -> DeviceContents | None:
        """Return what the engine tells of its own device cache, None for a device tier of the manager."""
        return None

    @abstractmethod
    def _make_requests(self, loads_ahead: Callable[[], bool] | bool) -> Loads:
        """Make ``_requests``, once there are tiers; return their loads."""

    def _set_time(self) -> None:
        """Give the caller's time to the tiers, whose order of eviction depends on it."""
        if self._reuse_clock is not None:
            self._tiers.set_clock(self._reuse_clock())

    def close(self) -> None:
        """Leave the service, which frees what this engine held there, and close the storage look-up. Idempotent.

        Call it after every worker has shut down.
        """
        if self._service is not None:
            self._service.close()
        if self._storage_lookup is not None:
            self._storage_lookup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def host_cache(self) -> HostCache:
        """The argument of every rank's ``CacheController.initialize_host_cache``: plain data."""
        return self._tiers.host.host_cache if self._tiers.host else HostCache()

    def restore_storage(self, scans: Sequence[StorageScan]) -> int:
        """Make the blocks in the ranks' local storage findable; return their number.

        Before this call nothing is read from local storage or written to it. ``scans``: those of
        ``CacheController.open_storage``. Raises ``PlanError`` unless there is one for each rank with
        bytes of its own.
        """
        with self._lock:
            ranks = sorted(scan.rank for scan in scans if isinstance(scan, StorageScan))
            expected = self.layout.record_ranks
            if ranks != list(range(expected)) or len(ranks) < len(scans):
                raise PlanError(f"restore_storage needs a scan of each of the {expected} ranks")
            return self._tiers.storage.restore(scans) if self._tiers.storage else 0

    def prepare(self, requests: Iterable[RequestT_contra]) -> None:
        """Hash the tokens of requests that have arrived, so that their match need not.

        Takes no lock and releases the GIL: call it in the thread that tokenizes, beside the steps. Raises
        ``HashingError`` for tokens that cannot be hashed.
        """
        for request in requests:
            self._requests.prepare(request)

    def load_of(self, request: RequestT_contra) -> int:
        """Return the number of the load that a request waits for, by which its outcome names it; 0 for none."""
        with self._lock:
            return self._requests.load_of(request)

    def apply(self, reports: Iterable[TransferReport]) -> list[LoadOutcome]:
        """Count the ranks' reports; return the loads that ended with them.

        Raises ``PlanError`` for a report that does not fit its plan; none is counted then. Repeated reports have no
        effect but ``Counters.unexpected_reports``.
        """
        reports = list(reports)
        with self._lock:
            self._set_time()
            self._plans.apply(reports)
            if self._deletions is not None:
                self._deletions.tell_ended()
            self._choices.record(reports)
            self._must_look = True
            return self._outcomes()

    def _describe(self, requests: Iterable[RequestT_contra]) -> None:
        """Tell a service that asks for it what the blocks of requests are, before they are copied there.

        So it can tell routers of them. Requests with keys alone have no tokens.
        """
        if self._service is not None and self._service.notes.is_wanted:
            self._service.notes.describe([each for each in requests if isinstance(each, Request)])

    def _close_step(self) -> list[TransferPlan]:
        """Tell a service how this engine does, close the step and return its plans."""
        if self._service is None:
            return self._plans.close(None)
        self._tell_device()
        self._service.report(self._figures)
        self._service.flush()
        plans = self._plans.close(self._service.plan_arena)
        if self._deletions is not None:
            self._deletions.step_closed()
        return plans

    @abstractmethod
    def _forget_on_device(self, deleted: Deleted) -> None:
        """Forget what was deleted in the service."""

    def _tell_device(self) -> None:
        """Tell a service that asks for it which blocks came to and left the device tier, if the manager has one."""
        events = self._tiers.device_events
        if events is not None and self._service is not None and self._service.notes.is_wanted:
            events.tell(self._service.notes)

    def _greet(self) -> bool:
        """Tell a new session of the device tier, unless a step is at work, which may wait for the session's thread."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._tell_device()
            return True
        finally:
            self._lock.release()

    def _figures(self) -> bytes:
        return msgspec.json.encode(
            {**msgspec.structs.asdict(self.get_stats()), "reuse": self._reuse.recent()}
        )

    def finish(self, requests: Iterable[RequestT_contra], *, preempted: bool = False) -> None:
        """End, abort or preempt requests: unpin their blocks, which stay cached. Idempotent.

        The hints of a request are taken then, unless it is ``preempted`` and comes back. Its loads in flight go on.
        Raises ``RequestStateError`` for anything but requests.
        """
        ended = requests_of(requests)
        with self._lock:
            self._set_time()
            self._release(ended)
            for request in ended:
                if request.hints and not preempted:
                    request.hint_outcomes, request.hints = self._take_hints(request, request.hints), ()
            if self._service is not None:
                self._tell_device()
        if story.audience.listens:
            story.finished(ended, preempted=preempted)

    @abstractmethod
    def _release(self, requests: list[RequestT_contra]) -> None:
        """Give up what requests hold that end."""

    def expire(self) -> list[LoadOutcome]:
        """Return the loads whose deadline has passed, each once. What they copy stays held until the reports."""
        with self._lock:
            self._plans.expire()
            return self._outcomes()

    @property
    def has_overdue(self) -> bool:
        """True while plans or storage tasks go on that were overdue at the last ``expire``."""
        with self._lock:
            return self._plans.has_overdue

    def worker_lost(self, rank: int) -> list[LoadOutcome]:
        """Forget the blocks that a rank had a part of, once its process is known to be gone; return the loads that end.

        The host tier of a service is kept. Local storage is not used until the next ``restore_storage``. Raises
        ``PlanError`` for an unknown rank.
        """
        with self._lock:
            self._plans.require_rank(rank)
            self._requests.forget_found(f"rank {rank}: its process is gone")
            self._plans.lose_rank(rank)
            self._tiers.worker_lost()
            self._must_look = True
            return self._outcomes()

    def reset_cache(self) -> int:
        """Forget every block of every tier; return their number.

        Running requests keep their device blocks, which nobody finds, and loads of an ``OffloadManager`` fail. The next
        plan clears the workers' local storage.
        """
        with self._lock:
            self._requests.forget_found("the cache was reset")
            self._must_look = True
            forgotten = self._tiers.reset()
            self._tell_device()
            return forgotten

    def _outcomes(self) -> list[LoadOutcome]:
        outcomes = self._requests.take_outcomes()
        if outcomes and story.audience.listens:
            story.loads_ended(outcomes)
        return outcomes

    def observe_prefill(
        self,
        chunks: Iterable[tuple[RequestT_contra, int, int]],
        seconds: float | None,
        *,
        waited: bool = False,
        steps: int = 1,
    ) -> None:
        """Record how fast the engine computes: a step took ``seconds`` for tokens ``start`` to ``stop`` of requests.

        ::

            manager.observe_prefill([(request, request.num_cached_tokens, request.num_tokens)], seconds)

        From the third call on a match loads no more of a prefix than takes less time to load than to compute, unless
        ``FDCACHE_LOAD_OR_RECOMPUTE=always``. Call it for steps with prefills once their results are there.
        ``seconds``: None if unknown. ``waited``: their layers waited for loads. ``steps``: how many steps in a row
        computed the chunks. Raises ``RequestStateError`` for tokens that a request does not have.
        """
        with self._lock:
            self._choices.observe_prefill(chunks, seconds, waited=waited, steps=steps)

    def hint(self, request: RequestT_contra, hints: Iterable[Hint]) -> Sequence[HintOutcome]:
        """Take hints about a request that has ended, such as that its session is over; return their outcomes.

        ::

            manager.hint(Request("session 7 is over", token_ids), [Hint.release()])

        Blocks that are still being copied to the host are not among those of the host. What the tiers of a service
        answer follows from ``take_hint_outcomes``.
        """
        with self._lock:
            self._set_time()
            self._requests.prepare(request)
            return self._take_hints(request, hints)

    def _take_hints(self, request: RequestT_contra, hints: Iterable[Hint]) -> Sequence[HintOutcome]:
        self._must_look = True
        return self._hints.take(request.request_id, hints, request.block_hashes, request.num_prompt_tokens)

    def fetch_from(self, request: RequestT_contra, source: str) -> str:
        """Read the stored blocks of a request that is about to begin from one node first, by its address.

        Return why that cannot be, or nothing. What the node lacks is read from the others; ``FDCACHE_STORAGE=nodes``.
        """
        with self._lock:
            self._requests.prepare(request)
            hashes = request.block_hashes
            return self._tiers.fetch_from(source, hashes, record_keys(hashes, self.layout.page_records))

    def take_hint_outcomes(self) -> list[HintOutcome]:
        """Return outcomes that came later, each once: kept, or evicted early and why; and those of a service."""
        with self._lock:
            return self._hints.take_outcomes()

    @property
    def has_session(self) -> bool:
        """True while the service of ``FDCACHE_SERVER`` is reached; False without one."""
        return self._service is not None and self._service.reads is not None

    def change_revision(self, revision: str) -> int:
        """Forget the blocks of the former weights after the engine has loaded others; return their number.

        Call it between steps. Workers need no call. Running requests keep what they have and publish no more. With a
        service, blocks of the new revision are shared with all engines that have it.

        Raises ``LayoutError`` for the current revision, ``ConfigurationError`` with a storage tier, whose files belong
        to one revision: make a new manager then.
        """
        with self._lock:
            layout = self.layout.with_revision(revision)
            if self._tiers.storage:
                raise ConfigurationError(
                    "change_revision: a storage tier belongs to one revision; shut the manager down and make a new one"
                )
            return self._change_layout(layout)

    def _change_layout(self, layout: KVLayout) -> int:
        self._must_look = True
        forgotten = self._tiers.change_layout(layout)
        self._requests.change_fingerprint(layout.fingerprint)
        self.layout = layout
        return forgotten

    def _blocks_being_loaded(self) -> int:
        plans = self._plans
        return plans.blocks_in_flight(SwapPurpose.LOAD) + len(plans.open.loads) + len(plans.ahead.loads)


def requests_of(requests: Iterable[RequestT_contra]) -> list[RequestT_contra]:
    """Return requests as a list. Raises ``RequestStateError``."""
    try:
        return list(requests)
    except TypeError as error:
        raise RequestStateError(
            f"requests has to be a list of requests, got {type(requests).__name__}"
        ) from error


# --- what a manager made from settings starts with -------------------------------------------------------------


def _settings_for(layout: KVLayout, settings: Settings | None) -> Settings:
    """Return settings that fit the layout, by default those of the environment. Raises ``SettingsError``."""
    settings = settings or Settings.load()
    settings.check_layout(layout)
    require_host_tier(settings)
    logs.follow(settings)
    tracing.follow(settings.deployment.traces, "fdcache-engine")
    log_misspelt(settings.misspelt)
    return settings


@contextmanager
def _lookup_for(
    layout: KVLayout, settings: Settings, lookup: StorageConnector | None
) -> Iterator[StorageConnector | None]:
    """Open the storage look-up of the settings, unless there is one; close it if the block fails.

    None if the settings have no store that a look-up could ask, or a service asks it.
    """
    if lookup is None and settings.cache.server is None:
        lookup = open_lookup(
            ConnectorContext(layout, None, settings.storage_tier, settings.connector_options)
        )
    try:
        yield lookup
    except BaseException:
        if lookup is not None:
            lookup.close()
        raise


def calibrated_priors(settings: Settings) -> Priors:
    """Return the speeds that ``fdcache init`` has measured: of the link, and of the storage."""
    folder = settings.transfer.calibration_dir
    link, place = calibrated_link(folder), measured_place(settings)
    found = None if place is None else load_storage_speed(place, folder)
    if found is None:
        return Priors(link)
    return Priors(link, found.bytes_per_second, found.latency_seconds)
