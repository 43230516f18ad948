"""What requests offer of an engine's device cache, and the ends of offers: which of it the host tier has now."""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from fdcache._core import DeviceContents, DevicePath, HostIndex
from fdcache.block_owners import BlockOwners
from fdcache.errors import PlanError
from fdcache.groups import is_spaced, state_keys
from fdcache.layout import KVLayout
from fdcache.manager.base import TierManager
from fdcache.manager.copy_out import CopyOut
from fdcache.manager.keyed import KeyedRequest, OffloadRequest
from fdcache.manager.loads import Tracked, count_of, device_ids_of, table_of
from fdcache.manager.offloaded import OffloadedRequests
from fdcache.metadata import NO_BLOCK, HashArray, Int32Array
from fdcache.plans.ledger import ROOT
from fdcache.settings.cache import StatePositions, WritePolicy
from fdcache.tiers.host import HostService, HostTier, PathNote
from fdcache.tiers.pool import READY
from fdcache.tiers.statistics import Counters


class OfferEnd(msgspec.Struct, frozen=True):
    """The end of the offer ``number``: of its ``blocks``, ``present`` were there before and ``stored`` are there now.

    The others were dropped.
    """

    number: int
    blocks: int = 0
    stored: int = 0
    present: int = 0

    @property
    def is_whole(self) -> bool:
        """True if the host tier has all blocks."""
        return self.stored + self.present == self.blocks


class OpenOffer:
    """Blocks ``start`` to ``stop`` of a path, of which those before ``next`` have ended."""

    def __init__(self, path: DevicePath, start: int, stop: int, host: HostIndex) -> None:
        self.path = path
        self.start = self.next = start
        self.stop = stop
        self.there = 0
        self.present = int(np.count_nonzero(host.contains(path.hashes_from(start)[: stop - start]) == READY))

    def advance(self, copies: CopyOut) -> bool:
        """Look at the blocks that had not ended; return True once all have."""
        ended, there = copies.ended_of(self.path, self.next, self.stop)
        self.next += ended
        self.there += there
        return self.next == self.stop


class OfferEnds:
    """The offers whose ends are told. An offer without new blocks has ended."""

    def __init__(self) -> None:
        self._open: deque[tuple[int, OpenOffer | None]] = deque()
        self._last = 0

    def add(self, offer: OpenOffer | None) -> int:
        """Return the number of one more offer."""
        self._last += 1
        self._open.append((self._last, offer))
        return self._last

    def take(self, copies: CopyOut) -> list[OfferEnd]:
        """Return the ends since the last call."""
        ends = []
        while self._open:
            number, offer = self._open[0]
            if offer is None:
                ends.append(OfferEnd(number))
            elif offer.advance(copies):
                blocks = offer.stop - offer.start
                present = min(offer.present, offer.there)
                ends.append(OfferEnd(number, blocks, offer.there - present, present))
            else:
                break
            self._open.popleft()
        return ends


class StateOffers:
    """Chooses the positions of each request whose states are stored, of those that its engine offers.

    States at a position that is not chosen by itself wait: they are stored if the request ends before the engine offers
    others, or gives their device blocks away.
    """

    def __init__(self, layout: KVLayout, positions: StatePositions, contents: DeviceContents) -> None:
        self._page = layout.block_size
        self._positions = positions
        self._contents = contents
        self._waiting: dict[str, tuple[DevicePath, Int32Array]] = {}

    def offer(self, request: OffloadRequest, pages: int, path: DevicePath, ids: Int32Array) -> None:
        """Offer the states at the end of a path, or let them wait."""
        self._waiting.pop(request.request_id, None)
        if self._is_kept(request, pages):
            self._contents.offered(path, len(path) - len(ids), 0)
        else:
            self._waiting[request.request_id] = path, ids

    def _is_kept(self, request: OffloadRequest, pages: int) -> bool:
        if self._positions is StatePositions.ALL or isinstance(request, KeyedRequest):
            return True
        prompt = request.num_prompt_tokens
        last = prompt // self._page
        if pages in (last, (prompt - 1) // self._page):  # the whole prompt, and what its repetition can use
            return True
        return self._positions is StatePositions.SPACED and is_spaced(pages, last)

    def ended(self, request: OffloadRequest) -> None:
        """Offer the last states of a request that ends."""
        if (found := self._waiting.pop(request.request_id, None)) is not None:
            path, ids = found
            self._contents.offered(path, len(path) - len(ids), 0)

    def given_away(self, ids: Int32Array) -> None:
        """Forget waiting states in these device blocks."""
        if self._waiting:
            gone = set(ids.tolist())
            for name in [
                each for each, (_, mine) in self._waiting.items() if not gone.isdisjoint(mine.tolist())
            ]:
                del self._waiting[name]

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()

    def forget(self, request: OffloadRequest) -> None:
        """Forget what waits of a request."""
        self._waiting.pop(request.request_id, None)


class Offers:
    """Takes what requests have on the device to ``contents``, from which the write policy chooses what is copied."""

    def __init__(
        self,
        layout: KVLayout,
        requests: OffloadedRequests,
        contents: DeviceContents,
        host: HostTier,
        counters: Counters,
        positions: StatePositions,
    ) -> None:
        self.states = StateOffers(layout, positions, contents)
        self._layout = layout
        self._block_size, self._records = layout.block_size, layout.page_records
        self._has_gaps, self._num_states = layout.has_gaps, layout.num_states
        self._requests = requests
        self._contents = contents
        self._host = host
        self._counters = counters
        self._ends = OfferEnds()

    def take_ends(self, copies: CopyOut) -> list[OfferEnd]:
        """Return the ends since the last call, in the order of the offers."""
        return self._ends.take(copies)

    def offer(self, tracked: Tracked, num_tokens: int, table: Int32Array) -> tuple[DevicePath, int] | None:
        """Offer the whole blocks of the first tokens of a request; return their path and the first new one, if any."""
        if (offered := self._extended(tracked, num_tokens, table)) is None:
            return None
        path, start = offered
        tracked.count_lookup(self._counters, self._layout)
        self._contents.offered(path, start, tracked.counted_blocks)
        tracked.counted_blocks = max(tracked.counted_blocks, len(path))
        if not start and self._host.service is not None:
            _own(self._host.service, tracked, path)
        return offered

    def number(self, offered: tuple[DevicePath, int] | None) -> int:
        """Return the number by which the end of an offer is told, which was just made."""
        if offered is None:
            return self._ends.add(None)
        path, start = offered
        return self._ends.add(OpenOffer(path, start, len(path), self._host.index))

    def offer_states(self, tracked: Tracked, num_tokens: int, ids: Int32Array, above: int) -> None:
        """Offer the states after the first tokens of a request. Raises ``PlanError`` for another number of them."""
        if len(ids) != self._num_states:
            raise PlanError(
                f"device_ids: {len(ids)} device blocks for the {self._num_states} states of a page"
            )
        path = self._states_below(tracked, num_tokens, ids, above)
        if path is not None:
            tracked.count_lookup(self._counters, self._layout)
            if not self._records and self._host.service is not None:
                _own(self._host.service, tracked, path)  # states below no page
            self.states.offer(tracked.request, num_tokens // self._block_size, path, ids)

    def end(self, request: OffloadRequest) -> None:
        """Offer the last states of a request that ends, if they may be stored."""
        tracked = self._requests.get(request)
        if tracked is not None and self._requests.may_offer(tracked):
            self.states.ended(request)
        self.states.forget(request)

    def _extended(
        self, tracked: Tracked, num_tokens: int, device_ids: Int32Array
    ) -> tuple[DevicePath, int] | None:
        """Return the path of a request on the device with the position of its first new block; None for none."""
        request, path = tracked.request, tracked.path
        start = 0 if path is None else len(path)
        stop = min(num_tokens // self._block_size * self._records, len(device_ids))
        if tracked.load is not None:
            stop = min(stop, tracked.load.load.first)
        if stop <= start or not self._requests.may_offer(tracked):
            return None
        self._requests.prepare(request, keeps_gil=True)
        hashes = tracked.keys_of_pages(self._records)
        stop = min(stop, len(hashes))
        if stop <= start:
            return None
        stop -= stop % self._records
        ids = device_ids_of(device_ids[start:stop], with_none=self._has_gaps)
        if path is None:
            path = tracked.path = DevicePath(tracked.parent)
        path.extend(hashes, ids)
        return path, start

    def _states_below(
        self, tracked: Tracked, num_tokens: int, device_ids: Int32Array, above: int
    ) -> DevicePath | None:
        """Return the path of the states at the end of a prefix, the first block of which is ``above``; None for none.

        ``above``: the device block of the last record of its pages, -1 if the engine does not have it.
        """
        request, pages = tracked.request, num_tokens // self._block_size
        is_end = self._num_states and pages and not num_tokens % self._block_size
        if not is_end or not self._requests.may_offer(tracked):
            return None
        if tracked.load is not None and pages > tracked.load.pages.start:
            return None
        self._requests.prepare(request, keeps_gil=True)
        hashes = request.block_hashes
        if pages > len(hashes):
            return None
        keys = state_keys(hashes[pages - 1 : pages], self._records, self._num_states)
        if not self._records:
            path = DevicePath(ROOT)
            path.extend(keys, device_ids)
            return path
        path = DevicePath(None)
        path.extend(
            np.concatenate((hashes[pages - 1 : pages], keys)),
            np.concatenate(([above], device_ids)).astype(np.int32),
        )
        return path


def _own(service: HostService, tracked: Tracked, path: DevicePath) -> None:
    if tracked.request.tenant is not None and (root := path.root) is not None:
        service.own(root, tracked.request.tenant)


class OffloadOffers(TierManager[OffloadRequest]):
    """The way out of an ``OffloadManager``: what the engine shows of its device blocks, and when it gives them away."""

    _requests: OffloadedRequests
    _host: HostTier
    _contents: DeviceContents
    _copies: CopyOut
    _owners: BlockOwners
    _offers: Offers
    _has_planned: bool

    @property
    def store_room(self) -> int:
        """Most blocks that plans may copy to the host tier now; a service grants slots in the background."""
        return self._host.index.room

    @property
    def has_queued_copies(self) -> bool:
        """True if the next plan may have copies of blocks that were offered."""
        with self._lock:
            return self._contents.has_offers or self._copies.has_queue

    def offer(
        self, request: OffloadRequest, num_tokens: int, device_ids: Int32Array, *, tells_end: bool = False
    ) -> int:
        """Offer the whole blocks of the first ``num_tokens`` tokens of a request, which lie in ``device_ids``.

        Call it after ``take_plans`` of the step that computes the last of them, or any time later, with the request's
        block table: the next plan may copy them. Repeated offers extend the first; one with nothing new is cheap. With
        groups of layers the table is that of the pages, as for ``load``, with ``NO_BLOCK`` for blocks that the engine
        has given up: a page is stored if the host tier has those already. Raises ``PlanError`` for ids of no device
        block.

        ``tells_end``: return the number by which ``take_offer_ends`` tells what became of the blocks that are new in
        this offer; else 0. The engine keeps those blocks until then.
        """
        num_tokens = count_of("num_tokens", num_tokens)
        table = self._owners.shared(table_of(device_ids))
        with self._lock:
            offered = self._offers.offer(self._requests.track(request), num_tokens, table)
            if offered is not None:
                self._describe([request])
            return self._offers.number(offered) if tells_end else 0

    def describe(self, keys: HashArray, tokens: Int32Array, parent: bytes, note: PathNote) -> None:
        """Tell a service that asks for it the tokens of blocks with keys of the engine, so that it can tell routers.

        ``parent``: the key of the block before them, empty for the beginning of a prompt.
        """
        with self._lock:
            if self._service is not None and self._service.notes.is_wanted:
                self._service.notes.describe_path(keys.tobytes(), tokens.tobytes(), parent, note)

    def take_offer_ends(self) -> list[OfferEnd]:
        """Return the ends of offers that were asked for, in the order of the offers: one that goes on holds up others.

        A block ends when it is in the host tier, is found to be there, or is dropped. Without a service that can be
        reached the offers end, and what was offered has to be forgotten.
        """
        with self._lock:
            return self._offers.take_ends(self._copies)

    def offer_states(
        self, request: OffloadRequest, num_tokens: int, device_ids: Int32Array, above: int = NO_BLOCK
    ) -> None:
        """Offer the states after the first ``num_tokens`` tokens, one device block for each of ``state_groups``.

        Call it once these tokens are offered, as often as you like: those at the end of the prompt and at growing
        distances are stored, and the last ones when the request ends (``settings.state_positions``). ``above``: the
        device block of the last record of their pages, without which the states are stored only if the host tier has
        that record already. States in the middle of a page, and those of a layout without states, are of no use.
        Raises ``PlanError`` for ids of no device block, or another number of them.
        """
        num_tokens, ids = count_of("num_tokens", num_tokens), self._owners.path(device_ids_of(device_ids))
        above = int(self._owners.shared(np.array([above], np.int32))[0])
        with self._lock:
            self._offers.offer_states(self._requests.track(request), num_tokens, ids, above)

    def evicted(self, device_ids: Int32Array) -> None:
        """Take the device blocks that get another content in the step whose plans are taken next.

        Wanted blocks in them are copied out first, and copies of them in flight are waited for by that step. Call it
        for every block that the step gives to a request, before ``take_plans``.
        """
        ids = self._owners.every(device_ids_of(device_ids))
        with self._lock:
            self._give_away(ids)

    def forget(self, device_ids: Int32Array) -> None:
        """Forget what was offered in these device blocks: it has gone, or is not wanted below."""
        ids = self._owners.every(device_ids_of(device_ids))
        with self._lock:
            self._offers.states.given_away(ids)
            self._contents.forget(ids)

    def next_evicted(self, device_ids: Int32Array) -> None:
        """Take the device blocks that the engine gives away next, coldest first: write_back keeps them clean."""
        ids = self._owners.every(device_ids_of(device_ids))
        if self.settings.write_policy is not WritePolicy.WRITE_BACK:
            return
        with self._lock:
            self._contents.next_evicted(ids)
            self._must_look = True

    def _give_away(self, ids: Int32Array) -> None:
        self._offers.states.given_away(ids)
        if self._copies.give_away(ids, self._contents, self._plans.open, self._plans.ledger):
            self._has_planned = True
