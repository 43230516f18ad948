"""CacheManager: requests from match to finish, with the model engine of the property tests."""

from __future__ import annotations

import pytest

from fdcache.errors import HashingError, RequestStateError
from fdcache.manager import AllocationFailure, CacheManager, MatchStatus, Request
from fdcache.metadata import (
    CacheLevel,
    CacheStatus,
)
from fdcache.settings.cache import CacheSettings
from tests.manager_world import TAIL, A, B, C, World, layout
from tests.property.engine_model import BLOCK


class TestMatch:
    def test_a_finished_request_leaves_its_full_blocks_to_the_next(self) -> None:
        world = World()
        world.serve(*A, *B, *TAIL)
        assert world.match(*A, *B, *C) == (2, 0)
        world.assert_nothing_is_held()

    def test_a_full_hit_recomputes_its_last_block_in_private(self) -> None:
        world = World()
        world.serve(*A, *B, *TAIL)
        job = world.submit(*A, *B)
        world.engine.schedule([job], 100)
        first, second = job.request.block_table.tolist()
        assert job.request.num_cached_tokens == BLOCK
        shared = world.manager.find_blocks(job.request)[CacheLevel.DEVICE]
        assert first == shared[0].block_id
        assert second != shared[1].block_id

    def test_generated_tokens_are_reused_but_not_the_last_sampled_one(self) -> None:
        world = World()
        job = world.submit(*A)
        world.engine.schedule([job], 100)
        world.settle()
        for token in B:
            world.engine.generate(job, token)
            world.engine.schedule([job], 100)
            world.settle()
        world.engine.generate(job, 7)  # sampled, its KV never computed
        world.engine.finish(job)
        assert world.match(*A, *B, 7, 7) == (2, 0)

    def test_find_blocks_pins_nothing(self) -> None:
        world = World(host=8)
        world.serve(*A, *B, *TAIL)
        found = world.manager.find_blocks(Request("probe", [*A, *B, *C]))
        device, host = found[CacheLevel.DEVICE], found[CacheLevel.HOST]
        assert [node.depth for node in device] == [node.depth for node in host] == [0, 1]
        assert device[1].parent == device[0].block_id
        assert (device[0].children, device[1].children) == (1, 0)
        assert {node.cache_status for node in device + host} == {CacheStatus.DEVICE, CacheStatus.HOST}
        world.assert_nothing_is_held()

    def test_a_request_without_cache_neither_reuses_nor_leaves_blocks(self) -> None:
        world = World()
        world.serve(*A, *TAIL, use_cache=False)
        assert world.match(*A, *TAIL) == (0, 0)
        world.serve(*A, *TAIL)
        job = world.submit(*A, *TAIL, use_cache=False)
        world.engine.schedule([job], 100)
        assert job.request.num_cached_tokens == 0

    def test_prefix_caching_can_be_off(self) -> None:
        world = World(enable_prefix_caching=False)
        world.serve(*A, *TAIL)
        assert world.match(*A, *TAIL) == (0, 0)

    def test_tenants_and_adapters_never_share(self) -> None:
        manager = World().manager
        for number, options in enumerate(({}, {"tenant": "t"}, {"adapter_id": "a"})):
            request = Request(str(number), [*A, 1], **options)  # type: ignore[arg-type]
            assert manager.match_prefix([request])[0].num_cached_tokens == 0
            manager.allocate_device_blocks([(request, BLOCK + 1)])
            manager.commit([(request, BLOCK + 1)])
            manager.finish([request])
        assert manager.get_stats().device.ready == 3

    def test_a_running_request_and_its_id_cannot_be_matched_again(self) -> None:
        world = World()
        job = world.submit(*A)
        world.engine.schedule([job], 100)
        with pytest.raises(RequestStateError, match="finish it before"):
            world.manager.match_prefix([job.request])
        with pytest.raises(RequestStateError, match="another request"):
            world.manager.match_prefix([Request(job.request.request_id, [1])])

    def test_blocks_are_not_found_before_their_kv_exists(self) -> None:
        world = World()
        job = world.submit(*A, *TAIL)
        world.engine.schedule([job], 100)
        assert world.match(*A, *TAIL) == (0, 0)
        world.engine.stop(job)  # aborted before anything was accepted
        world.settle()
        assert world.match(*A, *TAIL) == (0, 0)


class TestAllOrNothing:
    """A call that takes a list changes nothing when one of its elements is refused."""

    def test_matches(self) -> None:
        world = World()
        running = world.submit(*A)
        world.engine.schedule([running], 100)
        before = world.manager.get_stats()
        new = Request("new", [*A, *TAIL])
        for refused in (running.request, Request("new", [1]), new, Request("huge", [2**40])):
            with pytest.raises((RequestStateError, HashingError)):
                world.manager.match_prefix([new, refused])
            assert world.manager.get_stats() == before
        assert world.manager.match_prefix([new])[0].status is MatchStatus.MATCHED

    def test_allocations(self) -> None:
        world = World()
        world.serve(*A, *B, *TAIL)
        first, short = Request("first", [1, 2, 3]), Request("short", [*A, *B, *C])
        world.manager.match_prefix([first, short])
        for refused in ((short, 3), (Request("unmatched", [1]), 1)):
            with pytest.raises(RequestStateError):
                world.manager.allocate_device_blocks([(first, 3), refused])
            assert len(first.block_table) == 0

    def test_commits(self) -> None:
        world = World()
        first, second = Request("first", [*A, 1]), Request("second", [*B, 1])
        world.manager.match_prefix([first, second])
        world.manager.allocate_device_blocks([(first, 5), (second, 5)])
        for refused in ((second, 6), (second, -1), (Request("unmatched", [1]), 0)):
            with pytest.raises(RequestStateError, match="cannot commit"):
                world.manager.commit([(first, 5), refused])
            assert world.manager.get_stats().device.ready == 0


class TestAllocate:
    def test_all_or_nothing_with_the_shortfall(self) -> None:
        world = World(device=3)
        job = world.submit(*A, *B, *C, *TAIL)
        request = job.request
        world.manager.match_prefix([request])
        answer = world.manager.allocate_device_blocks([(request, 13)])[0]
        assert (answer.ok, answer.failure, answer.shortfall) == (False, AllocationFailure.NO_BLOCKS, 1)
        assert len(request.block_table) == 0
        world.manager.finish([request])
        world.assert_nothing_is_held()

    def test_an_unmatched_request_and_too_few_tokens_are_refused(self) -> None:
        world = World()
        with pytest.raises(RequestStateError, match="has to be matched"):
            world.manager.allocate_device_blocks([(Request("r", [1]), 1)])
        world.serve(*A, *B, *TAIL)
        request = Request("r", [*A, *B, *C])
        world.manager.match_prefix([request])
        with pytest.raises(RequestStateError, match="3 tokens are fewer than the 8"):
            world.manager.allocate_device_blocks([(request, 3)])

    def test_hits_of_a_request_are_counted_once(self) -> None:
        world = World()
        world.serve(*A, *TAIL)
        request = Request("r", [*A, *B, *C])
        world.manager.match_prefix([request])
        for tokens in (5, 9, 12):
            world.manager.allocate_device_blocks([(request, tokens)])
        counters = world.manager.get_stats().counters
        assert (counters.lookups, counters.lookup_tokens, counters.device_hit_tokens) == (2, 5 + 12, BLOCK)

    def test_a_commit_of_more_tokens_than_blocks_is_refused(self) -> None:
        world = World()
        request = Request("r", [*A, 1])
        world.manager.match_prefix([request])
        world.manager.allocate_device_blocks([(request, 5)])
        with pytest.raises(RequestStateError, match="cannot commit 6 tokens"):
            world.manager.commit([(request, 6)])
        world.manager.finish([request])
        with pytest.raises(RequestStateError, match="cannot commit"):
            world.manager.commit([(request, 1)])

    def test_finishing_twice_is_harmless(self) -> None:
        world = World()
        first, second = world.submit(*A, *TAIL), world.submit(*A, *TAIL)
        world.engine.schedule([first, second], 100)
        world.settle()
        world.manager.finish([first.request])
        world.manager.finish([first.request])
        assert world.manager.get_stats().live_requests == 1
        world.manager.check_integrity()

    def test_two_requests_that_compute_the_same_block_store_it_once(self) -> None:
        world = World()
        jobs = [world.submit(*A, *B, *TAIL), world.submit(*A, *B, *TAIL)]
        world.engine.schedule(jobs, 100)
        world.settle()
        stats = world.manager.get_stats().device
        assert (stats.ready, stats.writing) == (2, 4)
        for job in list(jobs):
            world.engine.finish(job)
        assert world.match(*A, *B, *TAIL) == (2, 0)
        world.assert_nothing_is_held()

    def test_a_request_belongs_to_the_manager_that_matched_it(self) -> None:
        ours, other = World().manager, World().manager
        request = Request("r", [*A, 1])
        ours.match_prefix([request])
        for call in (
            lambda: other.match_prefix([request]),
            lambda: other.allocate_device_blocks([(request, 5)]),
            lambda: other.commit([(request, 0)]),
        ):
            with pytest.raises(RequestStateError):
                call()
        other.finish([request])
        assert ours.allocate_device_blocks([(request, 5)])[0].ok
        ours.finish([request])
        other_layout = CacheManager(CacheSettings(device_blocks=4), layout(ranks=2))
        with pytest.raises(RequestStateError, match="another layout"):
            other_layout.match_prefix([request])

    def test_tokens_before_the_first_match_are_refused(self) -> None:
        with pytest.raises(RequestStateError, match="has to be matched"):
            Request("r", [1]).append_tokens([2])
