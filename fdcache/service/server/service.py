"""Service: carries out the requests of all clients. One thread owns it, and it touches no socket."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from fdcache.errors import FdcacheError, HostMemoryError, ProtocolError, RefusedError
from fdcache.metadata import HashArray
from fdcache.service.server import requests
from fdcache.service.server.arena import Arena
from fdcache.service.server.clients import Clients, RegisteredClient
from fdcache.service.server.deletion_log import DeletionLog
from fdcache.service.server.layout_storage import LayoutStorage
from fdcache.service.server.namespace import STOCK_DIVISOR, Namespace
from fdcache.service.server.namespaces import Namespaces
from fdcache.service.server.queues import Question, ToolQueue
from fdcache.service.server.storage import ServiceStorage
from fdcache.service.wire.arrays import int32_from, int64_from
from fdcache.service.wire.protocol import (
    FETCHED,
    Alive,
    Answer,
    Ask,
    Attach,
    Attached,
    Bye,
    Describe,
    DescribeAgain,
    Done,
    EndFetches,
    Events,
    FindEnd,
    FindStored,
    Forgotten,
    Granted,
    Heartbeat,
    Hinted,
    Hints,
    LoadEnded,
    Match,
    Matched,
    Missed,
    Prefetch,
    Publish,
    Refill,
    Refused,
    Register,
    Registered,
    RequestFrame,
    ToolAnswer,
    decode_request,
    is_question,
)
from fdcache.service.wire.views import ServiceTotals
from fdcache.settings.cache import EvictionPolicy
from fdcache.settings.server import ServerSettings
from fdcache.tiers.pool import EVENT_CLEARED
from fdcache.tiers.statistics import ReadTotals
from fdcache.tiers.storage_reads import StorageReads

log = logging.getLogger(__name__)

_LOOK_SECONDS = 5.0
"""Between two looks at the files of the arena."""

_LARGE = 64 << 10
"""Larger questions are decoded in their turn."""

Send = Callable[[bytes, Answer], bool]
"""Sends a notice to a client's routing id; False if its queue is full."""


class Service:
    """Namespaces, clients and the requests between them.

    No call blocks, and no slot is freed that a live process may be writing.
    """

    def __init__(
        self, settings: ServerSettings, arena: Arena, runtime_dir: Path, eviction: EvictionPolicy
    ) -> None:
        self.settings = settings
        self.arena = arena
        self.namespaces = Namespaces(settings, arena, eviction)
        self.storage: ServiceStorage | None = None
        self.deletions = DeletionLog(arena.directory / f"{arena.prefix}-deletions")
        self.totals = ServiceTotals()
        self.clients = Clients(runtime_dir, self.namespaces, self.reads_of, self.totals)
        self.started = time.time()
        self.paused = False
        self.draining = False
        self._faults: set[tuple[str, str]] = set()
        self._look_at = time.monotonic() + _LOOK_SECONDS
        self._lost_files: set[str] = set()
        self.has_urgent_events = False
        """True after a reset or deletion: clients must hear of it before the next answer."""
        self.answer_tool: Callable[[Ask], Iterator[bytes]] = lambda ask: iter(())
        self.drive_commands: Callable[[], None] = lambda: None
        """Goes on with commands of tools that take time; called by ``tick``."""
        self.tools = ToolQueue(self._slices, self.totals)
        self._handlers: dict[type, Callable[..., Answer]] = {
            Match: self._match,
            Prefetch: self._prefetch,
            FindStored: requests.stored,
            FindEnd: requests.last_end,
            EndFetches: requests.end_fetches,
            Refill: self._refill,
            Describe: requests.describe,
            Publish: self._publish,
            Missed: requests.missed,
            LoadEnded: requests.load_ended,
            Hints: requests.hints,
            Heartbeat: self._heartbeat,
            Forgotten: self._forgotten,
            Bye: self._bye,
        }

    @property
    def is_loading(self) -> bool:
        """Return True until the index of what storage held at the start is loaded."""
        return self.storage is not None and self.storage.is_loading

    @property
    def state(self) -> str:
        """One of ready, loading, recovering, paused and draining."""
        if self.draining:
            return "draining"
        if self.is_loading:
            return "loading"
        if self.paused:
            return "paused"
        return "recovering" if self.clients.earlier else "ready"

    @property
    def grants_slots(self) -> bool:
        """True while slots are granted to clients and to storage reads."""
        return not (self.paused or self.draining or self.clients.earlier)

    # --- requests -----------------------------------------------------------------------------------------

    def handle(self, identity: bytes, frame: RequestFrame) -> Answer | None:
        """Carry out one request, or return None for a question of a tool, which waits in ``tools``.

        Errors of the client become a ``Refused`` answer.
        """
        self.totals.requests += 1
        began = time.perf_counter()
        kind = "malformed"
        try:
            request = self._take_request(identity, frame)
            if request is None:
                kind = "question"
                return None
            kind = type(request).__name__.lower()
            return self._carry_out(identity, frame.session, request)
        except RefusedError as refusal:
            return self._refused(frame, kind, refusal.code, refusal)
        except (ProtocolError, ValueError, IndexError) as error:
            return self._refused(frame, kind, "malformed", error)
        except FdcacheError as error:
            return self._refused(frame, kind, type(error).__name__, error)
        except Exception as error:
            # A fault of the service. It must not end the loop, which serves others.
            if (fault := (kind, type(error).__name__)) not in self._faults:
                self._faults.add(fault)  # logged once: a client may repeat it any number of times
                log.exception("a request failed: %s", kind)
            failed = RuntimeError(f"{kind}: {fault[1]}: {error}; the service's log has the traceback")
            return self._refused(frame, kind, "internal", failed)
        finally:
            if kind != "question":
                self.totals.latencies.observe(kind, time.perf_counter() - began)

    def _take_request(self, identity: bytes, frame: RequestFrame) -> object | None:
        """Return a request that is carried out now; queue a question of a tool, and read a large one in its turn."""
        size = memoryview(frame.body).nbytes
        if size > _LARGE and is_question(frame):
            self.tools.add(identity, Question(frame.id, size, lambda: decode_request(frame)))
            return None
        request = decode_request(frame)
        if isinstance(request, Ask) and not (request.what == "reset" and frame.session in self.clients):
            self.tools.add(identity, Question(frame.id, size, lambda: request))
            return None
        return request

    def _refused(self, frame: RequestFrame, kind: str, code: str, error: Exception) -> Refused:
        self.totals.refused += 1
        # The text of the error may repeat what the client sent, which may be a secret.
        log.debug("session %d: %s refused: %s", frame.session, kind, code)
        return Refused(code, str(error))

    def _carry_out(self, identity: bytes, session: int, request: object) -> Answer:
        if isinstance(request, Ask):
            return ToolAnswer(b"".join(self._slices(request)))
        if isinstance(request, Register):
            return self._register(identity, request)
        if isinstance(request, Attach):
            self.make_lost_files()
            namespace = self.clients.attach(session, request).namespace
            return Attached(namespace.geometry, namespace.layout.fingerprint)
        if self.draining and isinstance(request, Match):
            raise RefusedError("draining", "the service is shutting down")
        return self._handlers[type(request)](self.clients.heard_from(session), request)

    def _register(self, identity: bytes, request: Register) -> Answer:
        if self.draining:
            raise RefusedError("draining", "the service is shutting down; try again later")
        self.make_lost_files()
        client = self.clients.register(identity, request)
        client.forgotten = min(request.forgotten, self.deletions.latest)
        namespace = client.namespace
        self.open_tables()
        return Registered(
            client.session,
            namespace.geometry,
            namespace.num_slots,
            str(client.ring_path),
            storage=self.storage is not None,
            notes=namespace.feed is not None,
        )

    def _slices(self, ask: Ask) -> Iterator[bytes]:
        """Yield the answer to a tool, or to an engine that resets its namespace, in slices."""
        self.open_tables(ask.what != "reset")  # no client begins a load while a reset finds out who loads
        self.clients.take_runs()
        slices = self.answer_tool(ask)
        while True:
            try:
                part = next(slices)
            except StopIteration:
                return
            finally:
                self.open_tables()
            yield part

    def open_tables(self, allowed: bool = True) -> None:
        """Allow clients to pin by themselves what they find, except where every look-up has to find nothing now."""
        now = time.monotonic()
        for namespace in self.namespaces.values():
            if namespace.tier is not None:
                is_closed = self.paused or self.draining or now < namespace.draining_until
                namespace.tier.open_table(allowed and not is_closed)

    def _match(self, client: RegisteredClient, request: Match) -> Answer:
        client.take_runs()
        if client.ring_error:
            raise RefusedError("malformed", client.ring_error)
        answer = requests.match(client, request, paused=self.paused, may_read=self.grants_slots)
        if answer.fetched and (storage := self.storage_of(client.namespace)) is not None:
            parts = np.diff(int32_from(answer.fetched, "fetched").reshape(-1, 2))[:, 0]
            storage.hit_blocks += int(parts[np.frombuffer(answer.states, np.uint8) == FETCHED].sum())
        self._send_reads(client)
        return answer

    def _prefetch(self, client: RegisteredClient, request: Prefetch) -> Answer:
        if self.grants_slots:
            requests.prefetch(client, request)
            self._send_reads(client)
        return Done()

    def _publish(self, client: RegisteredClient, request: Publish) -> Answer:
        answer, stored = requests.publish(client, request, self.deletions)
        if (storage := self.storage_of(client.namespace)) is not None:
            storage.on_arrival(stored)
        return answer

    def _refill(self, client: RegisteredClient, request: Refill) -> Answer:
        namespace = client.namespace
        slots, generations = np.empty(0, np.int32), np.empty(0, np.uint32)
        if self.grants_slots and not self.namespaces.reclaims.is_held(namespace):
            if namespace.tier is not None and namespace.tier.stats().free < request.count:
                self.clients.make_room(namespace)
            peers = len(self.clients.of(namespace))
            most = max(namespace.max_slots // (STOCK_DIVISOR * peers), 1) - len(client.stock)
            slots, generations = namespace.grant(client.stock_lease, max(0, min(request.count, most)))
            client.stock.update(zip(slots.tolist(), generations.tolist(), strict=True))
        return Granted(slots.tobytes(), generations.tobytes(), namespace.num_slots)

    def _heartbeat(self, client: RegisteredClient, request: Heartbeat) -> Answer:
        client.update(request)
        tier = client.namespace.tier
        figures = list(msgspec.structs.astuple(tier.usage())) if tier is not None else []
        storage = self.storage_of(client.namespace)
        reads = storage.read_totals if storage is not None else ReadTotals()
        return Alive(figures, device_resets=client.device_resets, reads=reads)

    def _forgotten(self, client: RegisteredClient, request: Forgotten) -> Answer:
        client.forgotten = max(client.forgotten, min(request.number, self.deletions.latest))
        return Done()

    def _bye(self, client: RegisteredClient, request: Bye) -> Answer:
        self.clients.remove(client)
        log.info("client %s said goodbye", client.name)
        return Done()

    def on_undelivered(self, session: int, answer: Answer) -> None:
        """Take back what an answer gave that the client's queue had no room for."""
        self.totals.undelivered += 1
        client = self.clients.get(session)
        if client is None:
            return
        if isinstance(answer, Matched):
            client.unpin(int64_from(answer.runs, "runs").tolist())
        elif isinstance(answer, Granted):
            requests.take_back(client, int32_from(answer.slots, "slots"))

    # --- storage ------------------------------------------------------------------------------------------

    def storage_of(self, namespace: Namespace) -> LayoutStorage | None:
        """Return the storage of a namespace; None without one, and until it is open."""
        return self.storage.of(namespace) if self.storage is not None else None

    def reads_of(self, namespace: Namespace) -> StorageReads | None:
        """Return the reads from a namespace's storage; None without one, and until it is open."""
        storage = self.storage_of(namespace)
        return storage.reads if storage is not None else None

    def make_room_for(self, namespace: Namespace, count: int) -> None:
        """Grow a namespace, as far as it may, before ``count`` blocks are read into it."""
        tier = namespace.tier
        while tier is not None and tier.stats().free < count and namespace.grow():
            pass
        if tier is not None and tier.stats().free < count:
            self.clients.make_room(namespace)

    def work(self) -> None:
        """Continue the reads and writes of storage."""
        if self.storage is not None:
            self.storage.work(
                self.namespaces, may_read=self.grants_slots, may_write=self.draining or not self.paused
            )

    def _send_reads(self, client: RegisteredClient) -> None:
        if (storage := self.storage_of(client.namespace)) is not None:
            storage.send()

    # --- upkeep -------------------------------------------------------------------------------------------

    def tick(self, send: Send) -> None:
        """Do what is due regularly: remove dead clients, continue storage, send events and reclaims."""
        self.clients.take_runs()
        self.clients.reap(self.settings.session_timeout)
        if time.monotonic() >= self._look_at:
            self.make_lost_files()
        self.open_tables()
        self.work()
        self.drive_commands()
        if (feeds := self.namespaces.feeds) is not None:
            used = (client.namespace.feed for client in self.clients.values())
            feeds.follow({feed for feed in used if feed is not None})
            feeds.work()
            forgetful = feeds.take_forgetful()
            for client in self.clients.values():
                if client.namespace.feed in forgetful:
                    send(client.identity, DescribeAgain())
        for namespace in self.namespaces.values():
            namespace.save_learned()
        self.send_events(send)
        self._send_hint_results(send)
        if self.namespaces.reclaims.unsent:
            for namespace, recall in self.namespaces.reclaims.take_new():
                for client in self.clients.of(namespace):
                    send(client.identity, recall)

    def make_lost_files(self) -> None:
        """Make the files of the arena anew that others removed, such as a cleaner of its directory.

        What fails is logged, and tried again some seconds later.
        """
        self._look_at = time.monotonic() + _LOOK_SECONDS
        lost = set()
        try:
            self.arena.make_lost_files()
        except (HostMemoryError, OSError) as error:
            lost.add(str(error))
        for namespace in self.namespaces.values():
            try:
                if namespace.make_lost_files():
                    self.clients.end_sessions(namespace)
            except (HostMemoryError, OSError) as error:
                lost.add(str(error))
        for problem in sorted(lost - self._lost_files):
            log.error("the arena has lost files: %s", problem)
        self._lost_files = lost

    def delete_from_devices(
        self, namespace: str, hashes: HashArray, tenant: bytes = b"", *, everything: bool = False
    ) -> None:
        """Have engines forget blocks and all below them, which are about to leave the tiers, or a tenant's, or all."""
        before = self.deletions.latest
        self.deletions.add(namespace, hashes, tenant, everything=everything)
        self.has_urgent_events = True
        for each in self.namespaces.values():
            if each.id == namespace and each.feed is not None:
                each.feed.forget_deleted(self.deletions.after(namespace, before))

    def _send_deletions(self, send: Send) -> None:
        """Tell clients what to forget on their devices, again if a message was lost."""
        for client in self.clients.values():
            told = max(client.told, client.forgotten)
            if self.deletions.is_behind(client.namespace.id, told):
                forget = self.deletions.after(client.namespace.id, told)
                if send(client.identity, forget):
                    client.told = forget.number

    def _send_hint_results(self, send: Send) -> None:
        """Tell clients what became of their hints whose time is over."""
        for namespace in self.namespaces.values():
            if not namespace.hints.open:
                continue
            for session, results in namespace.hints.settle().items():
                if (client := self.clients.get(session)) is not None:
                    send(client.identity, Hinted(results))

    def send_events(self, send: Send) -> None:
        """Send clients what entered and left the host tier of their namespace, and what they are to forget.

        Clients that did not ask for events receive resets and losses only.
        """
        self.has_urgent_events = False
        self._send_deletions(send)
        for namespace in self.namespaces.values():
            namespace.collect_events()
            namespace.clear_left()
            while namespace.pending_events:
                kinds, hashes, parents = namespace.pending_events.popleft()
                everything = Events(kinds.tobytes(), hashes.tobytes(), parents.tobytes())
                vital = kinds >= EVENT_CLEARED
                resets = Events(kinds[vital].tobytes(), hashes[vital].tobytes(), parents[vital].tobytes())
                for client in self.clients.of(namespace):
                    if client.wants_events or vital.any():
                        send(client.identity, everything if client.wants_events else resets)
