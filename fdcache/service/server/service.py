"""Service: what the node's cache knows and decides. One thread owns it, and it touches no socket."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fdcache.errors import FdcacheError, ProtocolError
from fdcache.service.server import requests
from fdcache.service.server.arena import Arena
from fdcache.service.server.clients import Client
from fdcache.service.server.history import Totals
from fdcache.service.server.layout_storage import LayoutStorage
from fdcache.service.server.namespace import SHARE_OF_STOCK, Namespace
from fdcache.service.server.sessions import Sessions
from fdcache.service.server.shares import Shares
from fdcache.service.server.storage import ServiceStorage
from fdcache.service.wire.protocol import (
    TIER_FIGURES,
    Alive,
    Answer,
    Ask,
    Attach,
    Attached,
    Bye,
    Done,
    EndFetches,
    Events,
    Granted,
    Heartbeat,
    LoadEnded,
    Match,
    Matched,
    Missed,
    Prefetch,
    Publish,
    Refill,
    RefusalError,
    Refused,
    Register,
    Registered,
    Release,
    RequestFrame,
    decode_request,
    int32_from,
)
from fdcache.settings.server import ServerSettings
from fdcache.tiers.pool import EVENT_CLEARED

log = logging.getLogger("fdcache.service.server")

Teller = Callable[[bytes, Answer], bool]


class Service:
    """Namespaces, clients and their requests.

    ``tell(identity, notice)`` sends a notice and says whether it was taken. Nothing here blocks, and nothing
    is freed that a living process may be writing.
    """

    def __init__(self, settings: ServerSettings, arena: Arena, runtime_dir: Path) -> None:
        self.settings = settings
        self.arena = arena
        self.shares = Shares(settings, arena)
        self.storage: ServiceStorage | None = None
        self.has_news = False
        """Whether clients have to be told of events before anything else: a layout's tier was reset."""
        self.totals = Totals()
        self.sessions = Sessions(runtime_dir, self.shares, self.storage_of, self.totals)
        self.started = time.time()
        self.paused = False
        self.draining = False
        self.answer_tool: Callable[[Ask], Answer] = lambda ask: Refused("unknown", "no tools here")
        self._handlers: dict[type, Callable[..., Answer]] = {
            Match: self._match,
            Prefetch: self._prefetch,
            EndFetches: requests.end_fetches,
            Release: requests.release,
            Refill: self._refill,
            Publish: self._publish,
            Missed: requests.missed,
            LoadEnded: requests.load_ended,
            Heartbeat: self._heartbeat,
            Bye: self._bye,
        }

    @property
    def namespaces(self) -> dict[bytes, Namespace]:
        """The layouts, by fingerprint."""
        return self.shares.namespaces

    @property
    def clients(self) -> dict[int, Client]:
        """Who is registered, by session."""
        return self.sessions.clients

    @property
    def is_loading(self) -> bool:
        """Whether what storage held at the start is not known yet."""
        return self.storage is not None and self.storage.is_loading

    # --- requests -----------------------------------------------------------------------------------------

    def handle(self, identity: bytes, frame: RequestFrame) -> Answer:
        """Carry out one request. Never raises for what a client sent."""
        self.totals.requests += 1
        began = time.perf_counter()
        kind = "malformed"
        try:
            request = decode_request(frame)
            kind = type(request).__name__.lower()
            return self._carry_out(identity, frame.session, request)
        except RefusalError as refusal:
            self.totals.refused += 1
            return Refused(refusal.code, str(refusal))
        except (ProtocolError, ValueError, IndexError) as error:
            self.totals.refused += 1
            return Refused("malformed", str(error))
        except FdcacheError as error:
            self.totals.refused += 1
            return Refused(type(error).__name__, str(error))
        finally:
            self.totals.latencies.observe(kind, time.perf_counter() - began)

    def _carry_out(self, identity: bytes, session: int, request: object) -> Answer:
        if isinstance(request, Ask):
            return self.answer_tool(request)
        if isinstance(request, Register):
            return self._register(identity, request)
        if isinstance(request, Attach):
            return self._attach(session, request)
        if self.draining and isinstance(request, Match):
            raise RefusalError("draining", "the service is about to end")
        return self._handlers[type(request)](self.sessions.heard(session), request)

    def _register(self, identity: bytes, request: Register) -> Answer:
        if self.draining:
            raise RefusalError("draining", "the service is about to end; try again later")
        client = self.sessions.register(identity, request)
        namespace = client.namespace
        return Registered(
            client.session, namespace.geometry, namespace.num_slots, storage=self.storage is not None
        )

    def _attach(self, session: int, request: Attach) -> Answer:
        namespace = self.sessions.attach(session, request).namespace
        return Attached(namespace.geometry, namespace.layout.fingerprint)

    def _match(self, client: Client, request: Match) -> Answer:
        answer = requests.match(client, request, paused=self.paused, may_read=self._gives_slots)
        self._send_reads(client)
        return answer

    def _prefetch(self, client: Client, request: Prefetch) -> Answer:
        if self._gives_slots:
            requests.prefetch(client, request)
            self._send_reads(client)
        return Done()

    def _publish(self, client: Client, request: Publish) -> Answer:
        answer, stored = requests.publish(client, request)
        if (storage := self.storage_of(client.namespace)) is not None:
            storage.on_arrival(stored)
        return answer

    @property
    def _gives_slots(self) -> bool:
        """Whether slots are given away: to clients to copy into, and to what comes from storage."""
        return not (self.paused or self.draining or self.sessions.earlier)

    def storage_of(self, namespace: Namespace) -> LayoutStorage | None:
        """The storage of a layout; None without one, and until it is open."""
        return self.storage.of(namespace) if self.storage is not None else None

    def _send_reads(self, client: Client) -> None:
        if (storage := self.storage_of(client.namespace)) is not None:
            storage.send()

    def make_room_for(self, namespace: Namespace, count: int) -> None:
        """Let a layout grow before so many blocks come to its host tier, as far as it may."""
        tier = namespace.tier
        while tier is not None and tier.stats().free < count and namespace.grow():
            pass
        if tier is not None and tier.stats().free < count:
            self.sessions.make_room(namespace)

    def work(self) -> None:
        """Go on with what is read from storage and written to it."""
        if self.storage is not None:
            self.storage.work(
                self.namespaces, may_read=self._gives_slots, may_write=self.draining or not self.paused
            )

    def _refill(self, client: Client, request: Refill) -> Answer:
        namespace = client.namespace
        nothing = np.empty(0, np.int32)
        slots, generations = nothing, nothing.view(np.uint32)
        if self._gives_slots and not self.shares.recalls.is_held(namespace):
            if namespace.tier is not None and namespace.tier.stats().free < request.count:
                self.sessions.make_room(namespace)
            fellows = len(self.sessions.of(namespace))
            most = max(namespace.most_slots // (SHARE_OF_STOCK * fellows), 1) - len(client.stock)
            slots, generations = namespace.grant(client.stock_lease, max(0, min(request.count, most)))
            client.stock.update(zip(slots.tolist(), generations.tolist(), strict=True))
        return Granted(slots.tobytes(), generations.tobytes(), namespace.num_slots)

    def undelivered(self, session: int, answer: Answer) -> None:
        """An answer that its client's queue has no room for: what it gives is taken back."""
        self.totals.undelivered += 1
        client = self.clients.get(session)
        if client is None:
            return
        if isinstance(answer, Matched):
            requests.release(client, Release(answer.leases))
        elif isinstance(answer, Granted):
            requests.take_back(client, int32_from(answer.slots, "slots"))

    def _heartbeat(self, client: Client, request: Heartbeat) -> Answer:
        client.figures = request.figures[:65536]
        client.count(request)
        client.device_resets_applied = max(client.device_resets_applied, request.resets)
        tier = client.namespace.tier
        figures = tier.stats() if tier is not None else None
        return Alive(
            [int(getattr(figures, name)) for name in TIER_FIGURES] if figures else [],
            device_resets=client.device_resets,
        )

    def _bye(self, client: Client, request: Bye) -> Answer:
        self.sessions.remove(client)
        log.info("client %s said goodbye", client.name)
        return Done()

    # --- upkeep -------------------------------------------------------------------------------------------

    def tick(self, tell: Teller) -> None:
        """What time brings: deaths, silence, events to be told."""
        self.sessions.look_after(self.settings.session_timeout)
        self.work()
        self.tell_events(tell)
        self.shares.recalls.tell(self.clients.values(), tell)

    def tell_events(self, tell: Teller) -> None:
        """Tell clients what entered and left their layout's tier."""
        self.has_news = False
        for namespace in self.namespaces.values():
            namespace.collect_events()
            while namespace.pending_events:
                kinds, hashes, parents = namespace.pending_events.popleft()
                everything = Events(kinds.tobytes(), hashes.tobytes(), parents.tobytes())
                matters = kinds >= EVENT_CLEARED
                whole = Events(
                    kinds[matters].tobytes(), hashes[matters].tobytes(), parents[matters].tobytes()
                )
                for client in self.sessions.of(namespace):
                    if client.wants_events or matters.any():
                        tell(client.identity, everything if client.wants_events else whole)
