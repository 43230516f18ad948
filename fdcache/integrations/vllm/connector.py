"""FdcacheConnector: vLLM's hooks, each a line or two over the scheduler's or the worker's side."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import msgspec
import torch
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.platforms import current_platform

from fdcache.errors import ConfigurationError
from fdcache.groups import engine_groups
from fdcache.integrations.vllm.callers import configurations
from fdcache.integrations.vllm.config import (
    kept_by,
    layout_from_config,
    require_peer_ranks,
    require_supported_options,
    why_not_cached,
)
from fdcache.integrations.vllm.early import EarlyLoads, fills_blocks_first
from fdcache.integrations.vllm.events import EventTranslator, group_kinds
from fdcache.integrations.vllm.handover import EngineIdentity, PeerSide
from fdcache.integrations.vllm.layers import layers_of_planes
from fdcache.integrations.vllm.metadata import NOTHING, StepMetadata, WorkerReports, WorkerStorage
from fdcache.integrations.vllm.planes import planes_of
from fdcache.integrations.vllm.running import Finished
from fdcache.integrations.vllm.scheduler import SchedulerSide
from fdcache.integrations.vllm.settings import (
    check_settings,
    choose_failure_policy,
    given_settings,
    load_settings,
    settings_in_force,
    warn_of_settings_without_effect,
)
from fdcache.integrations.vllm.states import state_parts
from fdcache.integrations.vllm.stats import FdcacheMetrics, FdcacheStats, StatsDelta
from fdcache.integrations.vllm.worker import WorkerSide
from fdcache.manager import OffloadManager
from fdcache.transfer.engine_handovers import EngineHandovers

logger = logging.getLogger(__name__)

_REPORTS_REQUESTS = hasattr(KVConnectorBase_V1, "get_transfer_results")
"""vLLM can compute a request again whose load failed, as models of several groups of layers need. Earlier versions keep
the layers of these in one group."""

_BASES = (KVConnectorBase_V1, SupportsHMA) if _REPORTS_REQUESTS else (KVConnectorBase_V1,)


class FdcacheConnector(*_BASES):  # type: ignore[misc]
    """fdcache below vLLM's prefix cache, in the scheduler and in each worker.

    Loads are asynchronous and whole: a request is scheduled once its blocks have arrived, or are sure to while nothing
    else is computed. No layer waits by itself, so that full CUDA graphs work. Raises ``ConfigurationError`` or
    ``SettingsError`` for what cannot be right.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_where_vllm_logs()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._events: EventTranslator | None = None
        if (reason := why_not_cached(vllm_config, kv_cache_config)) is not None:
            if (kv_role := self._kv_transfer_config.kv_role) != "kv_both":
                raise ConfigurationError(
                    f"FdcacheConnector: kv_role {kv_role!r} hands blocks over, and {reason}"
                )
            if role is KVConnectorRole.SCHEDULER:
                logger.warning("blocks are neither stored nor loaded: %s", reason)
            return
        self._start(vllm_config, role, kv_cache_config)

    def _start(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Make the side of this process."""
        packed_by = (current_platform.get_device_capability(), envs.VLLM_KV_CACHE_LAYOUT)
        weights = given_settings(self._kv_transfer_config).deployment.weights
        states = state_parts(kv_cache_config, channels_first=_has_channels_first())
        layout = layout_from_config(vllm_config, kv_cache_config, packed_by, weights, states)
        if layout.groups and not isinstance(self, SupportsHMA):
            raise ConfigurationError(
                "FdcacheConnector: all layers have a sliding window, and this version of vLLM cannot compute a request "
                "from its beginning when its load has failed; use vLLM 0.33, or set --disable-sliding-window"
            )
        settings = load_settings(vllm_config, layout.block_size)
        if settings.peers.is_on:
            require_peer_ranks(layout, kv_cache_config, settings.peers.peer_ranks, states)
        if role is KVConnectorRole.SCHEDULER:
            choose_failure_policy(self._kv_transfer_config, _top_of(self._kv_transfer_config))
            warn_of_settings_without_effect(settings)
            logger.info("settings: %s", settings_in_force(settings))
            events = vllm_config.kv_events_config
            if events is not None and events.enable_kv_cache_events:
                is_shared = settings.storage_tier.connector not in (None, "local")
                self._events = EventTranslator(
                    group_kinds(kv_cache_config),
                    is_shared=is_shared,
                    marks=[engine_groups(layout.groups)[at] for at in layout.record_groups],
                    num_records=layout.page_records,
                )
                settings = self._events.enable(settings)
            manager = OffloadManager.from_settings(layout, settings, loads_ahead=True)
            own = 0 if settings.cache.server is not None else manager.num_host_blocks
            logger.info("%s", kept_by(layout, own))
            parallel = vllm_config.parallel_config
            identity = EngineIdentity(
                self._kv_transfer_config.engine_id,
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
            )
            handovers = EngineHandovers.from_settings(manager, kv_cache_config.num_blocks, settings)
            self._scheduler = SchedulerSide(
                manager,
                self._events,
                parallel.pipeline_parallel_size + 1,
                None if handovers is None else PeerSide(handovers, identity),
                None if fills_blocks_first(kv_cache_config) else EarlyLoads(),
            )
            self._stats = StatsDelta(manager)
        else:
            rank, engine_id = vllm_config.parallel_config.rank, self._kv_transfer_config.engine_id
            self._worker = WorkerSide(settings, layout, rank, engine_id, states or ())

    # --- worker -------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Use vLLM's pages."""
        if self._worker is not None:
            layers = layers_of_planes(self._vllm_config, self._kv_cache_config)
            self._worker.register(planes_of(self._kv_cache_config, kv_caches), layers)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Tell the scheduler which blocks this rank's storage holds at the start. vLLM asks again when it wakes up."""
        if (worker := self._worker) is None:
            return None
        return WorkerStorage(worker.take_scan(), worker.rank, worker.address)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Enqueue the step's copies, loads and stores alike.

        The forward pass waits for copies of the blocks that it overwrites. This is the last hook before it in every
        version: the second model runner calls ``start_load_kv`` after the forward pass since vLLM 0.33.
        """
        super().bind_connector_metadata(connector_metadata)
        worker = self._worker
        if worker is None or (connector_metadata is NOTHING and not worker.is_loading):
            return
        if isinstance(connector_metadata, StepMetadata):
            worker.submit(connector_metadata)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Do nothing: the copies were enqueued when the metadata was bound."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a step waits for what is still being loaded before it begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any) -> None:
        """Hand over the layer's part of what decode waits for. Blocks are stored after the step."""
        if self._worker is not None:
            self._worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        """Record the end of the step. The order of streams keeps blocks until they are stored."""
        if self._worker is not None and self._worker.timer.number:
            self._worker.computed()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose blocks this rank has handed over, and those whose load has ended, well or not."""
        if self._worker is None:
            return None, None
        received = self._worker.poll()
        return self._worker.take_sent() or None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return what ``get_finished`` does, and the requests that vLLM has to compute from the beginning."""
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            results.failed_recving |= self._worker.take_failed()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the device blocks that vLLM has to compute."""
        return self._worker.take_bad_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return this rank's reports."""
        worker = self._worker
        if worker is None or not (worker.reports or worker.timer.running):
            return None
        reports, seconds = worker.take_reports(), worker.timer.take()
        return WorkerReports(reports, seconds) if reports or seconds else None

    # --- scheduler ----------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """True if blocks are handed over: a request that was preempted is computed again, so that it has them.

        Blocks that are not stored cost a later hit, for which preemption need not drop tokens in flight.
        """
        return self._scheduler is not None and self._scheduler.peers is not None

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take vLLM's block pool, for its coldest blocks and for resets of the device cache."""
        if self._scheduler is not None:
            self._scheduler.bind_pool(gpu_block_pool)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Make the blocks findable that the ranks' storage holds."""
        self._restore(metadata.values())

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Make the blocks findable that the ranks' storage holds, those of every pipeline stage."""
        self._restore(metadata.values())

    def _restore(self, metadata: Iterable[KVConnectorHandshakeMetadata]) -> None:
        if self._scheduler is None:
            return
        ranks = [each for each in metadata if isinstance(each, WorkerStorage)]
        self._scheduler.restore(each.scan for each in ranks)
        if self._scheduler.peers is not None:
            addresses = {each.rank: each.address for each in ranks if each.address is not None}
            self._scheduler.peers.learn_addresses(addresses)

    def on_new_request(self, request: Any) -> None:
        """Start to read the request's blocks from storage."""
        if self._scheduler is not None:
            with self._scheduler.guarded("on_new_request", follows_blocks=False):
                self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many more tokens can be loaded, None to be asked again; loads are asynchronous."""
        found: int | None = 0
        if self._scheduler is not None:
            with self._scheduler.guarded("get_num_new_matched_tokens", follows_blocks=False):
                found = self._scheduler.matched(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load of what was found into the request's blocks."""
        if self._scheduler is not None:
            with self._scheduler.guarded("update_state_after_alloc"):
                # The block table is a list that vLLM makes for each call.
                tables = blocks.get_block_ids() if num_external_tokens > 0 else ()
                self._scheduler.allocated(request, tables, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Return how many of the tokens that are being loaded were in host memory, in storage, and at a peer."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource  # since vLLM 0.33, which alone calls this

        found = {CacheHitSource.HOST: num_external_tokens}
        if self._scheduler is not None:
            with self._scheduler.guarded("get_external_cache_hit_sources", follows_blocks=False):
                tokens_of = self._scheduler.sources_of(request.request_id, num_external_tokens)
                places = (CacheHitSource.HOST, CacheHitSource.DISK, CacheHitSource.P2P)
                found = dict(zip(places, tokens_of, strict=True))
        return {source: tokens for source, tokens in found.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Plan the copies of the step."""
        return NOTHING if self._scheduler is None else self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Count the ranks' reports, and note the requests whose blocks have come, or are sure to."""
        reports = connector_output.kv_connector_worker_meta
        if self._scheduler is None:
            return
        if connector_output.finished_recving:
            self._scheduler.received(connector_output.finished_recving)
        if not isinstance(reports, WorkerReports):
            return
        if reports.reports:
            with self._scheduler.guarded("update_connector_output"):
                self._scheduler.reported(reports.reports)
        if reports.seconds:
            with self._scheduler.guarded("update_connector_output", follows_blocks=False):
                self._scheduler.times.ended(reports.seconds)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Do as ``request_finished_all_groups`` for the only group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer the request's last blocks. vLLM may reuse them at once, unless they are handed over.

        The parameters of a hand-over, and the outcomes of hints, go to the client.
        """
        ended = Finished()
        if self._scheduler is not None:
            with self._scheduler.guarded("request_finished"):
                ended = self._scheduler.finished(request, block_ids)
        told = dict(ended.handed_over or {})
        if ended.hints:
            told["hint_outcomes"] = msgspec.to_builtins(ended.hints)
        return ended.is_kept, told or None

    def has_pending_push_work(self) -> bool:
        """Return True while copies are in flight, so that vLLM goes on stepping."""
        is_pending = False
        if self._scheduler is not None:
            with self._scheduler.guarded("has_pending_push_work", follows_blocks=False):
                is_pending = self._scheduler.has_pending_work
        return is_pending

    def reset_cache(self) -> bool | None:
        """Forget every block of this engine."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    def take_events(self) -> Iterable[Any]:
        """Return which blocks entered and left host memory and storage, under vLLM's hashes."""
        events: Iterable[Any] = ()
        if self._events is not None and self._scheduler is not None:
            with self._scheduler.guarded("take_events", follows_blocks=False):
                events = self._scheduler.take_events()
        return events

    # --- both ---------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> FdcacheStats | None:
        """Return what has changed since the last call, while there are requests at most once a second."""
        if self._scheduler is None:
            return None
        try:
            return self._stats.take(self._scheduler.inconsistencies, is_idle=not self._scheduler.has_requests)
        except Exception:  # noqa: BLE001 - it is logged, and vLLM would end at it
            self._scheduler.hook_failed("get_kv_connector_stats", follows_blocks=False)
            return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FdcacheStats | None:
        """Return the statistics that were sent as ``data``."""
        return FdcacheStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> FdcacheMetrics:
        """Return the metrics of vLLM's Prometheus endpoint."""
        return FdcacheMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End the copies, then leave the service. The workers come before the scheduler."""
        if self._worker is not None:
            self._worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.manager.close()


def check_configurations() -> None:
    """Check the configuration of an engine that vLLM is making, if it is: long before it loads weights.

    Raises ``ConfigurationError``.
    """
    transfers, vllm_config = configurations()
    own = next((each for each in transfers if each.kv_connector == FdcacheConnector.__name__), None)
    if own is None or vllm_config is None:
        return
    _log_where_vllm_logs()
    check_settings(own, transfers[-1], vllm_config)
    if vllm_config.model_config is not None:
        require_supported_options(vllm_config, own)


def _top_of(transfer_config: Any) -> Any:
    """Return the transfer configuration with the connector in which this one is, itself if there is none."""
    return (configurations().transfers or [transfer_config])[-1]


def _has_channels_first() -> bool:
    """Return True if vLLM keeps the channels of a convolution's inputs in rows of their own."""
    return getattr(envs, "VLLM_SSM_CONV_STATE_LAYOUT", None) == "DS"


def _log_where_vllm_logs() -> None:
    """Show fdcache's log lines in vLLM's log, unless the application has a place for them."""
    ours, theirs = logging.getLogger("fdcache"), logging.getLogger("vllm")
    if not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.getEffectiveLevel())
