"""FastDeploy plug-in: with FD_PLUGINS=fdcache, FastDeploy uses fdcache's cache manager and controller.

FastDeploy calls the entry point ``install`` in the engine's and the workers' processes. It replaces FastDeploy's
classes by those of ``fastdeploy.engine``. The first manager adapts FastDeploy's scheduler in six points:

- a request whose load failed is preempted;
- tokens that were sampled after a failed load are dropped before they are sent;
- a request whose blocks are in storage waits for them, which is no error in FastDeploy's log;
- prefills are timed, so that the manager knows which blocks are sooner computed than loaded;
- in the roles prefill and decode, blocks are handed over (``fastdeploy.roles``).

A FastDeploy with other classes or signatures is refused.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from fdcache.errors import ConfigurationError
from fdcache.integrations.fastdeploy.engine import LinkedController, LinkedManager
from fdcache.integrations.fastdeploy.roles import adapt_roles, add_arrivals

logger = logging.getLogger(__name__)

_CACHE = "fastdeploy.cache_manager.v1"
_SCHEDULER = "fastdeploy.engine.sched.resource_manager_v1"
_REQUESTS = "fastdeploy.engine.request"
_TOKENS = "fastdeploy.output.token_processor"
_PROTOCOL = "fastdeploy.splitwise.splitwise_connector"
_QUEUE = "fastdeploy.inter_communicator.engine_worker_queue"
_ADAPTED = "_fdcache_adapted"
_ENVIRONMENT = "fastdeploy.envs"

EXPECTED_SIGNATURES: dict[tuple[str, str], tuple[str, ...]] = {
    (_CACHE, "CacheManager.__init__"): ("self", "config"),
    (_CACHE, "CacheManager.match_prefix"): ("self", "request", "skip_storage"),
    (_CACHE, "CacheManager.allocate_gpu_blocks"): ("self", "request", "num_blocks"),
    (_CACHE, "CacheManager.can_allocate_gpu_blocks"): ("self", "num_blocks"),
    (_CACHE, "CacheManager.request_finish"): ("self", "request"),
    (_CACHE, "CacheManager.issue_pending_backup_to_batch_request"): ("self",),
    (_CACHE, "CacheManager.check_and_add_pending_backup"): ("self",),
    (_CACHE, "CacheManager.reset_cache"): ("self",),
    (_CACHE, "CacheController.__init__"): ("self", "config", "local_rank", "device_id"),
    (_CACHE, "CacheController.submit_swap_tasks"): ("self", "evict_metadata", "swap_in_metadata"),
    (_CACHE, "CacheController.initialize_kv_cache"): ("self", "attn_backend", "num_gpu_blocks"),
    (_CACHE, "CacheController.initialize_mtp_kv_cache"): (
        *("self", "attn_backend", "num_gpu_blocks", "num_mtp_layers", "layer_offset"),
    ),
    (_CACHE, "CacheController.free_gpu_cache"): ("self",),
    (_REQUESTS, "BatchRequest.add_request"): ("self", "request"),
    (_REQUESTS, "BatchRequest.append_evict_metadata"): ("self", "metadata"),
    (_SCHEDULER, "ResourceManagerV1.schedule"): ("self",),
    (_SCHEDULER, "ResourceManagerV1.add_request"): ("self", "request"),
    (_SCHEDULER, "ResourceManagerV1.get_prefix_cached_blocks"): ("self", "request"),
    (_SCHEDULER, "ResourceManagerV1._prepare_preempt_task"): ("self", "request"),
    (_SCHEDULER, "ResourceManagerV1._free_blocks"): ("self", "request"),
    (_SCHEDULER, "ResourceManagerV1.reschedule_preempt_task"): ("self", "request_id", "process_func"),
    (_SCHEDULER, "ResourceManagerV1.waiting_async_process"): ("self", "request"),
    (_SCHEDULER, "ResourceManagerV1.preallocate_resource_in_p"): ("self", "request"),
    (_SCHEDULER, "ResourceManagerV1.preallocate_resource_in_d"): ("self", "request"),
    (_SCHEDULER, "ResourceManagerV1.add_prefilled_request"): ("self", "request_output"),
    (_SCHEDULER, "ResourceManagerV1.pre_recycle_resource"): ("self", "request_id"),
    (_TOKENS, "TokenProcessor.postprocess"): ("self", "batch_result", "mtype"),
    (_TOKENS, "TokenProcessor._process_batch_output_use_zmq"): ("self", "receive_datas"),
    (_TOKENS, "TokenProcessor._recycle_resources"): (
        *("self", "task_id", "index", "task", "result", "is_prefill"),
    ),
    (_PROTOCOL, "SplitwiseConnector.__init__"): ("self", "cfg", "worker_queue", "resource_manager"),
    (_QUEUE, "EngineWorkerQueue.put_cache_info"): ("self", "cache_info"),
    (_QUEUE, "EngineWorkerQueue.get_finished_add_cache_task_req"): ("self",),
    (_QUEUE, "EngineWorkerQueue.get_finished_req"): ("self",),
}
"""FastDeploy's functions that the plug-in calls or replaces, with their parameters."""

_TARGET_TOKENS = 3
"""FastDeploy's ``mtype`` of sampled tokens; other types are drafts."""

_KNOWN_MEMBERS = {
    "CacheManager": (
        "allocate_device_blocks allocate_gpu_blocks allocate_host_blocks available_gpu_resource "
        "can_allocate_device_blocks can_allocate_gpu_blocks can_allocate_host_blocks "
        "check_and_add_pending_backup device_pool drain_pending_prefetches free_all_device_blocks "
        "free_all_host_blocks free_device_blocks free_host_blocks get_memory_usage "
        "get_pending_backup_count get_stats gpu_free_block_list host_pool is_initialized "
        "issue_pending_backup_to_batch_request load_from_host match_prefix num_free_device_blocks "
        "num_free_host_blocks offload_to_host prefetch_storage prepare_prefetch_metadata radix_tree "
        "request_finish reset_cache resize_device_pool storage_scheduler update_cache_config "
        "write_cache_to_storage"
    ),
    "CacheController": (
        "backup_device_to_storage backup_host_to_storage evict_device_to_host free_cache free_gpu_cache "
        "get_host_cache_kvs_map get_kv_caches get_stats initialize_host_cache initialize_kv_cache "
        "initialize_mtp_kv_cache is_initialized load_host_to_device prefetch_from_storage reset_cache "
        "send_to_node start stop submit_swap_tasks swap_layer_done_counter transfer_manager "
        "wait_for_transfer_from_node write_policy"
    ),
}
"""Public members of FastDeploy's classes that docs/migration.md covers. A new member may be a new duty."""


class InstalledManager(LinkedManager):
    """The manager that FastDeploy's scheduler makes; adapts the scheduler first.

    Raises ``ConfigurationError`` if the scheduler has other functions than expected.
    """

    def __init__(self, config: Any) -> None:
        adapt_scheduler()
        super().__init__(config)


def install() -> None:
    """Replace FastDeploy's cache manager and controller by fdcache's. Idempotent.

    Raises ``ConfigurationError`` if ENABLE_V1_KVCACHE_MANAGER is not set, or FastDeploy has other functions than
    expected.
    """
    envs = importlib.import_module(_ENVIRONMENT)
    if not getattr(envs, "ENABLE_V1_KVCACHE_MANAGER", 0):
        raise ConfigurationError(
            "FD_PLUGINS names fdcache, but ENABLE_V1_KVCACHE_MANAGER is not 1; set it to 1, because FastDeploy uses "
            "its old cache manager otherwise"
        )
    package = importlib.import_module(_CACHE)
    if package.CacheManager is InstalledManager:
        return
    _refuse_differences({_CACHE: package})
    places = _replace(package.CacheManager, InstalledManager) + _replace(
        package.CacheController, LinkedController
    )
    logger.warning("fdcache serves FastDeploy's KV cache: it replaced %s", ", ".join(places))


def adapt_scheduler() -> None:
    """Add preemption after failed loads, waits for storage and the filter of tokens to FastDeploy's engine. Idempotent.

    Raises ``ConfigurationError`` if FastDeploy has other functions than expected.
    """
    names = (_REQUESTS, _SCHEDULER, _TOKENS, _PROTOCOL, _QUEUE)
    modules = {name: importlib.import_module(name) for name in names}
    scheduler = modules[_SCHEDULER].ResourceManagerV1
    if hasattr(scheduler.schedule, _ADAPTED):
        return
    _refuse_differences(modules)
    scheduler.schedule = _with_preemption(scheduler.schedule)
    scheduler.add_request = _with_storage(scheduler.add_request)
    scheduler.get_prefix_cached_blocks = _with_waiting(scheduler.get_prefix_cached_blocks)
    tokens = modules[_TOKENS].TokenProcessor
    tokens.postprocess = _with_sound_tokens(tokens.postprocess)
    adapt_roles(scheduler, tokens, modules[_PROTOCOL].SplitwiseConnector)
    logger.warning(
        "fdcache added to %s.ResourceManagerV1.schedule, add_request and get_prefix_cached_blocks, and to "
        "%s.TokenProcessor.postprocess",
        _SCHEDULER,
        _TOKENS,
    )


def _refuse_differences(modules: Mapping[str, ModuleType]) -> None:
    if differences := find_differences(modules):
        raise ConfigurationError(
            "fdcache's plug-in does not support this FastDeploy: "
            + "; ".join(differences)
            + ". Use the release that docs/fastdeploy.md names, or remove fdcache from FD_PLUGINS"
        )


def find_differences(modules: Mapping[str, ModuleType]) -> list[str]:
    """Return the differences between these modules and what the plug-in expects, one sentence each."""
    differences = []
    for (module, path), expected in EXPECTED_SIGNATURES.items():
        if module not in modules:
            continue
        found: Any = modules[module]
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is None:
            differences.append(f"{module}.{path} is missing")
        elif (parameters := tuple(inspect.signature(found).parameters)) != expected:
            differences.append(f"{module}.{path} takes {parameters}, not {expected}")
    for name, known in _KNOWN_MEMBERS.items() if _CACHE in modules else ():
        members = {each for each in vars(getattr(modules[_CACHE], name, object)) if not each.startswith("_")}
        if unknown := sorted(members.difference(known.split())):
            differences.append(f"{_CACHE}.{name} has unknown members: {', '.join(unknown)}")
    return differences


def _replace(theirs: type, ours: type) -> list[str]:
    """Replace a class wherever a module of FastDeploy names it; return these names."""
    places = []
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.partition(".")[0] != "fastdeploy":
            continue
        for name in [name for name, value in vars(module).items() if value is theirs]:
            setattr(module, name, ours)
            places.append(f"{module_name}.{name}")
    return places


def _with_preemption(schedule: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(schedule)
    def schedule_after_failures(self: Any) -> Any:
        if isinstance(self.cache_manager, LinkedManager):
            self.cache_manager.follow_stops(
                lambda: self.to_be_rescheduled_request_id_set | self.to_be_aborted_req_id_set
            )
        tasks = _preempt_failed(self)
        add_arrivals(self)
        batch, errors = schedule(self)
        was_empty = not len(batch)
        for task in tasks:
            batch.add_request(task)
        if isinstance(self.cache_manager, LinkedManager):
            if tasks and was_empty:  # the scheduler has not marked it
                batch.append_evict_metadata([self.cache_manager.issue_pending_backup_to_batch_request()])
            kinds = {each.task_type.name for each in batch.requests}
            self.cache_manager.release_plans(
                has_batch=bool(len(batch)), stops=not kinds.isdisjoint(("PREEMPTED", "ABORT"))
            )
            prefill = sys.modules[_REQUESTS].RequestType.PREFILL
            self.cache_manager.scheduled(each for each in batch.requests if each.task_type is prefill)
        return batch, errors

    setattr(schedule_after_failures, _ADAPTED, True)
    return schedule_after_failures


def _preempt_failed(scheduler: Any) -> list[Any]:
    """Preempt running requests whose load failed, as the scheduler itself preempts; return the tasks for the batch."""
    if not isinstance(scheduler.cache_manager, LinkedManager):
        return []
    request_type = sys.modules[_REQUESTS]
    with scheduler.lock:
        scheduler.cache_manager.collect()
        tasks = []
        for request in scheduler.cache_manager.take_failed(
            lambda request: any(each is request for each in scheduler.running)
        ):
            scheduler.running.remove(request)
            if request.metrics.inference_start_time is None:  # its load failed before its first batch
                request.metrics.inference_start_time = time.time()
            request.status = request_type.RequestStatus.PREEMPTED
            request.num_computed_tokens = 0
            scheduler._free_blocks(request)
            request.num_cached_blocks = 0
            scheduler.to_be_rescheduled_request_id_set.add(request.request_id)
            tasks.append(scheduler._prepare_preempt_task(request))
        return tasks


def _with_storage(add_request: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @functools.wraps(add_request)
    def add_request_with_storage(self: Any, request: Any) -> None:
        if isinstance(self.cache_manager, LinkedManager):
            self.cache_manager.request_arrived(request)
        add_request(self, request)

    return add_request_with_storage


def _with_waiting(match: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    @functools.wraps(match)
    def match_or_wait(self: Any, request: Any) -> bool:
        if isinstance(self.cache_manager, LinkedManager) and not self.cache_manager.can_match(request):
            return False
        return match(self, request)

    return match_or_wait


def _with_sound_tokens(postprocess: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(postprocess)
    def postprocess_sound(self: Any, batch_result: list[Any], mtype: int = _TARGET_TOKENS) -> None:
        if isinstance(self.resource_manager.cache_manager, LinkedManager):
            batch_result = _drop_unsound(self, batch_result, mtype)
            if mtype == _TARGET_TOKENS:
                self.resource_manager.cache_manager.sampled(
                    result.request_id for result in batch_result if result.outputs.token_ids
                )
        postprocess(self, batch_result, mtype)

    return postprocess_sound


def _drop_unsound(processor: Any, results: list[Any], mtype: int) -> list[Any]:
    """Drop the tokens of requests whose load failed; a request that ended with them cannot be recomputed."""
    scheduler = processor.resource_manager
    unsound = scheduler.cache_manager.unsound([result.request_id for result in results])
    kept = []
    for result in results:
        request = scheduler.requests.get(result.request_id)
        if result.request_id not in unsound or result.finished or request is None:
            kept.append(result)
            continue
        count = len(result.outputs.token_ids) if mtype == _TARGET_TOKENS else 0
        if count:
            del request.output_token_ids[-count:]
            processor.tokens_counter[result.request_id] -= count
    return kept
