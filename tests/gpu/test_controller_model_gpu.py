"""Model engine with GPU controllers: every step reads the bytes of its prefix."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from fdcache.devices.topology import visible_gpus
from fdcache.manager import CacheManager
from tests.gpu.workers import GpuWorker
from tests.property.controller_ranks import ControllerRank
from tests.property.test_manager import MOST_DEVICE_BLOCKS, ManagerMachine, bounded


class GpuMachine(ManagerMachine):
    """Ranks use the visible GPUs in turn, with different copy methods and few loads ahead."""

    num_layers = 3
    methods = ("auto", "staged")

    @classmethod
    def make_rank(cls, manager: CacheManager, index: int) -> ControllerRank:
        gpus = visible_gpus()
        worker = GpuWorker(
            manager.layout,
            gpu=gpus[index % len(gpus)].uuid,
            rank=index,
            device_blocks=MOST_DEVICE_BLOCKS,
            host_blocks=manager.host_cache.num_blocks,
            group_layers=1,
            swap_method=cls.methods[index],
            queued_bytes=2 * manager.layout.payload_bytes,
        )
        return ControllerRank(index, worker)


class OtherMethodsMachine(GpuMachine):
    methods = ("kernel", "dma")


@pytest.mark.parametrize("machine", [GpuMachine, OtherMethodsMachine])
def test_every_step_reads_the_bytes_of_its_prefix(machine: type[GpuMachine]) -> None:
    run_state_machine_as_test(machine, settings=bounded(examples=40, steps=25))
