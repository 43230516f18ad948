"""FdcacheTier: fdcache's storage below vLLM's own OffloadingConnector.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 34359738368, "secondary_tiers": [{
            "type": "FdcacheTier", "module_path": "fdcache.integrations.vllm.tier",
            "FDCACHE_STORAGE_DIR": "/nvme/kv", "FDCACHE_STORAGE_SIZE": "500GiB"}]}}'

vLLM keeps the host memory and decides what is stored and loaded; fdcache keeps the files: bounded, with a checksum for
every record, read again after a restart or a crash. With ``FDCACHE_SERVER`` in place of a folder it is the service of
the node, in which all engines of one layout find each other's chunks. Written for ``vllm.v1.kv_offload.tiering.base``
of vLLM 0.33.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import TIER_LABEL, JobResult, SecondaryTierManager, TransferJob

from fdcache.errors import ConfigurationError
from fdcache.integrations.vllm.keyed_tiers import EndedJob, KeyedTiers
from fdcache.integrations.vllm.settings import extra_settings
from fdcache.integrations.weights import digest_of
from fdcache.layout import KVLayout
from fdcache.layout_planes import PlaneKind, PlaneSpec
from fdcache.metadata import CacheLevel, HashArray
from fdcache.settings import Settings, SettingsError
from fdcache.settings.kinds import format_size
from fdcache.tiers.events import BlockRemoved, BlockStored

logger = logging.getLogger(__name__)

_MOST_EVENTS = 65536
_PREFIX = "vllm:fdcache_tier_"
_BLOCKS, _CAPACITY = f"{_PREFIX}blocks", f"{_PREFIX}capacity_blocks"
_COUNTS = {
    "stored": "Chunks that were stored.",
    "hits": "Chunks that were read, with the checksum that they were stored with.",
    "corrupt": "Chunks that were refused because their bytes had changed; they were computed.",
    "errors": "Chunks that could not be read or written.",
    "timeouts": "Chunks that were not read or written before the deadline.",
    "no_room": "Chunks for which the disk had no room.",
}


class FdcacheTier(SecondaryTierManager):  # type: ignore[misc]
    """A secondary tier of vLLM's offloading: a slab file of ``FDCACHE_STORAGE_DIR``, or the service of the node.

    Further keys of the tier's configuration are fdcache's settings, which win over the environment:
    ``FDCACHE_STORAGE_DIR``, ``FDCACHE_STORAGE_SIZE``, ``FDCACHE_STORAGE_FSYNC``, ``FDCACHE_STORAGE_TIMEOUT``,
    ``FDCACHE_HOST_MEMORY`` (between vLLM's memory and the file) and ``FDCACHE_WEIGHTS``, or ``FDCACHE_SERVER``,
    ``FDCACHE_PLAN_TIMEOUT`` and ``FDCACHE_WEIGHTS``. Raises ``ConfigurationError`` for others and for wrong values, and
    ``StorageError`` when the file cannot be opened.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **options: object,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else Locality.LOCAL
        settings = _settings(options)
        layout = _layout(offloading_spec.config, self.block_size_bytes, settings.deployment.weights)
        rows = np.asarray(primary_kv_view).view(np.uint8)
        self._tells = bool(offloading_spec.config.enable_kv_cache_events)
        self._tiers = KeyedTiers(layout, settings, rows, events=_MOST_EVENTS if self._tells else 0)
        self._keys: dict[int, tuple[OffloadKey, ...]] = {}
        self._named: dict[bytes, OffloadKey] = {}
        self._told = dict.fromkeys(_COUNTS, 0)
        self._told_blocks = -1
        usage = self._tiers.usage
        logger.info(
            "FdcacheTier: %d chunks found in %s, room for %d of %s",
            usage.ready,
            settings.cache.server or settings.storage_tier.directory,
            usage.blocks,
            format_size(self.block_size_bytes),
        )

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return HIT if the chunk is stored, else MISS."""
        return LookupResult.HIT if self._tiers.contains(_digest(key)) else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to store chunks; those that are stored already cost nothing."""
        self._submit(job_metadata, self._tiers.store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to read chunks into vLLM's memory."""
        self._submit(job_metadata, self._tiers.load)

    def _submit(self, job: TransferJob, begin: Any) -> None:
        keys = self._keys[job.job_id] = tuple(job.keys)
        digests = _digests(keys)
        if self._tells and not job.is_promotion:
            self._named.update(zip((row.tobytes() for row in digests), keys, strict=True))
        begin(job.job_id, digests, np.ascontiguousarray(job.chunk_ids, np.int32))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that have ended, with the chunks of a load that arrived."""
        return [self._result(ended) for ended in self._tiers.take_ended()]

    def _result(self, ended: EndedJob) -> JobResult:
        keys = self._keys.pop(ended.number)
        moved = tuple(key for key, is_moved in zip(keys, ended.moved.tolist(), strict=True) if is_moved)
        return JobResult(
            job_id=ended.number,
            success=len(moved) == len(keys),
            successful_keys=moved,
            transfer_time=ended.seconds,
            transfer_bytes=ended.nbytes,
        )

    def has_pending_work(self) -> bool:
        """Return True while a job has not been told as finished."""
        return not self._tiers.is_idle

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Count these chunks as used now, the first of a prompt as the last used."""
        for key in reversed(tuple(keys)):
            self._tiers.contains(_digest(key))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Return vLLM's default: new chunks are stored."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait until every job has ended, each by its deadline."""
        self._tiers.drain()

    def shutdown(self) -> None:
        """Close the file, or leave the service."""
        self._tiers.close()

    # --- metrics --------------------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Return the tier's metrics, ``vllm:fdcache_tier_*``."""
        counters = {
            f"{_PREFIX}{name}": OffloadingCounterMetadata(documentation=text, labelnames=(TIER_LABEL,))
            for name, text in _COUNTS.items()
        }
        gauges = {
            _BLOCKS: OffloadingGaugeMetadata(
                documentation="Chunks that are stored.", labelnames=(TIER_LABEL,)
            ),
            _CAPACITY: OffloadingGaugeMetadata(
                documentation="Chunks for which there is room.", labelnames=(TIER_LABEL,)
            ),
        }
        return {**counters, **gauges}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what was counted since the last call."""
        stats = OffloadingConnectorStats()
        labels = (self.tier_type,)
        for name, counted in ((name, getattr(self._tiers.stats, name)) for name in _COUNTS):
            if counted > self._told[name]:
                stats.increase_counter(f"{_PREFIX}{name}", counted - self._told[name], labels)
                self._told[name] = counted
        usage = self._tiers.usage
        if usage.ready != self._told_blocks:
            stats.set_gauge(_BLOCKS, usage.ready, labels)
            stats.set_gauge(_CAPACITY, usage.blocks, labels)
            self._told_blocks = usage.ready
        return None if stats.is_empty() else stats

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return which chunks were stored and removed since the last call; nothing unless vLLM's events are on."""
        if not self._tells:
            return ()
        told = []
        for event in self._tiers.take_events():
            if not isinstance(event, BlockStored | BlockRemoved) or event.tier is not CacheLevel.STORAGE:
                continue
            is_removed = isinstance(event, BlockRemoved)
            if (key := self._named.get(event.block_hash)) is not None:
                told.append(self._event([key], is_removed=is_removed))
                if is_removed:
                    del self._named[event.block_hash]
        return told

    def _event(self, keys: list[OffloadKey], *, is_removed: bool) -> OffloadingEvent:
        return OffloadingEvent(
            keys=keys,
            medium=self.medium,
            removed=is_removed,
            locality=self.locality,
            ownership=self.tier_type,
        )


def _settings(options: dict[str, object]) -> Settings:
    """Return the settings of a tier's configuration and of the environment.

    Storage is local unless they say so or name a service. Raises ``ConfigurationError`` for both.
    """
    given = extra_settings(options)
    try:
        settings = Settings.load(arguments=given)
        if settings.cache.server is None:
            return Settings.load(arguments=given, defaults={"FDCACHE_STORAGE": "local"})
    except SettingsError as error:
        raise ConfigurationError(f"FdcacheTier: {error}") from error
    of_storage = [name for name in given if name.startswith("FDCACHE_STORAGE")]
    if settings.storage_tier.is_on or of_storage:
        raise ConfigurationError(
            f"FdcacheTier: {of_storage[0] if of_storage else 'FDCACHE_STORAGE'}: with FDCACHE_SERVER the storage "
            "belongs to the service; set it for `fdcache serve` and unset it here, or unset FDCACHE_SERVER"
        )
    return settings


def _layout(config: Any, chunk_bytes: int, weights: str | None) -> KVLayout:
    """Return the layout of vLLM's chunks: one plane of bytes, with a name for all that decides them."""
    parts = {
        "weights": weights or digest_of(Path(config.model.name)) or config.model.name,
        "dtype": str(config.model.dtype),
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "groups": [(group.tokens_per_block, list(group.layer_names)) for group in config.groups],
        "kv_cache_layout": config.kv_cache_layout,
        "canonical": config.canonical_layout,
        "replicated": config.replicated_layout,
    }
    if not config.parallel.is_parallelism_agnostic:
        names = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
        parts["parallel"] = [getattr(config.parallel, name) for name in names]
    return KVLayout.build(
        [PlaneSpec(PlaneKind.KEY, "uint8", (chunk_bytes,))],
        model=weights or Path(config.model.name).name,
        revision=hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32],
        block_size=config.cache.tokens_per_hash * config.cache.blocks_per_chunk,
        num_layers=1,
    )


def _digest(key: OffloadKey) -> bytes:
    """Return the name in storage of vLLM's key: the chunk's hash and its group."""
    return hashlib.sha256(key).digest()


def _digests(keys: Collection[OffloadKey]) -> HashArray:
    return np.frombuffer(b"".join(map(_digest, keys)), np.uint8).reshape(-1, 32)
