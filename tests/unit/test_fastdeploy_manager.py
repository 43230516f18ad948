"""What FastDeploy's scheduler expects of its cache manager, kept by the stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fdcache.errors import ConfigurationError, RequestStateError, UnsupportedCallError
from fdcache.hashing import hash_blocks, root_hash
from fdcache.integrations.fastdeploy import CacheManager, layout_from_config, settings_from_config
from fdcache.metadata import StorageScan, TransferPlan
from fdcache.planes import PlaneKind
from fdcache.settings.storage_tier import StorageTierSettings
from tests.fastdeploy_help import BLOCK, fd_config, fd_request, report_of


def make(**cache: Any) -> CacheManager:
    return CacheManager(fd_config(**cache))


def run(manager: CacheManager, request: Any, outputs: int = 1) -> list[int]:
    """One request from match to its first tokens; returns the blocks of its table."""
    manager.match_prefix(request)
    matched: list[int] = request._match_result.device_block_ids
    tokens = len(request.prompt_token_ids) + outputs
    blocks = matched + manager.allocate_device_blocks(request, -(-tokens // BLOCK) - len(matched))
    settle(manager)
    request.output_token_ids.extend(range(1000, 1000 + outputs))
    manager.check_and_add_pending_backup()
    return blocks


def settle(manager: CacheManager) -> list[TransferPlan]:
    plans = manager.issue_pending_backup_to_batch_request()
    manager.apply([report_of(plan) for plan in plans])
    return plans


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
        assert sorted(manager.gpu_free_block_list + blocks) == list(range(100))
        assert manager.available_gpu_resource == 0.9

    @pytest.mark.parametrize("first", [95, 100])
    def test_too_many_blocks_give_none_and_change_nothing(self, first: int) -> None:
        manager = make(total_block_num=100)
        manager.allocate_device_blocks(fd_request("a", 1), first)
        assert manager.allocate_device_blocks(fd_request("b", 1), 10) == []
        assert manager.num_free_device_blocks == 100 - first

    def test_no_blocks_are_nothing(self) -> None:
        manager = make()
        assert manager.allocate_device_blocks(fd_request("a", 1), 0) == []
        assert manager.num_free_device_blocks == manager.num_gpu_blocks

    def test_can_allocate_up_to_what_there_is(self) -> None:
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

    def test_profiled_blocks_are_taken_up(self) -> None:
        manager = make(total_block_num=100)
        manager.update_cache_config(SimpleNamespace(total_block_num=150))
        assert len(manager.allocate_device_blocks(fd_request("a", 1), 120)) == 120
        assert manager.num_free_device_blocks == 30

    @pytest.mark.parametrize(
        "name",
        [
            *("free_device_blocks", "free_host_blocks", "free_all_device_blocks", "free_all_host_blocks"),
            *("allocate_host_blocks", "offload_to_host", "load_from_host"),
            *("prepare_prefetch_metadata", "write_cache_to_storage"),
        ],
    )
    def test_calls_by_block_number_are_refused_with_the_remedy(self, name: str) -> None:
        with pytest.raises(UnsupportedCallError, match="request_finish"):
            getattr(make(), name)([1, 2])


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

    def test_nothing_is_found_before_its_kv_exists(self) -> None:
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

    def test_a_partial_prefix_matches_as_far_as_it_goes(self) -> None:
        manager = make()
        first = fd_request("a", 4 * BLOCK)
        run(manager, first)
        second = fd_request("b", prompt=[*first.prompt_token_ids[: 2 * BLOCK + 3], 5, 6, 7, *range(BLOCK)])
        manager.match_prefix(second)
        assert second._match_result.matched_device_nums == 2

    def test_finish_gives_back_and_may_be_repeated(self) -> None:
        manager = make(total_block_num=10)
        request = fd_request("a", 2 * BLOCK)
        run(manager, request)
        manager.request_finish(request)
        manager.request_finish(request)
        assert manager.can_allocate_device_blocks(10)
        assert manager.num_free_device_blocks == 8
        manager.core.check_integrity()

    def test_running_blocks_are_not_evicted(self) -> None:
        manager = make(total_block_num=6, num_cpu_blocks=0)
        run(manager, fd_request("a", 3 * BLOCK))
        assert not manager.can_allocate_device_blocks(3)
        assert manager.allocate_device_blocks(fd_request("b", prompt=[9] * BLOCK), 3) == []

    def test_evicted_blocks_come_back_from_the_host_in_path_order(self) -> None:
        manager = make(total_block_num=8, num_cpu_blocks=16)
        first = fd_request("a", 4 * BLOCK)
        run(manager, first)
        manager.request_finish(first)
        settle(manager)
        other = fd_request("b", prompt=[9] * (6 * BLOCK))
        run(manager, other)
        manager.request_finish(other)
        settle(manager)
        again = fd_request("c", prompt=[*first.prompt_token_ids, 1])
        manager.match_prefix(again)
        match = again._match_result
        assert match.matched_host_nums > 0
        assert match.total_matched_blocks == 4
        blocks = manager.allocate_device_blocks(again, 5 - match.matched_device_nums)
        (plan, *_) = manager.issue_pending_backup_to_batch_request()
        assert plan.loads is not None
        assert plan.loads.dst_block_ids.tolist() == blocks[: match.matched_host_nums]
        assert manager.apply([report_of(plan)])[0].status == "confirmed"

    def test_a_failed_load_says_from_where_to_compute(self) -> None:
        manager = make(total_block_num=8, num_cpu_blocks=16)
        first = fd_request("a", 4 * BLOCK)
        run(manager, first)
        manager.request_finish(first)
        settle(manager)
        other = fd_request("b", prompt=[9] * (7 * BLOCK))
        run(manager, other)
        manager.request_finish(other)
        settle(manager)
        again = fd_request("c", prompt=[*first.prompt_token_ids, 1])
        manager.match_prefix(again)
        manager.allocate_device_blocks(again, 5 - again._match_result.matched_device_nums)
        (plan, *_) = manager.issue_pending_backup_to_batch_request()
        outcome = manager.apply([report_of(plan, failed=[0])])[0]
        assert (outcome.status, outcome.recompute_from) == (
            "failed",
            again._match_result.matched_device_nums * BLOCK,
        )

    def test_tokens_sampled_above_a_load_that_failed_leave_nothing(self) -> None:
        manager = make(total_block_num=10, num_cpu_blocks=16)
        first = fd_request("a", 4 * BLOCK)
        run(manager, first)
        manager.request_finish(first)
        settle(manager)
        other = fd_request("b", prompt=[9] * (9 * BLOCK))
        run(manager, other)
        manager.request_finish(other)
        settle(manager)
        again = fd_request("c", prompt=[*first.prompt_token_ids, 1])
        manager.match_prefix(again)
        manager.allocate_device_blocks(again, 6 - again._match_result.matched_device_nums)
        (plan, *_) = manager.issue_pending_backup_to_batch_request()
        wrong, right = [50, 51, 52, 53], [60, 61, 62, 63]
        again.output_token_ids.extend(wrong)
        manager.check_and_add_pending_backup()
        assert manager.apply([report_of(plan, failed=[0])])[0].status == "failed"
        again.output_token_ids.clear()
        manager.check_and_add_pending_backup()
        again.output_token_ids.extend(right)
        manager.request_finish(again)
        settle(manager)
        for outputs, blocks in ((wrong, 4), (right, 5)):
            probe = fd_request("probe", prompt=[*again.prompt_token_ids, *outputs[:3], 7])
            manager.match_prefix(probe)
            assert probe._match_result.total_matched_blocks == blocks
            manager.request_finish(probe)
        manager.core.check_integrity()

    def test_tokens_sampled_above_a_load_that_was_confirmed_are_kept(self) -> None:
        manager = make(total_block_num=10, num_cpu_blocks=16)
        first = fd_request("a", 4 * BLOCK)
        run(manager, first)
        manager.request_finish(first)
        settle(manager)
        other = fd_request("b", prompt=[9] * (9 * BLOCK))
        run(manager, other)
        manager.request_finish(other)
        settle(manager)
        again = fd_request("c", prompt=[*first.prompt_token_ids, 1])
        manager.match_prefix(again)
        manager.allocate_device_blocks(again, 6 - again._match_result.matched_device_nums)
        (plan, *_) = manager.issue_pending_backup_to_batch_request()
        again.output_token_ids.extend([50, 51, 52, 53])
        manager.check_and_add_pending_backup()
        assert manager.apply([report_of(plan)])[0].status == "confirmed"
        manager.request_finish(again)
        probe = fd_request("probe", prompt=[*again.prompt_token_ids, 50, 51, 52, 7])
        manager.match_prefix(probe)
        assert probe._match_result.matched_device_nums == 5

    def test_outputs_that_the_cache_knows_cannot_be_taken_back(self) -> None:
        manager = make()
        request = fd_request("a", 2 * BLOCK)
        run(manager, request, outputs=3)
        request.output_token_ids.pop()
        with pytest.raises(RequestStateError, match="of 3 output tokens 2 are left"):
            manager.check_and_add_pending_backup()

    def test_fewer_blocks_than_the_host_hit_are_refused(self) -> None:
        manager = make(total_block_num=8, num_cpu_blocks=16)
        first = fd_request("a", 4 * BLOCK)
        run(manager, first)
        manager.request_finish(first)
        settle(manager)
        other = fd_request("b", prompt=[9] * (7 * BLOCK))
        run(manager, other)
        manager.request_finish(other)
        settle(manager)
        again = fd_request("c", prompt=[*first.prompt_token_ids, 1])
        manager.match_prefix(again)
        with pytest.raises(RequestStateError, match="fewer"):
            manager.allocate_device_blocks(again, 0)

    def test_blocks_that_others_brought_meanwhile_are_told_once(self) -> None:
        manager = make(total_block_num=10, num_cpu_blocks=16)
        first = fd_request("a", 4 * BLOCK)
        run(manager, first)
        manager.request_finish(first)
        settle(manager)
        other = fd_request("b", prompt=[9] * (9 * BLOCK))
        run(manager, other)
        manager.request_finish(other)
        settle(manager)
        ahead, behind = (fd_request(name, prompt=[*first.prompt_token_ids, 1]) for name in "cd")
        manager.match_prefix(ahead)
        manager.match_prefix(behind)
        on_device = behind._match_result.matched_device_nums
        run_of_ahead = manager.allocate_device_blocks(ahead, 5 - on_device)
        settle(manager)
        rival = fd_request("e", prompt=[8] * (5 * BLOCK))
        assert len(manager.allocate_device_blocks(rival, 5)) == 5
        assert manager.allocate_device_blocks(behind, 5 - on_device) == []
        manager.request_finish(rival)
        blocks = manager.allocate_device_blocks(behind, 5 - on_device)
        assert len(blocks) == 5 - on_device
        assert blocks[:-1] == run_of_ahead[:-1]
        for request in (ahead, behind):
            manager.request_finish(request)
        manager.core.check_integrity()

    def test_a_running_request_is_not_matched_again_but_a_waiting_one_is(self) -> None:
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

    def test_without_prefix_caching_blocks_are_only_lent(self) -> None:
        manager = make(enable_prefix_caching=False)
        request = fd_request("a", 3 * BLOCK)
        run(manager, request)
        manager.request_finish(request)
        assert manager.num_free_device_blocks == manager.num_gpu_blocks


class TestStorage:
    def test_a_request_waits_for_its_blocks_and_gets_none_meanwhile(self) -> None:
        settings = StorageTierSettings(connector="local", prefetch_policy="wait_complete", size="1MiB")
        manager = CacheManager(fd_config(), storage=settings)
        request = fd_request("a", 3 * BLOCK)
        hashes = hash_blocks(
            request.prompt_token_ids, BLOCK, parent=root_hash(layout_from_config(fd_config()).fingerprint)
        )
        parents = np.concatenate([np.zeros((1, 32), np.uint8), hashes[:-1]])
        scan = StorageScan(
            rank=0,
            capacity=16,
            slots=np.arange(3, dtype=np.int32),
            generations=np.ones(3, np.uint32),
            hashes=hashes,
            parents=parents,
            checksums=np.zeros(3, np.uint64),
            written_ms=np.ones(3, np.uint64),
        )
        assert manager.core.restore_storage([scan]) == 3
        assert manager.prefetch_storage(request)
        manager.match_prefix(request, skip_storage=False)
        assert request._match_result.deferred
        assert manager.allocate_device_blocks(request, 3) == []
        (plan,) = manager.issue_pending_backup_to_batch_request()
        (task,) = plan.storage
        manager.apply([report_of(task)])
        manager.match_prefix(request)
        assert (request._match_result.deferred, request._match_result.matched_storage_nums) == (False, 2)
        assert len(manager.allocate_device_blocks(request, 4)) == 4

    def test_without_storage_nothing_is_prefetched(self) -> None:
        assert not make().prefetch_storage(fd_request("a", BLOCK))


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


class TestConfiguration:
    def test_plain_caches_have_key_and_value_in_the_models_dtype(self) -> None:
        layout = layout_from_config(fd_config(ranks=2))
        assert [(plane.kind, plane.dtype, plane.shape) for plane in layout.layer_planes(0)] == [
            (PlaneKind.KEY, "bfloat16", (2, BLOCK, 8)),
            (PlaneKind.VALUE, "bfloat16", (2, BLOCK, 8)),
        ]
        assert (layout.num_layers, layout.tp_size, layout.num_draft_layers) == (3, 2, 0)

    def test_quantised_caches_are_bytes_with_scales_for_block_wise_fp8(self) -> None:
        plain = layout_from_config(fd_config(quantised="int8")).layer_planes(0)
        assert [plane.dtype for plane in plain] == ["uint8", "uint8"]
        scaled = layout_from_config(fd_config(quantised="block_wise_fp8")).layer_planes(0)
        assert [(plane.dtype, plane.shape) for plane in scaled[2:]] == [("float32", (4, BLOCK))] * 2

    def test_latent_attention_has_no_value(self) -> None:
        (plane,) = layout_from_config(fd_config(latent=16)).layer_planes(0)
        assert (plane.kind, plane.shape) == (PlaneKind.KEY, (1, BLOCK, 24))

    def test_draft_layers_come_after_the_main_ones(self) -> None:
        layout = layout_from_config(fd_config(method="mtp", ratio=1.5))
        assert (layout.num_draft_layers, layout.draft_blocks(10)) == (1, 15)
        manager = CacheManager(fd_config(method="mtp"))
        first = fd_request("a", 3 * BLOCK)
        run(manager, first)
        manager.request_finish(first)
        second = fd_request("b", prompt=[*first.prompt_token_ids, 5])
        manager.match_prefix(second)
        assert second._match_result.matched_device_nums == 2

    def test_models_and_dtypes_never_share_keys(self) -> None:
        prints = {
            layout_from_config(config).fingerprint
            for config in (
                fd_config(),
                fd_config(model="other"),
                fd_config(quantised="int8"),
                fd_config(ranks=2),
            )
        }
        assert len(prints) == 4

    def test_what_is_missing_or_unknown_is_named(self) -> None:
        with pytest.raises(ConfigurationError, match="has no dtype"):
            CacheManager(fd_config(dtype=None))
        with pytest.raises(ConfigurationError, match="write_policy"):
            make(write_policy="sometimes")


def test_deterministic_mode_cuts_reuse_to_the_split_kv_size(monkeypatch: pytest.MonkeyPatch) -> None:
    config = fd_config()
    assert settings_from_config(config, layout_from_config(config)).reuse_grid == 0
    monkeypatch.setenv("FD_DETERMINISTIC_MODE", "1")
    monkeypatch.setenv("FD_DETERMINISTIC_SPLIT_KV_SIZE", "32")
    assert settings_from_config(config, layout_from_config(config)).reuse_grid == 32
