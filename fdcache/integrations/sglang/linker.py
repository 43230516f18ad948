"""FdcacheLinker: the tiers of fdcache below the device pools of SGLang, without a host pool between them."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from fdcache._core import keys_from_hex
from fdcache.errors import ConfigurationError
from fdcache.integrations.sglang.config import (
    LINKER,
    LINKER_METHODS,
    Rank,
    layout_with,
    load_settings,
    require_version,
    settings_of_pool,
)
from fdcache.integrations.sglang.device_pools import DevicePages, Keys, device_pages, shares_of
from fdcache.integrations.sglang.layer_waits import LayersOfBatch, LayerWaits
from fdcache.integrations.sglang.metrics import metrics_of
from fdcache.integrations.sglang.offloads import Offloads, PoolPart
from fdcache.integrations.sglang.pool_tier import PoolTier
from fdcache.integrations.sglang.slots import SlotReader
from fdcache.integrations.sglang.token_events import TokenEvents
from fdcache.integrations.sglang.turns import Turns
from fdcache.integrations.sglang.weights import KnownWeights
from fdcache.layout import KVLayout
from fdcache.manager.keyed import KeyedRequest
from fdcache.metadata import HashArray, Int32Array
from fdcache.settings import Settings
from fdcache.settings.cache import Verify

logger = logging.getLogger(__name__)

_KV = "kv"
_FORGET_AFTER = 10.0
"""Seconds after which a look-up that no load followed is forgotten: SGLang does not tell of requests that end."""

_LOOK_AGAIN = 0.005
"""Seconds after which a look-up that did not find all looks again: others may have come."""

_MOST_LENGTHS = 64
"""Most lengths of a run that one of several ranks tells: where ranks differ, one of 64 parts is computed again."""

_MOST_ENDS = 4
"""Most lengths that a look-up of a model with windows or states promises, the longest ones."""

_MOST_READ = 8
"""Most lengths for which windows and states are read from storage by one look-up, the longest ones."""

_SERVICE_WAIT = 5.0


@dataclass(slots=True)
class _Asked:
    """A run that SGLang has asked for: what is pinned of it, and of the other pools by the length that needs it."""

    keys: HashArray
    first: str
    last: str
    request: KeyedRequest
    pages: int = 0
    lengths: list[int] = field(default_factory=list)
    others: dict[int, list[tuple[PoolTier, KeyedRequest]]] = field(default_factory=dict)
    asked_at: float = 0.0
    looked_at: float = 0.0

    def requests(self, kv: PoolTier) -> list[tuple[PoolTier, KeyedRequest]]:
        """Return everything that is pinned."""
        return [(kv, self.request), *(each for pinned in self.others.values() for each in pinned)]


@dataclass(slots=True)
class _Planned:
    """A load that SGLang has given slots; ``is_whole``: False if some of it has gone."""

    asked: _Asked
    parts: list[tuple[PoolTier, KeyedRequest]]
    is_whole: bool = True

    def withdraw(self) -> None:
        """Withdraw what is planned."""
        for tier, request in self.parts:
            tier.cancel_load(request)


class FdcacheLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Loads and stores the pages of SGLang's device pools, layer by layer.

    ::

        --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
        --unified-cache-external-linker-config
        '{"linker": "FdcacheLinker", "linker_module_path": "fdcache.integrations.sglang.linker"}'

    Settings are those of the environment, or names of settings in ``linker_extra_config``. SGLang calls from one
    thread, that of its scheduler; stores go on in turns on another one. What can fail shows in ``lookup``: what it
    promises is pinned, and intact.

    Raises ``ConfigurationError`` or ``UnsupportedLayoutError`` for another version of SGLang, for options and pools
    that would not be right, and for settings that are wrong, before the engine serves.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[Any],
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        require_version(UnifiedCacheLinker, LINKER_METHODS, LINKER.name)
        self.forward_stream = forward_stream
        self._server_args = server_args
        self._weights = KnownWeights(server_args)
        pages = device_pages(params, components)
        self._rank = _rank_of(server_args, pages, extra_config or {})
        self._settings = load_settings(self._rank, int(params.page_size), LINKER)
        self._tiers: dict[str, PoolTier] = {}
        self._turns = Turns(self._turn, pages[0].device)
        self._events: TokenEvents | None = None
        try:
            for each, share in zip(pages, shares_of([each.nbytes for each in pages]), strict=True):
                self._tiers[each.name] = self._tier_of(each, share)
            self._wait_for_service()
        except BaseException:
            self._close_tiers()
            raise
        self.pools = {PoolName(each.name): each.pool for each in pages}
        self._kv, *self._others = self._tiers.values()
        self._slots = SlotReader(pages[0].device)
        self.layer_done_counter = LayerWaits(1 + max(layer for each in pages for layer in each.layers))
        if any(
            each.keys is Keys.END for each in pages
        ):  # SGLang lets the pools of pages alone wait by itself
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._layers = {
            each.name: {layer: local for local, layer in enumerate(each.layers)} for each in pages
        }
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._planned: dict[str, _Planned] = {}
        self._batches: dict[int, list[_Planned]] = {}
        self._offloads = Offloads(self._tiers)
        self._next_batch = 0
        self._metrics = metrics_of(server_args, self._rank.model_name, self._rank.tp_rank, self._tiers)
        if self._settings.cache.server is not None and getattr(server_args, "kv_events_config", None):
            self._events = TokenEvents(int(params.page_size), self._turns.ask)
        self._timeout = self._settings.cache.plan_timeout
        self._is_alone = getattr(server_args, "tp_size", 1) == 1
        self._lock = (
            threading.RLock()
        )  # of plans and reports: a plan that is taken is submitted before the next

    def _tier_of(self, pages: DevicePages, share: float) -> PoolTier:
        verifies_all = self._settings.transfer.verify is Verify.ALL
        settings = settings_of_pool(self._settings, pages.name, pages.page_size, share)
        stores = not self._rank.is_mla_model or self._rank.tp_rank == 0 or settings.cache.server is None
        layout = self._layout_of(pages, settings)
        return PoolTier(pages, layout, settings, verifies_all=verifies_all, stores=stores)

    def _layout_of(self, pages: DevicePages, settings: Settings) -> KVLayout:
        what = {"pool": f"device {pages.name}", "keys of": pages.keys.value, **pages.description}
        return layout_with(pages.specs, pages.page_size, what, self._rank, self._server_args, settings)

    def _wait_for_service(self) -> None:
        deadline = time.monotonic() + _SERVICE_WAIT
        while not all(tier.manager.store_room for tier in self._tiers.values()):
            if time.monotonic() > deadline:
                logger.warning("FdcacheLinker: no room at the service yet; the engine serves without it")
                return
            time.sleep(0.01)

    # --- look-ups -------------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Return the lengths of the run, in pages, that can be loaded: they are pinned for the request."""
        if not self._weights.are_loaded:
            return []
        names = next(each.keys for each in transfers if each.name == _KV)
        if not names:
            return []
        now = time.monotonic()
        asked = self._asked.get(rid)
        if asked is None or not self._is_same(asked, names):
            if asked is not None:
                self._forget(rid)
            keys = keys_from_hex(names)
            asked = self._asked[rid] = _Asked(keys, names[0], names[-1], self._kv.look(keys))
            self._look(asked, now)
            self._expire(now)
        elif not self._is_pinned(asked) or (
            len(asked.lengths) < len(names) and now - asked.looked_at >= _LOOK_AGAIN
        ):
            self._look(asked, now)
        asked.asked_at = now
        self._asked.move_to_end(rid)
        return asked.lengths

    @staticmethod
    def _is_same(asked: _Asked, names: Sequence[str]) -> bool:
        return len(asked.keys) == len(names) and asked.first == names[0] and asked.last == names[-1]

    def _is_pinned(self, asked: _Asked) -> bool:
        """Keep what is pinned for a request that asks again; False if some of it is not any more."""
        return self._kv.found(asked.request) == asked.pages and all(
            tier.found(request) == len(request.block_hashes)
            for pinned in asked.others.values()
            for tier, request in pinned
        )

    def _look(self, asked: _Asked, now: float) -> None:
        is_first = not asked.looked_at
        asked.looked_at = now
        found = self._kv.found(asked.request) if is_first else self._kv.look_again(asked.request)
        if not self._others:
            if found != asked.pages or is_first:
                asked.pages, asked.lengths = found, self._lengths(found, len(asked.keys))
            return
        self._end_others(asked)
        if is_first or found != asked.pages:
            self._read_others(asked.keys, found)
        asked.pages = found
        lengths = self._whole_lengths(asked.keys[:found], PoolTier.has)[-_MOST_ENDS:]
        asked.lengths = [length for length in lengths if self._pin_others(asked, length)]

    def _lengths(self, found: int, pages: int) -> list[int]:
        """Return lengths that can be loaded of a run of ``pages``, of which the first ``found`` are there.

        SGLang takes the longest one that all ranks tell, and spends 3 us of its scheduler's thread on each.
        """
        if self._is_alone or not found:
            return [found] * bool(found)
        step = -(-pages // _MOST_LENGTHS)
        return [*range(step, found, step), found]

    def _read_others(self, keys: HashArray, found: int) -> None:
        """Read from storage what other pools need for the longest lengths, also for pages that are read now."""
        there = self._kv.may_have(keys[found:])
        reach = found + (len(there) if there.all() else int(there.argmin()))
        for length in self._whole_lengths(keys[:reach], PoolTier.may_have)[-_MOST_READ:]:
            for tier in self._others:
                needed = keys[max(length - self._pages_of(tier), 0) : length]
                if not tier.has(needed).all():
                    tier.read(needed)

    def _whole_lengths(
        self, keys: HashArray, has: Callable[[PoolTier, HashArray], NDArray[np.bool_]]
    ) -> list[int]:
        """Return the lengths at which every pool has what it needs, as ``has`` tells."""
        whole = np.ones(len(keys), np.bool_)
        for tier in self._others:
            there = has(tier, keys)
            if tier.pages.keys is Keys.LAST:
                gaps = np.cumsum(~there)
                before = np.concatenate((np.zeros(tier.pages.pages_of_window, gaps.dtype), gaps))[: len(gaps)]
                there = gaps == before
            whole &= there
        return (np.flatnonzero(whole) + 1).tolist()

    def _pin_others(self, asked: _Asked, length: int) -> bool:
        pinned = asked.others[length] = []
        for tier in self._others:
            keys = asked.keys[max(length - self._pages_of(tier), 0) : length]
            request = tier.look(keys)
            pinned.append((tier, request))
            if tier.found(request) < len(keys):
                for other, each in asked.others.pop(length):
                    other.end([each])
                return False
        return True

    @staticmethod
    def _pages_of(tier: PoolTier) -> int:
        return tier.pages.pages_of_window if tier.pages.keys is Keys.LAST else 1

    def _end_others(self, asked: _Asked) -> None:
        for pinned in asked.others.values():
            for tier, request in pinned:
                tier.end([request])
        asked.others.clear()

    def _forget(self, rid: str) -> None:
        asked = self._asked.pop(rid, None)
        if asked is not None:
            self._end(asked)

    def _end(self, asked: _Asked) -> None:
        for tier, request in asked.requests(self._kv):
            tier.end([request])

    def _expire(self, now: float) -> None:
        """Forget requests that have not asked for long: they wait no more."""
        while self._asked:
            rid, oldest = next(iter(self._asked.items()))
            if now - oldest.asked_at < _FORGET_AFTER or not oldest.asked_at:
                return
            self._forget(rid)

    # --- loads ----------------------------------------------------------------------------------------------

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Plan a load, which begins with the batch. False if it was not promised: SGLang computes.

        What has gone since the look-up, as with a service, is computed, too. One of several ranks may not decide so by
        itself: there the load fails when it is finished.
        """
        self.cancel_queued_load(rid)  # the request has got other slots
        asked = self._asked.pop(rid, None)
        if asked is None:
            return False
        kv = next(each for each in transfers if each.name == _KV)
        pages = len(kv.keys)
        is_promised = pages in asked.lengths[-1:] or pages in asked.lengths
        planned = _Planned(asked, [])
        if self._weights.are_loaded and is_promised and kv.keys[0] == asked.first:
            by_name = {str(each.name): each for each in transfers}
            wanted = [
                (
                    tier,
                    request,
                    self._slots.read(by_name[tier.pages.name].device_indices, tier.pages.page_size),
                )
                for tier, request in ((self._kv, asked.request), *asked.others.get(pages, ()))
            ]
            with self._lock:
                planned.is_whole = all(self._plan(planned, *each) for each in wanted)
                if planned.is_whole or not self._is_alone:
                    self._planned[rid] = planned
                    return True
                planned.withdraw()
        self._end(asked)
        return False

    @staticmethod
    def _plan(planned: _Planned, tier: PoolTier, request: KeyedRequest, slots: Int32Array) -> bool:
        planned.parts.append((tier, request))
        return tier.plan_load(request, slots)

    def cancel_queued_load(self, rid: str) -> bool:
        """Withdraw a load that has not begun."""
        with self._lock:
            planned = self._planned.pop(rid, None)
            if planned is not None:
                planned.withdraw()
                self._end(planned.asked)
            return planned is not None

    def start_layer_wise_loading(self) -> int:
        """Begin the loads that are planned; return the index of their batch, -1 for none."""
        if not self._planned:
            return -1
        now, stores = self._slots.current_stream(), self._slots.store_stream
        with self._lock:
            batch, self._planned = list(self._planned.values()), {}
            layers = LayersOfBatch([], is_whole=all(each.is_whole for each in batch))
            for name, tier in self._tiers.items():
                layers.counters += [(counter, self._layers[name]) for counter in tier.submit(now, stores)]
        index, self._next_batch = self._next_batch, self._next_batch + 1
        self._batches[index], self.layer_done_counter.batches[index] = batch, layers
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until no load of a batch writes to the device; True if all have landed."""
        batch = self._batches.pop(counter_index, None)
        if batch is None:
            return True
        layers = self.layer_done_counter.batches.pop(counter_index)
        deadline = time.monotonic() + self._timeout
        with self._lock:
            landed = [tier.outcome(request, deadline) for each in batch for tier, request in each.parts]
        for each in batch:
            self._end(each.asked)
        return layers.is_whole and all(landed)

    # --- offloads -------------------------------------------------------------------------------------------

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Take the pages of a node to be stored, behind the work that fills them."""
        parts = []
        is_current = self._weights.are_loaded
        for each in transfers if is_current else ():
            tier = self._tiers[str(each.name)]
            if tier.stores and each.keys:
                slots = self._slots.begin(each.device_indices, tier.pages.page_size)
                parts.append(PoolPart(tier, each.keys, slots))
        is_ready = self._slots.store_after(self.record_offload_ready)
        self._offloads.add(parts, is_ready, is_whole=is_current)
        return True

    def num_completed_offloads(self) -> int:
        """Have copies go on, and return how many offloads have ended. An idle scheduler makes no other call."""
        self._expire(time.monotonic())
        if self._offloads.are_open or any(tier.is_due for tier in self._tiers.values()):
            self._turns.ask()
        return self._offloads.num_completed

    def _turn(self) -> None:
        """Go on with copies, without the lock now and then: the scheduler waits for none but a part of this."""
        if self._events is not None:
            self._events.describe(self._kv.manager)
        with self._lock:
            reported = [tier.take_reports() for tier in self._tiers.values()]
        with self._lock:
            self._offloads.take_added()
            if not any(reported) or self._offloads.are_many:
                self._offloads.begin()
        with self._lock:
            if not self._planned:  # loads are submitted by the scheduler, behind its stream
                for tier in self._tiers.values():
                    tier.turn(self._slots.store_stream)
        with self._lock:
            self._offloads.take_ends()
        if self._metrics is not None:
            self._metrics.tell()

    def pop_completed_offload(self) -> bool:
        """Return True if the oldest offload that has ended is stored whole."""
        return self._offloads.pop()

    # --- state ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """End what is in flight; what is stored stays, but that of former weights is not found any more."""
        with self._lock:
            self._reset()

    def _reset(self) -> None:
        for rid in list(self._asked):
            self._forget(rid)
        for rid in list(self._planned):
            self.cancel_queued_load(rid)
        for index in list(self._batches):
            self.finish_layer_wise_loading(index)
        self._offloads.forget()
        for name, tier in self._tiers.items():
            if not tier.drain(2 * self._timeout):
                logger.error("FdcacheLinker: storage of the pool %s has not ended", name)
        self._offloads.clear()
        self.layer_done_counter.consumer_index = -1
        self._weights.flushed()
        self._weights.renew(self._take_weights)

    def _take_weights(self, version: str | None) -> None:
        logger.info("FdcacheLinker: the weights were replaced; pages of the former ones are not found")
        for tier in self._tiers.values():
            tier.manager.weights_changed(version)

    def close(self) -> None:
        """End what is in flight, free the host memory and leave the service. Idempotent."""
        try:
            if self._tiers:
                self.reset()
        finally:
            self._close_tiers()

    def _close_tiers(self) -> None:
        if self._events is not None:
            self._events.close()
        self._turns.close()
        tiers, self._tiers = self._tiers, {}
        for tier in tiers.values():
            tier.close()


def _rank_of(server_args: Any, pages: Sequence[DevicePages], extra: Mapping[str, Any]) -> Rank:
    """Return which pages this rank has, as SGLang's storages are told. Raises ``ConfigurationError``."""
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.attn_dcp_size > 1:
        raise ConfigurationError(
            "FdcacheLinker: decode context parallelism shards its pages; unset --dcp-size"
        )
    by_attention = is_dp_attention_enabled()
    return Rank(
        model_name=str(server_args.served_model_name or server_args.model_path),
        tp_rank=parallel.attn_tp_rank if by_attention else parallel.tp_rank,
        tp_size=parallel.attn_tp_size if by_attention else parallel.tp_size,
        pp_rank=parallel.pp_rank,
        pp_size=parallel.pp_size,
        attn_cp_rank=parallel.attn_cp_rank,
        attn_cp_size=parallel.attn_cp_size,
        dp_rank=parallel.attn_dp_rank if by_attention else 0,
        is_mla_model=all(each.description.get("type") == "MLATokenToKVPool" for each in pages),
        extra_config=extra,
    )
