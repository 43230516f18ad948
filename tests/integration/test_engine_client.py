"""EngineClient: blocks of engines that manage their own device slots."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from fdcache.controller.cache_controller import CacheController
from fdcache.errors import HashingError, PlanError
from fdcache.hashing import TokenBlocks, root_hash
from fdcache.manager import AsyncEngineClient, EngineClient
from fdcache.metadata import HashArray, TransferPlan, TransferReport
from fdcache.settings.cache import CacheSettings, TransferSettings
from fdcache.tiers.events import BlockStored
from tests.service_engine import BLOCK, layout
from tests.service_help import TIMEOUT, LocalService, local_service, until


class Blocks:
    """Client with two ranks, whose device blocks a test fills and reads."""

    def __init__(self, address: str, events: int = 0) -> None:
        self.layout = layout(ranks=2)
        settings = CacheSettings(server=address, rpc_timeout=TIMEOUT, event_buffer=events)
        self.client = EngineClient(settings, self.layout, self.execute)
        self.ranks = [CacheController(TransferSettings(), self.layout, rank=rank) for rank in range(2)]
        self.tensors = [rank.initialize_kv_cache(16) for rank in self.ranks]
        for rank in self.ranks:
            rank.initialize_host_cache(self.client.host_cache)
        until(lambda: self.client.store_room, "slots are granted")

    def execute(self, plan: TransferPlan) -> list[TransferReport]:
        for rank in self.ranks:
            rank.submit_swap_tasks(plan)
        return [report for rank in self.ranks for report in rank.wait_reports(30)]

    def hashes(self, blocks: int) -> HashArray:
        tokens = TokenBlocks(BLOCK, root_hash(self.layout.fingerprint, None))
        tokens.append(list(range(blocks * BLOCK)))
        return tokens.hashes

    def fill(self, slots: list[int]) -> None:
        for rank, tensors in enumerate(self.tensors):
            for plane, tensor in enumerate(tensors):
                for i, slot in enumerate(slots):
                    tensor[slot] = 1000 * rank + 100 * plane + i

    def holds(self, slots: list[int], first: int = 0) -> bool:
        return all(
            bool((tensor[slot] == 1000 * rank + 100 * plane + first + i).all())
            for rank, tensors in enumerate(self.tensors)
            for plane, tensor in enumerate(tensors)
            for i, slot in enumerate(slots)
        )

    def close(self) -> None:
        for rank in self.ranks:
            rank.shutdown()
        self.client.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    with local_service(tmp_path) as running:
        yield running


def array(*slots: int) -> np.ndarray:
    return np.array(slots, np.int32)


def test_blocks_of_one_engine_are_loaded_by_another(service: LocalService) -> None:
    writer, reader = Blocks(service.address), Blocks(service.address)
    hashes = writer.hashes(5)
    writer.fill([3, 1, 4, 9, 5])
    assert writer.client.store(hashes, array(3, 1, 4, 9, 5)) == 5
    until(lambda: reader.client.lookup(hashes) == 5, "they are there")
    assert reader.client.load(hashes, array(7, 8), start=3) == 2
    assert reader.holds([7, 8], first=3)
    assert reader.client.load(hashes, array(0, 1, 2)) == 3
    assert reader.holds([0, 1, 2])
    writer.close()
    reader.close()
    assert service.ask("integrity") == []


def test_stored_blocks_are_not_copied_again(service: LocalService) -> None:
    blocks = Blocks(service.address)
    hashes = blocks.hashes(4)
    assert blocks.client.store(hashes, array(0, 1)) == 2
    assert blocks.client.store(hashes, array(0, 1, 2, 3)) == 2
    blocks.close()


def test_a_block_without_its_parent_is_not_stored(service: LocalService) -> None:
    blocks = Blocks(service.address)
    assert blocks.client.store(blocks.hashes(4), array(2, 3), start=2) == 0
    blocks.close()


def test_events_list_stored_blocks_parents_first(service: LocalService) -> None:
    blocks = Blocks(service.address, events=100)
    hashes = blocks.hashes(2)
    blocks.client.store(hashes, array(0, 1))
    seen: list[bytes] = []

    def both_are_listed() -> bool:
        seen.extend(event.block_hash for event in blocks.client.events() if isinstance(event, BlockStored))
        return seen == [row.tobytes() for row in hashes]

    until(both_are_listed, "both are listed, parents first")
    blocks.client.reset()
    assert blocks.client.lookup(hashes) == 0
    blocks.close()


def test_the_asyncio_client(service: LocalService) -> None:
    blocks = Blocks(service.address)
    hashes = blocks.hashes(2)
    blocks.fill([0, 1])

    async def use() -> int:
        client = AsyncEngineClient(blocks.client)
        assert await client.store(hashes, array(0, 1)) == 2
        while await client.lookup(hashes) < 2:
            await asyncio.sleep(0.01)
        await client.touch(hashes)
        return await client.load(hashes, array(5, 6))

    assert asyncio.run(use()) == 2
    assert blocks.holds([5, 6])
    blocks.close()


def test_without_a_service_every_call_misses(tmp_path: Path) -> None:
    settings = CacheSettings(server=f"ipc://{tmp_path}/none.sock", rpc_timeout=0.1)
    with EngineClient(settings, layout(), lambda plan: []) as client:
        hashes = np.ones((3, 32), np.uint8)
        assert client.lookup(hashes) == 0
        assert client.load(hashes, array(0, 1, 2)) == 0
        assert client.store(hashes, array(0, 1, 2)) == 0


@pytest.mark.parametrize("start", [-1, 4, None, "1"])
def test_arguments_that_are_none_are_refused_by_name(start: Any) -> None:
    with EngineClient(CacheSettings(host_memory=1 << 20), layout(), lambda plan: []) as client:
        hashes, wrong = np.ones((3, 32), np.uint8), cast(Any, [b"key"])
        for call in (client.load, client.store):
            with pytest.raises(HashingError, match="keys must be"):
                call(wrong, array(0))
            with pytest.raises(HashingError, match="start"):
                call(hashes, array(0), start=start)
            with pytest.raises(PlanError, match="device_ids"):
                call(hashes, cast(Any, None))
        with pytest.raises(HashingError, match="start"):
            client.lookup(hashes, start)
        with pytest.raises(HashingError, match="keys must be"):
            client.lookup(wrong)


def test_an_execution_that_fails_stores_nothing_and_holds_nothing() -> None:
    settings = CacheSettings(host_memory=1 << 20)

    def refuse(plan: TransferPlan) -> list[TransferReport]:
        raise OSError("the ranks are gone")

    with EngineClient(settings, layout(), refuse) as client:
        hashes = np.arange(64, dtype=np.uint8).reshape(2, 32)
        with pytest.raises(OSError, match="the ranks are gone"):
            client.store(hashes, array(0, 1))
        assert client.lookup(hashes) == 0
        assert client._manager._host.in_use == 0
