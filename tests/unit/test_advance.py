"""A decode step in one call: tokens are appended, block tables grow, full blocks are published."""

from __future__ import annotations

import pickle
import threading
from array import array

import numpy as np
import pytest

from fdcache.errors import HashingError, RequestStateError
from fdcache.hashing import hash_blocks, root_hash
from fdcache.manager import CacheManager, Request
from fdcache.metadata import CacheLevel
from fdcache.settings.cache import CacheSettings
from tests.manager_world import layout
from tests.property.engine_model import BLOCK

ROOT = root_hash(layout().fingerprint)


def make_manager(device_blocks: int = 16, **settings: object) -> CacheManager:
    return CacheManager(CacheSettings.model_validate({"device_blocks": device_blocks, **settings}), layout())


def begin(manager: CacheManager, name: str, tokens: int, first: int = 0) -> Request:
    """Return a running request of ``tokens`` computed tokens."""
    request = Request(name, range(first, first + tokens))
    manager.match_prefix([request])
    (allocation,) = manager.allocate_device_blocks([(request, tokens)])
    assert allocation.ok
    manager.commit([(request, tokens)])
    return request


def published(manager: CacheManager, request: Request) -> int:
    return len(manager.find_blocks(request)[CacheLevel.DEVICE])


@pytest.mark.parametrize(
    "tokens",
    [[7, 8], (7, 8), np.array([7, 8], np.int32), np.array([7, 8]), array("i", [7, 8]), [[7], np.array([8])]],
    ids=str,
)
def test_each_request_gets_its_token(tokens: object) -> None:
    manager = make_manager()
    requests = [begin(manager, "a", 3), begin(manager, "b", 5, 100)]
    manager.advance(requests, tokens)  # type: ignore[arg-type]
    assert [request.num_tokens for request in requests] == [4, 6]
    manager.advance(requests, [list(range(20, 20 + BLOCK)), list(range(30, 30 + BLOCK))])
    for request, expected in zip(requests, ([0, 1, 2, 7], [100, 101, 102, 103, 104, 8]), strict=True):
        start = 20 if request is requests[0] else 30
        path = hash_blocks(
            [*expected, *range(start, start + BLOCK)], BLOCK, parent=root_hash(manager.layout.fingerprint)
        )
        assert request.block_hashes.tobytes() == path.tobytes()


def test_a_table_grows_with_the_first_token_of_a_block_and_the_block_before_is_published_when_computed() -> (
    None
):
    manager = make_manager()
    request = begin(manager, "a", BLOCK - 1)
    assert len(manager.advance([request], [1])) == 0
    assert (request.num_blocks, published(manager, request)) == (1, 0)  # the token just sampled has no KV yet
    added = manager.advance([request], [2])
    assert (list(added), added.ok) == ([(0, int(request.block_table[1]))], True)
    assert published(manager, request) == 1


def test_without_uncomputed_tokens_a_full_block_is_published_at_once() -> None:
    manager = make_manager()
    request = begin(manager, "a", BLOCK - 1)
    manager.advance([request], [1], uncomputed_tokens=0)
    assert published(manager, request) == 1


def test_requests_that_find_no_block_keep_their_tokens_and_are_named() -> None:
    manager = make_manager(device_blocks=3)
    requests = [begin(manager, str(n), BLOCK, 100 * n) for n in range(3)]
    added = manager.advance(requests, [1, 2, 3])
    assert (len(added), added.failed.tolist(), added.shortfall, added.ok) == (0, [0, 1, 2], 1, False)
    assert [request.num_tokens for request in requests] == [BLOCK + 1] * 3
    assert manager.get_stats().counters.allocation_failures == 3
    manager.finish([requests[0]])
    assert all(allocation.ok for allocation in manager.allocate_device_blocks([(requests[1], BLOCK + 1)]))
    assert manager.advance(requests[1:], [4, 5]).failed.tolist() == [1]
    manager.check_integrity()


def test_a_paused_manager_appends_and_publishes_and_gives_no_blocks() -> None:
    manager = make_manager()
    request = begin(manager, "a", BLOCK)
    manager.pause()
    assert manager.advance([request], [1]).failed.tolist() == [0]
    assert (request.num_blocks, published(manager, request)) == (1, 1)
    manager.wakeup()
    assert list(manager.advance([request], [2])) == [(0, int(request.block_table[1]))]


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([1], RequestStateError),
        ([1, 2, 3], RequestStateError),
        ([1, 2**31], HashingError),
        ([1, "x"], HashingError),
    ],
)
def test_a_call_that_is_refused_changes_nothing(tokens: list[int], error: type[Exception]) -> None:
    manager = make_manager()
    requests = [begin(manager, "a", BLOCK), begin(manager, "b", BLOCK, 100)]
    with pytest.raises(error):
        manager.advance(requests, tokens)
    assert [(request.num_tokens, request.num_blocks) for request in requests] == [(BLOCK, 1)] * 2


def test_a_request_without_blocks_does_not_advance() -> None:
    manager, cached = make_manager(), Request("waiting", range(2 * BLOCK))
    running = begin(manager, "a", 2 * BLOCK)
    with pytest.raises(RequestStateError, match="'waiting'"):
        manager.advance([running, cached], [1, 1])
    manager.finish([running])
    with pytest.raises(RequestStateError, match="'a'"):
        manager.advance([running], [1])


def test_a_result_can_be_compared_pickled_and_read() -> None:
    manager = make_manager()
    requests = [begin(manager, "a", BLOCK), begin(manager, "b", 1, 100)]
    added = manager.advance(requests, [1, 2])
    assert repr(added) == f"AdvanceResult(0: {added[0][1]})"
    assert pickle.loads(pickle.dumps(added)) == added  # noqa: S301
    assert added != manager.advance(requests, [1, 2])
    positions = added.positions
    del added
    assert positions.tolist() == [0]  # a view keeps its result alive
    (allocation,) = manager.allocate_device_blocks([(requests[1], 3 * BLOCK)])
    assert pickle.loads(pickle.dumps(allocation)) == allocation  # noqa: S301
    assert allocation != manager.allocate_device_blocks([(requests[1], 3 * BLOCK)])[0]


def test_prompts_are_hashed_in_other_threads_while_steps_go_on() -> None:
    manager = make_manager()
    running = begin(manager, "running", BLOCK)
    prompt = np.arange(40_000, dtype=np.int32)
    arriving = [Request(str(n), prompt) for n in range(4)]
    threads = [threading.Thread(target=manager.prepare, args=(arriving,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for token in range(50):
        manager.advance([running], [token])
    manager.match_prefix(arriving[:1])
    for thread in threads:
        thread.join()
    expected = hash_blocks(prompt, BLOCK, parent=ROOT).tobytes()
    assert [request.block_hashes.tobytes() for request in arriving] == [expected] * 4


def test_a_request_is_hashed_with_the_keys_of_one_layout_only() -> None:
    first, second = make_manager(), make_manager(lookahead_tokens=1)
    request = Request("a", range(20))
    first.prepare([request])
    with pytest.raises(RequestStateError, match="another layout or look-ahead"):
        second.match_prefix([request])
