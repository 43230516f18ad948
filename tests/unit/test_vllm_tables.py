"""Block tables of vLLM's requests: one is kept and grows as long as vLLM's own does."""

from __future__ import annotations

import pytest

from fdcache.groups import CacheGroup, Reach
from fdcache.integrations.vllm.tables import TableShape
from tests.swaps import uniform_layout

PAGE = 4


@pytest.mark.parametrize(
    ("before", "after", "is_kept"),
    [
        ([], [3, 4], False),
        ([3, 4], [3, 4], True),
        ([3, 4], [3, 4, 9, 7], True),
        ([3, 4], [3], False),
        ([3, 4], [], False),
        ([3, 4], [3, 5, 9], False),
        ([3, 4], [5, 4, 9], False),
    ],
)
def test_a_table_is_kept_if_vllms_goes_on_with_its_blocks(
    before: list[int], after: list[int], is_kept: bool
) -> None:
    shape = TableShape(uniform_layout(block_size=PAGE, num_layers=2))
    table = shape.table([before])
    longer = shape.longer(table, [after])
    assert (longer is table) == is_kept
    assert longer.page_ids(0, 8).tolist() == after
    assert list(shape.given(longer.by_groups, PAGE)) == after[1:]


def test_tables_of_groups_are_taken_anew_since_vllm_gives_up_blocks_in_front() -> None:
    groups = (CacheGroup(PAGE, Reach.LAST, 2 * PAGE), CacheGroup(PAGE))
    shape = TableShape(uniform_layout(block_size=PAGE, num_layers=2, groups=groups))
    longer = shape.longer(shape.table([[3, 4, 5], [6, 7, 8]]), [[0, 4, 5, 9], [6, 7, 8, 10]])
    assert [list(each) for each in longer.by_groups] == [[0, 4, 5, 9], [6, 7, 8, 10]]
