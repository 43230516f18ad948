"""FastDeploy's cache manager of the scheduler, with its method names, built on fdcache's ``CacheManager``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from threading import RLock
from typing import Any, Never, overload

import numpy as np

from fdcache.errors import RequestStateError, UnsupportedCallError
from fdcache.hints import read_hints
from fdcache.integrations.fastdeploy.config import (
    device_blocks,
    device_bytes,
    layout_from_config,
    load_settings,
    warn_of_old_manager,
)
from fdcache.integrations.fastdeploy.request_fields import (
    MatchedPrefix,
    TrackedRequest,
    images_of,
    is_preempted,
    reuse_before_images,
    tokens_of,
)
from fdcache.integrations.fastdeploy.serving_variables import SchedulingSettings
from fdcache.layout import KVLayout
from fdcache.manager.cache_manager import CacheManager
from fdcache.manager.requests import Request
from fdcache.manager.results import AllocationFailure, LoadOutcome, MatchResult, MatchStatus
from fdcache.metadata import CacheLevel, TransferPlan, TransferReport
from fdcache.settings.cache import CacheSettings, StorageTierSettings
from fdcache.storage.connector import StorageConnector
from fdcache.tiers.host import HostCache


class FastDeployManager:
    """Cache manager with the interface of FastDeploy's; ``core`` is fdcache's own manager.

        manager.match_prefix(request)                       # result in request._match_result
        blocks = manager.allocate_device_blocks(request, n)
        plans = manager.issue_pending_backup_to_batch_request()  # to the workers with the batch
        outcomes = manager.apply(reports)                   # from FastDeployController.poll of every worker

    FastDeploy's scheduler does not call ``apply``; without it nothing is reused from the host. The caller must also
    act on the loads that failed. docs/migration.md compares every member. Parameters that are not given come from the
    environment, and what that does not set from FastDeploy's configuration. ``loads_ahead``: as for fdcache's own
    manager; off, because workers submit a plan with the next batch, and there may be none.
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
        loads_ahead: Callable[[], bool] | bool = False,
    ) -> None:
        layout = layout or layout_from_config(config)
        self.config = config
        self._settings = load_settings(config, layout, cache=settings, storage=storage)
        self._has_own_settings = settings is not None
        self.core = CacheManager.from_settings(
            layout,
            self._settings,
            device_bytes=partial(device_bytes, layout.tp_size),
            lookup=lookup,
            clock=clock,
            loads_ahead=loads_ahead,
        )
        self.cache_config = config.cache_config
        self.block_size = layout.block_size
        self._uncertain_tokens = 1 + self.core.settings.lookahead_tokens
        self._whole_images = bool(getattr(config.cache_config, "disable_chunked_mm_input", False))
        self._tracked: dict[str, TrackedRequest] = {}
        warn_of_old_manager(self._settings)
        # Guards the tracked requests: FastDeploy finishes requests in another thread.
        self._lock = RLock()

    def is_initialized(self) -> bool:
        """Return True: a manager can be used once it exists."""
        return True

    @property
    def host_cache(self) -> HostCache:
        """Description of the host tier for the workers; plain data."""
        return self.core.host_cache

    # --- blocks -------------------------------------------------------------------------------------------

    @property
    def num_gpu_blocks(self) -> int:
        """Number of blocks of the device tier."""
        return self.core.num_device_blocks

    @property
    def num_cpu_blocks(self) -> int:
        """Number of blocks of the host tier."""
        return self.core.num_host_blocks

    @property
    def enable_host_cache(self) -> bool:
        """True if there is a host tier."""
        return self.num_cpu_blocks > 0

    @property
    def num_free_device_blocks(self) -> int:
        """Number of device blocks that are neither held by a request nor cached."""
        return self.core.num_free_device_blocks

    @property
    def num_free_host_blocks(self) -> int:
        """Number of host blocks that are not cached; 0 without a host tier."""
        host = self.core.get_stats().host
        return host.free if host else 0

    @property
    def gpu_free_block_list(self) -> Sequence[int]:
        """Ids of the free device blocks. Its length is cheap; reading the ids visits every block."""
        return FreeBlocks(self.core)

    @property
    def available_gpu_resource(self) -> float:
        """Free share of the device tier."""
        return self.num_free_device_blocks / self.num_gpu_blocks

    def can_allocate_device_blocks(self, num_blocks: int) -> bool:
        """Return True if that many device blocks are free or can be evicted now. A negative number counts as 0."""
        return self.core.can_allocate_device_blocks(max(num_blocks, 0))

    can_allocate_gpu_blocks = can_allocate_device_blocks

    def can_allocate_host_blocks(self, num_blocks: int) -> bool:
        """Return True if that many host blocks are free or can be evicted now."""
        host = self.core.get_stats().host
        return host is not None and host.free + host.evictable >= num_blocks

    # --- requests -----------------------------------------------------------------------------------------

    def match_prefix(self, request: Any, skip_storage: bool = True) -> None:
        """Pin the longest cached prefix and store the result in ``request._match_result``.

        Reads the engine request's ``request_id``, ``prompt_token_ids``, ``output_token_ids`` and
        ``multimodal_inputs``. With ``skip_storage=False`` it also starts a read from storage, unless one was started.
        """
        with self._lock:
            tracked = self._begin(request, use_cache=True)
            if not skip_storage:
                self.core.begin([tracked.request])
            self._match(tracked)

    def _match(self, tracked: TrackedRequest) -> None:
        result = self.core.match_prefix([tracked.request])[0]
        if self._whole_images:
            result = self._match_to_images(tracked, result)
        tracked.matched = result.status is MatchStatus.MATCHED
        if not tracked.matched:
            tracked.engine_request._match_result = MatchedPrefix(deferred=True)
            return
        tracked.blocks = result.num_device_blocks
        found = self.core.find_blocks(tracked.request)[CacheLevel.DEVICE] if tracked.blocks else []
        tracked.engine_request._match_result = MatchedPrefix(
            device_nodes=found[: tracked.blocks],
            matched_host_nums=result.num_host_blocks,
            matched_storage_nums=result.num_storage_blocks,
        )

    def _match_to_images(self, tracked: TrackedRequest, result: MatchResult) -> MatchResult:
        """Shorten the match if it ends inside an image: an image is computed in one piece."""
        request, images = tracked.request, images_of(tracked.engine_request)
        limit = reuse_before_images(images, result.num_cached_tokens, self.block_size)
        if result.status is not MatchStatus.MATCHED or limit == result.num_cached_tokens:
            return result
        self.core.finish([request])
        request.max_cached_tokens = limit
        return self.core.match_prefix([request])[0]

    def prefetch_storage(self, request: Any) -> bool:
        """Start reading from storage the blocks of a request that has arrived; return False without storage."""
        with self._lock:
            self.core.begin([self._begin(request, use_cache=True).request])
        return CacheLevel.STORAGE in self.core.get_memory_usage()

    def drain_pending_prefetches(self) -> list[Any]:
        """Return []: reads from storage are part of the plans."""
        return []

    def allocate_device_blocks(self, request: Any, num_blocks: int) -> list[int]:
        """Append ``num_blocks`` blocks to the request's table, blocks to load first, and return them; [] without room.

        A request that was not matched neither reuses nor caches blocks. A negative number counts as 0. Raises
        ``RequestStateError`` for fewer blocks than the match found in the host tier.
        """
        with self._lock:
            tracked = self._tracked.get(request.request_id)
            if tracked is None:
                tracked = self._begin(request, use_cache=False)
                tracked.matched = self.core.match_prefix([tracked.request])[0].status is MatchStatus.MATCHED
            if not tracked.matched:
                return []
            covered = (tracked.blocks + max(num_blocks, 0)) * self.block_size
            allocation = self.core.allocate_device_blocks([(tracked.request, covered)])[0]
            tracked.has_blocks |= allocation.ok
            tracked.blocks += len(allocation.block_ids)
            tracked.matched = allocation.failure is not AllocationFailure.DEFERRED
            return [int(block) for block in allocation.block_ids]

    allocate_gpu_blocks = allocate_device_blocks

    def allocate_anew(
        self, request: Any, num_blocks: int, extend: Callable[[Request], object]
    ) -> list[int] | None:
        """Give up the request's blocks, match it, ``extend`` it, and return a table of new ones; None without room."""
        with self._lock:
            known = self._tracked.get(request.request_id)
            if known is not None and known.has_blocks:
                del self._tracked[request.request_id]
                self.core.finish([known.request], preempted=True)
                request._fdcache_device_only = known.request.device_only
            tracked = self._begin(request, use_cache=True)
            self._match(tracked)
            if not tracked.matched:
                return None
            extend(tracked.request)
            found: list[int] = request._match_result.device_block_ids
            new = self.allocate_device_blocks(request, num_blocks - len(found))
            if len(found) + len(new) == num_blocks:
                return found + new
            if tracked.matched:
                self.core.unmatch([tracked.request])
                tracked.matched = False
            return None

    def request_finish(self, request: Any) -> None:
        """End, abort or preempt a request: its computed blocks stay cached, its pins are released. Idempotent.

        With ``FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST=0`` only the prompt of a preempted request stays cached. The
        hints in the request's ``metadata`` (see ``fdcache.hints``) are taken at its end, and their outcomes written to
        its ``hint_outcomes``.
        """
        with self._lock:
            tracked = self._tracked.pop(request.request_id, None)
            if tracked is None:
                return
            ended = not is_preempted(request)
            self._publish(tracked, ended=ended)
            self.core.finish([tracked.request], preempted=not ended)
            if ended and (tracked.refused_hints or tracked.request.hint_outcomes):
                request.hint_outcomes = [*tracked.refused_hints, *tracked.request.hint_outcomes]
            if tracked.request.device_only:
                # Remember it on the engine's request: its next match creates a new tracked request.
                tracked.engine_request._fdcache_device_only = True

    def _begin(self, request: Any, *, use_cache: bool) -> TrackedRequest:
        known = self._tracked.get(request.request_id)
        if known is not None and known.has_blocks:
            raise RequestStateError(
                f"request {request.request_id!r} is running; request_finish comes before it is matched again"
            )
        outputs = tokens_of(request.output_token_ids)
        if known is not None and known.outputs == len(outputs) and not known.matched:
            return known  # still waiting, perhaps for storage
        if known is not None:
            self.core.finish([known.request], preempted=True)
        tokens = np.concatenate([tokens_of(request.prompt_token_ids), outputs])
        made = Request(
            request.request_id,
            tokens,
            multimodal=images_of(request),
            use_cache=use_cache,
            device_only=getattr(request, "_fdcache_device_only", False),
        )
        made.hints, refused = read_hints(
            request.request_id, getattr(request, "metadata", None), partial(self.core.fetch_from, made)
        )
        tracked = TrackedRequest(
            request,
            made,
            outputs=len(outputs),
            outputs_at_match=len(outputs),
            publish_at=len(outputs) + 1,
            refused_hints=refused,
        )
        self._tracked[request.request_id] = tracked
        return tracked

    def _publish(self, tracked: TrackedRequest, *, ended: bool = False) -> None:
        """Commit the computed blocks. A sampled token proves the KV of all tokens before it, and no more.

        Skips requests with an unconfirmed load, whose tokens may still be dropped, and with a failed one.
        """
        request = tracked.request
        if request.is_loading or tracked.load_failed:
            return
        outputs = tracked.engine_request.output_token_ids
        if len(outputs) < tracked.outputs:
            raise RequestStateError(
                f"request {request.request_id!r}: of {tracked.outputs} output tokens {len(outputs)} are left; "
                "only those above a load that failed may be dropped: finish the request and match it again"
            )
        new = tokens_of(outputs[tracked.outputs :])
        if len(new):
            request.append_tokens(new)
            tracked.outputs += len(new)
        elif not ended or tracked.outputs == tracked.outputs_at_match:
            return
        computed = min(max(request.num_tokens - self._uncertain_tokens, 0), tracked.blocks * self.block_size)
        if not ended and not self._settings.group(SchedulingSettings).save_preempted_output:
            computed = min(computed, len(tracked.engine_request.prompt_token_ids))
        self.core.commit([(request, computed)])
        tracked.publish_at = tracked.outputs + self.block_size - computed % self.block_size

    def send_computed(self, request: Any, send: Callable[[Request], object]) -> None:
        """Commit the blocks that a request has computed and hand it to ``send``, unless a load below them failed."""
        with self._lock:
            tracked = self._tracked.get(request.request_id)
            if tracked is not None and not tracked.load_failed:
                self._publish(tracked)
                send(tracked.request)

    def take_first_token(self, request: Any, token: int) -> None:
        """Take the token that another instance has sampled; unlike later ones it proves nothing of the KV here."""
        with self._lock:
            tracked = self._tracked[request.request_id]
            tracked.request.append_tokens(tokens_of([token]))
            tracked.outputs = tracked.outputs_at_match = tracked.outputs + 1
            tracked.publish_at = tracked.outputs + 1

    def cached_tokens(self, request: Any) -> int | None:
        """Return how many tokens of a request were found in the cache; None while its load is in flight."""
        with self._lock:
            tracked = self._tracked[request.request_id]
            return None if tracked.request.is_loading else tracked.request.num_cached_tokens

    # --- a step -------------------------------------------------------------------------------------------

    def issue_pending_backup_to_batch_request(self) -> list[TransferPlan]:
        """Close the step and return its plans for every rank: evictions, loads and backups; [] if there are none.

        Pass them with the batch to ``FastDeployController.submit_swap_tasks``.
        """
        return self.core.take_plans()

    def check_and_add_pending_backup(self) -> None:
        """Commit the blocks that running requests have computed; the write policy queues their backups."""
        with self._lock:
            for tracked in self._tracked.values():
                length = len(tracked.engine_request.output_token_ids)
                if length >= tracked.publish_at or length < tracked.outputs:
                    self._publish(tracked)

    def write_cache_to_storage(self, request: Any) -> None:
        """Commit the blocks that a request has computed; the write policy decides on copies to host and storage."""
        with self._lock:
            tracked = self._tracked.get(request.request_id)
            if tracked is not None:
                self._publish(tracked)

    write_cache_to_storage_decode = write_cache_to_storage

    def cache_output_blocks(self, request: Any, block_size: int) -> None:
        """Do the same as ``write_cache_to_storage``: outputs are cached like prompts."""
        self.write_cache_to_storage(request)

    def update_cache_blocks(self, request: Any, block_size: int, num_computed_tokens: int) -> None:
        """Do nothing: a block is committed when a sampled token proves that it was computed."""

    def recycle_gpu_blocks(self, block_ids: Sequence[int], request_id: str | None = None) -> None:
        """Do nothing: ``request_finish`` releases all blocks of a request."""

    def get_pending_backup_count(self) -> int:
        """Return the number of blocks that wait for a backup."""
        return self.core.get_stats().queued_backups

    def apply(self, reports: Iterable[TransferReport]) -> list[LoadOutcome]:
        """Apply the workers' reports and return the outcomes of loads.

        After a FAILED load, drop the tokens of the request's steps in flight and recompute from ``recompute_from``.
        After an OVERDUE load, preempt the request; its next match loads nothing.
        """
        return self.core.apply(reports) + self.core.expire()

    # --- the whole cache ----------------------------------------------------------------------------------

    def resize_device_pool(self, num_gpu_blocks: int) -> bool:
        """Change the number of device blocks; return False, without a change, if a block to remove is in use."""
        return self.core.resize_device_pool(num_gpu_blocks)

    def update_cache_config(self, cache_config: Any) -> None:
        """Resize to the number of blocks that profiling found, unless the environment sets one.

        Raises ``RequestStateError`` if a block to remove is in use.
        """
        blocks = int(cache_config.total_block_num)
        if not self._has_own_settings:
            blocks = device_blocks(self._settings, self.core.layout, blocks)
        if not self.resize_device_pool(blocks):
            raise RequestStateError(
                f"cannot shrink to {blocks} device blocks: a block to remove is in use; finish the requests first"
            )
        self.config.cache_config = self.cache_config = cache_config

    def reset_cache(self) -> bool:
        """Drop everything that is cached; running requests keep their blocks but cache nothing more."""
        self.core.reset_cache()
        return True

    def get_stats(self) -> dict[str, Any]:
        """Return sizes, free blocks, and the statistics of both tiers."""
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
        """Return total, used and free blocks of device and host, and the used share in percent."""
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

    # --- unsupported calls --------------------------------------------------------------------------------

    def _refuse(self, *_: object, **__: object) -> Never:
        raise UnsupportedCallError(
            "blocks belong to requests and copies, and cannot be allocated or freed by number; allocate with "
            "allocate_device_blocks(request, n), release with request_finish(request), see docs/migration.md"
        )

    allocate_host_blocks = free_device_blocks = free_host_blocks = _refuse
    free_all_device_blocks = free_all_host_blocks = offload_to_host = load_from_host = _refuse
    prepare_prefetch_metadata = _refuse


class FreeBlocks(Sequence[int]):
    """Live sequence of the free device blocks. Its length is cheap; reading ids visits every block."""

    def __init__(self, manager: CacheManager) -> None:
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
