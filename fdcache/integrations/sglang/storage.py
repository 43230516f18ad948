"""FdcacheStorage: the storage backend of SGLang's HiCache."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_server_args

from fdcache.errors import ConfigurationError, UnsupportedCallError
from fdcache.integrations.sglang.client import PageClient
from fdcache.integrations.sglang.config import (
    PREFIX_KEYS,
    STORAGE,
    STORAGE_METHODS,
    layout_of,
    load_settings,
    require_options,
    require_pools,
    require_version,
)
from fdcache.integrations.sglang.metrics import Metrics, metrics_of
from fdcache.integrations.sglang.pages import HostPages
from fdcache.integrations.sglang.token_events import TokenEvents
from fdcache.integrations.sglang.turns import Turns
from fdcache.integrations.sglang.weights import KnownWeights
from fdcache.metadata import HashArray

logger = logging.getLogger(__name__)

_KV = "kv"
_SERVICE_WAIT = 5.0
"""Seconds that a start waits for room at the service; without it nothing is stored until it comes."""


class FdcacheStorage(HiCacheStorage):  # type: ignore[misc]
    """Stores the pages of SGLang's host pools in the tiers of fdcache, one client for each pool.

    ::

        --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
        '{"backend_name": "fdcache", "module_path": "fdcache.integrations.sglang.storage",
          "class_name": "FdcacheStorage", "interface_v1": 1, "hicache_storage_pass_prefix_keys": true}'

    SGLang calls it from one thread for look-ups, one for loads and one for stores. No call raises for a failure: what
    cannot be had is not there, and is computed. The keys before a run are used for stores alone: SGLang 0.5.23 leaves
    some out for look-ups and loads.

    Raises ``ConfigurationError`` for another version of SGLang, for options and pools that would not be right, and for
    settings that are wrong, before the engine serves.
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        require_version(HiCacheStorage, STORAGE_METHODS, STORAGE.name)
        self._config = storage_config
        self._server_args = get_server_args()
        require_options(storage_config, self._server_args)
        self._weights = KnownWeights(self._server_args)
        self._weights.watch_flushes(HiCacheController)
        self._clients: dict[str, PageClient] = {}
        self._pages: dict[str, HostPages] = {}
        self._moved = _Moved()
        self._metrics: Metrics | None = None
        self._events: TokenEvents | None = None
        self._turns: Turns | None = None
        self._has_warned = False

    # --- pools ----------------------------------------------------------------------------------------------

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a pool of the model; one that comes after the start is refused, as nothing is stored of it."""
        if self._clients:
            raise ConfigurationError(
                f"FdcacheStorage: the pool {host_pool_name} was registered after the others, and would not be stored; "
                "serve this model without --hicache-storage-backend"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def on_host_pools_registered(self) -> None:
        """Open a client for each pool."""
        pools = {str(name): pool for name, pool in getattr(self, "registered_pools", {}).items()}
        pools.setdefault(_KV, self.mem_pool_host)
        require_pools(pools, self._config)
        settings = load_settings(self._config, int(pools[_KV].page_size))
        ranks = self._config.tp_size * self._config.pp_size
        try:
            for name, pool in pools.items():
                pages = self._pages[name] = HostPages(pool, name)
                layout = layout_of(pages, name, self._config, self._server_args, settings)
                self._clients[name] = PageClient(layout, settings, pages.planes, ranks)
        except BaseException:
            self.close()
            raise
        self._metrics = metrics_of(
            self._server_args, str(self._config.model_name), self._config.tp_rank, self._clients
        )
        self._wait_for_service()
        if settings.cache.server is not None and self._server_args.kv_events_config:
            self._turns = Turns(self._describe, torch.device("cpu"))
            self._events = TokenEvents(int(pools[_KV].page_size), self._turns.ask)

    def _describe(self) -> None:
        """Tell the service the tokens of pages."""
        if self._events is not None:
            self._events.describe(self._clients[_KV].manager)

    def _wait_for_service(self) -> None:
        deadline = time.monotonic() + _SERVICE_WAIT
        while not all(client.room for client in self._clients.values()):
            if time.monotonic() > deadline:
                logger.warning("FdcacheStorage: no room at the service yet; the engine serves without it")
                return
            time.sleep(0.01)

    # --- look-ups -------------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many leading pages are there."""
        return self._clients[_KV].lookup(_hashes(keys)) if keys and self._has_weights() else 0

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """Return how many leading pages are there in all pools, and in each."""
        found = {_KV: self.batch_exists(keys)}
        for transfer in pool_transfers or []:
            if transfer.hit_policy is not PoolHitPolicy.ALL_PAGES:
                return PoolTransferResult.empty()
            name = str(transfer.name)
            found[name] = self._clients[name].lookup(_hashes(keys[: found[_KV]])) if found[_KV] else 0
        whole = min(found.values())
        return PoolTransferResult(whole, {name: n for name, n in found.items() if n}, [*range(1, whole + 1)])

    # --- loads and stores -----------------------------------------------------------------------------------

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Load pages; return True for each leading one that is in its place."""
        return self._load(_KV, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages; return True for each leading one that is there now."""
        return self._store(_KV, keys, host_indices, extra_info)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Load pages of several pools."""
        return {each.name: self._load(str(each.name), each.keys, each.host_indices) for each in transfers}

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of several pools."""
        return {
            each.name: self._store(str(each.name), each.keys, each.host_indices, extra_info)
            for each in transfers
        }

    def _load(self, pool: str, keys: Sequence[str] | None, host_indices: Any) -> list[bool]:
        if not keys:
            return []
        if not self._has_weights():
            return [False] * len(keys)
        began = time.perf_counter()
        loaded = self._clients[pool].load(_hashes(keys), self._pages[pool].slots_of(host_indices))
        self._moved.loaded(loaded, self._bytes_of(pool, loaded), time.perf_counter() - began)
        return [page < loaded for page in range(len(keys))]

    def _store(self, pool: str, keys: Sequence[str] | None, host_indices: Any, extra_info: Any) -> list[bool]:
        if not keys:
            return []
        if not self._has_weights():
            return [False] * len(keys)
        above = getattr(extra_info, "prefix_keys", None)
        if above is None:
            if not self._has_warned:
                logger.error("FdcacheStorage stores nothing: %s; %s", *PREFIX_KEYS)
            self._has_warned = True
            return [False] * len(keys)
        began = time.perf_counter()
        slots = self._pages[pool].slots_of(host_indices)
        stored = self._clients[pool].store(_hashes(keys), slots, _hashes(above))
        self._moved.stored(stored, self._bytes_of(pool, stored), time.perf_counter() - began)
        return [page < stored for page in range(len(keys))]

    def _has_weights(self) -> bool:
        """Return False while SGLang's pools may have pages of former weights, which nobody may find."""
        return self._weights.are_loaded or self._weights.renew(self._take_weights)

    def _take_weights(self, version: str | None) -> None:
        logger.info("FdcacheStorage: the weights were replaced; pages of the former ones are not found")
        for client in self._clients.values():
            client.weights_changed(version)

    def _bytes_of(self, pool: str, pages: int) -> int:
        return pages * self._clients[pool].layout.payload_bytes

    # --- state ----------------------------------------------------------------------------------------------

    def get_stats(self) -> Any:
        """Return what was moved since the last call, for SGLang's metrics, and tell our own."""
        if self._metrics is not None:
            self._metrics.tell()
        return self._moved.take()

    def clear(self) -> None:
        """Forget the pages of this model on this rank, in all tiers, and no others."""
        for client in self._clients.values():
            client.clear()

    def close(self) -> None:
        """End the clients. Idempotent."""
        if self._events is not None:
            self._events.close()
        if self._turns is not None:
            self._turns.close()
        for client in self._clients.values():
            client.close()

    # --- calls of other interfaces --------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Return True for a page that is there."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Refuse: pages are loaded in place."""
        raise self._refusal("get")

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        """Refuse: pages are loaded in place."""
        raise self._refusal("batch_get")

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Refuse: pages are stored from their place."""
        raise self._refusal("set")

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Refuse: pages are stored from their place."""
        raise self._refusal("batch_set")

    @staticmethod
    def _refusal(name: str) -> UnsupportedCallError:
        return UnsupportedCallError(f'FdcacheStorage.{name}: pages are moved in place; set "interface_v1": 1')


class _Moved:
    """Pages moved and GB/s, of each call since the last ``take``."""

    def __init__(self) -> None:
        self._metrics = StorageMetrics()

    def loaded(self, pages: int, nbytes: int, seconds: float) -> None:
        """Count a load."""
        if pages:
            self._metrics.prefetch_pgs.append(pages)
            self._metrics.prefetch_bandwidth.append(nbytes / max(seconds, 1e-9) / 1e9)

    def stored(self, pages: int, nbytes: int, seconds: float) -> None:
        """Count a store."""
        if pages:
            self._metrics.backup_pgs.append(pages)
            self._metrics.backup_bandwidth.append(nbytes / max(seconds, 1e-9) / 1e9)

    def take(self) -> Any:
        """Return what was counted, and begin anew."""
        taken, self._metrics = self._metrics, StorageMetrics()
        return taken


def _hashes(keys: Sequence[str]) -> HashArray:
    """Return SGLang's hexadecimal keys as bytes, shape (keys, 32)."""
    return np.frombuffer(bytes.fromhex("".join(keys)), np.uint8).reshape(-1, 32)
