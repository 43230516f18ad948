"""Many plans in flight, held up and cancelled at random, against a plain account of which bytes are where."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from fdcache.controller.layers import LayerDoneCounter
from fdcache.devices.base import Stream
from fdcache.metadata import CacheSwapMetadata, SwapPurpose, TransferPlan, TransferReport
from fdcache.tasks import CpuEvent
from tests.seeds import budget
from tests.swaps import PATIENCE, Worker, swap, uniform_layout

SLOTS = 32
Pair = tuple[int, int]


@dataclass
class Sent:
    """A plan in flight: its pairs as (device, host), and the bytes that each copy must carry."""

    plan: TransferPlan
    pairs: dict[SwapPurpose, list[Pair]]
    carried: dict[SwapPurpose, list[list[bytes]]]
    cancelled: bool = False


@dataclass
class Account:
    """The test's own account of the blocks that the worker must hold."""

    worker: Worker
    rng: random.Random
    host: dict[int, list[bytes]] = field(default_factory=dict)
    generations: list[int] = field(default_factory=lambda: [0] * SLOTS)
    free_device: set[int] = field(default_factory=lambda: set(range(SLOTS)))
    free_host: set[int] = field(default_factory=lambda: set(range(SLOTS)))
    sent: dict[int, Sent] = field(default_factory=dict)
    counters: list[LayerDoneCounter] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)

    def take(self, slots: set[int], most: int) -> list[int]:
        chosen = self.rng.sample(sorted(slots), min(len(slots), self.rng.randint(0, most)))
        slots.difference_update(chosen)
        return chosen

    def save(self, purpose: SwapPurpose) -> tuple[list[Pair], list[list[bytes]]]:
        """Pairs that overwrite free host slots with free device blocks."""
        device, host = self.take(self.free_device, 5), self.take(self.free_host, 5)
        pairs = list(zip(device, host, strict=False))
        self.free_device.update(device[len(pairs) :])
        self.free_host.update(host[len(pairs) :])
        for _, slot in pairs:
            self.host.pop(slot, None)
            self.generations[slot] += 1
        return pairs, [self.worker.block(slot) for slot, _ in pairs]

    def submit(self, plan_id: int, gate: CpuEvent | None) -> None:
        pairs: dict[SwapPurpose, list[Pair]] = {}
        carried: dict[SwapPurpose, list[list[bytes]]] = {}
        for purpose in (SwapPurpose.EVICT, SwapPurpose.BACKUP):
            pairs[purpose], carried[purpose] = self.save(purpose)
        ready = {slot for slot in self.free_host if slot in self.host}
        sources = self.take(ready, 5)
        self.free_host.difference_update(sources)
        # Loads go into slots that the plan empties, too.
        emptied = [device for device, _ in pairs[SwapPurpose.EVICT]]
        others = self.take(self.free_device, 5)
        targets = emptied + others
        loads = list(zip(targets, sources, strict=False))
        self.free_device.update(set(others) - {device for device, _ in loads})
        self.free_host.update(sources[len(loads) :])
        pairs[SwapPurpose.LOAD] = loads
        carried[SwapPurpose.LOAD] = [self.host[host] for _, host in loads]
        made = TransferPlan(
            plan_id=plan_id,
            evictions=self.swap(SwapPurpose.EVICT, pairs),
            loads=self.swap(SwapPurpose.LOAD, pairs),
            backups=self.swap(SwapPurpose.BACKUP, pairs),
        )
        self.sent[plan_id] = Sent(made, pairs, carried)
        stream = None
        if gate is not None:
            stream = self.worker.controller.device.create_stream()
            stream.wait_event(gate)
            self.streams.append(stream)
        self.counters.append(self.worker.controller.submit_swap_tasks(made, stream))

    def look(self) -> None:
        """Somebody asks about a layer, or waits for it on a stream."""
        counter = self.rng.choice(self.counters[-8:])
        layer = self.rng.randrange(counter.num_layers)
        if self.rng.random() < 0.5:
            counter.is_layer_done(layer)
            return
        self.streams.append(self.worker.controller.device.create_stream())
        counter.wait_for_layer(layer, stream=self.streams[-1])

    def swap(self, purpose: SwapPurpose, pairs: dict[SwapPurpose, list[Pair]]) -> CacheSwapMetadata:
        generations = [self.generations[host] for _, host in pairs[purpose]]
        load = purpose is SwapPurpose.LOAD
        ordered = [(host, device) if load else (device, host) for device, host in pairs[purpose]]
        return swap(purpose, ordered, generation=generations)

    def confirm(self, report: TransferReport) -> None:
        sent = self.sent.pop(report.plan_id)
        results = {result.purpose: result for result in report.results}
        for purpose, pairs in sent.pairs.items():
            failed = set(results[purpose].failed.tolist())
            assert sent.cancelled or not failed
            for position, (device, host) in enumerate(pairs):
                if position in failed:
                    continue
                if purpose is SwapPurpose.LOAD:
                    assert self.worker.block(device) == sent.carried[purpose][position]
                else:
                    self.host[host] = sent.carried[purpose][position]
        for pairs in sent.pairs.values():
            self.free_device.update(device for device, _ in pairs)
            self.free_host.update(host for _, host in pairs)
        for device in sorted(self.free_device)[:2]:
            self.worker.scramble(device)


def run_account(seed: int, plans: int) -> None:
    """Seeds differ in how many bytes of loads may be ahead: one load, a few, or all there are."""
    rng = random.Random(seed)
    layout = uniform_layout(num_layers=5, num_draft_layers=1, head_dim=9, dtype="float16")
    ahead = (4 * layout.payload_bytes, 1, 1 << 30)[seed % 3]
    with Worker(
        layout,
        device_blocks=SLOTS,
        host_blocks=SLOTS,
        copy_threads=1 + seed % 3,
        group_layers=1 + seed % 2,
        queued_bytes=ahead,
    ) as worker:
        account = Account(worker, rng)
        gates: list[CpuEvent] = []
        for plan_id in range(1, plans):
            gate = CpuEvent() if rng.random() < 0.4 else None
            if gate is not None:
                gates.append(gate)
            account.submit(plan_id, gate)
            if rng.random() < 0.1:
                chosen = rng.choice(list(account.sent))
                account.sent[chosen].cancelled |= worker.controller.handler(chosen).cancel()
            if rng.random() < 0.2:
                account.look()
            if len(gates) > 4 or rng.random() < 0.15:
                while gates:
                    gates.pop(0).set()
                account.streams.clear()
            for report in worker.controller.wait_reports(rng.choice([0, 0.001])):
                account.confirm(report)
        for gate in gates:
            gate.set()
        while account.sent:
            for report in worker.controller.wait_reports(PATIENCE):
                account.confirm(report)
        assert account.free_device == account.free_host == set(range(SLOTS))
        assert worker.controller.poll() == []


@pytest.mark.parametrize("seed", range(3))
def test_every_block_is_where_the_account_says(seed: int) -> None:
    run_account(seed, 300)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(9))
def test_every_block_is_where_the_account_says_in_long_runs(seed: int) -> None:
    run_account(seed, budget(3000))
