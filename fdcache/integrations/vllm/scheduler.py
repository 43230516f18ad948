"""The connector in vLLM's scheduler: what is loaded, offered and given away in each step."""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from fdcache.errors import FdcacheError
from fdcache.hints import read_hints
from fdcache.integrations.vllm.early import EarlyLoads
from fdcache.integrations.vllm.events import EventTranslator
from fdcache.integrations.vllm.handover import PeerSide
from fdcache.integrations.vllm.keys import extra_of, request_of
from fdcache.integrations.vllm.metadata import NOTHING, StepMetadata
from fdcache.integrations.vllm.offers import StepOffers
from fdcache.integrations.vllm.running import Computed, Finished, HookGuard, Running, ids_of
from fdcache.integrations.vllm.tables import BlockIds, RequestTable, TableShape, coldest_of
from fdcache.integrations.vllm.timing import StepTimes
from fdcache.manager import LoadOutcome, LoadStatus, MatchStatus, OffloadManager
from fdcache.metadata import Int32Array, PeerTask, SwapPurpose, TransferPlan, TransferReport, decode_scan
from fdcache.settings.cache import WritePolicy

logger = logging.getLogger(__name__)

_Tables = list[RequestTable]
"""Block tables of the requests of a step."""


class SchedulerSide:
    """Follows vLLM's requests and blocks, and plans with an ``OffloadManager``.

    Hooks take requests that are unknown, and may be repeated. An inconsistency costs the block concerned its place
    in the cache and is counted in ``inconsistencies``; no hook raises for one. After a hook that failed in a step the
    block tables are not trusted: the requests of that time are computed to their end and nothing of them is stored.
    """

    def __init__(
        self,
        manager: OffloadManager,
        events: EventTranslator | None = None,
        steps_in_flight: int = 2,
        peers: PeerSide | None = None,
        early: EarlyLoads | None = None,
    ) -> None:
        """``steps_in_flight``: how many steps before the one being planned the device may not have finished.

        ``peers``: other engines, if blocks are handed over. ``early``: given if loads may be told before their end.
        """
        self.peers = peers
        self._early = early
        self.manager, layout = manager, manager.layout
        self._events = events
        self.inconsistencies = 0
        self.times = StepTimes(manager)
        self._block_size = layout.block_size
        self._shape = TableShape(layout)
        self._is_plain = not (layout.has_gaps or layout.num_states)
        self._writes_back = manager.settings.write_policy is WritePolicy.WRITE_BACK
        self._offers = StepOffers(manager, events, self._count)
        self._running: dict[str, Running] = {}
        self._in_flight: deque[_Tables | None] = deque(maxlen=steps_in_flight)
        self._has_loads = False
        self._unordered: str | None = None
        self._made = StepMetadata()
        self._unloaded: dict[str, list[int]] = {}
        self._reports: list[TransferReport] = []
        self._pool: Any = None
        self._resets_device = False
        self._is_lost = False
        self._is_late = False
        self._sent_host_cache = False
        self._failed_loads = 0

    def bind_pool(self, pool: Any) -> None:
        """Take vLLM's block pool, whose hashes may stand for less than a block (``prefix_match_unit``)."""
        self._pool = pool
        if self._events is not None:
            self._events.bind_pool(pool, self._block_size)

    def restore(self, scans: Iterable[bytes | None]) -> None:
        """Make the blocks findable that the ranks' storage holds."""
        found = [decode_scan(scan) for scan in scans if scan is not None]
        if found:
            logger.info("%d blocks restored from storage", self.manager.restore_storage(found))

    # --- requests -----------------------------------------------------------------------------------------

    def arrived(self, source: Any) -> Running | None:
        """Follow a request, and start to read its blocks from storage; None for one that is not cached."""
        known = self._running.get(source.request_id)
        if known is not None and known.source is source:
            return known
        if known is not None:
            self._forget(source.request_id)
        if self.peers is not None:
            self.peers.shorten(source)
        request = request_of(source)
        if request is None:
            return None
        request.hints, refused = read_hints(
            source.request_id, extra_of(source), partial(self.manager.fetch_from, request)
        )
        known = self._running[source.request_id] = Running(source, request, refused, self._shape.table())
        self.manager.begin([request], whole_prompt=self._is_plain)
        if self.peers is not None:
            self.peers.arrived(source, request)
        return known

    def matched(self, source: Any, device_tokens: int) -> int | None:
        """Return how many tokens beyond those on the device can be loaded; None to be asked in the next step."""
        known = self.arrived(source)
        if known is None or known.is_lost:
            return 0
        known.has_table(self._shape.table())
        known.device_tokens = device_tokens
        known.learn_tokens(source.num_tokens)
        # vLLM computes the last token of a prompt that is loaded whole. Its last block alone is sooner computed, a
        # window would have to reach back one token more, and a state cannot go back.
        is_worth_it = source.num_tokens - device_tokens > self._block_size and self._is_plain
        found = self.manager.match(known.request, device_tokens, whole_prompt=is_worth_it)
        known.stored_tokens, known.peer_tokens = found.from_storage, found.from_peer
        return None if found.status is MatchStatus.DEFERRED else found.num_tokens

    def sources_of(self, request_id: str, num_tokens: int) -> tuple[int, int, int]:
        """Return how many of the tokens found for a request came, or come, from the host, from storage and a peer."""
        known = self._running.get(request_id)
        stored, theirs = (0, 0) if known is None else (known.stored_tokens, known.peer_tokens)
        stored = min(stored, num_tokens)
        theirs = min(theirs, num_tokens - stored)
        return num_tokens - stored - theirs, stored, theirs

    def allocated(self, source: Any, blocks: BlockIds, num_tokens: int) -> None:
        """Record a request's block table; load ``num_tokens`` tokens beyond those that were on the device."""
        known = self._running.get(source.request_id)
        if num_tokens <= 0:
            if known is not None:
                self.manager.unmatch([known.request])
            return
        start = known.device_tokens if known is not None else 0
        stop = start + num_tokens
        made = self._shape.table(blocks)
        table = made.path_ids(stop, start // self._block_size)  # a peer's last block need not be full
        loaded = 0
        try:
            if known is not None:
                known.has_table(made)
                is_unordered = not self._is_used(table)
                self._close_plan(is_unordered)
                self.manager.evicted(ids_of(self._shape.given(made.by_groups, stop)))
                loaded = self.manager.load(known.request, table)
                known.load = self.manager.load_of(known.request)
                self._unordered = source.request_id if is_unordered else None
        finally:
            if loaded:
                self._has_loads = True
                if self._early is not None and known is not None:
                    self._early.begins(source.request_id, known.load)
            if loaded < len(table):
                # Asked again, it would be promised the blocks again; vLLM then admits nobody behind it.
                if known is not None:
                    known.request.device_only = True
                self._unloaded[source.request_id] = table[loaded:].tolist()
                self._count("a load of %d blocks was promised, %d are there", len(table), loaded)

    def finished(self, source: Any, blocks: BlockIds) -> Finished:
        """Offer what a request has computed and not offered yet, hand it over if it is to be, and forget it."""
        known = self._running.get(source.request_id)
        if known is None:
            return Finished()
        handed_over, is_kept = None, False
        if known.source is source and any(blocks) and known.blocks:
            known.blocks = self._shape.longer(known.blocks, blocks)
            self._offers.blocks(known, source.num_computed_tokens)
            if self.peers is not None and not known.is_lost:
                handed_over, is_kept = self.peers.finished(source, known.request, known.blocks, self._made)
        self._forget(source.request_id)
        return Finished([*known.refused_hints, *known.request.hint_outcomes], handed_over, is_kept)

    def _forget(self, request_id: str) -> None:
        if self.peers is not None:
            self.peers.forget(request_id)
        self.manager.finish([self._running.pop(request_id).request])

    # --- steps --------------------------------------------------------------------------------------------

    def step(self, output: Any) -> StepMetadata:
        """Plan the copies of a step that vLLM has scheduled.

        Loads whose plan could not be taken wait for the plan of the next step.
        """
        computed: Sequence[Computed] = ()
        used: _Tables | None = None
        if self._early is not None:
            received, self._made.seconds_left = self._early.step(output.total_num_scheduled_tokens)
            self._made.received = received or self._made.received
        try:
            computed = self._learn_blocks(output)
            if self.peers is not None:
                self._follow_handovers(self.peers, output.preempted_req_ids or (), computed)
            used = self._tables(output)
        except Exception:  # noqa: BLE001 - logged
            self.hook_failed("following the block tables")
        was_late, self._is_late = self._is_late, True
        try:
            if self._is_lost or was_late:
                self._lose_requests(are_blocks_known=not was_late)
            self._plan(is_patient=bool(output.num_scheduled_tokens))
            self._is_late = False
        except Exception:  # noqa: BLE001 - logged
            self.hook_failed("planning")
        if self.peers is not None:
            self._tell_of_handovers(self.peers, computed)
        self._in_flight.append(used)
        self._made.is_late = was_late or self._is_late
        if self._unloaded:
            self._made.unloaded, self._unloaded = self._unloaded, {}
        try:
            if computed:
                self._follow(output, computed)
        except Exception:  # noqa: BLE001 - logged
            self.hook_failed("offering")
        if not self._made:
            return NOTHING
        made, self._made = self._made, StepMetadata()
        return made

    def received(self, request_ids: Iterable[str]) -> None:
        """Record requests whose blocks have come on all ranks, or are sure to: the next step waits for the rest."""
        if self._early is not None:
            self._early.received(request_ids)

    def _follow_handovers(
        self, peers: PeerSide, preempted: Iterable[str], computed: Sequence[Computed]
    ) -> None:
        """End and begin the hand-overs of requests whose blocks go to decode as they are computed."""
        for request_id in preempted:
            peers.preempted(request_id)
        for known, start, _ in computed:
            if not known.is_lost:
                peers.scheduled(known.source, known.request, start)

    def _tell_of_handovers(self, peers: PeerSide, computed: Sequence[Computed]) -> None:
        """Tell the ranks what the step computes of blocks that decode may read already."""
        with self.guarded("handing over", follows_blocks=False):
            for known, _, num_tokens in computed:
                is_loading = self._early is not None and self._early.is_open(known.source.request_id)
                if not (is_loading or known.is_lost):
                    peers.computed(known.source, known.blocks, num_tokens, self._made)
            peers.tell(self._made)

    def _follow(self, output: Any, computed: Sequence[Computed]) -> None:
        """Time the step, and offer the blocks that it computes."""
        # Of steps in which requests have a part that are not followed the time says nothing.
        if len(computed) == len(output.num_scheduled_tokens) and self.manager.decides_loads:
            with self.guarded("timing", follows_blocks=False):
                self._made.timed = self.times.begin(
                    (known.request, start, stop) for known, start, stop in computed
                )
        self._offers.step(computed)
        self._offers.states(getattr(output, "kv_connector_block_state", None), self._running)

    def _plan(self, *, is_patient: bool) -> None:
        if not self._sent_host_cache:
            self._made.host_cache, self._sent_host_cache = self.manager.host_cache, True
        if self._reports:
            self.reported(())
        if self.manager.settings.server is not None:
            self._reset_device()
        if self._writes_back:
            self.manager.next_evicted(ids_of(coldest_of(self._pool, self.manager.settings.clean_reserve)))
        if late := self.manager.expire():
            self._learn_ends(late)
        if plans := self.manager.take_plans(is_patient=is_patient):
            self._send(plans)

    def _close_plan(self, is_unordered: bool) -> None:
        """Give each request a plan of its own: it is admitted when its blocks are there, not with the step's last.

        One that waits for no step has no copies of earlier blocks to the host either, which do. After a step that
        failed, the requests that are lost come before any plan.
        """
        if (self._has_loads or is_unordered) and not (self._is_lost or self._is_late):
            self._send(self.manager.take_plans(is_patient=True))

    def _send(self, plans: Iterable[TransferPlan]) -> None:
        for plan in plans:
            self._made.plans.append(plan)
            for task in plan.peers:
                self._send_handover(task)
            if plan.loads is not None:
                of_plan = self.manager.loads_of(plan.plan_id)
                loads = self._made.loads[plan.plan_id] = {name: last for (name, _), last in of_plan.items()}
                if loads.keys() == {self._unordered} and plan.evictions is None and plan.backups is None:
                    self._made.unordered.add(plan.plan_id)
        self._has_loads, self._unordered = False, None

    def _send_handover(self, task: PeerTask) -> None:
        if task.swap.purpose is SwapPurpose.SEND and self.peers is not None:
            self.peers.planned(task, self._made)
        elif waiting := self.manager.loads_of(task.plan_id):
            self._made.loads[task.plan_id] = {name: last for (name, _), last in waiting.items()}

    def _is_used(self, table: Int32Array) -> bool:
        """Return True if a step in flight may use one of these blocks: a load into them has to wait for it.

        vLLM gives away the blocks of a request that has ended while a step that it was part of is still computed.
        """
        is_unknown = self.manager.layout.groups or self._is_lost or self._is_late or None in self._in_flight
        if is_unknown or (self._early is not None and self._early.are_told):
            return True
        tables = {id(each): each for each in chain.from_iterable(tables or () for tables in self._in_flight)}
        parts = (part for each in tables.values() for part in each.by_groups)
        used = np.frombuffer(b"".join(parts), np.int32)  # an array for each costs more than its bytes
        wanted = np.zeros(table.max(initial=0) + 1, bool)
        wanted[table] = True
        return bool(wanted[used[used < len(wanted)]].any())

    def _tables(self, output: Any) -> _Tables | None:
        """Return the block tables that a step uses, None if they are not known."""
        found = list(map(self._running.get, output.num_scheduled_tokens))
        tables = [known.blocks for known in found if known is not None and not known.is_lost]
        return tables if len(tables) == len(found) else None

    def _lose_requests(self, *, are_blocks_known: bool) -> None:
        """Store nothing more of the requests so far, whose block tables may be wrong; what is being loaded goes on.

        Every device block is taken for one that the step gives away: its copy comes first. After a step that went
        without its plan, what the blocks hold is not known either.
        """
        for known in self._running.values():
            known.is_lost = True
            if self.peers is not None:
                self.peers.preempted(known.source.request_id)
            self.manager.finish([known.request])
        if self._pool is not None:
            everything = np.arange(self._pool.num_gpu_blocks, dtype=np.int32)
            (self.manager.evicted if are_blocks_known else self.manager.forget)(everything)
        self._is_lost = False

    def _learn_blocks(self, output: Any) -> Sequence[Computed]:
        """Follow the block tables; return the scheduled requests.

        Of a step that only generates, a token for each request, those are left out that got no block.
        """
        scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        only_generates = output.total_num_scheduled_tokens == len(scheduled) and self._is_plain
        is_same = only_generates and not (output.scheduled_new_reqs or output.preempted_req_ids)
        if is_same and not any(cached.new_block_ids):
            return ()
        computed: list[Computed] = []
        given, filled = array("i"), set[int]()
        for request_id in output.preempted_req_ids or ():
            if (known := self._running.get(request_id)) is not None:
                known.has_table(self._shape.table())
        for new in output.scheduled_new_reqs:
            start, tables = new.num_computed_tokens, new.block_ids
            if (known := self._running.get(new.req_id)) is not None:
                known.has_table(self._shape.longer(known.blocks, tables))
                tables = known.blocks.by_groups
                computed.append((known, start, start + scheduled.get(new.req_id, 0)))
            fresh = self._shape.given(tables, start)
            given.extend(fresh)
            filled |= self._of_states(new.block_ids, fresh)
        for i, added in enumerate(cached.new_block_ids):
            if added is None and only_generates:
                continue
            request_id, start = cached.req_ids[i], cached.num_computed_tokens[i]
            resumed = request_id in cached.resumed_req_ids
            if added is not None:
                fresh = self._shape.given(added, start) if resumed else self._shape.real(added)
                given.extend(fresh)
                filled |= self._of_states(added, fresh)
            if (known := self._running.get(request_id)) is not None:
                if resumed:
                    known.has_table(self._shape.table(added or ()))
                elif added is not None:
                    known.blocks.extend(added)
                computed.append((known, start, start + scheduled.get(request_id, 0)))
        self._forget_overwritten(output, filled)
        if given:
            self.manager.evicted(ids_of(given))
        return computed

    def _of_states(self, tables: BlockIds, fresh: Iterable[int]) -> set[int]:
        """Return which of the blocks that a step gives a request are for states."""
        states = chain.from_iterable(tables[group] for group, _ in self._shape.states)
        return set(fresh).intersection(states) if self._shape.states else set()

    def _forget_overwritten(self, output: Any, filled: Iterable[int]) -> None:
        """Forget the blocks that the step fills before it executes a plan: vLLM clears some, and copies into others.

        Into those ``filled`` it copies the states that a request goes on from.

        It is too late to copy what they held; copies of that in flight are worth nothing.
        """
        early = [*(getattr(output, "new_block_ids_to_zero", None) or ()), *filled]
        early += [copy.dst_block_id for copy in getattr(output, "kv_cache_block_copies", None) or ()]
        if early:
            self.manager.forget(ids_of(early))
            self._made.overwritten = early

    def take_events(self) -> Iterable[Any]:
        """Return vLLM's events since the last call."""
        return () if self._events is None else list(self._events.translate(self.manager.take_events()))

    def _reset_device(self) -> None:
        """Forget vLLM's prefix cache if an operator of the service asked for it, once no block is in use."""
        self._resets_device |= self.manager.take_device_reset()
        if self._resets_device and self._pool is not None and self._pool.reset_prefix_cache():
            self._resets_device = False

    # --- reports and the whole cache ----------------------------------------------------------------------

    def reported(self, reports: Iterable[TransferReport]) -> None:
        """Count the ranks' reports. Loads that failed are computed by vLLM, which the ranks told as well.

        A report that an exception kept from being counted is counted in a later step: its plan holds host memory.
        """
        self._reports += reports
        pending, self._reports = self._reports, []
        for report in pending:
            try:
                self._learn_ends(self.manager.apply([report]))
            except FdcacheError as error:
                self._count("a report was not counted: %s", error)
            except Exception:  # noqa: BLE001 - logged by _count
                self._count("counting a report failed", exc_info=True)
                self._reports.append(report)

    def _learn_ends(self, outcomes: Iterable[LoadOutcome]) -> None:
        """Record blocks that did not come from storage; the ranks report those that a plan has failed to load.

        A request that came back under the same name has no part in its former load.
        """
        for outcome in outcomes:
            known = self._running.get(outcome.request_id)
            if self._early is not None:
                self._early.ended(outcome)
            if outcome.status is LoadStatus.FAILED:
                self._tell_failed(outcome)
            if outcome.unplanned and (known is None or known.load == outcome.load):
                self._unloaded.setdefault(outcome.request_id, []).extend(outcome.unplanned)

    def _tell_failed(self, outcome: LoadOutcome) -> None:
        """Log why blocks did not come: at most one line each time the number of such loads doubles."""
        self._failed_loads += 1
        if self._failed_loads.bit_count() == 1:
            logger.warning(
                "failed load %d: request %s is computed from token %d on: %s",
                self._failed_loads,
                outcome.request_id,
                outcome.recompute_from,
                outcome.error_message,
            )

    @property
    def has_requests(self) -> bool:
        """True between the arrival of a request that is cached and its end."""
        return bool(self._running)

    @property
    def has_pending_work(self) -> bool:
        """True while copies are in flight or blocks wait for one: vLLM has to go on stepping."""
        return self.manager.has_pending_work or bool(self._unloaded)

    def reset(self) -> None:
        """Forget every block: vLLM does not tell a reset from new weights. Other engines keep theirs."""
        self.manager.weights_changed()

    def guarded(self, hook: str, *, follows_blocks: bool = True) -> HookGuard:
        """Return a context in which an exception of a hook is logged and counted.

        vLLM ends at one, and computes what is not cached. The block tables may be wrong after one that
        ``follows_blocks``.
        """
        return HookGuard(self, hook, follows_blocks)

    def hook_failed(self, hook: str, *, follows_blocks: bool = True) -> None:
        """Count the exception that is being handled."""
        self._is_lost |= follows_blocks
        self._count("%s failed; the engine goes on without what it would have cached", hook, exc_info=True)

    def _count(self, message: str, *values: object, exc_info: bool = False) -> None:
        self.inconsistencies += 1
        if self.inconsistencies.bit_count() == 1:  # at most one line each time their number doubles
            logger.warning("inconsistency %d: " + message, self.inconsistencies, *values, exc_info=exc_info)
