"""What an engine may do wrong with requests is refused, and changes nothing."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from fdcache._core import AdvanceResult
from fdcache.errors import RequestStateError
from fdcache.hashing import hash_blocks, root_hash
from fdcache.manager import AllocationFailure, CacheManager, MatchStatus, Request
from fdcache.metadata import CacheLevel
from fdcache.settings.cache import CacheSettings
from tests.manager_world import layout
from tests.property.engine_model import BLOCK


def make_manager() -> CacheManager:
    return CacheManager(CacheSettings(device_blocks=16), layout())


class Calls:
    """A token that calls something when it is read."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def __index__(self) -> int:
        self.call()
        return 7


def tokens_with(call: Callable[[], object], count: int = 8) -> list[int]:
    return [Calls(call), *range(count)]


@pytest.mark.parametrize("allocated", [0, BLOCK])
def test_a_prompt_without_all_its_blocks_does_not_advance_and_publishes_nothing(allocated: int) -> None:
    manager, request = make_manager(), Request("a", range(4 * BLOCK))
    manager.match_prefix([request])
    if allocated:
        manager.allocate_device_blocks([(request, allocated)])
    with pytest.raises(RequestStateError, match="blocks for all its tokens"):
        manager.advance([request], [9])
    assert request.num_tokens == 4 * BLOCK
    assert not manager.find_blocks(request)[CacheLevel.DEVICE]


@pytest.mark.parametrize("tokens", [2**64 - 1, 2**63, 2**40, 2**32 * BLOCK, 2**32 * BLOCK + BLOCK])
def test_more_tokens_than_any_pool_holds_find_no_blocks(tokens: int) -> None:
    manager, request = make_manager(), Request("a", range(BLOCK))
    manager.match_prefix([request])
    (allocation,) = manager.allocate_device_blocks([(request, tokens)])
    assert (allocation.failure, request.num_blocks) == (AllocationFailure.NO_BLOCKS, 0)
    assert allocation.shortfall > 0


@pytest.mark.parametrize("count", [-1, 2**70, 1.5, "many"])
def test_a_count_that_is_none_is_refused_by_name(count: object) -> None:
    manager, request = make_manager(), Request("a", range(BLOCK))
    manager.match_prefix([request])
    calls: dict[str, Callable[[], object]] = {
        "num_tokens": lambda: manager.allocate_device_blocks([(request, count)]),  # type: ignore[list-item]
        "cannot commit": lambda: manager.commit([(request, count)]),  # type: ignore[list-item]
        "uncomputed_tokens": lambda: manager.advance([], [], uncomputed_tokens=count),  # type: ignore[arg-type]
        "max_cached_tokens": lambda: Request("b", [1], max_cached_tokens=count),  # type: ignore[arg-type]
    }
    for name, call in calls.items():
        with pytest.raises(RequestStateError, match=name):
            call()
    assert (request.num_blocks, manager.num_free_device_blocks) == (0, 16)


def test_a_negative_number_of_blocks_is_refused() -> None:
    with pytest.raises(RequestStateError, match="num_blocks is -1"):
        make_manager().can_allocate_device_blocks(-1)


def test_tokens_appended_while_a_request_is_hashed_again_are_kept() -> None:
    manager, count = make_manager(), 2_000_000
    request = Request("a", np.arange(count, dtype=np.int32))
    manager.prepare([request])
    manager.change_revision("2")
    hashing = threading.Thread(target=manager.prepare, args=([request],))
    hashing.start()
    appended = 0
    while hashing.is_alive():
        request.append_tokens(5)
        appended += 1
    assert request.num_tokens == count + appended
    manager.match_prefix([request])
    path = hash_blocks(request.tokens, BLOCK, parent=root_hash(manager.layout.fingerprint))
    assert request.block_hashes.tobytes() == path.tobytes()


def test_a_running_request_can_be_prepared_and_found_after_a_change_of_revision() -> None:
    manager, request = make_manager(), Request("a", range(2 * BLOCK))
    manager.match_prefix([request])
    manager.allocate_device_blocks([(request, 2 * BLOCK)])
    manager.change_revision("2")
    manager.prepare([request])
    assert manager.find_blocks(request) == {CacheLevel.DEVICE: []}


def test_a_request_whose_init_was_not_called_is_refused() -> None:
    class Hollow(Request):
        def __init__(self) -> None:
            pass

    manager = make_manager()
    for call in (
        lambda: manager.match_prefix([Hollow()]),
        lambda: manager.advance([Hollow()], [1]),
        lambda: manager.commit([(Hollow(), 0)]),
    ):
        with pytest.raises(TypeError):
            call()


def test_tokens_that_bind_their_request_again_are_appended_to_what_it_has_then() -> None:
    manager, request = make_manager(), Request("a", range(2000))
    manager.prepare([request])

    def change() -> None:
        manager.change_revision("2")
        manager.prepare([request])

    request.append_tokens(tokens_with(change, 400))
    assert request.num_tokens == 2401


def test_requests_of_a_generator_live_as_long_as_the_call() -> None:
    with pytest.raises(RequestStateError, match="y99"):
        make_manager().advance((Request(f"{'y' * 300}{n}", [1]) for n in range(99, 120)), [1] * 21)  # type: ignore[arg-type]


def test_pairs_that_change_while_they_are_read_keep_their_requests() -> None:
    pair: list[object] = [Request("x" * 100, [1])]
    pair.append(Calls(pair.clear))
    with pytest.raises((RequestStateError, TypeError)):
        make_manager().commit([pair])  # type: ignore[list-item]


def test_a_match_within_a_match_leaves_one_request_of_each_id() -> None:
    manager, inner = make_manager(), Request("same", [1] * 9)
    outer = Request("same", tokens_with(lambda: manager.match_prefix([inner])))
    with pytest.raises(RequestStateError, match="'same'"):
        manager.match_prefix([outer])
    assert (inner.is_live, outer.is_live) == (True, False)
    manager.finish([outer, inner])
    assert manager.match_prefix([outer])[0].status is MatchStatus.MATCHED


def test_any_text_is_an_id() -> None:
    manager, request = make_manager(), Request("\ud800", [1])
    manager.match_prefix([request])
    with pytest.raises(RequestStateError, match="ud800"):
        manager.match_prefix([request])


def test_a_damaged_result_is_refused_and_equal_results_have_equal_hashes() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        AdvanceResult.__new__(AdvanceResult).__setstate__(([], [2] * 5, [], 0))
    manager = make_manager()
    one, other = (manager.advance([], []) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)


def test_a_prompt_that_refers_to_its_request_is_freed() -> None:
    class Prompt(list[int]):
        request: Request

    manager, prompt = make_manager(), Prompt([1] * 9)
    prompt.request = Request("a", prompt)
    manager.match_prefix([prompt.request])
    manager.finish([prompt.request])
    freed = weakref.ref(prompt)
    del prompt
    gc.collect()
    assert freed() is None
