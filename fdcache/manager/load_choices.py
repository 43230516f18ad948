"""Load or recompute: what is decided for each request, from what costs are observed, and how it turned out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

import msgspec

from fdcache.errors import RequestStateError
from fdcache.layout import KVLayout
from fdcache.manager.cost import MARGIN, Cached, CostModel, Decision, LoadChoice, Priors
from fdcache.manager.keyed import OffloadRequest
from fdcache.manager.requests import LoadLimit
from fdcache.manager.speeds import LinkSpeed
from fdcache.metadata import SwapPurpose, TransferReport, TransferResult
from fdcache.settings.cache import LoadOrRecompute
from fdcache.tiers.statistics import LoadDecision, LoadFigures, ReadTotals, SpeedFigures
from fdcache.tiers.storage_reads import GROUP_SECONDS
from fdcache.tiers.waiting_fetches import Wait

_FORGET_AFTER = 30.0
"""After this many idle seconds, load once regardless of cost, to measure the link again."""

_PROBE_AFTER = 10.0
"""Seconds without a read after which one is begun for a request that does not wait for it."""

_COMPARISONS = 64
"""A late read is compared with computing again after each 64th of the time that it has taken."""

_MOST_OTHERS = 8
"""Cap on observations taken from one batch of other engines' reads."""

_MOST_UNREPORTED = 1024
"""Limit of partly reported plans kept; beyond it the oldest is assumed lost."""

_MOST_RECENT = 16


@dataclass(slots=True)
class _Open:
    """A decision whose request has not computed its prompt yet, and how many blocks it loads after its match.

    ``since``: when the request was first to be matched, None before; its reads may have begun long before its turn.
    ``settled``: a read that began at the first of these times needs no comparison until the second.
    """

    decision: LoadDecision
    since: float | None = None
    loaded: int = 0
    settled: tuple[float, float] = (-inf, -inf)


class LoadChoices:
    """Decides how much of each request's cached prefix is loaded.

    Blocks are records, of which a page of tokens has one for each group of layers. ``loads_ahead`` returns the number
    of blocks on their way to the device. ``priors``: speeds as calibrated.
    ``stages``: groups of layers that are loaded while the layers before them compute, 1 if a request is computed after
    its load. ``streams``: blocks are loaded to the device while later ones are read.
    """

    def __init__(
        self,
        mode: LoadOrRecompute,
        layout: KVLayout,
        clock: Callable[[], float],
        loads_ahead: Callable[[], int],
        priors: Priors,
        *,
        stages: int,
        streams: bool = False,
    ) -> None:
        groups = self._groups = layout.page_records + layout.num_states
        self.model = CostModel(
            block_size=layout.block_size / groups,
            block_bytes=layout.payload_bytes,
            record_bytes=layout.record_bytes,
            stages=stages,
            priors=priors,
            streams=streams,
            read_seconds=GROUP_SECONDS,
            windows=[_window_of(layout, group) for group in layout.record_groups] if layout.groups else (),
        )
        self._is_auto = mode is LoadOrRecompute.AUTO
        self._clock = clock
        self._loads_ahead = loads_ahead
        self._last: dict[bool, LoadChoice] = {}  # by: some of the prefix is in storage
        self.open: dict[str, _Open] = {}
        """Decisions whose requests have not computed their prompts yet, by request."""

        self._num_ranks = layout.tp_size
        self._unreported: dict[int, dict[int, tuple[TransferResult, ...]]] = {}
        self._recent: deque[LoadDecision] = deque(maxlen=_MOST_RECENT)
        self._figures = LoadFigures()
        self._began = clock()
        self._probed_at: float | None = None
        self._is_told = False  # how fast the engine computes; without that nothing can be compared

    # --- observations ---------------------------------------------------------------------------------------

    def record(self, reports: Iterable[TransferReport]) -> None:
        """Measure the speed of link and storage, unless the engine does not tell how fast it computes.

        A copy has taken as long as that of the slowest rank.
        """
        if not self._is_told or not self.model.prefill.is_known:
            return
        links = {SwapPurpose.LOAD: self.model.link, SwapPurpose.PREFETCH: self.model.storage}
        for report in reports:
            for of_ranks in zip(*self._reported(report), strict=False):
                if (link := links.get(of_ranks[0].purpose)) is not None:
                    slowest = max(of_ranks, key=lambda result: result.seconds)
                    link.observe(slowest.copied_bytes, slowest.seconds, self._clock())

    def _reported(self, report: TransferReport) -> Sequence[tuple[TransferResult, ...]]:
        """Return the results of each rank with the last report of a plan, nothing before."""
        if self._num_ranks == 1:
            return [report.results]
        reported = self._unreported.setdefault(report.plan_id, {})
        reported[report.rank] = report.results
        if len(reported) == self._num_ranks:
            return list(self._unreported.pop(report.plan_id).values())
        if len(self._unreported) > _MOST_UNREPORTED:
            del self._unreported[next(iter(self._unreported))]
        return ()

    def observe_read(self, num_blocks: int, seconds: float, *, has_ended: bool) -> None:
        """Record how long a read took that a request waited for, unless the engine does not tell how fast it computes.

        One that has not ended, and perhaps never will, tells something once it takes longer than was expected.
        """
        is_news = has_ended or seconds > self.model.seconds_of_read(num_blocks)
        if is_news and self._is_auto and self.model.prefill.is_known:
            self.model.observe_read(num_blocks, seconds, self._clock())

    def observe_others(self, reads: ReadTotals) -> None:
        """Record reads that no request waited for, if there was none lately that one waited for."""
        if self._is_auto and self.model.prefill.is_known and self._has_old_reads:
            now = self._clock()
            for _ in range(min(reads.reads, _MOST_OTHERS)):
                self.model.storage.observe(reads.bytes // reads.reads, reads.seconds / reads.reads, now)

    def observe_prefill(
        self,
        chunks: Iterable[tuple[OffloadRequest, int, int]],
        seconds: float | None,
        *,
        waited: bool,
        steps: int,
    ) -> None:
        """Measure the engine's speed from steps, and which decisions have come true.

        Raises ``RequestStateError`` for chunks outside their requests' tokens, or less than one step.
        """
        chunks = list(chunks)
        if steps < 1:
            raise RequestStateError(f"steps: {steps}; chunks are computed in at least one step")
        for request, start, stop in chunks:
            if not 0 <= start <= stop <= request.num_tokens:
                raise RequestStateError(
                    f"request {request.request_id!r}: tokens {start} to {stop} are not among its {request.num_tokens}; "
                    "give the first token computed in the step and the one after the last"
                )
        self._is_told = self._is_auto
        spans = [(start, stop) for _, start, stop in chunks]
        if seconds is not None and not waited:
            self.model.prefill.observe(spans, seconds, steps)
        elif seconds is not None:
            self.model.observe_waiting(
                spans, seconds, sum(self._loaded(each) for each, _, _ in chunks), steps
            )
        self.computed((request, stop) for request, _, stop in chunks)

    def _loaded(self, request: OffloadRequest) -> int:
        """Return how many blocks a request has loaded since its match, if there is a decision on it."""
        found = self.open.get(request.request_id)
        return found.loaded if found is not None else 0

    def computed(self, progress: Iterable[tuple[OffloadRequest, int]]) -> None:
        """Record when prompts are computed: their decisions have come true."""
        if not self.open:
            return
        for request, num_tokens in progress:
            found = self.open.get(request.request_id)
            if found is not None and num_tokens >= found.decision.num_tokens:
                del self.open[request.request_id]
                self._close(found)

    # --- decisions ------------------------------------------------------------------------------------------

    @property
    def loads_ahead(self) -> int:
        """Number of blocks on their way to the device."""
        return self._loads_ahead()

    @property
    def is_auto(self) -> bool:
        """True unless the settings say to load always."""
        return self._is_auto

    @property
    def decides_loads(self) -> bool:
        """True if loads can be compared with computing now."""
        if not (self._is_told and self.model.loads_are_known()):
            return False
        seen = self.model.link.observed_at
        return self._clock() - (self._began if seen is None else seen) <= _FORGET_AFTER

    @property
    def decides_reads(self) -> bool:
        """True if reads from storage can be compared with computing now."""
        return self._is_told and self.model.reads_are_known()

    @property
    def limit(self) -> LoadLimit | None:
        """``worth_loading`` while loads can be compared with computing, else None: all is loaded."""
        return self.worth_loading if self.decides_loads else None

    def seconds_to_compute(self, cached_tokens: int, num_tokens: int) -> float | None:
        """Return the expected seconds of computing a request beyond its first ``cached_tokens``; None if unknown."""
        if not (self._is_told and self.model.prefill.is_known):
            return None
        return float(self.model.prefill.seconds(float(cached_tokens), num_tokens))

    def worth_loading(
        self, request_id: str, num_tokens: int, on_device: int, on_host: int, last_block: bytes
    ) -> int:
        """Return how many of the blocks on the host are worth loading."""
        cached = Cached(num_tokens, on_device, on_host, loads_ahead=self._loads_ahead())
        decision = self._decide(cached)
        self._note(request_id, last_block, cached, decision)
        return decision.num_blocks - on_device

    def matched(self, request_id: str, on_device: int, to_load: int) -> None:
        """Record what a request reuses in the end: after its reads, some of which may not have come."""
        found = self.open.get(request_id)
        if found is not None:
            found.decision.reused_blocks, found.loaded = on_device + to_load, to_load
            found.decision.waited_seconds = self._seconds_of(found)

    def asked(self, request_id: str) -> None:
        """Record that a request is to be matched."""
        found = self.open.get(request_id)
        if found is not None and found.since is None:
            found.since = self._clock()

    def _seconds_of(self, found: _Open) -> float:
        """Return the seconds since the request was first to be matched, which is now if it was not before."""
        now = self._clock()
        found.since = now if found.since is None else found.since
        return now - found.since

    def forget(self, requests: Iterable[OffloadRequest]) -> None:
        """Forget requests that have ended before they computed their prompt."""
        for request in requests:
            self.open.pop(request.request_id, None)

    def figures(self) -> LoadFigures:
        """Return totals, speeds and recent decisions."""
        step, token, pair = self.model.prefill.coefficients
        return msgspec.structs.replace(
            self._figures,
            host=_speed(self.model.link),
            storage=_speed(self.model.storage),
            prefill_step_seconds=step,
            prefill_token_seconds=token,
            prefill_context_seconds=pair,
            recent=[msgspec.structs.replace(each) for each in self._recent],
        )

    # --- for waits ------------------------------------------------------------------------------------------

    def decide_read(self, request: OffloadRequest, cached: Cached) -> int:
        """Return how many leading blocks of a path are worth reading, some of which are in storage."""
        decision = self._decide(cached)
        last = request.block_hashes[(cached.num_blocks - 1) // self._groups].tobytes()
        self._note(request.request_id, last, cached, decision)
        return decision.num_blocks

    @property
    def _has_old_reads(self) -> bool:
        """True if no read was observed lately."""
        seen = self.model.storage.observed_at
        return seen is None or self._clock() - seen > _PROBE_AFTER

    def takes_probe(self) -> bool:
        """Return True if the speed of storage is so old that a read is worth its news alone."""
        now = self._clock()
        if not self._has_old_reads or (self._probed_at is not None and now - self._probed_at <= _PROBE_AFTER):
            return False
        self._probed_at = now
        self._figures.probes += 1
        return True

    def is_worth_waiting(self, request: OffloadRequest, wait: Wait) -> bool:
        """Return False once a request is sooner done with the blocks that have arrived than with those being read.

        A read that is late is expected to take as long again as it is late, so that the wait for one that never ends is
        no longer than what its blocks would have saved.
        """
        self.asked(request.request_id)
        if not self.decides_reads:
            return True
        num_tokens, on_device = request.num_tokens, wait.on_device
        arrived, ends, ahead, since = wait.arrived, wait.ends, wait.ahead, wait.since
        now_is, found = self._clock(), self.open.get(request.request_id)
        if found is not None and found.settled[0] == since and now_is <= found.settled[1]:
            return True
        model, elapsed = self.model, now_is - since
        loads_ahead = self._loads_ahead()
        on_host = max(arrived - on_device, 0)
        now = model.decide(Cached(num_tokens, on_device, on_host, loads_ahead=loads_ahead)).seconds
        if now is None:
            now = model.seconds(Cached(num_tokens, on_device, 0), on_device)
        end, start, soonest = model.seconds_of_read(ahead), arrived, inf
        due = end + model.seconds_of_read(ends[0] - arrived)
        late = max(elapsed - due, 0.0)
        for stop in ends:
            end += model.seconds_of_read(stop - start)
            loaded = max(start, on_device) if model.streams else on_device
            if stop > on_device:
                whole = Cached(num_tokens, loaded, stop - loaded, loads_ahead=loads_ahead)
                soonest = min(soonest, end - elapsed + 2 * late + model.seconds(whole, stop))
            start = stop
        is_worth = soonest <= now * (1 + MARGIN)
        if not is_worth:
            self._count_hedge(found)
            first = elapsed - model.seconds_of_read(ahead)
            self.observe_read(ends[0] - arrived, first, has_ended=False)
        elif found is not None:
            found.settled = since, max(since + due, now_is + elapsed / _COMPARISONS)
        return is_worth

    def _count_hedge(self, found: _Open | None) -> None:
        """Count a request that goes on without its reads; it has no decision if a speed was unknown then."""
        if found is None or not found.decision.hedged:
            self._figures.hedged += 1
        if found is not None:
            found.decision.hedged = True

    # --- log ------------------------------------------------------------------------------------------------

    def _decide(self, cached: Cached) -> Decision:
        key = cached.in_storage > 0
        decision = self.model.decide(cached, self._last.get(key))
        if decision.seconds is not None:
            self._last[key] = decision.choice
        return decision

    def _note(self, request_id: str, last_block: bytes, cached: Cached, decision: Decision) -> None:
        if decision.seconds is None or request_id in self.open:
            return
        noted = LoadDecision(
            request_id=request_id,
            last_block=last_block.hex(),
            num_tokens=cached.num_tokens,
            device_blocks=cached.on_device,
            host_blocks=cached.on_host,
            storage_blocks=cached.in_storage,
            reused_blocks=decision.num_blocks,
            choice=decision.choice.value,
            expected_seconds=decision.seconds,
            expected_seconds_whole=decision.seconds_whole or 0.0,
            expected_seconds_nothing=decision.seconds_nothing or 0.0,
        )
        self.open[request_id] = _Open(noted)
        self._recent.append(noted)
        name = decision.choice.value
        setattr(self._figures, name, getattr(self._figures, name) + 1)

    def _close(self, found: _Open) -> None:
        found.decision.true_seconds = self._seconds_of(found)
        self._figures.judged += 1
        self._figures.expected_seconds += found.decision.expected_seconds
        self._figures.true_seconds += found.decision.true_seconds


def _speed(link: LinkSpeed) -> SpeedFigures:
    return SpeedFigures(latency_seconds=link.latency, bytes_per_second=link.bandwidth)


def _window_of(layout: KVLayout, group: int) -> float:
    """Return how many pages, of those to be loaded, have a record of the group that is needed; 0 for all."""
    given = layout.groups[group]
    return 1.0 if given.is_state else given.tokens / layout.block_size
