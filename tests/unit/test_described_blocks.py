"""DescribedBlocks: which blocks of requests were described, and what is to be described of the others."""

from __future__ import annotations

import numpy as np

from fdcache._core import DescribedBlocks
from fdcache.manager import CacheManager, Request
from fdcache.settings.cache import CacheSettings
from tests.service_engine import BLOCK, layout


def matched(manager: CacheManager, name: str, tokens: list[int]) -> Request:
    request = Request(name, tokens)
    manager.match_prefix([request])
    return request


def test_only_what_is_new_at_the_end_of_a_path_is_described() -> None:
    described = DescribedBlocks(64)
    with CacheManager(CacheSettings(device_blocks=32), layout()) as manager:
        first, second = (matched(manager, "a", list(range(9))), matched(manager, "b", list(range(22))))
        assert first.num_tokens // BLOCK == 2
        (run,) = described.describe([first])
        assert run == (0, 0, b"", first.block_hashes.tobytes(), np.arange(8, dtype=np.int32).tobytes())
        assert described.describe([first]) == []
        (run,) = described.describe([first, second])
        assert run == (
            1,
            2,
            first.block_hashes[1].tobytes(),
            second.block_hashes[2:].tobytes(),
            np.arange(8, 20, dtype=np.int32).tobytes(),
        )
        described.clear()
        assert [each[:2] for each in described.describe([second, first])] == [(0, 0)]


def test_a_request_that_was_not_matched_has_nothing_to_describe() -> None:
    assert DescribedBlocks(64).describe([Request("a", list(range(40)))]) == []


def test_the_oldest_half_is_forgotten_and_described_again() -> None:
    described = DescribedBlocks(8)
    with CacheManager(CacheSettings(device_blocks=32), layout()) as manager:
        requests = [matched(manager, str(i), [i] * (4 * BLOCK)) for i in range(3)]
        for request in requests:
            assert len(described.describe([request])) == 1
        assert [each[0] for each in described.describe(requests[1:])] == []
        assert len(described.describe(requests[:1])) == 1
