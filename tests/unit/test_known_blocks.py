"""KnownBlocks: which missing blocks were there before, by a sample of bounded size."""

from __future__ import annotations

import math
import random

import numpy as np

from fdcache import _core
from fdcache.hashing import hash_blocks, root_hash
from fdcache.metadata import HashArray
from fdcache.service.server.known_blocks import KnownBlocks, SampledMisses


def hashes(*numbers: int) -> HashArray:
    return np.concatenate([hash_blocks([number], 1, parent=root_hash(b"m" * 32)) for number in numbers])


def test_blocks_that_were_missed_or_stored_before_are_known() -> None:
    known = KnownBlocks()
    assert known.add_missing(hashes(1, 2, 3)) == SampledMisses(3, 3, 0)
    known.add_stored(hashes(4))
    assert known.add_missing(hashes(2, 3, 4, 5)) == SampledMisses(4, 4, 3)


def test_a_look_up_that_is_repeated_counts_once() -> None:
    known = KnownBlocks()
    assert known.add_missing(hashes(1, 2)) == SampledMisses(2, 2, 0)
    assert known.add_missing(hashes(1, 2)) == SampledMisses()


def test_the_estimate_is_as_near_as_the_sample_allows_and_the_sample_is_bounded() -> None:
    rng, known, seen = random.Random(3), KnownBlocks(most=1000), set[int]()
    missed = missed_known = 0
    found = []
    for _ in range(4000):
        # A hundred thousand blocks, the first ones asked for most often.
        numbers = {int(100_000 * rng.random() ** 3) for _ in range(8)}
        missed += len(numbers)
        missed_known += len(numbers & seen)
        seen |= numbers
        found.append(known.add_missing(hashes(*numbers)))
        assert len(known) <= 1000
    sample, estimated = sum(each.sample for each in found), sum(each.missed for each in found)
    assert sample < missed / 4
    assert abs(estimated / missed - 1) < 0.1
    true, estimate = missed_known / missed, sum(each.known for each in found) / estimated
    assert abs(estimate - true) < 4 * math.sqrt(true * (1 - true) / sample)


def test_an_engine_sends_a_bounded_sample_of_its_misses_with_its_limit() -> None:
    engine, exact = KnownBlocks(), KnownBlocks()
    path = hash_blocks(list(range(10_000)), 1, parent=root_hash(b"m" * 32)).copy()
    starts = path[:, :8].copy().view("<u8").ravel()
    log = _core.MissLog()
    assert log.take()[3:] == (b"", 2**64 - 1)
    limit = 2**62
    chosen = starts[starts < limit].tolist()
    assert engine.add_missing_sample(chosen, limit) == SampledMisses(len(chosen), 4 * len(chosen), 0)
    assert exact.add_missing(path) == SampledMisses(len(path), len(path), 0)
    assert engine.add_missing(path[::-1]) == SampledMisses(len(chosen), 4 * len(chosen), 4 * len(chosen))
