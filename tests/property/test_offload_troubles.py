"""OffloadManager of several ranks under troubles: reports late, twice and out of order, ranks and plans that are lost.

Resets and other weights come between any two calls of a step.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache.controller.cache_controller import CacheController
from fdcache.errors import ConfigurationError
from fdcache.groups import CacheGroup
from fdcache.manager import LoadOutcome
from fdcache.metadata import TransferReport
from fdcache.settings.cache import CopySettings, WritePolicy
from fdcache.tiers import storage_reads
from tests.offload_engine import BLOCK
from tests.property.offload_model import Engine
from tests.property.offload_play import ACTIONS
from tests.property.offload_sequences import FULL, HALVES, MODELS, STATE, Sequence, window
from tests.seeds import budget
from tests.swaps import PATIENCE

TIMEOUT = 20.0
"""Seconds after which the report of a plan is overdue, by the clock of the engine."""


class Troubled(Engine):
    """Forgets to offer, repeats calls, and resets in the middle of a step."""

    troubles = 0.0

    def __init__(self, seed: int, policy: WritePolicy, **options: Any) -> None:
        super().__init__(seed, policy, plan_timeout=TIMEOUT, **options)
        self.applied: list[TransferReport] = []
        self.revisions = 1
        self.rootless: set[int] = set()

    def chance(self, share: float) -> bool:
        return self.random.random() < share * self.troubles

    def trouble(self) -> None:
        """Let something happen between two calls of a step."""
        if self.chance(0.01):
            self.manager.reset_cache()
        elif self.chance(0.1):
            self.report()
        elif self.chance(0.05):
            self.expire()

    def change_weights(self) -> None:
        self.revisions += 1
        self.manager.change_revision(f"r{self.revisions}")
        self.preempt_all()

    def step(self) -> None:
        self.given = []
        for sequence in list(self.waiting):
            self.admit(sequence)
            self.trouble()
        self.withdraw_some()
        self.trouble()
        scheduled = self.schedule()
        self.trouble()
        self.manager.evicted(np.array(self.given, np.int32))
        self.manager.next_evicted(np.array(list(self.free)[:3], np.int32))
        self.trouble()
        if self.chance(0.02):  # the step is over before it is taken
            self.lose()
            return
        if self.chance(0.3):  # as vLLM's hook does
            self.expire()
        plans = self.taken(self.manager.take_plans(is_patient=self.chance(0.3)))
        self.trouble()
        for sequence, tokens in scheduled:
            for _ in range(self.random.choice([1, 1, 2]) if not self.chance(0.3) else 0):
                self.manager.offer(sequence.request, tokens, np.array(sequence.table, np.int32))
                self.trouble()
        lost = [plan for plan in plans if not plan.after and self.chance(0.05)]
        for plan in lost:
            self.reports += [
                TransferReport.refusal(plan, rank.rank, "lost on the way") for rank in self.offload.ranks
            ]
        self.run([plan for plan in plans if plan not in lost], scheduled)
        self.end_preempted()

    def report(self) -> None:
        self.reports += [report for rank in self.offload.ranks for report in rank.poll()]
        if self.troubles:
            self.random.shuffle(self.reports)
        count = self.random.randint(0, len(self.reports))
        taken, self.reports = self.reports[:count], self.reports[count:]
        self.applied += taken
        if self.applied and self.chance(0.2):
            taken = [*taken, self.random.choice(self.applied)]
        self.apply(taken)

    def overdue(self) -> None:
        self.offload.now += TIMEOUT + 1
        self.expire()
        assert not self.manager.expire()

    def lose(self) -> None:
        """Let the process of one rank end, with its memory, and begin another."""
        self.open()
        engine = self.offload
        rank = self.random.randrange(len(engine.ranks))
        engine.ranks[rank].shutdown()
        self.reports = [report for report in self.reports if report.rank != rank]
        outcomes = self.manager.worker_lost(rank)
        self.plans.lost(rank)
        self.preempt_all()
        for outcome in outcomes:
            self.end_load(outcome)
        self.free_late()
        transfer = CopySettings(drain_timeout=PATIENCE, layer_timeout=PATIENCE)
        fresh = CacheController(transfer, engine.layout, rank=rank, device=engine.devices[rank])
        engine.ranks[rank] = fresh
        engine.tensors[rank] = fresh.initialize_kv_cache(len(self.uses))
        fresh.initialize_host_cache(self.manager.host_cache)
        self.begun(rank)

    def begun(self, rank: int) -> None:
        """Go on with a rank that has begun anew."""

    def preempt_all(self) -> None:
        """Forget what the device cache has."""
        self.cached.clear()
        self.content.clear()
        for sequence in self.running:
            self.release(sequence)
        self.waiting[:0], self.running = self.running, []
        self.rootless |= self.loads.keys()

    def end_load(self, outcome: LoadOutcome) -> None:
        sequence = self.loads[outcome.load]
        first = sequence.computed
        super().end_load(outcome)
        if outcome.load in self.rootless:  # the blocks above have gone, and all that was loaded
            assert outcome.recompute_from == first
            self.rootless.remove(outcome.load)
            if sequence in self.running:
                self.running.remove(sequence)
                self.release(sequence)
                self.waiting.append(sequence)

    def admit(self, sequence: Sequence) -> None:
        self.manager.prepare([sequence.request])
        super().admit(sequence)

    def drain(self) -> None:
        self.troubles = 0.0
        super().drain()


RANKS = [(1, 1), (2, 1), (2, 2), (4, 2)]
"""Ranks of an engine, and how many of them hold the same bytes."""


class Stored(Troubled):
    """The same engine with storage, which a rank that begins anew opens. Resets are rare, so that it is of use."""

    def __init__(self, seed: int, policy: WritePolicy, folder: Path, **options: Any) -> None:
        super().__init__(seed, policy, head_dim=16, folder=folder, **options)

    def chance(self, share: float) -> bool:
        return super().chance(share * (0.1 if share < 0.05 else 1))

    def change_weights(self) -> None:
        with pytest.raises(ConfigurationError, match="one revision"):
            self.manager.change_revision("other")

    def begun(self, rank: int) -> None:
        record_rank, share = divmod(rank, self.layout.replicas)
        if share:
            return
        self.offload.stores[record_rank] = self.offload.opened_store(rank)
        if self.random.random() < 0.8:
            self.offload.restore()


def play(engine: Troubled, steps: int) -> None:
    engine.troubles = 1.0
    for _ in range(steps):
        action = engine.random.choice((*ACTIONS, "overdue", "lose", "weights"))
        if action == "arrive" and len(engine.waiting) < 4:
            engine.arrive([engine.random.randint(1, 2) for _ in range(engine.random.randint(1, 5))])
        elif action == "step":
            engine.offload.now += engine.random.choice([0.0, 0.5])
            engine.step()
        elif action == "report":
            engine.report()
        elif action == "open":
            engine.open()
        elif action == "abort":
            engine.abort()
        elif action == "fail":
            engine.failures = engine.random.choice([0.0, 0.0, 0.3])
        elif action == "overdue" and engine.random.random() < 0.2:
            engine.overdue()
        elif action == "lose" and engine.random.random() < 0.2:
            engine.lose()
        elif action == "weights" and engine.random.random() < 0.1:
            engine.change_weights()
        engine.manager.check_integrity()


@settings(max_examples=budget(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(WritePolicy),
    host=st.sampled_from([5, 14, 40]),
    ranks=st.sampled_from(RANKS),
)
def test_no_block_of_any_rank_has_wrong_bytes_and_every_load_ends_once(
    seed: int, policy: WritePolicy, host: int, ranks: tuple[int, int]
) -> None:
    engine = Troubled(seed, policy, host_blocks=host, ranks=ranks[0], replicas=ranks[1])
    play(engine, 150)
    assert engine.close() == 0


@settings(max_examples=budget(40), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from([WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK]),
    host=st.sampled_from([10, 28, 80]),
    groups=st.sampled_from(MODELS),
    replicas=st.sampled_from([1, 2]),
    own_states=st.booleans(),
)
def test_groups_of_layers_survive_the_same(
    seed: int,
    policy: WritePolicy,
    host: int,
    groups: tuple[CacheGroup, ...],
    replicas: int,
    own_states: bool,
) -> None:
    engine = Troubled(
        seed, policy, host_blocks=host, ranks=2, replicas=replicas, groups=groups, own_states=own_states
    )
    play(engine, 120)
    assert engine.close() == 0


@settings(max_examples=budget(15), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from([WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK]),
    host=st.sampled_from([9, 14, 30]),
    ranks=st.sampled_from(RANKS),
    streams=st.booleans(),
    groups=st.sampled_from([(), (), (window(5, BLOCK // 2), FULL), (HALVES, STATE), (STATE, STATE)]),
)
def test_storage_and_a_restart_survive_the_same(
    seed: int,
    policy: WritePolicy,
    host: int,
    ranks: tuple[int, int],
    streams: bool,
    groups: tuple[CacheGroup, ...],
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage_reads, "MOST_GROUP_BYTES", 1)  # each read brings one block
        for life in range(2):
            engine = Stored(
                seed + life,
                policy,
                Path(folder),
                host_blocks=host,
                ranks=ranks[0],
                replicas=ranks[1],
                streams=streams,
                groups=groups,
            )
            play(engine, 120)
            assert engine.close() == 0
