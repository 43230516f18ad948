"""Numbers of device blocks that ranks fill differently, beside those that they fill alike."""

import numpy as np

from fdcache.block_owners import EVERYONE, BlockOwners
from fdcache.controller.shares import CopyShares
from fdcache.groups import CacheGroup, Reach, groups_of_ranks
from fdcache.layout import KVLayout
from fdcache.metadata import (
    NO_BLOCK,
    CacheSwapMetadata,
    PeerTask,
    SwapPurpose,
    TransferPlan,
    TransferReport,
    TransferResult,
)

STATE, FULL = CacheGroup(4, Reach.STATE), CacheGroup(4)


def layout_of(groups: tuple[CacheGroup, ...], ranks: int = 2) -> KVLayout:
    return KVLayout.mla(
        model="m",
        revision="r",
        num_layers=1,
        block_size=4,
        latent_dim=8,
        dtype="bfloat16",
        tp_size=ranks,
        groups=groups,
    )


APART = layout_of(groups_of_ranks((STATE, FULL, STATE), 2))
OWNERS = BlockOwners(APART)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def swap_of(purpose: SwapPurpose, device: np.ndarray) -> CacheSwapMetadata:
    count = len(device)
    others, zeros = np.arange(100, 100 + count, dtype=np.int32), np.zeros(count, np.uint32)
    is_out = purpose in (SwapPurpose.BACKUP, SwapPurpose.SEND)
    return CacheSwapMetadata(
        purpose=purpose,
        src_type=purpose.source,
        dst_type=purpose.target,
        src_block_ids=device if is_out else others,
        dst_block_ids=others if is_out else device,
        src_generations=zeros,
        dst_generations=zeros,
        hash_values=np.arange(32 * count, dtype=np.uint8).reshape(count, 32),
        parent_hashes=np.zeros((count, 32), np.uint8),
    )


def report_of(plan: TransferPlan, rank: int) -> TransferReport:
    """What a rank says that has copied all but the first block of each transfer."""
    results = tuple(
        TransferResult(
            purpose=swap.purpose,
            failed=ids(0),
            checksums=np.array(swap.host_slots, np.uint64) if swap.to_host else np.empty(0, np.uint64),
            copied_bytes=0,
            seconds=0.0,
        )
        for swap in plan.swaps()
    )
    return TransferReport(plan_id=plan.plan_id, rank=rank, results=results)


def test_numbers_tell_the_owners_of_states_apart_and_name_the_engines_blocks() -> None:
    table = OWNERS.path(ids(7, NO_BLOCK, 5, 5, 6, NO_BLOCK))
    assert len({*table.tolist()} - {NO_BLOCK}) == 4
    assert OWNERS.blocks(table).tolist() == [7, NO_BLOCK, 5, 5, 6, NO_BLOCK]
    assert OWNERS.owners(table)[[0, 2, 3, 4]].tolist() == [EVERYONE, 0, 1, 0]
    every = OWNERS.every(ids(5, 6, 7))
    assert {*table.tolist()} - {NO_BLOCK} <= {*every.tolist()}
    assert sorted(every.tolist()) == list(range(15, 24))
    assert OWNERS.count(24) == 8
    assert (
        OWNERS.path(ids(3)).tolist() == OWNERS.shared(ids(3)).tolist()
    )  # a table that is too short loads nothing


def test_numbers_are_blocks_where_no_rank_has_states_of_its_own() -> None:
    for layout in (layout_of(()), layout_of((STATE, FULL))):
        owners, table = BlockOwners(layout), ids(3, NO_BLOCK, 4)
        for made in (owners.path(table), owners.shared(table), owners.every(table), owners.blocks(table)):
            assert made is table


def test_ranks_divide_what_they_hold_alike_and_copy_their_own_states() -> None:
    device = OWNERS.path(ids(1, 2, 3, 8, 8, 9, 9))
    plan = TransferPlan(
        plan_id=1,
        loads=swap_of(SwapPurpose.LOAD, device),
        backups=swap_of(SwapPurpose.BACKUP, device),
    )
    shares = [CopyShares(APART, rank) for rank in range(2)]
    cut = [share.cut(plan) for share in shares]
    assert [part.loads.dst_block_ids.tolist() for part in cut if part.loads] == [[1, 2, 3, 8, 9]] * 2
    assert [part.loads.src_block_ids.tolist() for part in cut if part.loads] == [
        [100, 101, 102, 103, 105],
        [100, 101, 102, 104, 106],
    ]
    copied = [part.backups.dst_block_ids.tolist() for part in cut if part.backups]
    assert sorted(copied[0] + copied[1]) == list(range(100, 107))
    assert {103, 105} < {*copied[0]} and {104, 106} < {*copied[1]}
    assert [{*part.backups.src_block_ids.tolist()} >= {8, 9} for part in cut if part.backups] == [True, True]

    wholes = [
        share.take_whole([report_of(part, rank)])[0]
        for rank, (share, part) in enumerate(zip(shares, cut, strict=True))
    ]
    loaded, stored = zip(*(whole.results for whole in wholes), strict=True)
    assert [result.failed.tolist() for result in loaded] == [[0], [0]]
    assert not any(len(result.checksums) for result in loaded)
    assert sum(result.checksums for result in stored).tolist() == list(range(100, 107))
    assert [result.failed.tolist() for result in stored] == [[copied[0][0] - 100], [copied[1][0] - 100]]


def test_a_hand_over_has_the_positions_of_what_the_peers_rank_hands_over() -> None:
    device = OWNERS.path(ids(1, 2, 8, 8, 9, 9))
    sent = PeerTask(plan_id=2, transfer="a", timeout=1.0, swap=swap_of(SwapPurpose.SEND, device), computed=6)
    fetched = PeerTask(plan_id=3, transfer="a", timeout=1.0, swap=swap_of(SwapPurpose.FETCH, device[1:]))
    for rank in range(2):
        shares = CopyShares(APART, rank)
        cut = shares.cut(TransferPlan(plan_id=1, peers=(sent, fetched)))
        send, fetch = cut.peers
        assert (send.computed, send.swap.src_block_ids.tolist()) == (4, [1, 2, 8, 9])
        assert fetch.swap.dst_block_ids.tolist() == [2, 8, 9]
        assert fetch.swap.src_block_ids.tolist() == [100, 101, 102]
        assert np.array_equal(fetch.swap.hash_values, fetched.swap.hash_values[[0, 1 + rank, 3 + rank]])
        failed = TransferResult.failure(fetch.swap, "no peer")
        (whole,) = shares.take_whole([TransferReport(plan_id=3, rank=rank, results=(failed,))])
        assert whole.results[0].failed.tolist() == [0, 1 + rank, 3 + rank]
