"""FastDeploy's scheduler-side cache manager, its names over fdcache's ``CacheManager``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from threading import RLock
from typing import Any, Never, overload

import numpy as np

from fdcache.errors import RequestStateError, UnsupportedCallError
from fdcache.integrations.fastdeploy_config import (
    device_blocks,
    device_bytes,
    layout_from_config,
    load_settings,
)
from fdcache.integrations.fastdeploy_requests import (
    MatchedPrefix,
    Served,
    images_of,
    reuse_before_images,
    tokens_of,
)
from fdcache.integrations.fastdeploy_variables import EngineVariables, is_preempted, warn_of_old_manager
from fdcache.layout import KVLayout
from fdcache.manager.cache_manager import CacheManager as Manager
from fdcache.manager.requests import Request
from fdcache.manager.results import AllocationFailure, LoadOutcome, MatchResult, MatchStatus
from fdcache.metadata import CacheLevel, TransferPlan, TransferReport
from fdcache.settings.cache import CacheSettings, StorageTierSettings
from fdcache.storage.connector import StorageConnector
from fdcache.tiers.host import HostCache


class CacheManager:
    """What FastDeploy's scheduler calls, under the old names; ``core`` is fdcache's own manager.

    New duties, without which nothing is ever reused from the host: give ``apply`` the reports that workers return
    from ``CacheController.poll``, and act on the loads that failed. docs/migration.md compares every member.

    What is not given comes from the environment, and what is not set there from FastDeploy's configuration.
    """

    def __init__(
        self,
        config: Any,
        *,
        layout: KVLayout | None = None,
        settings: CacheSettings | None = None,
        storage: StorageTierSettings | None = None,
        lookup: StorageConnector | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        layout = layout or layout_from_config(config)
        self.config = config
        self._settings = load_settings(config, layout, cache=settings, storage=storage)
        self._has_own_settings = settings is not None
        self.core = Manager.from_settings(
            layout,
            self._settings,
            device_bytes=partial(device_bytes, layout.tp_size),
            lookup=lookup,
            clock=clock,
        )
        self.cache_config = config.cache_config
        self.block_size = layout.block_size
        self._unsure_tokens = 1 + self.core.settings.lookahead_tokens
        self._whole_images = bool(getattr(config.cache_config, "disable_chunked_mm_input", False))
        self._served: dict[str, Served] = {}
        self._variables = EngineVariables.load()
        warn_of_old_manager()
        self._requests = RLock()
        """Held over what changes a request: FastDeploy ends requests in a thread of its own."""

    def is_initialized(self) -> bool:
        """Whether the manager can be used: always, once it is made."""
        return True

    @property
    def host_cache(self) -> HostCache:
        """What every worker is told where the host tier is that of a service; plain data."""
        return self.core.host_cache

    # --- blocks -------------------------------------------------------------------------------------------

    @property
    def num_gpu_blocks(self) -> int:
        """Blocks of the device tier."""
        return self.core.num_device_blocks

    @property
    def num_cpu_blocks(self) -> int:
        """Blocks of the host tier."""
        return self.core.num_host_blocks

    @property
    def enable_host_cache(self) -> bool:
        """Whether there is a host tier."""
        return self.num_cpu_blocks > 0

    @property
    def num_free_device_blocks(self) -> int:
        """Device blocks that nobody holds and that cache nothing."""
        return self.core.num_free_device_blocks

    @property
    def num_free_host_blocks(self) -> int:
        """Host blocks that cache nothing; 0 without a host tier."""
        host = self.core.get_stats().host
        return host.free if host else 0

    @property
    def gpu_free_block_list(self) -> Sequence[int]:
        """The ids of the free device blocks. Its length is known at once, its ids are looked up when asked for."""
        return FreeBlocks(self.core)

    @property
    def available_gpu_resource(self) -> float:
        """The free share of the device tier."""
        return self.num_free_device_blocks / self.num_gpu_blocks

    def can_allocate_device_blocks(self, num_blocks: int) -> bool:
        """Whether that many device blocks are free or can be made free now."""
        return self.core.can_allocate_device_blocks(num_blocks)

    can_allocate_gpu_blocks = can_allocate_device_blocks

    def can_allocate_host_blocks(self, num_blocks: int) -> bool:
        """Whether that many host blocks are free or can be made free now."""
        host = self.core.get_stats().host
        return host is not None and host.free + host.evictable >= num_blocks

    # --- requests -----------------------------------------------------------------------------------------

    def match_prefix(self, request: Any, skip_storage: bool = True) -> None:
        """Pin the longest cached prefix; the result is ``request._match_result``.

        The request is the engine's: ``request_id``, ``prompt_token_ids``, ``output_token_ids`` and
        ``multimodal_inputs`` are read. Without ``skip_storage`` a read from storage begins, if none has.
        """
        with self._requests:
            served = self._begin(request, use_cache=True)
            if not skip_storage:
                self.core.prefetch([served.request])
            self._match(served)

    def _match(self, served: Served) -> None:
        result = self.core.match_prefix([served.request])[0]
        if self._whole_images:
            result = self._match_to_images(served, result)
        served.matched = result.status is MatchStatus.MATCHED
        if not served.matched:
            served.engine_request._match_result = MatchedPrefix(deferred=True)
            return
        served.blocks = result.num_device_blocks
        found = self.core.find_blocks(served.request)[CacheLevel.DEVICE] if served.blocks else []
        served.engine_request._match_result = MatchedPrefix(
            device_nodes=found[: served.blocks],
            matched_host_nums=result.num_host_blocks,
            matched_storage_nums=result.num_storage_blocks,
        )

    def _match_to_images(self, served: Served, result: MatchResult) -> MatchResult:
        """Match again, shorter, where the match ends inside an image that has to be computed in one piece."""
        request, images = served.request, images_of(served.engine_request)
        limit = reuse_before_images(images, result.num_cached_tokens, self.block_size)
        if result.status is not MatchStatus.MATCHED or limit == result.num_cached_tokens:
            return result
        self.core.request_finish([request])
        request.max_cached_tokens = limit
        return self.core.match_prefix([request])[0]

    def prefetch_storage(self, request: Any) -> bool:
        """Begin to read from storage what a request that has arrived will need; False without storage."""
        with self._requests:
            self.core.prefetch([self._begin(request, use_cache=True).request])
        return CacheLevel.STORAGE in self.core.get_memory_usage()

    def drain_pending_prefetches(self) -> list[Any]:
        """Nothing: reads from storage are part of the plans."""
        return []

    def allocate_device_blocks(self, request: Any, num_blocks: int) -> list[int]:
        """``num_blocks`` more blocks for the request's table, those to be loaded first; [] when there is no room.

        A request that was not matched neither reuses nor leaves blocks. Raises ``RequestStateError`` for fewer
        blocks than the match found in the host tier.
        """
        with self._requests:
            served = self._served.get(request.request_id)
            if served is None:
                served = self._begin(request, use_cache=False)
                served.matched = self.core.match_prefix([served.request])[0].status is MatchStatus.MATCHED
            if not served.matched:
                return []
            covered = (served.blocks + num_blocks) * self.block_size
            allocation = self.core.allocate_device_blocks([(served.request, covered)])[0]
            served.has_blocks |= allocation.ok
            served.blocks += len(allocation.block_ids)
            served.matched = allocation.failure is not AllocationFailure.DEFERRED
            return [int(block) for block in allocation.block_ids]

    allocate_gpu_blocks = allocate_device_blocks

    def request_finish(self, request: Any) -> None:
        """End, abort or preempt: what was computed stays cached, the pins go. Idempotent.

        With ``FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST=0`` a preempted request leaves only its prompt.
        """
        with self._requests:
            served = self._served.pop(request.request_id, None)
            if served is None:
                return
            self._publish(served, ended=not is_preempted(request))
            self.core.request_finish([served.request])
            if served.request.device_only:
                # The request's next match is made with a record of its own.
                served.engine_request._fdcache_device_only = True

    def _begin(self, request: Any, *, use_cache: bool) -> Served:
        known = self._served.get(request.request_id)
        if known is not None and known.has_blocks:
            raise RequestStateError(
                f"request {request.request_id!r} is running; request_finish comes before it is matched again"
            )
        outputs = tokens_of(request.output_token_ids)
        if known is not None and known.outputs == len(outputs) and not known.matched:
            return known  # waiting still, perhaps for storage
        if known is not None:
            self.core.request_finish([known.request])
        tokens = np.concatenate([tokens_of(request.prompt_token_ids), outputs])
        served = Served(
            request,
            Request(
                request.request_id,
                tokens,
                multimodal=images_of(request),
                use_cache=use_cache,
                device_only=getattr(request, "_fdcache_device_only", False),
            ),
            outputs=len(outputs),
            begun_with=len(outputs),
            publish_at=len(outputs) + 1,
        )
        self._served[request.request_id] = served
        return served

    def _publish(self, served: Served, *, ended: bool = False) -> None:
        """Tell the cache what exists: a token that was sampled proves the KV of all before it, and of no other.

        Tokens above a load that is not confirmed might be dropped, so they are not taken up before; above one that
        failed none is.
        """
        request = served.request
        if request.is_loading or served.load_failed:
            return
        outputs = served.engine_request.output_token_ids
        if len(outputs) < served.outputs:
            raise RequestStateError(
                f"request {request.request_id!r}: of {served.outputs} output tokens {len(outputs)} are left; "
                "only those above a load that failed may be dropped: finish the request and match it again"
            )
        new = tokens_of(outputs[served.outputs :])
        if len(new):
            request.append_tokens(new)
            served.outputs += len(new)
        elif not ended or served.outputs == served.begun_with:
            return
        computed = min(max(request.num_tokens - self._unsure_tokens, 0), served.blocks * self.block_size)
        if not ended and not self._variables.keeps_preempted_output:
            computed = min(computed, len(served.engine_request.prompt_token_ids))
        self.core.commit([(request, computed)])
        served.publish_at = served.outputs + self.block_size - computed % self.block_size

    # --- a step -------------------------------------------------------------------------------------------

    def issue_pending_backup_to_batch_request(self) -> list[TransferPlan]:
        """Close the step: everything that every rank has to copy, evictions and loads as well as backups.

        Goes with the batch to ``CacheController.submit_swap_tasks``; [] when there is nothing to copy.
        """
        return self.core.take_plans()

    def check_and_add_pending_backup(self) -> None:
        """Publish what running requests have computed; the write policy queues their backups."""
        with self._requests:
            for served in self._served.values():
                length = len(served.engine_request.output_token_ids)
                if length >= served.publish_at or length < served.outputs:
                    self._publish(served)

    def write_cache_to_storage(self, request: Any) -> None:
        """Publish what a request has computed; what the write policy keeps goes to host and storage by itself."""
        with self._requests:
            served = self._served.get(request.request_id)
            if served is not None:
                self._publish(served)

    write_cache_to_storage_decode = write_cache_to_storage

    def cache_output_blocks(self, request: Any, block_size: int) -> None:
        """As ``write_cache_to_storage``: outputs are cached like prompts."""
        self.write_cache_to_storage(request)

    def update_cache_blocks(self, request: Any, block_size: int, num_computed_tokens: int) -> None:
        """Nothing: a block is published when a sampled token proves that it was computed."""

    def recycle_gpu_blocks(self, block_ids: Sequence[int], request_id: str | None = None) -> None:
        """Nothing: blocks belong to their request, and ``request_finish`` gives all of them back."""

    def get_pending_backup_count(self) -> int:
        """Blocks that wait for a backup."""
        return self.core.get_stats().queued_backups

    def apply(self, reports: Iterable[TransferReport]) -> list[LoadOutcome]:
        """Take the workers' reports. A FAILED load: drop the tokens of the request's steps in flight and compute again
        from ``recompute_from``. OVERDUE: preempt the request; matched again it loads nothing.
        """
        return self.core.apply(reports) + self.core.expire()

    # --- the whole cache ----------------------------------------------------------------------------------

    def resize_device_pool(self, num_gpu_blocks: int) -> bool:
        """Change the number of device blocks; False, and nothing changed, while a block beyond it is in use."""
        return self.core.resize_device_pool(num_gpu_blocks)

    def update_cache_config(self, cache_config: Any) -> None:
        """Take up the number of blocks that profiling found, unless the environment has one.

        Raises ``RequestStateError`` when blocks beyond are in use.
        """
        blocks = int(cache_config.total_block_num)
        if not self._has_own_settings:
            blocks = device_blocks(self._settings, self.core.layout, blocks)
        if not self.resize_device_pool(blocks):
            raise RequestStateError(
                f"cannot change to {blocks} device blocks: blocks beyond are in use; finish the requests first"
            )
        self.config.cache_config = self.cache_config = cache_config

    def reset_cache(self) -> bool:
        """Forget everything that is cached; running requests keep their blocks and leave nothing behind."""
        self.core.reset_cache()
        return True

    def get_stats(self) -> dict[str, Any]:
        """Numbers of blocks and of both tiers."""
        stats = self.core.get_stats()
        return {
            "initialized": True,
            "num_gpu_blocks": self.num_gpu_blocks,
            "num_cpu_blocks": self.num_cpu_blocks,
            "block_size": self.block_size,
            "num_free_device_blocks": self.num_free_device_blocks,
            "num_free_host_blocks": self.num_free_host_blocks,
            "device_pool": stats.device,
            "host_pool": stats.host,
            "counters": stats.counters,
        }

    def get_memory_usage(self) -> dict[str, dict[str, float]]:
        """Blocks of device and host: total, used, free, and the used share in percent."""
        sizes = {
            "device": (self.num_gpu_blocks, self.num_free_device_blocks),
            "host": (self.num_cpu_blocks, self.num_free_host_blocks),
        }
        return {
            tier: {
                "total_blocks": total,
                "used_blocks": total - free,
                "free_blocks": free,
                "usage_percent": 100.0 * (total - free) / total if total else 0.0,
            }
            for tier, (total, free) in sizes.items()
        }

    # --- what a tier does not let others do ---------------------------------------------------------------

    def _refuse(self, *_: object, **__: object) -> Never:
        raise UnsupportedCallError(
            "blocks belong to requests and copies, and no call takes or frees them by number; allocate with "
            "allocate_device_blocks(request, n), give back with request_finish(request), see docs/migration.md"
        )

    allocate_host_blocks = free_device_blocks = free_host_blocks = _refuse
    free_all_device_blocks = free_all_host_blocks = offload_to_host = load_from_host = _refuse
    prepare_prefetch_metadata = _refuse


class FreeBlocks(Sequence[int]):
    """The free device blocks at each moment: their number at once, their ids by visiting every block."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def __len__(self) -> int:
        return self._manager.num_free_device_blocks

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self._manager.free_device_blocks()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._manager.free_device_blocks())
