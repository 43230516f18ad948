"""What a full host tier finds of prompts that end at states, by each policy, beside the best fixed set."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from itertools import product
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from benchmarks.groups.positions import WORKLOADS, replayed
from benchmarks.harness import Report, Row
from fdcache import _core
from fdcache.groups import record_keys, state_keys
from fdcache.hashing import hash_blocks
from fdcache.metadata import HashArray
from fdcache.settings.cache import EvictionPolicy, StatePositions

STATES = 9
"""Records of the states at the end of a prompt, each as large as that of a page."""
SIZES = (3, 8)
"""MiB of host memory of the replays."""
STEP = 1000
"""Milliseconds between requests."""
_ROOT = np.zeros((1, 32), np.uint8)


class Prompts(NamedTuple):
    """``number`` prompts of ``pages`` pages, of which one is asked for ``share`` of the requests."""

    number: int
    pages: int
    share: float

    @property
    def records(self) -> int:
        """Records of one, its states among them."""
        return self.pages + STATES

    @property
    def density(self) -> float:
        """Pages that a record of one saves in a request."""
        return self.share / self.number * self.pages / self.records


class Traffic(NamedTuple):
    """Prompts of two kinds, and the slots of the tier."""

    name: str
    kinds: tuple[Prompts, Prompts]
    slots: int

    @property
    def best(self) -> float:
        """The share of the pages asked for that is found if a tier holds the prompts that are worth most."""
        room, found = float(self.slots), 0.0
        for kind in sorted(self.kinds, key=lambda each: -each.density):
            held = min(room / (kind.number * kind.records), 1.0)
            room -= held * kind.number * kind.records
            found += held * kind.share * kind.pages
        return found / sum(kind.share * kind.pages for kind in self.kinds)


TRAFFIC = (
    Traffic("pages are worth more", (Prompts(60, 1, 2 / 3), Prompts(30, 20, 1 / 3)), 900),
    Traffic("states are worth more", (Prompts(60, 1, 60 / 61), Prompts(30, 20, 1 / 61)), 900),
    Traffic("alike", (Prompts(60, 10, 2 / 3), Prompts(30, 10, 1 / 3)), 900),
)


class Tier:
    """A host tier that requests with states use, in blocks' keys alone."""

    def __init__(self, slots: int, eviction: str) -> None:
        self.tier = _core.Tier(slots, eviction)
        self.tier.set_states(1, STATES)

    def ask(self, hashes: HashArray) -> bool:
        """Use a prompt: return True if it was found, else store it."""
        states = state_keys(hashes[-1:], 1, STATES)
        path = np.concatenate((record_keys(hashes, 1), states))
        lease = self.tier.open_lease()
        is_found = len(self.tier.find(path[-1:]).slots) > 0
        if is_found:
            slots = self.tier.match(lease, path).slots
            self.tier.begin_load(lease, slots)
            self.tier.end_load(slots, path, np.ones(len(path), np.uint8))
        else:
            copies = self.tier.reserve_copies(lease, np.concatenate((_ROOT, path[:-1])), path)
            copied = np.ones(len(copies.slots), np.uint8)
            self.tier.complete(copies.slots, copied, np.zeros(len(copied), np.uint64))
        self.tier.release(lease)
        return is_found


def found(traffic: Traffic, eviction: str, requests: int, seed: int = 0) -> float:
    """Return the share of the pages asked for that a tier has, in the second half of the requests."""
    chance, tier = random.Random(seed), Tier(traffic.slots, eviction)
    asked = have = 0
    for number in range(requests):
        (kind,) = chance.choices(traffic.kinds, [each.share for each in traffic.kinds])
        first = 1 + 1000 * chance.randrange(kind.number) + 100_000 * traffic.kinds.index(kind)
        tier.tier.set_clock(number * STEP)
        is_found = tier.ask(
            hash_blocks(np.arange(first, first + kind.pages, dtype=np.int32), 1, parent=bytes(32))
        )
        if 2 * number >= requests:
            asked += kind.pages
            have += kind.pages * is_found
    return have / asked


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the length of the traffic."""
    parser.add_argument(
        "--asked", type=int, default=6000, help="requests of each traffic of two kinds of prompts"
    )
    parser.add_argument("--replayed", type=int, default=300, help="requests of each replay")
    parser.add_argument("--seeds", type=int, default=4, help="of which a mean is")


def measure(options: argparse.Namespace, report: Report) -> bool:
    """Return False if a byte was wrong in a replay."""
    seeds = range(1, options.seeds + 1)
    clean: list[bool] = []

    def asked() -> Iterator[Row]:
        for traffic in TRAFFIC:
            shares = {
                policy.value: mean(found(traffic, policy, options.asked, seed) for seed in seeds)
                for policy in EvictionPolicy
            }
            yield {"traffic": traffic.name, **shares, "best fixed set": traffic.best}

    def replays() -> Iterator[Row]:
        for workload, size, kept in product(WORKLOADS, SIZES, (StatePositions.SPACED, StatePositions.ALL)):
            row: dict[str, Any] = {"traffic": workload.value, "host MiB": size, "positions": kept.value}
            for policy in EvictionPolicy:
                made = [replayed(workload, options.replayed, size, kept, policy, seed) for seed in seeds]
                clean.extend(each.clean for each in made)
                row[policy.value] = mean(each.tally.hit_rate for each in made)
            yield row

    report.table("Prompts of two lengths", asked())
    report.table("Replays", replays())
    return all(clean)
