"""Loads ahead at a service in any order of reads, copies, failures, aborts and losses: right bytes, nothing held."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fdcache.manager import LoadStatus, MatchStatus, Request
from fdcache.settings.cache import PrefetchPolicy
from fdcache.tiers import storage_reads
from tests.prefetch_stage import BLOCKS, Stage, prefetch_stage
from tests.seeds import budget
from tests.service_engine import BLOCK, PROMPT, layout
from tests.service_help import until

TURN = ("read", "report", "match", "send")
FAULTS = (
    *("bad record", "refuse", "other", "abort", "reset device", "reset host", "lose rank"),
    *("lose service", "leave", "late"),
)
STEPS = (*(TURN,) * 8, *((one,) for one in (*TURN, *FAULTS)))


class Run:
    """A request for a stored path of an engine at a service whose disk serves one read of two blocks at a time."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.engine = stage.engine(PrefetchPolicy.WAIT_COMPLETE)
        self.request = Request("0", PROMPT)
        self.others = 0

    def match(self) -> None:
        """Match the request and, if it need not wait, run it to its end; then another comes."""
        manager, request = self.engine.manager, self.request
        (match,) = manager.match_prefix([request])
        if match.status is MatchStatus.DEFERRED:
            return
        (allocation,) = manager.allocate_device_blocks([(request, len(PROMPT))])
        if allocation.ok:
            reused = match.num_cached_tokens
            for outcome in self.engine.carry_out(manager.take_plans()):
                if outcome.request_id == request.request_id and outcome.status is not LoadStatus.CONFIRMED:
                    reused = outcome.recompute_from
            event(f"{match.num_ahead_blocks} blocks ahead")
            self.engine.check(request, PROMPT, reused // BLOCK)
            self.engine.compute(request, PROMPT, reused // BLOCK)
            manager.commit([(request, len(PROMPT))])
        self.abort()

    def abort(self) -> None:
        self.engine.manager.finish([self.request])
        self.others += 1
        self.request = Request(str(self.others), PROMPT)

    def send(self, *, refuses: bool = False) -> None:
        (rank,) = self.engine.ranks
        for plan in self.engine.manager.take_plans():
            if refuses and plan.is_ahead:
                rank.refuse(plan, "refused")
            else:
                rank.submit_swap_tasks(plan)

    def report(self) -> None:
        self.engine.manager.apply(self.engine.ranks[0].poll())

    def read(self) -> None:
        """Serve one read, if one waits."""
        store = self.stage.store
        if len(store.reads) > store.ended:
            stop = store.ended + 1
            store.allow(1)
            until(lambda: store.ended >= stop, "the disk has read")

    def other(self) -> None:
        """Another request needs most of the device for a moment."""
        tokens = [5000 + 100 * self.others + index for index in range(25 * BLOCK)]
        other = Request(f"other {self.others}", tokens)
        self.others += 1
        manager = self.engine.manager
        if manager.match_prefix([other])[0].status is MatchStatus.MATCHED:
            manager.allocate_device_blocks([(other, len(tokens))])
        manager.finish([other])

    def leave(self) -> None:
        """Go on without the reads, as for one that is late."""
        manager, request = self.engine.manager, self.request
        fetches = manager._tiers.fetches
        assert fetches is not None
        fetches.leave(manager._requests.fetch_number(request), keep=True)

    def bad_record(self) -> None:
        self.stage.store.loses = {1}
        self.read()
        self.stage.store.loses = set()

    def late(self) -> None:
        self.stage.store.answer.clear()
        self.read()
        self.stage.store.answer.set()

    def lose_service(self) -> None:
        sessions = self.engine.manager._host.sessions  # type: ignore[union-attr]
        if sessions.session is not None:
            sessions.lose(sessions.session, "the test")

    def step(self, name: str) -> None:
        manager = self.engine.manager
        match name:
            case "refuse":
                self.send(refuses=True)
            case "reset device":
                manager._reset_device()
            case "reset host":
                self.stage.service.ask("reset", tier="host")
            case "lose rank":
                self.engine.replace_worker(0)
            case _:
                getattr(self, name.replace(" ", "_"))()
        manager.check_integrity()

    def close(self) -> None:
        """End everything: nothing may be held then."""
        self.abort()
        self.stage.store.gate.set()
        manager = self.engine.manager

        def is_over() -> bool:
            self.engine.carry_out(manager.take_plans())
            self.report()
            stats = manager.get_stats()
            return not (stats.plans_in_flight or stats.queued_backups or manager.shared_blocks_in_use)

        until(is_over, "all copies have ended")
        usage = manager.get_stats().device
        assert (usage.pins, usage.holds, usage.leases, usage.writing) == (0, 0, 0, 0)
        manager.check_integrity()


@given(steps=st.lists(st.sampled_from(STEPS), min_size=6, max_size=24))
@settings(max_examples=budget(120), deadline=None)
def test_blocks_loaded_ahead_from_a_service_are_right_or_not_found(steps: list[tuple[str, ...]]) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        TemporaryDirectory() as folder,
        prefetch_stage(Path(folder), patch) as stage,
    ):
        patch.setattr(storage_reads, "MOST_GROUP_BYTES", 2 * layout().record_bytes)
        run = Run(stage)
        for step in chain(("match", "send"), *steps):
            run.step(step)
        event(f"{run.engine.manager.get_stats().counters.blocks_loaded_ahead} loaded ahead of {BLOCKS}")
        run.close()
