"""Requests of FastDeploy whose blocks come from the host or from storage."""

from __future__ import annotations

import numpy as np
import pytest

from fdcache.errors import RequestStateError
from fdcache.hashing import hash_blocks, root_hash
from fdcache.integrations.fastdeploy import CacheManager, layout_from_config
from fdcache.metadata import StorageScan
from fdcache.settings.cache import StorageTierSettings
from tests.fastdeploy_help import BLOCK, evicted, fd_config, fd_request, make, report_of, run, settle


class TestHost:
    def test_running_blocks_are_not_evicted(self) -> None:
        manager = make(total_block_num=6, num_cpu_blocks=0)
        run(manager, fd_request("a", 3 * BLOCK))
        assert not manager.can_allocate_device_blocks(3)
        assert manager.allocate_device_blocks(fd_request("b", prompt=[9] * BLOCK), 3) == []

    def test_evicted_blocks_come_back_from_the_host_in_path_order(self) -> None:
        manager, first = evicted(device_blocks=8, others=6)
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

    def test_a_failed_load_reports_the_block_to_recompute_from(self) -> None:
        manager, first = evicted(device_blocks=8, others=7)
        again = fd_request("c", prompt=[*first.prompt_token_ids, 1])
        manager.match_prefix(again)
        manager.allocate_device_blocks(again, 5 - again._match_result.matched_device_nums)
        (plan, *_) = manager.issue_pending_backup_to_batch_request()
        outcome = manager.apply([report_of(plan, failed=[0])])[0]
        assert (outcome.status, outcome.recompute_from) == (
            "failed",
            again._match_result.matched_device_nums * BLOCK,
        )

    def test_tokens_sampled_after_a_failed_load_are_not_cached(self) -> None:
        manager, first = evicted(device_blocks=10, others=9)
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

    def test_tokens_sampled_after_a_confirmed_load_are_cached(self) -> None:
        manager, first = evicted(device_blocks=10, others=9)
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

    def test_a_request_with_an_overdue_load_loads_nothing_at_its_next_match(self) -> None:
        now = 0.0
        manager, first = evicted(device_blocks=8, others=7, clock=lambda: now)
        again, other = (fd_request(name, prompt=[*first.prompt_token_ids, 1]) for name in "cd")
        manager.match_prefix(again)
        manager.allocate_device_blocks(again, 5 - again._match_result.matched_device_nums)
        (plan, *_) = manager.issue_pending_backup_to_batch_request()
        now = 100.0
        assert [outcome.status for outcome in manager.apply([])] == ["overdue"]
        manager.request_finish(again)
        loaded = again._match_result.matched_host_nums
        assert loaded > 0
        manager.apply([report_of(plan, failed=range(loaded))])
        for request, on_host in ((again, 0), (other, loaded)):
            manager.match_prefix(request)
            assert request._match_result.matched_host_nums == on_host
            manager.request_finish(request)
        manager.core.check_integrity()

    def test_allocating_fewer_blocks_than_the_host_hit_is_refused(self) -> None:
        manager, first = evicted(device_blocks=8, others=7)
        again = fd_request("c", prompt=[*first.prompt_token_ids, 1])
        manager.match_prefix(again)
        with pytest.raises(RequestStateError, match="fewer"):
            manager.allocate_device_blocks(again, 0)

    def test_blocks_cached_by_another_request_are_counted_once(self) -> None:
        manager, first = evicted(device_blocks=10, others=9)
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


class TestStorage:
    def test_a_deferred_request_gets_no_blocks(self) -> None:
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
