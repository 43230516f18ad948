"""Lists of blocks, native and of arrays: reading, comparing, pickling; the queue of block hashes."""

from __future__ import annotations

import gc
import pickle

import numpy as np
import pytest

from fdcache._core import BlockCopies, BlockList, HostRun
from fdcache.metadata import CacheLevel
from fdcache.plans.ledger import Block, BlockQueue, Blocks
from fdcache.tiers.pool import BlockPool
from tests.tier_help import ROOT_HASH, chain, hash_list, hashes, store

PATH = chain(*range(12))


def found() -> BlockList:
    pool = BlockPool(CacheLevel.DEVICE, 16)
    store(pool, PATH)
    return pool.find(hashes(PATH))


class TestBlockList:
    def test_arrays_are_read_only_views_that_outlive_the_list(self) -> None:
        blocks = found()
        rows, slots = blocks.hashes, blocks.slots
        assert np.shares_memory(rows, blocks.hashes)
        with pytest.raises(ValueError, match="read-only"):
            slots[0] = 1
        del blocks
        gc.collect()
        assert hash_list(rows) == PATH

    def test_one_line_says_how_many_blocks_in_which_slots(self) -> None:
        assert repr(found()) == "BlockList(12 blocks in slots [0, 1, 2, 3, 4, 5, 6, 7, ...])"
        assert repr(found()[:2]) == "BlockList(2 blocks in slots [0, 1])"

    def test_an_index_is_a_block_and_a_slice_is_a_list(self) -> None:
        blocks = found()
        assert blocks[1] == (1, int(blocks.generations[1]), PATH[1], PATH[0], int(blocks.hits[1]))
        assert blocks[-1] == blocks[11]
        assert [blocks[i][0] for i in range(12)] == blocks.slots.tolist()
        assert blocks[8:2:-2].slots.tolist() == [8, 6, 4]
        for outside in (12, -13):
            with pytest.raises(IndexError):
                blocks[outside]

    def test_lists_are_equal_if_their_contents_are(self) -> None:
        blocks = found()
        assert blocks == found() == pickle.loads(pickle.dumps(blocks))  # noqa: S301
        assert blocks != blocks[:11] and blocks != 3
        with pytest.raises(TypeError, match="unhashable"):
            hash(blocks)


class TestBlocks:
    def test_they_read_like_a_native_list(self) -> None:
        blocks = Blocks.of(found())
        assert repr(blocks) == "Blocks(12 blocks in slots [0, 1, 2, 3, 4, 5, 6, 7, ...])"
        assert blocks[1] == Block(1, int(blocks.generations[1]), PATH[1], PATH[0])
        assert blocks[2:4] == blocks.select(np.arange(2, 4)) != blocks[2:5]
        assert [block.hash for block in blocks] == PATH
        assert blocks == pickle.loads(pickle.dumps(blocks))  # noqa: S301

    def test_marks_of_unverified_blocks_count_for_equality(self) -> None:
        blocks = Blocks.of(found())
        marked = Blocks(
            blocks.slots, blocks.generations, blocks.hashes, blocks.parents, np.ones(12, np.uint8)
        )
        assert blocks != marked == marked[:]


class TestBlockCopies:
    def test_parts_become_columns_and_leave_it_empty(self) -> None:
        copies, blocks = BlockCopies(), Blocks.of(found())
        for part in (blocks[:5], blocks[5:]):
            assert copies.append(
                part.slots, part.generations, part.hashes, part.parents, None, part.slots, part.generations
            ) == int(part.slots[0])
        sources, targets, before, after, rows, above, marks = copies.take()
        assert len(copies) == 0 and marks is None
        assert sources.tolist() == targets.tolist() == list(range(12))
        assert before.tolist() == after.tolist() == blocks.generations.tolist()
        assert hash_list(rows) == PATH and hash_list(above) == [ROOT_HASH, *PATH[:-1]]

    @pytest.mark.parametrize(("start", "stop"), [(0, 12), (0, 1), (3, 12), (4, 4)])
    def test_a_run_of_a_path_becomes_the_same_columns(self, start: int, stop: int) -> None:
        path = Blocks.of(found())
        marks = np.arange(12, dtype=np.uint8) % 2
        run = HostRun(7, path.slots, path.generations, marks).part(start, stop)
        part, copies, expected = path[start:stop], BlockCopies(), BlockCopies()
        assert run.lease == 7 and len(run) == stop - start
        targets = np.arange(stop - start, dtype=np.int32) + 100
        for _ in range(2):
            copies.append_run(run, path.hashes, start, targets, None)
            expected.append(
                part.slots, part.generations, part.hashes, part.parents, marks[start:stop], targets, None
            )
        for ours, theirs in zip(copies.take(), expected.take(), strict=True):
            assert np.array_equal(ours, theirs)  # type: ignore[arg-type]

    def test_a_run_beyond_its_path_adds_nothing(self) -> None:
        path, copies = Blocks.of(found()), BlockCopies()
        run = HostRun(0, path.slots, path.generations)
        with pytest.raises(IndexError, match="no such blocks"):
            copies.append_run(run, path.hashes, 1, path.slots, None)
        with pytest.raises(ValueError, match="differ in length"):
            copies.append_run(run, path.hashes, 0, path.slots[:3], None)
        with pytest.raises(IndexError, match="no such blocks"):
            run.part(3, 13)
        assert len(copies) == 0

    def test_arrays_of_other_lengths_add_nothing(self) -> None:
        copies, blocks = BlockCopies(), Blocks.of(found())
        with pytest.raises(ValueError, match="differ in length"):
            copies.append(
                blocks.slots,
                blocks.generations,
                blocks.hashes,
                blocks.parents[:3],
                None,
                blocks.slots,
                blocks.generations,
            )
        assert len(copies) == 0


class TestBlockQueue:
    def test_blocks_leave_in_order_whatever_parts_they_came_in(self) -> None:
        queue = BlockQueue(8)
        queue.add(hashes(PATH[2:5]))
        queue.add(hashes(PATH[5:8]))
        assert hash_list(queue.take(2)) == PATH[2:4]
        assert hash_list(queue.take(1)) == [PATH[4]]
        assert hash_list(queue.take(10)) == PATH[5:8]
        assert len(queue) == len(queue.take(1)) == 0

    def test_a_full_queue_drops_the_parts_that_came_first(self) -> None:
        queue, part = BlockQueue(8), hashes(PATH * 500)
        assert [queue.add(part) for _ in range(4)] == [0, 0, 6000, 6000]
        assert len(queue) == 12000
        queue.clear()
        assert len(queue) == 0
