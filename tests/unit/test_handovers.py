"""Counts of hand-overs by peer and result."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache.metadata import HandoverEnd, SwapPurpose, TransferReport, TransferResult
from fdcache.tiers.statistics import OTHERS, HandoverCount, HandoverTally
from tests.seeds import budget

NONE = np.empty(0, np.int32)
ENDS = st.builds(
    HandoverEnd,
    peer=st.integers(0, 60).map(lambda n: f"tcp://h:{n}" if n else ""),
    result=st.sampled_from(["done", "expired"]),
    blocks=st.integers(0, 9),
    waited_seconds=st.just(0.5),
)


def report(end: HandoverEnd | None, moved: int = 0) -> TransferReport:
    result = TransferResult(
        purpose=SwapPurpose.SEND,
        failed=NONE,
        checksums=np.empty(0, np.uint64),
        copied_bytes=moved,
        seconds=0.25,
        corrupt=NONE,
    )
    return TransferReport(plan_id=1, rank=0, results=(result,), handover=end)


@settings(max_examples=budget(60), deadline=None)
@given(ends=st.lists(ENDS, max_size=120))
def test_no_hand_over_is_lost_however_many_peers_there_are(ends: list[HandoverEnd]) -> None:
    tally = HandoverTally()
    for end in ends:
        tally.record(report(end, moved=end.blocks * 10))
    counts = tally.counts()
    assert sum(each.transfers for each in counts) == len(ends)
    assert sum(each.blocks for each in counts) == sum(end.blocks for end in ends)
    assert sum(each.bytes for each in counts) == 10 * sum(end.blocks for end in ends)
    assert sum(each.waited_seconds for each in counts) == 0.5 * len(ends)
    assert sum(each.moved_seconds for each in counts) == 0.25 * len(ends)
    assert sum(each.transfers for each in counts if each.is_expired_lease) == sum(
        end.result == "expired" for end in ends
    )
    assert len({each.peer for each in counts} - {OTHERS}) <= 32
    assert len({(each.peer, each.result) for each in counts}) == len(counts)


def test_the_peers_counted_last_keep_their_names() -> None:
    tally = HandoverTally()
    for n in range(40):
        tally.record(report(HandoverEnd(f"peer {n % 36}", "done")))
    names = {each.peer for each in tally.counts()}
    assert {f"peer {n}" for n in range(4)} <= names
    assert OTHERS in names and len(names) == 33


def test_reports_of_other_plans_are_not_counted() -> None:
    tally = HandoverTally()
    tally.record(report(None))
    assert tally.counts() == []


def test_a_snapshot_does_not_change_with_later_hand_overs() -> None:
    tally = HandoverTally()
    tally.record(report(HandoverEnd("a", "done", 3)))
    before = tally.counts()
    tally.record(report(HandoverEnd("a", "done", 3)))
    assert before == [HandoverCount("send", "a", "done", 1, 3, 0, 0.0, 0.25)]
