"""Hand-overs of an engine that owns its device cache, on the scheduler's side.

    manager = OffloadManager.from_settings(layout, settings)
    handovers = EngineHandovers.from_settings(manager, num_device_blocks, settings)   # None with FDCACHE_TRANSFER=none
    handovers.send(request, name, num_tokens, block_table)    # prefill, once they are computed
    handovers.send_ahead(request, name, num_tokens)           # or before, told to the ranks as they are computed
    handovers.fetch(request, source)                          # decode, when the request arrives

A match then promises the whole prompt: what the tiers below the device have is loaded, and the rest is fetched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fdcache.block_owners import BlockOwners
from fdcache.errors import RequestStateError
from fdcache.groups import path_end
from fdcache.manager.keyed import OffloadRequest
from fdcache.manager.loads import EngineFetch, PeerRun, table_of
from fdcache.manager.offload import OffloadManager
from fdcache.manager.requests import PeerSource, Request
from fdcache.metadata import NO_BLOCK, HashArray, Int32Array, PeerTask, TransferReport
from fdcache.settings import Settings
from fdcache.settings.peers import TransferRole
from fdcache.transfer.connector import layout_of_peer
from fdcache.transfer.handovers import HandoverTasks, PeerTerms


@dataclass(slots=True, eq=False)
class EngineSend:
    """Blocks that the engine keeps until every rank has reported them.

    ``is_ahead``: later steps compute them. ``number``: of the task, 0 until it is planned. ``is_awaited``: the engine
    waits for its end. ``was_asked``: a peer has asked for it, as a rank has reported. ``is_over``: all ranks have.
    """

    request: OffloadRequest
    transfer: str
    hashes: HashArray
    slots: Int32Array
    is_ahead: bool = False
    number: int = 0
    is_awaited: bool = False
    was_asked: bool = False
    is_over: bool = False


class EngineHandovers(HandoverTasks[EngineSend, EngineFetch]):
    """The hand-overs of one ``OffloadManager``.

    ``num_device_blocks``: those of the engine. Calls are thread-safe. Raises ``TransferNotFoundError`` for a connector
    that does not exist, ``TransferError`` for ranks of peers that cannot be served.
    """

    def __init__(self, manager: OffloadManager, terms: PeerTerms, num_device_blocks: int) -> None:
        super().__init__(terms)
        self._manager = manager
        self._peer_layout = layout_of_peer(manager.layout, terms.settings.peer_ranks)
        self._owners = BlockOwners(manager.layout)
        self._num_device_blocks = num_device_blocks
        self._unsent: list[EngineSend] = []
        self._over: list[int] = []
        self._unheld: dict[str, OffloadRequest] = {}  # that wait to fetch, without a hold yet
        self._holds: dict[str, int] = {}
        self._held_by: dict[int, str] = {}
        parts = manager.attach_hooks(self)
        self._lock, self._requests, self._wake = parts.lock, parts.requests, parts.wake
        self._loads, self._counters = parts.requests.native_loads, parts.counters
        self._computing = parts.seconds_to_compute

    @classmethod
    def from_settings(
        cls, manager: OffloadManager, num_device_blocks: int, settings: Settings | None = None
    ) -> EngineHandovers | None:
        """Return those of a manager, None with FDCACHE_TRANSFER=none. ``settings``: by default the environment's."""
        terms = PeerTerms.of(settings or Settings.load())
        return cls(manager, terms, num_device_blocks) if terms.settings.is_on else None

    # --- calls of the engine ----------------------------------------------------------------------------------

    def send(self, request: Request, transfer: str, num_tokens: int, device_ids: Int32Array) -> int:
        """Hand over the blocks of a request's first ``num_tokens`` tokens under this name; return their number.

        The steps before the next plan compute them; the last one need not be full. The engine keeps them until
        every rank has reported the task of this name, also after ``finish``. With groups of layers those are handed
        over that the next token needs: ``device_ids`` has for each page the blocks of its records, as for
        ``OffloadManager.load``, then those of the states after exactly these tokens. Return 0 if the engine has given
        up one of them. Raises ``RequestStateError`` for a table without these blocks, or a name that another send has.
        """
        with self._lock:
            self._requests.prepare(request)
            keys, needed = self._path(request, min(num_tokens, request.num_tokens))
            slots = self._owners.path(table_of(device_ids)[: len(keys)])
            if len(slots) < len(keys) or request.num_tokens < num_tokens:
                raise RequestStateError(
                    f"request {request.request_id!r} has {len(slots)} of the {len(keys)} blocks to hand over"
                )
            hashes = keys
            if needed is not None:
                hashes, slots = keys[needed], slots[needed]
            if (slots == NO_BLOCK).any():
                return 0
            self._begin_send(EngineSend(request, transfer, hashes, slots, is_awaited=True))
            return len(hashes)

    def send_ahead(self, request: Request, transfer: str, num_tokens: int) -> EngineSend:
        """Hand over the blocks of a request's first ``num_tokens`` tokens, which steps from the next plan on compute.

        Tell the ranks which are computed, and where, with ``CacheController.blocks_computed`` and the number of the
        send. The engine keeps them until it gives the request up and ``end`` was called, or until every rank has
        reported. Layouts with groups of layers hand over at the end alone. Raises ``RequestStateError`` like ``send``.
        """
        with self._lock:
            if self._manager.layout.groups or request.num_tokens < num_tokens:
                raise RequestStateError(
                    f"request {request.request_id!r} cannot be handed over ahead: it has {request.num_tokens} of "
                    f"{num_tokens} tokens, or layers of several kinds, which are handed over at the end"
                )
            self._requests.prepare(request)
            keys, _ = self._path(request, num_tokens)
            slots = np.full(len(keys), NO_BLOCK, np.int32)
            send = EngineSend(request, transfer, keys, slots, is_ahead=True)
            self._begin_send(send)
            return send

    def _begin_send(self, send: EngineSend) -> None:
        self._require_new(send.transfer)
        self._named[send.transfer] = send
        self._unsent.append(send)
        self._wake()

    def fetch(self, request: Request, source: PeerSource) -> int:
        """Take note where a request that has arrived fetches the blocks that it lacks; return how many its prompt has.

        With groups of layers these are what the last token needs, which is computed: none can go back by one.
        Return 0 if it may fetch none, and tell the peer. The next ``load`` fetches; without one, ``unmatch`` and
        ``finish`` tell the peer.
        """
        with self._lock:
            self.unwanted(request)
            self._requests.prepare(request)
            if self._holds_too_much(self._num_device_blocks):
                self._counters.fetches_skipped += 1
                self.decline([source])
                return 0
            num_tokens = request.num_tokens - self.tokens_left
            keys, needed = self._path(request, num_tokens)
            most_pages = -(-(num_tokens - self.least_tokens) // self._manager.layout.block_size)
            theirs = self._keys_of_peer(request, num_tokens)
            run = PeerRun(source, keys, num_tokens, most_pages, needed, theirs)
            self._requests.track(request).peer = run
            if not source.is_ahead:  # of which prefill may know nothing yet
                self._unheld[request.request_id] = request
            self._wake()
            return len(run.hashes)

    def decline(self, sources: Iterable[PeerSource]) -> None:
        """Tell prefill instances that transfers are not wanted."""
        with self._lock:
            super().decline(sources)
            self._wake()

    def end(self, request: OffloadRequest) -> None:
        """End the hand-overs of a request, and tell the peers. Idempotent."""
        with self._lock:
            self._unsent = [each for each in self._unsent if each.request is not request]
            self._cancelled += [number for number, each in self._sends.items() if each.request is request]
            self._wake()
            self._named = {name: each for name, each in self._named.items() if each.request is not request}
            self.released(request)

    def take_over(self) -> list[int]:
        """Return the numbers of the sends that have ended since the last call, and that the engine did not wait for."""
        with self._lock:
            over, self._over = self._over, []
            return over

    @property
    def role(self) -> TransferRole:
        """Part of this engine in hand-overs."""
        return TransferRole(self._terms.settings.role)

    @property
    def least_tokens(self) -> int:
        """Tokens of the smallest block. A prompt of no more is sooner computed."""
        layout = self._manager.layout
        return min((group.block_size for group in layout.groups), default=layout.block_size)

    @property
    def tokens_left(self) -> int:
        """Tokens of a prompt that prefill leaves to decode: neither a state nor a window can go back by one."""
        return int(bool(self._manager.layout.groups))

    def _path(self, request: Request, num_tokens: int) -> tuple[HashArray, NDArray[np.bool_] | None]:
        """Return the keys of a path, and which of its records are handed over, None for all."""
        layout = self._manager.layout
        hashes = request.hashes_to(num_tokens, layout, self._manager.settings.lookahead_tokens)
        return path_end(layout.groups, hashes, num_tokens) if layout.groups else (hashes, None)

    def _keys_of_peer(self, request: Request, num_tokens: int) -> HashArray | None:
        """Return the keys of what a peer of another layout hands over."""
        layout, lookahead = self._peer_layout, self._manager.settings.lookahead_tokens
        if layout.tp_size == self._manager.layout.tp_size:
            return None
        hashes = request.hashes_to(num_tokens, layout, lookahead, request.hashes_for(layout, lookahead))
        if not layout.groups:
            return hashes
        keys, needed = path_end(layout.groups, hashes, num_tokens)
        return keys[needed]

    # --- hooks of the manager ---------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True if the next plan has a hand-over to begin or to end."""
        return bool(self._unsent or self._declined or self._cancelled or self._unheld)

    def unwanted(self, request: OffloadRequest) -> None:
        """Tell the peer that a request fetches nothing."""
        tracked = self._requests.get(request)
        if tracked is not None and tracked.peer is not None:
            self.decline([tracked.peer.source])
            tracked.peer = None
        self._drop_hold(request)

    def released(self, request: OffloadRequest) -> None:
        """End what a request fetches, or would fetch, as it ends."""
        self.unwanted(request)
        for number, each in self._fetches.items():
            if each.loading.request is request and not each.given_up:
                each.given_up = True
                self._cancelled.append(number)
        self._requests.loads.give_up_fetches(request)
        self._wake()

    # --- plans ------------------------------------------------------------------------------------------------

    def _due_sends(self) -> list[EngineSend]:
        due, self._unsent = self._unsent, []
        return due

    def _send_task(self, send: EngineSend) -> PeerTask:
        computed = 0 if send.is_ahead else len(send.hashes)
        return self._task_of_send(send.transfer, send.hashes, send.slots, computed)

    def _send_planned(self, number: int, send: EngineSend) -> None:
        send.number = number

    def _send_ended(self, send: EngineSend) -> None:
        send.is_over = True
        if not send.is_awaited:
            self._over.append(send.number)

    def record(self, report: TransferReport) -> None:
        """Count the hand-over that a rank has reported, and note whether a peer has asked for it."""
        super().record(report)
        send = self._sends.get(report.plan_id)
        if send is not None and report.handover is not None:
            send.was_asked |= bool(report.handover.peer)

    def _due_fetches(self) -> list[EngineFetch]:
        fetches = self._requests.loads.take_fetches()
        for each in fetches:
            self._drop_hold(each.loading.request)
        return fetches

    def _seconds_to_compute(self, fetch: EngineFetch) -> float | None:
        seconds = self._computing(fetch.pages * self._manager.layout.block_size, fetch.run.num_tokens)
        return seconds if seconds is None or not fetch.source.is_ahead else 2 * seconds

    def _path_of(self, fetch: EngineFetch) -> tuple[HashArray, bytes]:
        theirs = fetch.run.peer_keys
        part = slice(fetch.first, fetch.first + len(fetch.slots))
        return fetch.run.hashes, b"" if theirs is None else theirs[part].tobytes()

    # --- holds: prefill keeps its blocks while a request waits for room ----------------------------------------

    def _due_holds(self) -> list[tuple[PeerSource, str]]:
        waiting, self._unheld = self._unheld, {}
        found = ((name, self._requests.get(request)) for name, request in waiting.items())
        return [
            (each.peer.source, name) for name, each in found if each is not None and each.peer is not None
        ]

    def _hold_sent(self, plan_id: int, request_id: str) -> None:
        self._holds[request_id] = plan_id
        self._held_by[plan_id] = request_id

    def _drop_hold(self, request: OffloadRequest) -> None:
        self._unheld.pop(request.request_id, None)
        if (plan_id := self._holds.pop(request.request_id, None)) is not None:
            del self._held_by[plan_id]
            self._cancelled.append(plan_id)

    def _hold_ended(self, plan_id: int) -> None:
        """Fetch nothing any more: prefill has told that it has no such transfer, or does not answer."""
        if (request_id := self._held_by.pop(plan_id, None)) is None:
            return
        del self._holds[request_id]
        tracked = self._requests.named(request_id)
        if tracked is not None:
            tracked.peer = None
