"""What groups need of a prefix, and the longest usable one, follow from the tokens that layers attend to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fdcache.groups import CacheGroup, PageColumns, Reach
from fdcache.layout import KVLayout
from fdcache.layout_planes import PlaneKind, PlaneSpec

PAGE = 8


def attended(group: CacheGroup, token: int) -> range:
    """Return the tokens before ``token`` that a layer attends to when it computes it."""
    if group.reach is Reach.LAST:
        return range(max(token - group.tokens + 1, 0), token)
    if group.reach is Reach.CHUNK:
        return range(token // group.tokens * group.tokens, token)
    return range(token)


def is_needed(group: CacheGroup, first: int, stop: int, num_tokens: int) -> bool:
    """Return True if the next token needs a block of tokens ``first`` to ``stop``, or the state at its end."""
    if group.is_state:
        return stop == num_tokens
    seen = attended(group, num_tokens)
    return max(first, seen.start) < min(stop, seen.stop)


def columns_of(groups: Sequence[CacheGroup]) -> list[tuple[CacheGroup, int, int]]:
    """Return group, first and last token of each column in a page: pages' blocks, then states."""
    blocks = [
        (group, at, at + group.block_size)
        for group in groups
        if not group.is_state
        for at in range(0, PAGE, group.block_size)
    ]
    return blocks + [(group, 0, PAGE) for group in groups if group.is_state]


def needed(groups: Sequence[CacheGroup], pages: int) -> list[list[bool]]:
    return [
        [
            is_needed(group, page * PAGE + first, page * PAGE + stop, pages * PAGE)
            for group, first, stop in columns_of(groups)
        ]
        for page in range(pages)
    ]


sizes = st.sampled_from([1, 2, 4, 8])
groups_lists = st.lists(
    st.one_of(
        st.builds(CacheGroup, sizes),
        st.builds(CacheGroup, sizes, st.sampled_from([Reach.LAST, Reach.CHUNK]), st.integers(1, 40)),
        st.builds(CacheGroup, st.just(PAGE), st.just(Reach.STATE)),
    ),
    min_size=1,
    max_size=4,
)


@given(groups_lists, st.integers(0, 7))
def test_entries_are_needed_that_hold_tokens_the_next_one_attends_to(
    groups: list[CacheGroup], pages: int
) -> None:
    found = PageColumns(groups, PAGE).needed(pages)
    assert found.shape == (pages, len(columns_of(groups)))
    assert found.tolist() == needed(groups, pages)


@given(groups_lists, st.integers(0, 7), st.data())
def test_the_longest_prefix_is_usable_whose_needed_entries_are_all_there(
    groups: list[CacheGroup], pages: int, data: st.DataObject
) -> None:
    columns = PageColumns(groups, PAGE)
    missing = data.draw(st.sets(st.tuples(st.integers(0, 6), st.integers(0, len(columns) - 1)), max_size=6))
    there = np.array(
        [[(page, column) not in missing for column in range(len(columns))] for page in range(pages)], bool
    ).reshape(pages, len(columns))
    wanted = max(
        length
        for length in range(pages + 1)
        if all(
            there[page, column] or not is_wanted
            for page, row in enumerate(needed(groups, length))
            for column, is_wanted in enumerate(row)
        )
    )
    assert columns.usable(there) == wanted


@given(groups_lists.filter(lambda groups: groups != [CacheGroup(PAGE)]))
def test_columns_are_the_records_and_states_of_a_layout_in_its_order(groups: list[CacheGroup]) -> None:
    layout = KVLayout.of_layers(
        [[PlaneSpec(PlaneKind.KEY, "uint8", (8,))]],
        model="m",
        revision="1",
        block_size=PAGE,
        groups=tuple(groups),
    )
    columns = PageColumns(groups, PAGE)
    assert tuple(group for group, _ in columns.columns) == layout.page_groups + layout.state_groups
    assert columns.num_states == layout.num_states


def test_one_group_of_a_layout_without_groups_needs_all() -> None:
    assert PageColumns((), PAGE).needed(3).all()
