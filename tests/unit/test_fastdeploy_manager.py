"""FastDeploy's cache manager: its interface to the scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fdcache.errors import ConfigurationError, RequestStateError, UnsupportedCallError
from tests.fastdeploy_help import BLOCK, fd_request, make, run, settle


class TestBlocks:
    def test_a_new_manager_is_initialized_and_all_blocks_are_free(self) -> None:
        manager = make(total_block_num=100, num_cpu_blocks=50)
        assert manager.is_initialized()
        assert (manager.num_gpu_blocks, manager.num_cpu_blocks, manager.block_size) == (100, 50, BLOCK)
        assert (manager.num_free_device_blocks, manager.num_free_host_blocks) == (100, 50)
        assert manager.enable_host_cache

    def test_allocation_gives_distinct_blocks_and_counts_them(self) -> None:
        manager = make(total_block_num=100)
        blocks = manager.allocate_gpu_blocks(fd_request("a", 10 * BLOCK), 10)
        assert len(set(blocks)) == 10
        assert manager.num_free_device_blocks == 90
        assert len(manager.gpu_free_block_list) == 90
        assert sorted([*manager.gpu_free_block_list, *blocks]) == list(range(100))
        assert manager.gpu_free_block_list[0] not in blocks
        assert manager.available_gpu_resource == 0.9

    @pytest.mark.parametrize("first", [95, 100])
    def test_allocating_too_many_blocks_returns_none_and_changes_nothing(self, first: int) -> None:
        manager = make(total_block_num=100)
        manager.allocate_device_blocks(fd_request("a", 1), first)
        assert manager.allocate_device_blocks(fd_request("b", 1), 10) == []
        assert manager.num_free_device_blocks == 100 - first

    def test_allocating_no_blocks_returns_an_empty_list(self) -> None:
        manager = make()
        assert manager.allocate_device_blocks(fd_request("a", 1), 0) == []
        assert manager.num_free_device_blocks == manager.num_gpu_blocks

    def test_a_negative_number_of_blocks_counts_as_none(self) -> None:
        """FastDeploy's scheduler asks for what a request lacks, which may be less than nothing."""
        manager, request = make(total_block_num=100), fd_request("a", 4 * BLOCK)
        assert manager.can_allocate_gpu_blocks(-3)
        first = manager.allocate_gpu_blocks(request, 2)
        assert manager.allocate_gpu_blocks(request, -3) == []
        assert len({*first, *manager.allocate_gpu_blocks(request, 2)}) == 4
        assert manager.num_free_device_blocks == 96

    def test_can_allocate_up_to_the_number_of_blocks(self) -> None:
        manager = make(total_block_num=100, num_cpu_blocks=50)
        assert manager.can_allocate_device_blocks(100)
        assert manager.can_allocate_gpu_blocks(100)
        assert not manager.can_allocate_device_blocks(101)
        assert manager.can_allocate_host_blocks(50)
        assert not manager.can_allocate_host_blocks(51)

    def test_without_host_blocks_there_is_no_host_cache(self) -> None:
        manager = make(num_cpu_blocks=0)
        assert not manager.enable_host_cache
        assert manager.num_free_host_blocks == 0
        assert not manager.can_allocate_host_blocks(1)

    @pytest.mark.parametrize("size", [150, 100, 50, 1])
    def test_an_unused_pool_takes_any_size(self, size: int) -> None:
        manager = make(total_block_num=100)
        assert manager.resize_device_pool(size)
        assert (manager.num_gpu_blocks, manager.num_free_device_blocks) == (size, size)

    def test_a_pool_of_no_blocks_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="0 device blocks"):
            make().resize_device_pool(0)

    def test_a_pool_does_not_shrink_below_what_is_used(self) -> None:
        manager = make(total_block_num=100)
        manager.allocate_device_blocks(fd_request("a", 1), 60)
        assert not manager.resize_device_pool(50)
        assert (manager.num_gpu_blocks, manager.num_free_device_blocks) == (100, 40)
        with pytest.raises(RequestStateError, match="50 device blocks"):
            manager.update_cache_config(SimpleNamespace(total_block_num=50))

    def test_the_pool_is_resized_to_the_profiled_blocks(self) -> None:
        manager = make(total_block_num=100)
        manager.update_cache_config(SimpleNamespace(total_block_num=150))
        assert len(manager.allocate_device_blocks(fd_request("a", 1), 120)) == 120
        assert manager.num_free_device_blocks == 30

    @pytest.mark.parametrize(
        "name",
        [
            *("free_device_blocks", "free_host_blocks", "free_all_device_blocks", "free_all_host_blocks"),
            *("allocate_host_blocks", "offload_to_host", "load_from_host"),
            "prepare_prefetch_metadata",
        ],
    )
    def test_calls_by_block_number_are_refused_with_the_remedy(self, name: str) -> None:
        with pytest.raises(UnsupportedCallError, match="request_finish"):
            getattr(make(), name)([1, 2])


class TestOtherDuties:
    """Calls of FastDeploy's scheduler for features that fdcache implements differently."""

    @pytest.mark.parametrize("name", ["write_cache_to_storage", "write_cache_to_storage_decode"])
    def test_write_cache_to_storage_commits_computed_blocks(self, name: str) -> None:
        manager = make()
        first = fd_request("a", 3 * BLOCK)
        manager.match_prefix(first)
        manager.allocate_device_blocks(first, 4)
        first.output_token_ids.append(9)
        getattr(manager, name)(first)
        second = fd_request("b", prompt=[*first.prompt_token_ids, 9, 9])
        manager.match_prefix(second)
        assert second._match_result.matched_device_nums == 3
        manager.request_finish(first)
        getattr(manager, name)(first)  # it has ended

    def test_calls_that_have_nothing_to_do_do_nothing(self) -> None:
        manager = make()
        request = fd_request("a", 3 * BLOCK)
        blocks = run(manager, request)
        free = manager.num_free_device_blocks
        manager.cache_output_blocks(request, BLOCK)
        manager.update_cache_blocks(request, BLOCK, 3 * BLOCK)
        manager.recycle_gpu_blocks(blocks[1:], request.request_id)
        assert manager.drain_pending_prefetches() == []
        assert not manager.prefetch_storage(fd_request("b", 3 * BLOCK))
        assert manager.num_free_device_blocks == free
        assert manager.cache_config is manager.config.cache_config
        manager.core.check_integrity()

    @pytest.mark.parametrize("steps", [1, 3])
    def test_outputs_are_cached_when_they_fill_a_block(self, steps: int) -> None:
        manager = make()
        request = fd_request("a", 2 * BLOCK)
        manager.match_prefix(request)
        manager.allocate_device_blocks(request, 8)
        for index in range(3 * BLOCK):
            request.output_token_ids.append(50 + index)
            if not index % steps:
                manager.check_and_add_pending_backup()
        manager.check_and_add_pending_backup()
        probe = fd_request("b", prompt=[*request.prompt_token_ids, *request.output_token_ids, 7])
        manager.match_prefix(probe)
        assert probe._match_result.matched_device_nums == 4  # the last output has no KV yet

    def test_a_resumed_request_that_ends_before_it_is_recomputed_caches_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST", "0")
        manager = make()
        request = fd_request("a", 2 * BLOCK)
        request.output_token_ids.extend([50] * 2 * BLOCK)  # of a run whose blocks are gone
        manager.match_prefix(request)
        manager.allocate_device_blocks(request, 5)
        manager.request_finish(request)
        probe = fd_request("b", prompt=[*request.prompt_token_ids, *request.output_token_ids])
        manager.match_prefix(probe)
        assert probe._match_result.total_matched_blocks == 0


class TestCostOfAStep:
    def test_each_output_is_read_once(self) -> None:
        class Outputs(list[int]):
            read = 0

            def __getitem__(self, index: Any) -> Any:
                found = super().__getitem__(index)
                Outputs.read += len(found) if isinstance(index, slice) else 1
                return found

        manager = make(total_block_num=300)
        request = fd_request("a", 2 * BLOCK)
        manager.match_prefix(request)
        manager.allocate_device_blocks(request, 260)
        request.output_token_ids = Outputs()
        for index in range(1000):
            request.output_token_ids.append(index)
            manager.check_and_add_pending_backup()
        assert 1000 - BLOCK <= Outputs.read <= 1000

    def test_the_number_of_free_blocks_is_known_without_visiting_blocks(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        manager = make(total_block_num=100)

        def visit() -> list[int]:
            raise AssertionError("visited")

        monkeypatch.setattr(manager.core, "free_device_blocks", visit)
        assert len(manager.gpu_free_block_list) == 100
        assert manager.available_gpu_resource == 1.0


class TestImages:
    @pytest.mark.parametrize(("whole", "blocks"), [(False, 3), (True, 1)])
    def test_a_match_ends_before_an_image_that_is_computed_in_one_piece(
        self, whole: bool, blocks: int
    ) -> None:
        manager = make(disable_chunked_mm_input=whole)
        image = [(BLOCK + 1, 2 * BLOCK + 1, "cat")]
        run(manager, fd_request("a", prompt=[1] * 5 * BLOCK, images=image))
        second = fd_request("b", prompt=[*[1] * 3 * BLOCK, 1, 1, *[8] * BLOCK], images=image)
        manager.match_prefix(second)
        assert second._match_result.total_matched_blocks == blocks
        assert len(manager.allocate_device_blocks(second, 5 - blocks)) == 5 - blocks
        manager.core.check_integrity()

    def test_a_match_that_ends_before_or_behind_an_image_stays(self) -> None:
        manager = make(disable_chunked_mm_input=True)
        image = [(BLOCK, 2 * BLOCK, "cat")]
        run(manager, fd_request("a", prompt=[1] * 5 * BLOCK, images=image))
        second = fd_request("b", prompt=[*[1] * 3 * BLOCK, *[8] * BLOCK], images=image)
        manager.match_prefix(second)
        assert second._match_result.total_matched_blocks == 3


class TestRequests:
    def test_a_second_request_reuses_prompt_and_output_of_the_first(self) -> None:
        manager = make()
        first = fd_request("a", 3 * BLOCK)
        blocks = run(manager, first, outputs=BLOCK + 1)
        manager.request_finish(first)
        second = fd_request("b", prompt=[*first.prompt_token_ids, *first.output_token_ids, 7])
        manager.match_prefix(second)
        assert second._match_result.device_block_ids == blocks[:4]
        assert (second._match_result.matched_device_nums, second._match_result.total_matched_blocks) == (4, 4)

    def test_blocks_are_matchable_only_after_their_kv_is_computed(self) -> None:
        manager = make()
        first = fd_request("a", 3 * BLOCK)
        manager.match_prefix(first)
        manager.allocate_device_blocks(first, 4)
        second = fd_request("b", 3 * BLOCK)
        manager.match_prefix(second)
        assert second._match_result.total_matched_blocks == 0
        manager.request_finish(first)
        third = fd_request("c", 3 * BLOCK)
        manager.match_prefix(third)
        assert third._match_result.total_matched_blocks == 0

    def test_a_partial_prefix_matches_up_to_the_first_difference(self) -> None:
        manager = make()
        first = fd_request("a", 4 * BLOCK)
        run(manager, first)
        second = fd_request("b", prompt=[*first.prompt_token_ids[: 2 * BLOCK + 3], 5, 6, 7, *range(BLOCK)])
        manager.match_prefix(second)
        assert second._match_result.matched_device_nums == 2

    def test_finish_releases_blocks_and_is_idempotent(self) -> None:
        manager = make(total_block_num=10)
        request = fd_request("a", 2 * BLOCK)
        run(manager, request)
        manager.request_finish(request)
        manager.request_finish(request)
        assert manager.can_allocate_device_blocks(10)
        assert manager.num_free_device_blocks == 8
        manager.core.check_integrity()

    def test_committed_outputs_cannot_be_removed(self) -> None:
        manager = make()
        request = fd_request("a", 2 * BLOCK)
        run(manager, request, outputs=3)
        request.output_token_ids.pop()
        with pytest.raises(RequestStateError, match="of 3 output tokens 2 are left"):
            manager.check_and_add_pending_backup()

    def test_a_waiting_request_can_be_matched_again_but_not_a_running_one(self) -> None:
        manager = make()
        request = fd_request("a", 2 * BLOCK)
        manager.match_prefix(request)
        manager.match_prefix(request)
        manager.allocate_device_blocks(request, 2)
        with pytest.raises(RequestStateError, match="running"):
            manager.match_prefix(request)

    def test_a_preempted_request_finds_its_own_blocks(self) -> None:
        manager = make()
        request = fd_request("a", 2 * BLOCK)
        run(manager, request, outputs=BLOCK + 2)
        manager.request_finish(request)
        manager.match_prefix(request)
        assert request._match_result.matched_device_nums == 3

    def test_images_keep_equal_tokens_apart(self) -> None:
        manager = make()
        run(manager, fd_request("a", 3 * BLOCK, images=[(BLOCK, 2, "cat")]))
        dog = fd_request("b", 3 * BLOCK, images=[(BLOCK, 2, "dog")])
        manager.match_prefix(dog)
        assert dog._match_result.matched_device_nums == 1

    def test_without_prefix_caching_no_block_stays_cached(self) -> None:
        manager = make(enable_prefix_caching=False)
        request = fd_request("a", 3 * BLOCK)
        run(manager, request)
        manager.request_finish(request)
        assert manager.num_free_device_blocks == manager.num_gpu_blocks


class TestWholeCache:
    def test_a_released_block_is_backed_up_once(self) -> None:
        manager = make(num_cpu_blocks=8)
        request = fd_request("a", 3 * BLOCK)
        run(manager, request)
        manager.request_finish(request)
        assert manager.get_pending_backup_count() == 3
        (plan,) = settle(manager)
        assert plan.backups is not None
        assert len(plan.backups) == 3
        assert manager.get_pending_backup_count() == 0
        assert manager.issue_pending_backup_to_batch_request() == []
        assert manager.num_free_host_blocks == 5

    def test_reset_forgets_and_drops_queued_backups(self) -> None:
        manager = make(num_cpu_blocks=8)
        request = fd_request("a", 3 * BLOCK)
        run(manager, request)
        assert manager.reset_cache()
        assert manager.get_pending_backup_count() == 0
        again = fd_request("b", 3 * BLOCK)
        manager.match_prefix(again)
        assert again._match_result.total_matched_blocks == 0
        manager.request_finish(again)
        manager.request_finish(request)
        assert manager.num_free_device_blocks == manager.num_gpu_blocks
        assert manager.num_free_host_blocks == 8

    def test_statistics_have_the_old_keys(self) -> None:
        manager = make(total_block_num=100, num_cpu_blocks=50)
        manager.allocate_device_blocks(fd_request("a", 1), 25)
        stats = manager.get_stats()
        assert (stats["initialized"], stats["num_gpu_blocks"], stats["num_cpu_blocks"]) == (True, 100, 50)
        assert (stats["num_free_device_blocks"], stats["block_size"]) == (75, BLOCK)
        usage = manager.get_memory_usage()
        assert usage["device"] == {
            "total_blocks": 100,
            "used_blocks": 25,
            "free_blocks": 75,
            "usage_percent": 25.0,
        }
        assert usage["host"]["used_blocks"] == 0
