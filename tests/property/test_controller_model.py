"""Manager and controllers together against the model engine: what a step reads is what the copies brought."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from fdcache.manager import CacheManager
from tests.property.controller_ranks import ControllerRank
from tests.property.test_manager import MOST_DEVICE_BLOCKS, ManagerMachine, bounded
from tests.seeds import budget
from tests.swaps import Worker


class ControllerMachine(ManagerMachine):
    """Two ranks with copy threads of their own; few loads may be ahead, so that others wait and are merged."""

    num_layers = 3

    @staticmethod
    def make_rank(manager: CacheManager, index: int) -> ControllerRank:
        worker = Worker(
            manager.layout,
            rank=index,
            device_blocks=MOST_DEVICE_BLOCKS,
            host_blocks=manager.host_cache.num_blocks,
            group_layers=1,
            copy_threads=1 + index,
            queued_bytes=2 * manager.layout.payload_bytes,
        )
        return ControllerRank(index, worker)


def test_every_step_reads_the_bytes_of_its_prefix() -> None:
    run_state_machine_as_test(ControllerMachine, settings=bounded(examples=budget(300), steps=25))


@pytest.mark.slow
def test_every_step_reads_the_bytes_of_its_prefix_in_long_histories() -> None:
    run_state_machine_as_test(ControllerMachine, settings=bounded(examples=budget(1000), steps=50))
