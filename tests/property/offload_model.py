"""An engine like vLLM's scheduler, which owns its device blocks, and an oracle of hashes and bytes.

It hands its blocks over in the middle of copies, preempts, aborts, and asks repeatedly. With groups of layers it gives
blocks back as they are beyond a group's reach, and with states it keeps those at the ends of the pages where a step
ended. Every record of the host tier, and every block that a step reads, must hold what its hash stands for.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import numpy as np
from msgspec.structs import replace

from fdcache.groups import CacheGroup, groups_of_ranks
from fdcache.manager import NO_BLOCK, LoadOutcome, LoadStatus, MatchStatus, Request
from fdcache.metadata import CacheSwapMetadata, TransferPlan, TransferReport
from fdcache.settings.cache import WritePolicy
from tests.offload_engine import BLOCK, GatedDevice, OffloadEngine
from tests.property.offload_sequences import (
    CHUNK,
    DEVICE_BLOCKS,
    Late,
    PlansInFlight,
    Sequence,
    page_records,
)
from tests.swaps import uniform_layout


class Engine:
    """A scheduler with a prefix cache of its own: free blocks keep their content until they are used again."""

    def __init__(
        self,
        seed: int,
        policy: WritePolicy,
        *,
        ignores_after: bool = False,
        host_blocks: int = 14,
        groups: tuple[CacheGroup, ...] = (),
        skew: int = 0,
        head_dim: int = 8,
        ranks: int = 1,
        replicas: int = 1,
        own_states: bool = True,
        **options: Any,
    ) -> None:
        """``own_states``: ranks that hold the same bytes have states of their own beside them."""
        self.random = random.Random(seed)
        self.failures = 0.0
        self.skew = skew
        self.offload = OffloadEngine(
            layout=uniform_layout(
                block_size=BLOCK,
                num_layers=2,
                head_dim=head_dim,
                groups=groups_of_ranks(groups, replicas) if own_states else groups,
                tp_size=ranks,
                replicas=replicas,
            ),
            device_blocks=DEVICE_BLOCKS * max(page_records(groups), 1),
            host_blocks=host_blocks,
            policy=policy,
            device=lambda: GatedDevice(self.failing),
            clean_reserve=2,
            defer_timeout=3.0,
            **options,
        )
        self.manager = self.offload.manager
        self.layout = self.offload.layout
        self.groups, self.num_states = self.layout.page_records, sum(group.is_state for group in groups)
        self.owners = self.layout.num_states // max(self.num_states, 1)
        blocks = DEVICE_BLOCKS * max(page_records(groups), 1)
        for device in self.gated:
            device.is_gated = True
        self.ignores_after = ignores_after
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self.uses = [0] * blocks
        self.content: dict[int, bytes] = {}
        self.cached: dict[bytes, int] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.loads: dict[int, Sequence] = {}
        self.withdrawn = 0
        self.plans = PlansInFlight()
        self.late: list[Late] = []
        self.preempted: list[Sequence] = []
        self.reports: list[Any] = []
        self.outcomes = self.planned_loads = 0
        self.names = 0
        self.given: list[int] = []
        self.former_states: list[tuple[Sequence, list[int]]] = []
        self.waited_for = 0
        self.wrong = 0
        self.strays = 0

    @property
    def gated(self) -> list[GatedDevice]:
        return [device for device in self.offload.devices if isinstance(device, GatedDevice)]

    def open(self) -> None:
        for device in self.gated:
            device.open()

    def failing(self, swap: CacheSwapMetadata) -> list[int]:
        return [i for i in range(len(swap)) if self.random.random() < self.failures]

    # --- device blocks ------------------------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        taken = []
        for _ in range(count):
            block, _ = self.free.popitem(last=False)
            old = self.content.pop(block, None)
            if old is not None and self.cached.get(old) == block:
                del self.cached[old]
            self.uses[block] = 1
            taken.append(block)
        self.given += taken
        return taken

    def share(self, block: int) -> None:
        self.free.pop(block, None)
        self.uses[block] += 1

    def give_back(self, block: int) -> None:
        self.uses[block] -= 1
        if not self.uses[block]:
            self.free[block] = None

    def release(self, sequence: Sequence) -> None:
        for block in reversed(sequence.table):
            if block != NO_BLOCK:
                self.give_back(block)
        self.release_states(sequence)
        sequence.table, sequence.computed = [], 0

    def of_ranks(self, states: list[int]) -> list[int]:
        """Return the blocks of states once for each rank that has its own."""
        return [block for block in states for _ in range(self.owners)]

    def release_states(self, sequence: Sequence) -> None:
        for block in sequence.states:
            self.give_back(block)
        sequence.states = []

    def is_outside(self, index: int, tokens: int) -> bool:
        """Return True if nothing after the first ``tokens`` tokens reads entry ``index`` of a block table."""
        if not self.layout.groups:
            return False
        page, record = divmod(index, self.groups)
        of_page = self.layout.page_groups
        group = self.layout.groups[of_page[record]]
        number = page * of_page.count(of_page[record]) + record - of_page.index(of_page[record])
        return number < group.blocks_beyond(tokens + self.skew)

    def local_hit(self, request: Request) -> tuple[int, list[int]]:
        """Return the pages that are on the device with their states, and their blocks."""
        keys = self.offload.keys(request)
        for pages in range((request.num_tokens - 1) // BLOCK, 0, -1):
            if any(key.tobytes() not in self.cached for key in self.offload.state_keys(request, pages)):
                continue
            hit = [
                NO_BLOCK if self.is_outside(i, pages * BLOCK) else self.cached.get(keys[i].tobytes())
                for i in range(pages * self.groups)
            ]
            if None not in hit:
                return pages, [block for block in hit if block is not None]
        return 0, []

    # --- a step -------------------------------------------------------------------------------------------

    def arrive(self, families: list[int]) -> None:
        self.names += 1
        tokens = [family for family in families for _ in range(BLOCK)] + [self.names] * self.random.randint(
            1, 3
        )
        request = Request(f"r{self.names}", tokens)
        self.manager.begin([request])
        self.waiting.append(Sequence(request, len(tokens) + self.random.choice([0, 0, 5]), tokens))

    def step(self) -> None:
        self.given = []
        for sequence in list(self.waiting):
            self.admit(sequence)
        self.withdraw_some()
        scheduled = self.schedule()
        self.manager.evicted(np.array(self.given, np.int32))
        self.manager.next_evicted(np.array(list(self.free)[:3], np.int32))
        plans = self.taken(self.manager.take_plans())
        for sequence, tokens in scheduled:
            whole = np.array(sequence.table, np.int32)
            self.manager.offer(sequence.request, tokens, whole)
            if sequence.states:
                above = sequence.table[tokens // BLOCK * self.groups - 1] if self.groups else NO_BLOCK
                self.manager.offer_states(
                    sequence.request, tokens, np.array(self.of_ranks(sequence.states), np.int32), above
                )
        self.run(plans, scheduled)
        self.end_preempted()

    def admit(self, sequence: Sequence) -> None:
        request = sequence.request
        pages, hit = self.local_hit(request)
        tokens = pages * BLOCK
        found = self.manager.match(request, tokens)
        if found.status is MatchStatus.DEFERRED:
            return
        reused = tokens + found.num_tokens
        end = reused if found.num_tokens else min(tokens + CHUNK, request.num_tokens)
        outside = [self.is_outside(i, reused) for i in range(-(-end // BLOCK) * self.groups)]
        kept = [block for block, is_outside in zip(hit, outside, strict=False) if not is_outside]
        new = outside[len(hit) :].count(False)
        states: Any = [] if found.num_tokens else self.offload.state_keys(request, pages)
        kept_states = [self.cached[key.tobytes()] for key in states]
        new_states = self.num_states if found.num_tokens else 0
        room = len(self.free) - sum(block in self.free for block in {*kept, *kept_states})
        if new + new_states > room or self.random.random() < 0.2:  # asked again in the next step
            return
        self.waiting.remove(sequence)
        for block in [*kept, *kept_states]:
            self.share(block)
        blocks = iter([*kept, *self.take(new)])
        sequence.table = [NO_BLOCK if is_outside else next(blocks) for is_outside in outside]
        sequence.computed = tokens
        sequence.states = kept_states + self.take(new_states)
        if not found.num_tokens:
            self.manager.unmatch([request])
            self.running.append(sequence)
            return
        sequence.loading = sequence.table[len(hit) :] + self.of_ranks(sequence.states)
        loading = np.array(sequence.loading, np.int32)
        assert self.manager.load(request, loading) == len(loading)
        self.planned_loads += 1
        number = self.manager.load_of(request)
        assert number not in self.loads
        self.loads[number] = sequence

    def withdraw_some(self) -> None:
        """Take back loads of this step, as when the engine does not schedule them after all, or their client leaves.

        Their device blocks may get other contents in the same step.
        """
        for number, sequence in list(self.loads.items()):
            if self.random.random() > 0.2 or sequence.aborted:
                continue
            is_sent = bool(self.plans.of_load(number))
            assert self.manager.cancel_load(sequence.request) == (not is_sent)
            if not is_sent:
                self.withdrawn += 1
                self.planned_loads -= 1
                del self.loads[number]
                sequence.loading = None
                self.release(sequence)
                self.waiting.insert(0, sequence)

    def schedule(self) -> list[tuple[Sequence, int]]:
        scheduled: list[tuple[Sequence, int]] = []
        for sequence in list(self.running):
            if sequence not in self.running:
                continue
            for i, block in enumerate(sequence.table):
                if block != NO_BLOCK and self.is_outside(i, sequence.computed):
                    self.give_back(block)
                    sequence.table[i] = NO_BLOCK
            tokens = min(sequence.computed + CHUNK, sequence.request.num_tokens)
            if self.num_states and tokens // BLOCK * BLOCK > sequence.computed:
                tokens -= tokens % BLOCK
            missing = max(-(-tokens // BLOCK) * self.groups - len(sequence.table), 0)
            states = self.num_states if tokens % BLOCK == 0 else 0
            while missing + states > len(self.free) and sequence in self.running:
                victim = self.running.pop()
                scheduled = [each for each in scheduled if each[0] is not victim]
                self.release(victim)
                self.waiting.insert(0, victim)
            if sequence in self.running:
                sequence.table += self.take(missing)
                self.former_states.append((sequence, sequence.states))
                sequence.states = self.take(states)
                scheduled.append((sequence, tokens))
        return scheduled

    def run(self, plans: Any, scheduled: list[tuple[Sequence, int]]) -> None:
        self.waited_for += sum(len(plan.after) for plan in plans)
        if self.ignores_after:
            plans = [replace(plan, after=()) for plan in plans]
        counters = self.offload.submit(plans)
        if any(plan.after for plan in plans) or self.random.random() < 0.3:
            self.open()
        for counter in counters:
            counter.wait_all()
        former = {id(sequence): states for sequence, states in self.former_states}
        for sequence, tokens in scheduled:
            self.compute(sequence, tokens, former[id(sequence)])
        for _, states in self.former_states:
            for block in states:
                self.give_back(block)
        self.former_states.clear()
        for sequence, tokens in scheduled:
            if tokens == sequence.request.num_tokens:
                self.accept(sequence)

    def compute(self, sequence: Sequence, tokens: int, former: list[int]) -> None:
        request, keys = sequence.request, self.offload.keys(sequence.request)
        whole = sequence.computed // BLOCK * self.groups
        if former:
            before = self.offload.state_keys(request, sequence.computed // BLOCK)
            self.wrong += not self.offload.hold_keys(former, before)
        self.wrong += not self.offload.holds(request, sequence.table[:whole])
        self.wrong += any(
            block == NO_BLOCK and not self.is_outside(i, sequence.computed - self.skew)
            for i, block in enumerate(sequence.table)
        )
        for index in range(whole, len(sequence.table)):
            block = sequence.table[index]
            is_whole = (index // self.groups + 1) * BLOCK <= tokens
            row = keys[index].tobytes() if is_whole else None
            if block != NO_BLOCK:
                self.offload.fill(block, row)
                self.keep(block, row)
        if sequence.states:
            for block, key in zip(
                sequence.states, self.offload.state_keys(request, tokens // BLOCK), strict=True
            ):
                self.offload.fill(block, key.tobytes())
                self.keep(block, key.tobytes())
        sequence.computed = tokens

    def keep(self, block: int, row: bytes | None) -> None:
        """Enter a block into the engine's own prefix cache."""
        if row is not None:
            self.content[block] = row
            self.cached.setdefault(row, block)

    def accept(self, sequence: Sequence) -> None:
        if sequence.request.num_tokens < sequence.goal:
            sequence.request.append_tokens(self.names)
            return
        self.running.remove(sequence)
        self.manager.finish([sequence.request])
        self.release(sequence)

    # --- reports and accidents ----------------------------------------------------------------------------

    def report(self) -> None:
        self.reports += [report for rank in self.offload.ranks for report in rank.poll()]
        count = self.random.randint(0, len(self.reports))
        taken, self.reports = self.reports[:count], self.reports[count:]
        self.apply(taken)

    def apply(self, reports: list[TransferReport]) -> None:
        outcomes = self.manager.apply(reports)
        self.plans.reported(reports)
        for outcome in outcomes:
            self.end_load(outcome)
        self.free_late()

    def expire(self) -> None:
        for outcome in self.manager.expire():
            self.end_load(outcome)

    def free_late(self) -> None:
        """Give back what overdue plans may have written into, once they have ended."""
        for late in [late for late in self.late if not self.plans.any_in_flight(late.plans)]:
            self.late.remove(late)
            for block in late.blocks:
                self.give_back(block)

    def taken(self, plans: list[TransferPlan]) -> list[TransferPlan]:
        """Return plans, none of which may load into a device block that was given back."""
        for plan in plans:
            numbers = [number for _, number in self.manager.loads_of(plan.plan_id)]
            self.plans.sent(plan, numbers, len(self.offload.ranks))
            if plan.loads is not None:
                waiting = [self.loads[number] for number in numbers if number in self.loads]
                waited_for = {block for each in waiting for block in [*each.table, *each.states]}
                loaded = self.offload.owners.blocks(plan.loads.dst_block_ids)
                self.strays += len(set(loaded.tolist()) - waited_for)
        return plans

    def end_load(self, outcome: LoadOutcome) -> None:
        self.outcomes += 1
        sequence = self.loads.pop(outcome.load)
        assert sequence.request.request_id == outcome.request_id
        assert sequence.loading is not None
        first = len(sequence.table) + self.owners * len(sequence.states) - len(sequence.loading)
        planned = len(sequence.loading) - len(outcome.unplanned)
        assert sequence.loading[planned:] == list(outcome.unplanned)
        pages = outcome.recompute_from // BLOCK
        is_whole = outcome.status is LoadStatus.CONFIRMED
        good = pages * self.groups - first + (self.layout.num_states if is_whole else 0)
        assert 0 <= good <= len(sequence.loading)
        assert (good == len(sequence.loading)) == is_whole
        keys = np.concatenate(
            (
                self.offload.keys(sequence.request)[: pages * self.groups][first:],
                self.offload.state_keys(sequence.request, pages).repeat(self.owners, axis=0),
            )
        )
        self.wrong += not self.offload.hold_keys(sequence.loading[:good], keys[:good])
        for block, key in zip(sequence.loading[:good], keys, strict=False):
            self.keep(block, key.tobytes() if block != NO_BLOCK else None)
        if outcome.status is LoadStatus.OVERDUE:
            self.hold_late(sequence.loading[:planned], outcome.load)
        sequence.loading = None
        if sequence.aborted:
            self.release(sequence)
            return
        if outcome.status is LoadStatus.OVERDUE:  # its blocks may still be written into
            self.release(sequence)
            self.preempted.append(sequence)
            if self.random.random() < 0.5:
                self.end_preempted()
            return
        if outcome.unplanned and self.random.random() < 0.5:
            del sequence.table[first + planned :]
            for block in outcome.unplanned:
                self.give_back(block)
        if (
            self.layout.has_gaps or self.num_states
        ) and not is_whole:  # what is left would need what is not there
            self.release(sequence)
            self.waiting.insert(0, sequence)
            return
        sequence.computed = outcome.recompute_from
        self.running.append(sequence)

    def hold_late(self, blocks: list[int], load: int) -> None:
        self.late.append(Late([block for block in blocks if block != NO_BLOCK], self.plans.of_load(load)))
        for block in self.late[-1].blocks:
            self.share(block)

    def end_preempted(self) -> None:
        """End the requests whose load was overdue, at once or after the plans of the next step were taken."""
        for sequence in self.preempted:
            self.manager.finish([sequence.request])
            self.begin_anew(sequence)
        self.preempted.clear()

    def begin_anew(self, former: Sequence) -> None:
        """Let a request begin again, as the same object or another under its name."""
        request = former.request
        if self.random.random() < 0.5:
            tokens = former.prompt if self.random.random() < 0.7 else former.prompt[: BLOCK + 1]
            request = Request(request.request_id, tokens)
        self.manager.begin([request])
        self.waiting.append(Sequence(request, former.goal, former.prompt))

    def abort(self) -> None:
        candidates = [
            *self.waiting,
            *self.running,
            *(each for each in self.loads.values() if not each.aborted),
        ]
        if not candidates:
            return
        sequence = self.random.choice(candidates)
        self.manager.finish([sequence.request])
        if sequence.loading is not None:
            sequence.aborted = True
            if self.random.random() < 0.5:
                self.begin_anew(sequence)
            return
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)
        self.release(sequence)

    def reset(self) -> None:
        self.manager.reset_cache()

    def drain(self) -> None:
        self.failures = 0.0
        for _ in range(300):
            self.offload.now += 1
            self.step()
            self.open()
            reports, self.reports = [*self.reports, *self.offload.reports()], []
            self.apply(reports)
            is_idle = not (self.waiting or self.running or self.loads or self.preempted)
            if is_idle and not self.manager.has_pending_work:
                return
        raise AssertionError("the engine never comes to an end")

    def close(self) -> int:
        """End everything; return the number of wrong loads and records."""
        self.drain()
        assert self.outcomes == self.planned_loads
        assert not self.late and not self.strays
        wrong = self.wrong + self.offload.wrong_records()
        self.offload.close()
        return wrong
