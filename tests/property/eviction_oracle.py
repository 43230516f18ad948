"""Oracles of the policies that learn: the rules of docs/eviction.md in plain dictionaries and lists.

An oracle is told what a tier is told, and says which leaf is evicted next. Where two leaves are worth the same, the
tier may choose.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

ROLES, OUTPUTS, NEWS, AGES = 9, 5, 5, 23
CLASSES = ROLES * OUTPUTS * NEWS
LEFT = CLASSES + 30
"""The class of blocks that their path left behind, after those of hints."""

LONGEST, OLDEST = 2**32 / 1000, 2**31 / 1000
"""Seconds that times are counted for, and those that they go on from then."""


@dataclass
class End:
    """How a request ended."""

    prompt: int
    output: int
    block: int


def begin(bucket: int) -> float:
    return float(2 ** (bucket / 1.5) - 1)


NONE = [0.0] * AGES
BEGINS = [begin(age) for age in range(AGES)]
WIDTHS = [begin(age + 1) - begin(age) for age in range(AGES)]


def bucket_of(age: float) -> int:
    return bisect_right(BEGINS, age) - 1


def group(number: int, limits: tuple[int, ...]) -> int:
    return sum(number > limit for limit in limits)


@dataclass
class Known:
    last: float = 0.0
    kind: int = 0
    hits: int = 0
    request: int = 0  # that used it last
    is_tracked: bool = False
    is_used: bool = False  # since it arrived
    is_idle: bool = False
    is_counted: bool = False  # the use that has begun
    was_below: bool = False  # when it was evicted


@dataclass
class Ghost:
    block: bytes
    known: Known
    is_there: bool = True


@dataclass
class LastUses:
    """What a tier that evicts by last use would hold: how many blocks were last used at each time."""

    blocks: dict[int, int] = field(default_factory=dict)
    begin: int = 0
    oldest: int = 0
    share: float = 1.0

    def holds(self, last: int) -> float:
        if not self.blocks or last < self.begin:
            return 0.0
        return 1.0 if last > self.oldest else self.share

    def leave(self, last: int) -> None:
        if last >= self.begin and self.blocks.get(last):
            self.blocks[last] -= 1

    def use(self, now: int) -> None:
        if not self.blocks:
            self.begin = self.oldest = now
        self.blocks[now] = self.blocks.get(now, 0) + 1

    def move_begin(self, time: int) -> None:
        moved: dict[int, int] = {}
        for last, count in self.blocks.items():
            moved[max(last, time)] = moved.get(max(last, time), 0) + count
        self.blocks, self.begin, self.oldest = moved, max(self.begin, time), max(self.oldest, time)

    def trim(self, capacity: int) -> None:
        size = sum(self.blocks.values())
        while len(self.blocks) > 1 and size - self.blocks[min(self.blocks)] >= capacity:
            gone = min(self.blocks)
            size -= self.blocks.pop(gone)
            self.begin = gone + 1
        if self.blocks:
            self.oldest = min(self.blocks)
            count, beyond = self.blocks[self.oldest], max(size - capacity, 0)
            self.share = 1 - beyond / count if beyond < count else float(not beyond)


@dataclass
class Trust:
    """When what was learned is followed, by the hits that it gained on last use."""

    is_given: bool = True
    uses: float = 0.0
    gain: float = 0.0
    best: float = 0.0
    least: float = math.inf
    rests_until: float = 0.0
    expected: float = 0.0
    proof: float = 6.0
    changes: int = 0
    share: float = 1.0  # of what may be lost; 0.15 for one of several tiers

    def judge(self, path: float, slots: int) -> None:
        most_lost = self.share * (0.0008 * self.uses + 2 * path)
        before = self.is_given
        if self.is_given:
            self.best = max(self.best, self.gain)
            self.least = math.inf if self.gain >= -most_lost else self.least
            self.proof = 6.0 if self.gain > 0 else self.proof
            lost = self.gain < min(-most_lost, self.least)
            if lost or self.gain < self.best - self.share * 5 * path:
                self.proof *= 2 if self.least < math.inf else 1
                self.is_given, self.expected = False, 0.0
                self.rests_until = self.uses + (0.0 if lost else 0.5 * slots)
        elif (
            self.uses >= self.rests_until
            if self.gain >= -0.8 * most_lost
            else self.expected > self.proof * path
        ):
            self.is_given, self.best, self.least = True, self.gain, self.gain - self.share * path
        self.changes += before != self.is_given


@dataclass
class Survival:
    """How many of the evicted blocks that are used again are found in the tier below: [used, found].

    By whether they were there when they were evicted, and had been used more than once.
    """

    counts: dict[tuple[bool, bool], list[float]] = field(default_factory=dict)

    def of(self, is_below: bool, is_reused: bool) -> list[float]:
        return self.counts.setdefault((is_below, is_reused), [64.0, 57.6 if is_below else 0.0])

    def loss(self, is_below: bool, is_reused: bool) -> float:
        used, found = self.of(is_below, is_reused)
        return 1 - 0.9 * found / used


@dataclass
class LearnedOracle:
    """By the Gittins index of a reuse rate that is learned by class and age."""

    slots: int
    now: float | None = None
    begin_at: float = 0.0
    """Times before are the same."""

    learned_at: float = 0.0
    uses: int = 0  # of blocks, since then
    blocks: dict[bytes, Known] = field(default_factory=dict)
    ghosts: deque[Ghost] = field(default_factory=deque)
    mean_path: float = 16.0
    last_uses: LastUses = field(default_factory=LastUses)
    trust: Trust = field(default_factory=Trust)
    is_below: Callable[[bytes], bool] | None = None
    """True for a block that the tier below holds; None without such a tier."""

    survival: Survival = field(default_factory=Survival)
    both: LastUses = field(default_factory=LastUses)
    """What this tier and the one below would hold by last use."""

    requests: int = 0
    left_requests: set[int] = field(default_factory=set)
    """Those whose path went on elsewhere."""

    children: Callable[[bytes], int] = lambda block: 0
    """How many children of a block are not in use."""

    beside: int = 0
    blocks_below: Callable[[], int] = lambda: 0
    share_beside: float = 0.5
    kept: dict[int, list[bool]] | None = None
    """By class and age: would a tier keep the block? Known once the tables are learned without trust."""

    reused: dict[int, list[float]] = field(default_factory=dict)  # by class and age
    left: dict[int, list[float]] = field(default_factory=dict)
    at_risk: dict[int, list[float]] = field(default_factory=dict)
    frozen: tuple[dict[int, list[float]], float] = ({}, 16.0)
    index: dict[int, list[float]] = field(default_factory=dict)
    floor: float = 0.0

    # --- what it is told ----------------------------------------------------------------------------------

    def set_time(self, seconds: float) -> None:
        if self.now is None:
            self.begin_at = self.learned_at = seconds
        self.now = seconds
        if round(1000 * (seconds - self.begin_at)) >= 1000 * LONGEST:
            self.move_begin(seconds - OLDEST)
        if seconds - self.learned_at >= 16:
            self.learn()

    def move_begin(self, seconds: float) -> None:
        """Forget how long before this a block was used."""
        self.begin_at = seconds
        for known in [*self.blocks.values(), *(ghost.known for ghost in self.ghosts)]:
            known.last = max(known.last, seconds)
        self.last_uses.move_begin(round(1000 * seconds))
        self.both.move_begin(round(1000 * seconds))

    def arrive(self, block: bytes) -> None:
        self.blocks[block] = Known()
        for ghost in self.ghosts:
            if ghost.is_there and ghost.block == block:
                ghost.is_there = False
                self.blocks[block] = ghost.known
                ghost.known.is_used = ghost.known.is_idle = False
                if self.is_below is not None:
                    survived = self.survival.of(ghost.known.was_below, ghost.known.hits > 0)
                    survived[0] += 1
                    survived[1] += self.is_below(block)
                self.count_use(block, is_found=False)
                self.leave_shadows(ghost.known)

    def evicted(self, block: bytes) -> None:
        known = self.blocks.pop(block)
        assert known.is_tracked
        if len(self.ghosts) == 4 * self.slots:
            oldest = self.ghosts.popleft()
            if oldest.is_there:
                self.leave(oldest.known)
        known.was_below = self.is_below is not None and self.is_below(block)
        known.kind, known.request = self.kind_of(known), 0
        self.ghosts.append(Ghost(block, known))

    def dropped(self, block: bytes) -> None:
        known = self.blocks.pop(block)
        if known.is_tracked:
            self.leave(known)
        if known.is_idle:
            self.leave_shadows(known)

    def begin(self, blocks: list[bytes]) -> None:
        """Note that a use of these blocks, which were not in use, begins."""
        self.trim()
        for block in blocks:
            known = self.blocks[block]
            if not known.is_counted:
                self.count_use(block, is_found=True)
            self.leave_shadows(known)
            known.is_idle = False

    def idle(self, blocks: list[bytes]) -> None:
        """Note that these blocks are not in use any more."""
        assert self.now is not None
        for block in blocks:
            known = self.blocks[block]
            known.is_idle, known.last = True, self.now
            self.last_uses.use(round(1000 * self.now))
            self.both.use(round(1000 * self.now))

    def use(self, path: list[bytes], end: End) -> None:
        """Note that a request that used these blocks, from the end of its path on, has ended."""
        known = next((i for i, block in enumerate(path) if self.blocks[block].is_tracked), len(path))
        is_fresh = known == len(path) or self.blocks[path[known]].hits >= 8
        new = end.prompt - min((len(path) - known) * end.block, end.prompt)
        lengths = group(end.output, (4, 32, 128, 512)) * NEWS + group(new, (512, 2048, 8192, 32768))
        if 0 < known < len(path) and self.children(path[known]) == 1:
            self.left_requests.add(self.blocks[path[known]].request)
        self.requests += 1
        for i, block in enumerate(path):
            self.trust.uses += 1
            self.touch(self.blocks[block], is_fresh, lengths, i < max(2048 // end.block, 1))
        self.mean_path += 0.002 * (len(path) - self.mean_path)
        self.trim()
        self.judge()

    def judge(self) -> None:
        """Decide whether what was learned is trusted, after a path was used or has arrived."""
        self.trust.judge(self.mean_path, self.slots)
        if self.trust.is_given:
            self.kept = None

    def trim(self) -> None:
        self.last_uses.trim(self.number_idle)
        self.both.trim(self.number_idle + self.beside)

    def leave_shadows(self, known: Known) -> None:
        self.last_uses.leave(round(1000 * known.last))
        self.both.leave(round(1000 * known.last))

    @property
    def number_idle(self) -> int:
        return sum(known.is_idle for known in self.blocks.values())

    def loss(self, block: bytes) -> float:
        if self.is_below is None:
            return 1.0
        return self.survival.loss(self.is_below(block), self.blocks[block].hits > 0)

    def count_use(self, block: bytes, *, is_found: bool) -> None:
        assert self.now is not None
        known = self.blocks[block]
        by_last_use = self.last_uses.holds(round(1000 * known.last))
        gain = is_found - by_last_use
        is_below = self.is_below is not None and self.is_below(block)
        if self.is_below is not None:
            below = max(self.both.holds(round(1000 * known.last)) - by_last_use, 0.0)
            gain = (1.0 if is_found else 0.9 * is_below) - (by_last_use + 0.9 * below)
        self.trust.gain += gain
        value = self.loss(block) if is_found else 0.1 if is_below else 1.0
        if self.kept is not None:
            would = self.kept_of(self.kind_of(known))[bucket_of(self.now - known.last)]
            self.trust.expected += value * (would - by_last_use)
        self.count(self.reused, known)
        self.leave(known)
        known.is_counted = True

    def touch(self, known: Known, is_fresh: bool, lengths: int, is_last: bool) -> None:
        assert self.now is not None
        self.uses += 1
        if known.is_tracked:
            known.hits = min(known.hits + 1, 127)
        if is_last and known.hits < 4:
            role = 1 if known.hits else 0
        elif not known.hits:
            role = 2 if is_fresh else 3
        else:
            role = 3 + known.hits if known.hits < 4 else 7 if known.hits < 8 else 8
        known.kind, known.last = role * OUTPUTS * NEWS + lengths, self.now
        known.is_tracked, known.is_used, known.is_counted = True, True, False
        known.request = self.requests

    def kind_of(self, known: Known) -> int:
        return LEFT if known.request and known.request in self.left_requests else known.kind

    def leave(self, known: Known) -> None:
        self.count(self.left, known)

    def count(self, table: dict[int, list[float]], known: Known) -> None:
        assert self.now is not None
        kind = self.kind_of(known)
        row = list(table.get(kind, NONE))
        row[bucket_of(self.now - known.last)] += 1
        table[kind] = row

    # --- what it learns -----------------------------------------------------------------------------------

    def learn(self) -> None:
        assert self.now is not None
        present: dict[int, list[float]] = {}
        there = [ghost.known for ghost in self.ghosts if ghost.is_there]
        for known in [*self.blocks.values(), *there]:
            if known.is_idle:
                row = present.setdefault(self.kind_of(known), [0.0] * AGES)
                row[bucket_of(self.now - known.last)] += 1
        fade = 2 ** (-self.uses / (16 * (self.slots + 1000 * self.mean_path)))
        self.learned_at, self.uses = self.now, 0
        self.at_risk = {}
        for kind in {*self.left, *present}:
            for table in (self.reused, self.left):
                table[kind] = [count * fade for count in table.get(kind, NONE)]
            counts = [a + b for a, b in zip(self.left[kind], present.get(kind, NONE), strict=True)]
            self.at_risk[kind] = [
                width * (sum(counts[age + 1 :]) + counts[age] / 2) for age, width in enumerate(WIDTHS)
            ]
        self.frozen = dict(self.reused), self.mean_path
        self.index = {}
        self.kept = None if self.trust.is_given else {}
        if self.kept is not None:
            self.forecast(present)
        self.beside = int(self.share_beside * self.blocks_below())

    def forecast(self, present: dict[int, list[float]]) -> None:
        """Find the worth of the least block that a tier by worth would keep of all that are known."""
        groups = [
            (worth, number)
            for kind, row in present.items()
            for worth, number in zip(self.least_worth(kind), row, strict=True)
            if number
        ]
        left, self.floor = float(self.number_idle), 0.0
        for worth, number in sorted(groups, reverse=True):
            left -= number
            if left <= 0:
                self.floor = worth
                break

    def least_worth(self, kind: int) -> list[float]:
        row = [*self.index_of(kind), self.index_of(kind)[-1]]
        return list(accumulate(((a + b) / 2 for a, b in pairwise(row)), min))

    def kept_of(self, kind: int) -> list[bool]:
        assert self.kept is not None
        if kind not in self.kept:
            self.kept[kind] = [worth >= self.floor * (1 - 1e-6) for worth in self.least_worth(kind)]
        return self.kept[kind]

    def index_of(self, kind: int) -> list[float]:
        """Return the Gittins index of a class, from the counts when the tables were learned."""
        if kind not in self.index:
            reused, path = self.frozen
            weight = max(path / 2, 0.5)
            everything, role = range(CLASSES), kind // (OUTPUTS * NEWS)
            of_role = range(role * OUTPUTS * NEWS, (role + 1) * OUTPUTS * NEWS)
            prior = [0.3 / (begin(age) + width / 2 + 60) for age, width in enumerate(WIDTHS)]
            uses, risk = sums(reused, everything), sums(self.at_risk, everything)
            base = [(uses[a] + weight) / (risk[a] + weight / prior[a]) for a in range(AGES)]
            if kind == LEFT:
                rate = [each * 0.2 for each in base]
            else:
                rate = smooth(sums(reused, of_role), sums(self.at_risk, of_role), base, weight)
            rate = smooth(reused.get(kind, NONE), self.at_risk.get(kind, NONE), rate, weight)
            self.index[kind] = [gittins(rate, age) for age in range(AGES)]
        return self.index[kind]

    def rank(self, block: bytes) -> float:
        """Return the rank of a leaf; the lowest goes first."""
        assert self.now is not None
        known = self.blocks[block]
        kind = self.kind_of(known)
        if not self.trust.is_given and kind != LEFT:
            return 0.3 / (self.now - known.last + 60)
        place = min(1.5 * math.log2(1 + self.now - known.last), AGES - 0.5)
        age = int(place)
        row = [*self.index_of(kind), self.index_of(kind)[-1]]
        worth = row[age] + (place - age) * (row[age + 1] - row[age])
        return worth * self.loss(block) if self.trust.is_given else worth


def sums(table: dict[int, list[float]], kinds: range) -> list[float]:
    rows = [row for kind, row in sorted(table.items()) if kind in kinds]
    return [sum(row[age] for row in rows) for age in range(AGES)]


def smooth(reused: list[float], at_risk: list[float], parent: list[float], weight: float) -> list[float]:
    """Draw the rate of a group to that of a coarser one."""
    expected = sum(risk * rate for risk, rate in zip(at_risk, parent, strict=True))
    level = (weight + sum(reused)) / (weight + expected)
    return [(reused[a] + weight * level) / (at_risk[a] + weight / parent[a]) for a in range(AGES)]


def gittins(rate: list[float], age: int) -> float:
    """The most hits per second that keeping a block from this age to any later one gives."""
    alive, hits, seconds, best = 1.0, 0.0, 0.0, 0.0
    for at in range(age, AGES):
        chance = 1 - math.exp(-rate[at] * WIDTHS[at])
        hits += alive * chance
        seconds += alive * chance / rate[at]
        best = max(best, hits / seconds)
        alive *= 1 - chance
    return best
