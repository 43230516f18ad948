"""Plans, reports and snapshots: packing, pickling, comparing."""

from __future__ import annotations

import pickle

import msgspec
import numpy as np
import pytest

from fdcache.metadata import (
    BlockNode,
    CacheLevel,
    CacheStatus,
    CacheSwapMetadata,
    StorageTask,
    SwapPurpose,
    TransferPlan,
    TransferReport,
    TransferResult,
    decode_plan,
    decode_report,
    encode,
)


def swap(purpose: SwapPurpose, count: int) -> CacheSwapMetadata:
    rng = np.random.default_rng(count)
    return CacheSwapMetadata(
        purpose=purpose,
        src_type=CacheLevel.HOST,
        dst_type=CacheLevel.DEVICE,
        src_block_ids=np.arange(count, dtype=np.int32),
        dst_block_ids=np.arange(count, dtype=np.int32)[::-1],
        src_generations=np.full(count, 2**32 - 1, np.uint32),
        dst_generations=np.zeros(count, np.uint32),
        hash_values=rng.integers(0, 256, (count, 32), np.uint8),
        parent_hashes=rng.integers(0, 256, (count, 32), np.uint8),
    )


def same(left: object, right: object) -> bool:
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, msgspec.Struct):
        return type(left) is type(right) and all(
            same(getattr(left, name), getattr(right, name)) for name in left.__struct_fields__
        )
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_plans_survive_msgpack_and_pickle(count: int) -> None:
    plan = TransferPlan(plan_id=7, loads=swap(SwapPurpose.LOAD, count), backups=swap(SwapPurpose.BACKUP, 3))
    assert plan == decode_plan(encode(plan)) == pickle.loads(pickle.dumps(plan))  # noqa: S301
    assert same(decode_plan(encode(plan)), plan)
    assert same(pickle.loads(pickle.dumps(plan)), plan)  # noqa: S301
    assert [one.purpose for one in plan.swaps()] == [SwapPurpose.LOAD, SwapPurpose.BACKUP]


def test_reports_survive_msgpack_and_pickle() -> None:
    result = TransferResult(
        purpose=SwapPurpose.EVICT,
        failed=np.array([1], np.int32),
        checksums=np.array([2**64 - 1, 0], np.uint64),
        copied_bytes=2**40,
        seconds=0.5,
        error_message="slot 3 changed",
    )
    report = TransferReport(plan_id=1, rank=3, results=(result,))
    assert same(decode_report(encode(report)), report)
    assert same(pickle.loads(pickle.dumps(report)), report)  # noqa: S301
    assert not result.success


def test_other_data_is_not_decoded_as_a_plan() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_plan(b"\xc1")
    with pytest.raises(msgspec.DecodeError):
        decode_plan(encode(TransferReport(plan_id=1, rank=0, results=())))
    odd = msgspec.msgpack.encode(
        {"plan_id": 1, "rank": 0, "results": [{"purpose": "load", "failed": ["|O", [1], b"x"]}]}
    )
    with pytest.raises(msgspec.ValidationError):
        decode_report(odd)


def test_one_line_says_what_a_plan_copies() -> None:
    loads = swap(SwapPurpose.LOAD, 6)
    pairs = "0 -> 5, 1 -> 4, 2 -> 3, 3 -> 2, ..."
    assert repr(loads) == f"CacheSwapMetadata(load of 6 blocks, host to device: {pairs})"
    loads.success = True
    assert repr(loads[:1]) == "CacheSwapMetadata(load of 1 block, host to device: 0 -> 5; succeeded)"
    loads.success, loads.error_message = False, "rank 0: broken"
    assert repr(loads[:0]) == "CacheSwapMetadata(load of 0 blocks, host to device; rank 0: broken)"
    task = StorageTask(plan_id=9, swap=swap(SwapPurpose.STORE, 2), timeout=1.0)
    plan = TransferPlan(plan_id=8, arena="a", loads=loads, storage=(task,), cancelled=(3,))
    assert repr(plan) == "TransferPlan(8, load of 6, store of 2 as 9, arena='a', cancelled=(3,))"
    assert repr(TransferPlan(plan_id=9, after=(4, 7))) == "TransferPlan(9, after=(4, 7))"


def test_a_part_of_a_transfer_has_the_same_blocks() -> None:
    loads = swap(SwapPurpose.LOAD, 4)
    loads.unverified = np.array([0, 1, 0, 1], np.uint8)
    assert loads[np.array([True, False, False, True])] == loads[::3] != loads[:2]
    assert [copy.src_block_id for copy in loads] == [0, 1, 2, 3]
    assert loads[-1] == (3, 0, 2**32 - 1, 0, loads.hash_values[3].tobytes(), loads.parent_hashes[3].tobytes())
    with pytest.raises(IndexError):
        loads[4]


def test_transfers_are_equal_if_their_arrays_are() -> None:
    loads, other = swap(SwapPurpose.LOAD, 4), swap(SwapPurpose.LOAD, 4)
    assert loads == other and TransferPlan(plan_id=1, loads=loads) == TransferPlan(plan_id=1, loads=other)
    other.hash_values[3, 31] ^= 1
    assert loads != other and TransferPlan(plan_id=1, loads=loads) != TransferPlan(plan_id=1, loads=other)
    assert loads != swap(SwapPurpose.LOAD, 3) and loads != "loads"


def test_a_transfer_maps_nothing_until_it_succeeded() -> None:
    loads = swap(SwapPurpose.LOAD, 3)
    assert loads.mapping == {}
    loads.success = True
    assert loads.mapping == {0: 2, 1: 1, 2: 0}


def test_nodes_are_hashable_and_compare_by_value() -> None:
    def node(slot: int) -> BlockNode:
        return BlockNode(
            block_id=slot,
            generation=1,
            hash_value=bytes(32),
            parent=None,
            depth=0,
            cache_status=CacheStatus.SWAP_TO_HOST,
            ref_count=0,
            children=0,
            hit_count=1,
            idle_seconds=0.0,
        )

    assert {node(1), node(1), node(2)} == {node(1), node(2)}


@pytest.mark.parametrize("purpose", SwapPurpose)
def test_a_transfer_names_its_host_and_device_slots(purpose: SwapPurpose) -> None:
    transfer = msgspec.structs.replace(
        swap(purpose, 3),
        src_type=purpose.source,
        dst_type=purpose.target,
        src_block_ids=np.arange(5, 8, dtype=np.int32),
    )
    source = (transfer.src_block_ids, transfer.src_generations)
    target = (transfer.dst_block_ids, transfer.dst_generations)
    host, other = (target, source) if purpose.target is CacheLevel.HOST else (source, target)
    assert transfer.to_host == (purpose.target is CacheLevel.HOST)
    assert np.array_equal(transfer.host_slots, host[0])
    assert np.array_equal(transfer.host_generations, host[1])
    assert np.array_equal(transfer.device_slots, other[0])


def test_the_plans_that_a_plan_waits_for_travel_with_it() -> None:
    plan = TransferPlan(plan_id=9, after=(4, 7))
    assert decode_plan(encode(plan)) == plan
