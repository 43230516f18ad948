"""What an engine believes of a store that others use and empty."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from fdcache.metadata import CacheSwapMetadata, HashArray, SwapPurpose
from fdcache.plans.ledger import Blocks
from fdcache.storage.connector import Outcome, RunResult, last_whole
from fdcache.testing.storage import path_of
from fdcache.tiers.remote_index import RemoteIndex
from tests.service_help import until

PATH = path_of(8, "remote")
NOTHING = np.zeros(len(PATH), np.bool_)


class Store:
    """A store that answers what it is told, and remembers which blocks were doubted."""

    def __init__(self) -> None:
        self.answer = RunResult(len(PATH))
        self.doubted: list[bytes] = []

    def exists(self, hashes: HashArray, timeout: float) -> RunResult:
        return self.answer

    def doubt(self, hashes: HashArray) -> None:
        self.doubted += [row.tobytes() for row in hashes]

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def index(store: Store) -> Iterator[RemoteIndex]:
    index = RemoteIndex(store, timeout=30.0)  # type: ignore[arg-type]
    yield index
    index.close()


def blocks() -> Blocks:
    count = len(PATH)
    return Blocks(np.arange(count, dtype=np.int32), np.zeros(count, np.uint32), PATH, np.zeros_like(PATH))


def swap(purpose: SwapPurpose) -> CacheSwapMetadata:
    slots, generations = np.arange(len(PATH), dtype=np.int32), np.zeros(len(PATH), np.uint32)
    return CacheSwapMetadata(
        purpose=purpose,
        src_type=purpose.source,
        dst_type=purpose.target,
        src_block_ids=slots,
        dst_block_ids=slots,
        src_generations=generations,
        dst_generations=generations,
        hash_values=PATH,
        parent_hashes=np.zeros_like(PATH),
    )


def write(index: RemoteIndex) -> None:
    index.begin_writes(blocks())
    index.end_writes(swap(SwapPurpose.STORE), ~NOTHING, np.zeros(len(PATH), np.uint64), NOTHING, NOTHING)


def ask(index: RemoteIndex) -> int:
    index.run(PATH, 0)
    until(lambda: index.run(PATH, 0) is not None, "the store has answered")
    return int(index.run(PATH, 0) or 0)


def test_blocks_that_the_store_has_removed_are_stored_again(index: RemoteIndex, store: Store) -> None:
    write(index)
    assert not index.is_absent(PATH).any()
    store.answer = RunResult(3)
    assert ask(index) == 3
    assert index.is_absent(PATH).tolist() == [False] * 3 + [True] * 5


def test_an_answer_that_was_cut_short_says_nothing_of_what_is_behind_it(
    index: RemoteIndex, store: Store
) -> None:
    write(index)
    store.answer = RunResult(3, Outcome.TIMEOUT, "no answer")
    assert ask(index) == 3
    assert not index.is_absent(PATH).any()


def test_blocks_that_are_being_written_are_not_written_twice(index: RemoteIndex, store: Store) -> None:
    index.begin_writes(blocks())
    store.answer = RunResult(0)
    assert ask(index) == 0
    assert not index.is_absent(PATH).any()


def test_a_failed_read_makes_the_connector_ask_the_store_again(index: RemoteIndex, store: Store) -> None:
    write(index)
    lost = NOTHING.copy()
    lost[5:] = True
    index.end_reads(swap(SwapPurpose.PREFETCH), lost, NOTHING)
    assert store.doubted == [row.tobytes() for row in PATH[5:]]
    assert index.is_absent(PATH).tolist() == [False] * 5 + [True] * 3


class StoreByPosition(Store):
    """A store that can be asked for the last of some groups of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[list[bytes], int]] = []

    def last(self, hashes: HashArray, width: int, timeout: float) -> RunResult:
        self.asked.append(([row.tobytes() for row in hashes], width))
        return self.answer


def test_the_last_group_is_asked_for_once_and_those_after_it_may_be_stored_again() -> None:
    store = StoreByPosition()
    index = RemoteIndex(store, timeout=30.0)  # type: ignore[arg-type]
    write(index)
    store.answer = RunResult(3)
    assert index.last(PATH, 2) is None
    until(lambda: index.last(PATH, 2) is not None, "the store has answered")
    assert index.last(PATH, 2) == 3
    assert store.asked == [([row.tobytes() for row in PATH], 2)]
    assert index.is_absent(PATH).tolist() == [False] * 6 + [True] * 2
    assert index.last(PATH[:0], 2) == 0
    index.close()


def test_of_a_store_that_is_not_asked_by_position_what_this_engine_has_stored_is_known(
    index: RemoteIndex,
) -> None:
    assert index.last(PATH, 2) == 0
    write(index)
    assert index.last(PATH, 2) == 4


def test_the_last_whole_group_is_counted() -> None:
    assert last_whole(np.array([True, True, False, True, True, True, True, False]), 2) == 3
    assert last_whole(np.array([True, False]), 2) == 0
    assert last_whole(np.zeros(0, np.bool_), 2) == 0
