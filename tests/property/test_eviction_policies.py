"""The policy that learns evicts, decision by decision, what its oracle says."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache import _core
from fdcache.hashing import hash_blocks
from fdcache.metadata import HashArray
from tests.property.eviction_oracle import End, LearnedOracle
from tests.seeds import budget
from tests.tier_help import hash_list

BLOCK = 256
ROOT = bytes(32)


class Act(NamedTuple):
    """A request along a path, what becomes of its blocks, and the time before it in seconds."""

    path: list[int]
    output: int
    keeps: str  # what else is done with its blocks
    gap: float
    in_flight: int = 0  # requests that may go on when it has begun


KEEPS = ["nothing", "nothing", "nothing", "pin", "hold", "unpin", "unhold", "drop"]
GAPS = [0.0, 0.2, 3.0, 17.0, 300.0, 9000.0, 3_000_000.0]


def acts(keeps: list[str], gaps: list[float]) -> st.SearchStrategy[list[Act]]:
    act = st.builds(
        Act,
        st.lists(st.integers(0, 2), min_size=1, max_size=6),
        st.sampled_from([0, 20, 100, 700]),
        st.sampled_from(keeps),
        st.sampled_from(gaps),
        st.integers(0, 3),
    )
    return st.lists(act, min_size=10, max_size=40)


def rows_of(blocks: list[bytes]) -> HashArray:
    return np.frombuffer(b"".join(blocks), np.uint8).reshape(-1, 32)


def rows_of_path(path: list[int]) -> HashArray:
    return hash_blocks(np.repeat(np.array(path, np.int32), BLOCK), BLOCK, parent=ROOT)


class World:
    """A tier that learns, and its oracle."""

    def __init__(self, slots: int) -> None:
        self.tier = _core.Tier(slots, "learned")
        self.oracle = LearnedOracle(slots)
        self.oracle.children = lambda block: sum(
            parent == block and self.oracle.blocks[child].is_idle for child, parent in self.parents.items()
        )
        self.now = 0.0
        self.parents: dict[bytes, bytes] = {}
        self.slots: dict[bytes, int] = {}
        self.pinned: list[tuple[int, list[bytes]]] = []
        self.running: list[tuple[int, list[bytes], End]] = []
        self.held: list[bytes] = []
        self.decisions = self.checks = 0
        self.lower: _core.Tier | None = None

    def set_below(self, slots: int, is_always_copied: bool) -> None:
        """Put a tier below, into which paths are copied, and from which they are dropped."""
        self.lower = lower = _core.Tier(slots)
        self.tier.set_below(lower, is_always_copied)
        self.oracle.trust.share = 0.15
        self.oracle.share_beside = 1.0 if is_always_copied else 0.5
        self.oracle.is_below = lambda block: bool(lower.contains(rows_of([block]))[0])
        self.oracle.blocks_below = lambda: lower.stats().ready

    def copy(self, path: list[bytes]) -> None:
        assert self.lower is not None
        taken = self.lower.reserve_copies(0, rows_of([ROOT, *path[:-1]]), rows_of(path))
        self.lower.complete(
            taken.slots, np.ones(len(taken.slots), np.uint8), np.zeros(len(taken.slots), np.uint64)
        )

    def pass_time(self, seconds: float) -> None:
        """Let all blocks be ranked again."""
        self.now += seconds
        self.tier.set_clock(round(self.now * 1000))
        self.oracle.set_time(self.now)

    def busy(self, also: list[bytes]) -> set[bytes]:
        return self.used([*also, *self.held])

    def used(self, also: list[bytes]) -> set[bytes]:
        reached: set[bytes] = set()
        pinned = [*self.pinned, *((lease, blocks) for lease, blocks, _ in self.running)]
        for block in [*also, *(each for _, blocks in pinned for each in blocks)]:
            at = block
            while at in self.parents and at not in reached:
                reached.add(at)
                at = self.parents[at]
        return reached

    def candidates(self, cached: dict[bytes, bytes], busy: set[bytes]) -> dict[bytes, float]:
        above = set(cached.values())
        return {
            block: self.oracle.rank(block) for block in cached if block not in above and block not in busy
        }

    def check_next(self, block: bytes, cached: dict[bytes, bytes], busy: set[bytes]) -> None:
        ranks = self.candidates(cached, busy)
        assert block in ranks, "evicted though it is used, held, or has children"
        assert ranks[block] <= min(ranks.values()) * (1 + 1e-6)
        self.decisions += 1

    def check(self) -> None:
        assert self.tier.check_integrity() == []
        found = self.tier.starting_with(b"")
        assert set(hash_list(found.hashes)) == set(self.parents)
        left = dict(self.parents)
        busy = self.busy([])
        for block in hash_list(self.tier.coldest(len(left)).hashes):
            self.check_next(block, left, busy)
            del left[block]
        assert set(left) == busy

    def request(self, act: Act) -> None:
        self.now += act.gap
        self.tier.set_clock(round(self.now * 1000))
        rows = rows_of_path(act.path)
        path = hash_list(rows)
        lease = self.tier.open_lease()
        run = self.tier.match(lease, rows)
        assert hash_list(rows)[: len(run)] == [block for block in path if block in self.parents]
        self.oracle.set_time(self.now)
        begun = self.begin(path[: len(run)])
        taken = self.tier.reserve(lease, len(path) - len(run))
        if taken.missing:
            self.tier.release(lease)
            self.oracle.idle(begun)
            return
        busy = self.busy(path[: len(run)])
        for block in hash_list(taken.evicted.hashes):
            self.check_next(block, self.parents, busy)
            self.oracle.evicted(block)
            del self.parents[block], self.slots[block]
        parent = path[len(run) - 1] if len(run) else ROOT
        self.tier.commit(lease, parent, rows[len(run) :], taken.slots)
        for above, block, slot in zip(
            [parent, *path[len(run) :]], path[len(run) :], taken.slots.tolist(), strict=False
        ):
            self.parents[block], self.slots[block] = above, slot
            self.oracle.arrive(block)
        if len(taken.slots):
            self.oracle.judge()
        self.running.append((lease, path, End(len(path) * BLOCK + 9, act.output, BLOCK)))
        while len(self.running) > act.in_flight:
            self.end(*self.running.pop(0))
        self.follow(act, path)
        if self.checks % 4 == 0:
            self.check()
        self.checks += 1

    def begin(self, path: list[bytes]) -> list[bytes]:
        begun = [block for block in path if block not in self.used([])]
        self.oracle.begin(begun)
        return begun

    def end(self, lease: int, path: list[bytes], end: End) -> None:
        self.oracle.use(path[::-1], end)
        self.tier.finish(lease, end.prompt, end.output, end.block)
        self.oracle.idle([block for block in path if block not in self.used([])])

    def follow(self, act: Act, path: list[bytes]) -> None:
        if act.keeps == "pin" and len(self.pinned) < 2:
            lease = self.tier.open_lease()
            self.tier.match(lease, rows_of(path))
            self.begin(path)
            self.pinned.append((lease, path))
        elif act.keeps == "unpin" and self.pinned:
            lease, path = self.pinned.pop(0)
            self.tier.release(lease)
            self.oracle.idle([block for block in path if block not in self.used([])])
        elif act.keeps == "hold" and len(self.held) < 2 and path[-1] not in self.held:
            self.held.append(path[-1])
            self.tier.hold(np.array([self.slots[path[-1]]], np.int32))
        elif act.keeps == "unhold" and self.held:
            self.tier.unhold(np.array([self.slots[self.held.pop(0)]], np.int32))
        elif act.keeps in ("copy", "forget") and self.lower is not None:
            self.copy(path) if act.keeps == "copy" else self.lower.drop(rows_of([path[-1]]))
            self.pass_time(0.001)
        elif act.keeps == "drop" and not self.pinned and not self.held and not self.running:
            below = [block for block in self.parents if path[0] in self.line(block)]
            self.tier.drop(rows_of([path[0]]))
            for block in below:
                self.oracle.dropped(block)
            for block in below:
                del self.parents[block], self.slots[block]

    def line(self, block: bytes) -> list[bytes]:
        above = self.parents[block]
        return [block] if above == ROOT else [block, *self.line(above)]


@given(acts(KEEPS, GAPS), st.integers(6, 20))
@settings(max_examples=budget(200), deadline=None)
def test_every_eviction_is_the_one_of_the_oracle(history: list[Act], slots: int) -> None:
    world = World(slots)
    for act in history:
        world.request(act)
    world.check()


@given(
    acts([*KEEPS, "copy", "copy", "copy", "forget"], GAPS),
    st.integers(6, 20),
    st.sampled_from([False, False, True]),
)
@settings(max_examples=budget(150), deadline=None)
def test_a_tier_above_another_one_evicts_as_the_oracle_says(
    history: list[Act], slots: int, is_always_copied: bool
) -> None:
    world = World(slots)
    world.set_below(2 * slots, is_always_copied)
    for act in history:
        world.request(act)
    world.check()


def test_long_paths_of_which_the_tier_below_holds_a_part_go_as_the_oracle_says() -> None:
    """More blocks of a path go at once than are ranked together; some were copied, with those above them."""
    random = np.random.default_rng(0)
    world = World(220)
    world.set_below(500, is_always_copied=False)
    for _ in range(25):
        path = [int(random.integers(4))] * int(random.integers(60, 200))
        world.request(Act(path, 20, "nothing", float(random.integers(1, 40))))
        if random.random() < 0.6:
            world.copy(hash_list(rows_of_path(path))[: int(random.integers(1, len(path)))])
            world.pass_time(0.001)
    assert {below for ghost in world.oracle.ghosts for below in [ghost.known.was_below]} == {True, False}
    assert world.decisions > 1000


def test_what_was_learned_is_left_for_last_use_and_taken_up_again() -> None:
    """Popular paths among many that are read once give way to paths that are read a few times in a row."""
    random = np.random.default_rng(0)
    world = World(20)
    for turn in range(700):
        if turn // 200 % 2:
            first = 10_000 + turn // 4 + int(random.integers(3))
        else:
            first = int(random.integers(3)) if random.random() < 0.5 else 1000 + turn
        world.request(Act([first, 0, 0, 0, 0], 20, "nothing", 2.0))
    assert world.oracle.trust.changes == 2
    assert world.decisions > 1000


def test_what_a_path_left_behind_goes_first_wherever_only_one_path_goes_on() -> None:
    def play(paths: list[list[int]], slots: int) -> World:
        world = World(slots)
        for path in paths:
            world.request(Act(path, 20, "nothing", 5.0))
        return world

    def is_cached(world: World, path: list[int]) -> bool:
        return bool(world.tier.contains(rows_of_path(path))[-1])

    # The third request goes on behind 2 and leaves 3 and 4 behind, which were used after 8 and 9.
    world = play([[8, 9], [1, 2, 3, 4], [1, 2, 5, 6], [7, 7]], slots=8)
    assert is_cached(world, [8, 9]) and not is_cached(world, [1, 2, 3])
    assert world.oracle.left_requests == {2}
    # 3 was left behind. Then two paths go on behind 2, and 4 may be somebody else's.
    world = play([[8, 9], [1, 2, 3], [1, 2, 4], [1, 2, 5], [7, 7, 7, 7]], slots=8)
    assert world.oracle.left_requests == {2} and not is_cached(world, [1, 2, 3])
