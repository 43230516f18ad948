"""Decode steps by ``advance`` leave a manager as the three calls do that it stands for."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache.manager import CacheManager, Request
from fdcache.metadata import CacheLevel
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.tiers.host import host_block_bytes
from tests.manager_world import layout
from tests.property.engine_model import BLOCK
from tests.tier_help import hash_list

POLICIES = st.sampled_from([None, *WritePolicy])


class Pair:
    """Two managers that do the same, one with ``advance``."""

    def __init__(self, device_blocks: int, policy: WritePolicy | None) -> None:
        values: dict[str, object] = {"device_blocks": device_blocks}
        if policy is not None:
            values |= {"write_policy": policy, "host_memory": 6 * host_block_bytes(layout())}
        self.managers = [CacheManager(CacheSettings.model_validate(values), layout()) for _ in range(2)]
        self.running: list[list[Request]] = [[], []]

    def admit(self, name: str, prompt: list[int]) -> None:
        outcomes = []
        for manager, running in zip(self.managers, self.running, strict=True):
            request = Request(name, prompt)
            found = manager.match_prefix([request])[0]
            allocation = manager.allocate_device_blocks([(request, len(prompt))])[0]
            if allocation.ok:
                manager.commit([(request, len(prompt))])
                running.append(request)
            else:
                manager.finish([request])
            outcomes.append((found, allocation))
        assert outcomes[0] == outcomes[1]

    def step(self, tokens: list[int]) -> None:
        """Run a decode step. Requests without blocks are finished, as an engine would preempt them."""
        apart, together = self.managers
        failed = []
        for position, (request, token) in enumerate(zip(self.running[0], tokens, strict=True)):
            request.append_tokens([token])
            if not apart.allocate_device_blocks([(request, request.num_tokens)])[0].ok:
                failed.append(position)
            room = BLOCK * request.num_blocks
            apart.commit([(request, min(request.num_tokens - 1, room))])
        added = together.advance(self.running[1], tokens)
        assert added.failed.tolist() == failed
        for position, block in added:
            assert block in self.running[1][position].block_table
        for manager, running in zip(self.managers, self.running, strict=True):
            for position in reversed(failed):
                manager.finish([running.pop(position)])

    def finish(self, position: int) -> None:
        for manager, running in zip(self.managers, self.running, strict=True):
            manager.finish([running.pop(position)])

    def check(self) -> None:
        states = []
        for manager, running in zip(self.managers, self.running, strict=True):
            manager.check_integrity()
            stats = manager.get_stats()
            blocks = [hash_list(request.block_hashes) for request in running]
            tables = [request.block_table.tolist() for request in running]
            found = [
                [node.hash_value for node in manager.find_blocks(request).get(CacheLevel.DEVICE, [])]
                for request in running
            ]
            plans = [[(len(swap), swap.purpose) for swap in plan.swaps()] for plan in manager.take_plans()]
            states.append((stats.device, stats.counters, stats.queued_backups, blocks, tables, found, plans))
        assert states[0] == states[1]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data(), st.integers(3, 10), POLICIES)
def test_advance_is_append_allocate_and_commit(
    data: st.DataObject, device_blocks: int, policy: WritePolicy | None
) -> None:
    pair = Pair(device_blocks, policy)
    for number in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["admit", "step", "step", "step", "finish"]))
        if action == "admit":
            length = data.draw(st.integers(1, 3 * BLOCK))
            pair.admit(str(number), [data.draw(st.integers(0, 1)), *range(length)])
        elif action == "step" and pair.running[0]:
            count = len(pair.running[0])
            for _ in range(data.draw(st.integers(1, BLOCK))):
                pair.step([data.draw(st.integers(0, 1)) for _ in range(len(pair.running[0]))])
                if len(pair.running[0]) != count:
                    break
        elif action == "finish" and pair.running[0]:
            pair.finish(data.draw(st.integers(0, len(pair.running[0]) - 1)))
        pair.check()
