"""FdcacheLinker: the tiers of fdcache below the device pools of SGLang, without a host pool between them."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from fdcache._core import keys_from_hex
from fdcache.controller.layers import LayerDoneCounter
from fdcache.errors import ConfigurationError, FdcacheError
from fdcache.integrations.sglang.config import (
    LINKER,
    LINKER_METHODS,
    Rank,
    layout_with,
    load_settings,
    require_version,
    settings_of_pool,
)
from fdcache.integrations.sglang.device_pools import DevicePages, Keys, device_pages
from fdcache.integrations.sglang.pool_tier import PoolTier
from fdcache.integrations.sglang.slots import SlotReader
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

_MOST_ENDS = 4
"""Most lengths that a look-up of a model with windows or states promises, the longest ones."""

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
class _Queued:
    """A load that SGLang has given slots: they are read from the device when it begins."""

    asked: _Asked
    parts: list[tuple[PoolTier, KeyedRequest, Callable[[], Int32Array]]]


@dataclass(slots=True)
class _Batch:
    """Loads that began together, with their layers."""

    parts: list[tuple[PoolTier, KeyedRequest]]
    layers: list[tuple[LayerDoneCounter, Mapping[int, int]]]
    asked: list[_Asked]
    is_whole: bool


@dataclass(slots=True)
class _Offload:
    """Pages of a node that SGLang wants stored, until the last of its offers has ended."""

    parts: list[tuple[PoolTier, HashArray, Callable[[], Int32Array]]]
    is_ready: Callable[[], bool]
    slots: list[tuple[PoolTier, Int32Array]] = field(default_factory=list)
    waits_for: set[tuple[str, int]] = field(default_factory=set)
    is_whole: bool = True


class LayerWaits:
    """What the forward pass waits for: the layers of the batch that was chosen last."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.consumer_index = -1
        self.batches: dict[int, _Batch] = {}
        self._stream: Any = None

    def set_consumer(self, index: int) -> None:
        """Choose a batch by its index; -1 for none."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Wait for a layer of the chosen batch: the device's current stream does, or on a CPU the calling thread."""
        batch = self.batches.get(self.consumer_index)
        if batch is None:
            return
        for counter, layers in batch.layers:
            local = layers.get(layer)
            if local is None:
                continue
            try:
                counter.wait_for_layer(local, stream=self._current_stream())
            except FdcacheError as error:  # the load has failed, which is told when it is finished
                logger.warning("layer %d: %s", layer, error)
                batch.is_whole = False

    def _current_stream(self) -> Any:
        """Return the current stream, as the same object as long as it is the same: layers share what they wait for."""
        if torch.cuda.is_initialized() and (stream := torch.cuda.current_stream()) != self._stream:
            self._stream = stream
        return self._stream


class FdcacheLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Loads and stores the pages of SGLang's device pools, layer by layer.

    ::

        --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
        --unified-cache-external-linker-config
        '{"linker": "FdcacheLinker", "linker_module_path": "fdcache.integrations.sglang.linker"}'

    Settings are those of the environment, or names of settings in ``linker_extra_config``. SGLang calls from one
    thread. What can fail shows in ``lookup``: what it promises is pinned, and intact.

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
        pages = device_pages(params, components)
        self._rank = _rank_of(server_args, pages, extra_config or {})
        self._settings = load_settings(self._rank, int(params.page_size), LINKER)
        self._tiers: dict[str, PoolTier] = {}
        try:
            total = sum(each.nbytes for each in pages)
            for each in pages:
                self._tiers[each.name] = self._tier_of(each, each.nbytes / total)
            self._wait_for_service()
        except BaseException:
            self._close_tiers()
            raise
        self.pools = {PoolName(each.name): each.pool for each in pages}
        self._kv, *self._others = self._tiers.values()
        self._slots = SlotReader(pages[0].device)
        self.layer_done_counter = LayerWaits(1 + max(layer for each in pages for layer in each.layers))
        self._layers = {
            each.name: {layer: local for local, layer in enumerate(each.layers)} for each in pages
        }
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._queued: dict[str, _Queued] = {}
        self._offloads: deque[_Offload] = deque()
        self._completed: deque[bool] = deque()
        self._next_batch = 0
        self._timeout = self._settings.cache.plan_timeout

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
        names = next(each.keys for each in transfers if each.name == _KV)
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
                asked.pages, asked.lengths = found, list(range(1, found + 1))
            return
        self._end_others(asked)
        asked.pages = found
        lengths = self._whole_lengths(asked.keys[:found])[-_MOST_ENDS:]
        asked.lengths = [length for length in lengths if self._pin_others(asked, length)]

    def _whole_lengths(self, keys: HashArray) -> list[int]:
        """Return the lengths at which every pool has what it needs."""
        whole = np.ones(len(keys), np.bool_)
        for tier in self._others:
            there = tier.has(keys)
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
        """Take the slots of a load, which begins with the batch. False if it was not promised: SGLang computes."""
        asked = self._asked.pop(rid, None)
        if asked is None:
            return False
        kv = next(each for each in transfers if each.name == _KV)
        pages = len(kv.keys)
        if (pages not in asked.lengths[-1:] and pages not in asked.lengths) or kv.keys[0] != asked.first:
            self._end(asked)
            return False
        parts = [(self._kv, asked.request, self._slots.begin(kv.device_indices, self._kv.pages.page_size))]
        by_name = {str(each.name): each for each in transfers}
        for tier, request in asked.others.get(pages, ()):
            slots = self._slots.begin(by_name[tier.pages.name].device_indices, tier.pages.page_size)
            parts.append((tier, request, slots))
        self._queued[rid] = _Queued(asked, parts)
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """Withdraw a load that has not begun."""
        queued = self._queued.pop(rid, None)
        if queued is not None:
            self._end(queued.asked)
        return queued is not None

    def start_layer_wise_loading(self) -> int:
        """Begin the loads that were taken; return the index of their batch, -1 for none."""
        if not self._queued:
            return -1
        queued, self._queued = list(self._queued.values()), {}
        batch = _Batch([], [], [each.asked for each in queued], is_whole=True)
        for each in queued:
            for tier, request, slots in each.parts:
                batch.is_whole &= tier.plan_load(request, slots())
                batch.parts.append((tier, request))
        now, stores = self._slots.current_stream(), self._slots.store_stream
        for name, tier in self._tiers.items():
            counters = tier.submit(now, stores)
            batch.layers += [(counter, self._layers[name]) for counter in counters]
        index, self._next_batch = self._next_batch, self._next_batch + 1
        self.layer_done_counter.batches[index] = batch
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until no load of a batch writes to the device; True if all have landed."""
        batch = self.layer_done_counter.batches.pop(counter_index, None)
        if batch is None:
            return True
        deadline = time.monotonic() + self._timeout
        landed = [tier.outcome(request, deadline) for tier, request in batch.parts]
        for asked in batch.asked:
            self._end(asked)
        return batch.is_whole and all(landed)

    # --- offloads -------------------------------------------------------------------------------------------

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Take the pages of a node to be stored, behind the work that fills them."""
        parts = []
        for each in transfers:
            tier = self._tiers[str(each.name)]
            if tier.stores and each.keys:
                slots = self._slots.begin(each.device_indices, tier.pages.page_size)
                parts.append((tier, keys_from_hex(each.keys), slots))
        self._offloads.append(_Offload(parts, self._slots.store_after(self.record_offload_ready)))
        return True

    def num_completed_offloads(self) -> int:
        """Go on with copies, and return how many offloads have ended."""
        for offload in self._offloads:
            if not offload.waits_for and not offload.slots:
                if not offload.is_ready():
                    break
                self._begin(offload)
        for name, tier in self._tiers.items():
            tier.turn(self._slots.store_stream)
            for end in tier.take_ends():
                self._ended(name, end.number, is_whole=end.is_whole)
        while self._offloads and self._offloads[0].slots and not self._offloads[0].waits_for:
            self._complete(self._offloads.popleft())
        return len(self._completed)

    def _begin(self, offload: _Offload) -> None:
        for tier, keys, read in offload.parts:
            slots = read()
            offload.waits_for.add((tier.pages.name, tier.offer(keys, slots)))
            offload.slots.append((tier, slots))
        if not offload.parts:
            offload.slots.append((self._kv, np.empty(0, np.int32)))

    def _ended(self, name: str, number: int, *, is_whole: bool) -> None:
        for offload in self._offloads:
            if (name, number) in offload.waits_for:
                offload.waits_for.remove((name, number))
                offload.is_whole &= is_whole
                return

    def _complete(self, offload: _Offload) -> None:
        for tier, slots in offload.slots:
            tier.manager.forget(slots)
        self._completed.append(offload.is_whole)

    def pop_completed_offload(self) -> bool:
        """Return True if the oldest offload that has ended is stored whole."""
        return self._completed.popleft()

    # --- state ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """End what is in flight; what is stored stays."""
        for rid in list(self._asked):
            self._forget(rid)
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        for index in list(self.layer_done_counter.batches):
            self.finish_layer_wise_loading(index)
        for offload in self._offloads:
            for tier, slots in offload.slots:
                tier.manager.forget(slots)
        for name, tier in self._tiers.items():
            if not tier.drain(2 * self._timeout):
                logger.error("FdcacheLinker: copies of the pool %s have not ended", name)
            tier.take_ends()
        self._offloads.clear()
        self._completed.clear()
        self.layer_done_counter.consumer_index = -1

    def close(self) -> None:
        """End what is in flight, free the host memory and leave the service. Idempotent."""
        if self._tiers:
            self.reset()
        self._close_tiers()

    def _close_tiers(self) -> None:
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
