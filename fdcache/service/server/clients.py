"""Registered clients: what each one holds, how it registers, and how the service notices that it is gone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from secrets import randbits
from typing import Any

import msgspec

from fdcache._core import MemoryGuard, RunRing
from fdcache.errors import RefusedError
from fdcache.layout import KVLayout
from fdcache.machine.decoding import MALFORMED
from fdcache.metadata import HashArray
from fdcache.service.server.namespace import Namespace, Run
from fdcache.service.server.namespaces import Namespaces
from fdcache.service.wire.client_views import HIT_TIERS
from fdcache.service.wire.liveness import Live, Watch, is_live_file, live_processes
from fdcache.service.wire.protocol import (
    Attach,
    Heartbeat,
    Register,
)
from fdcache.service.wire.shared_memory import RING_BYTES, create_shared
from fdcache.service.wire.views import MissReason, NamespaceTotals, ServiceTotals
from fdcache.tiers.fetches import FetchTable
from fdcache.tiers.statistics import Count, Traffic
from fdcache.tiers.storage_reads import StorageReads

log = logging.getLogger(__name__)

MAX_CLIENTS = 1024
MAX_RUNS = 65536
MAX_LAYOUT_BYTES = 1 << 18
MAX_FIGURES_BYTES = 1 << 16
MAX_NAME_LENGTH = 200
MAX_WATCHES = 8
"""Processes that a client may have for each rank."""
MAX_FETCHED_BLOCKS = 1 << 20
"""Limit of the hashes of one client's fetches."""


class PromptTokens(msgspec.Struct, frozen=True):
    """Tokens of prompts that a client looked up, and found by tier, since it began."""

    lookup_tokens: Count = 0
    device_hit_tokens: Count = 0
    host_hit_tokens: Count = 0
    storage_hit_tokens: Count = 0

    def hit_tokens(self, tier: str) -> int:
        """Return the tokens found in ``device``, ``host`` or ``storage``."""
        return int(getattr(self, f"{tier}_hit_tokens"))


class _PromptFigures(msgspec.Struct):
    counters: PromptTokens = PromptTokens()


_figures = msgspec.json.Decoder(_PromptFigures)


@dataclass(eq=False, slots=True)
class RegisteredClient:
    """One session of a client.

    It owns the slots in ``stock`` until it returns them or all of its processes are proved dead. Silence frees none.
    """

    session: int
    identity: bytes
    """ZeroMQ routing id."""
    namespace: Namespace
    live: Live
    name: str
    wants_events: bool
    watches: list[Watch]
    """Its scheduler and worker processes."""
    stock_lease: int
    fetches: FetchTable
    ring: RunRing
    ring_guard: MemoryGuard
    ring_path: Path
    stock: dict[int, int] = field(default_factory=dict)
    """Slots that it may copy into, with their generations."""
    stale_stock: dict[int, set[int]] = field(default_factory=dict)
    """The slots of ``stock`` that were granted before a reset, by lease."""
    runs: dict[int, int] = field(default_factory=dict)
    """Leases of its pinned look-ups, by the numbers that it gave them."""
    ring_error: str = ""
    """What was wrong in its ring, which is not read any more then."""
    has_fault: bool = False
    """True once the service failed to look after it."""
    figures: bytes = b"{}"
    since: float = field(default_factory=time.time)
    heartbeat_at: float = field(default_factory=time.monotonic)
    silent: bool = False
    num_ranks: int = 1
    """Ranks of the engine, of which some may keep their blocks in common."""
    ranks: dict[str, int] = field(default_factory=dict)
    """Ranks by the live file of their worker."""
    device_resets: int = 0
    device_resets_applied: int = 0
    forgotten: int = 0
    """Number of the last deletion of which its device has nothing."""
    told: int = 0
    """Number of the last deletion that it was told of."""
    lookups: int = 0
    stored: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    in_flight_misses: int = 0
    prompts: PromptTokens | None = None
    """As of its last heartbeat; None before the first."""

    def watch(self, live: Live, rank: int) -> None:
        """Add a worker process that copies for this client."""
        if live.path not in self.ranks:
            self.watches.append(Watch(live))
        self.ranks[live.path] = rank

    def update(self, heartbeat: Heartbeat) -> None:
        """Take over the figures of a heartbeat, and add what is new in them to the totals of the namespace."""
        self.figures = heartbeat.figures[:MAX_FIGURES_BYTES]
        self.device_resets_applied = max(self.device_resets_applied, heartbeat.resets)
        self.told = min(self.told, heartbeat.heard)
        totals = self.namespace.history.totals
        self._add_prompts(totals)
        totals.traffic.add(heartbeat.traffic.since(self.traffic))
        totals.in_flight_misses += max(heartbeat.in_flight_misses - self.in_flight_misses, 0)
        self.traffic, self.in_flight_misses = heartbeat.traffic, heartbeat.in_flight_misses

    def _add_prompts(self, totals: NamespaceTotals) -> None:
        """Add the prompts looked up since the last heartbeat: a client's own figures begin before its session."""
        try:
            now = _figures.decode(self.figures).counters
        except MALFORMED:
            return
        if (then := self.prompts) is not None:
            totals.prompt_tokens += max(now.lookup_tokens - then.lookup_tokens, 0)
            for tier in HIT_TIERS:
                found = now.hit_tokens(tier) - then.hit_tokens(tier)
                totals.prompt_hit_tokens[tier] += max(found, 0)
        self.prompts = now

    def reported(self) -> dict[str, Any]:
        """Return the figures of its last heartbeat; empty if they are not what a client can report."""
        try:
            figures = msgspec.json.decode(self.figures, type=dict[str, Any])
        except MALFORMED:
            return {}
        sections = (
            figures.get("counters"),
            figures.get("device"),
            figures.get("loads"),
            figures.get("hints"),
        )
        if not all(each is None or isinstance(each, dict) for each in sections):
            return {}
        return figures if isinstance(figures.get("handovers", []), list) else {}

    def is_gone(self) -> bool:
        """Return True if all of its processes have ended. Stops watching those that have."""
        alive = []
        for watch in self.watches:
            if watch.is_gone():
                watch.remove_file()
                self.ranks.pop(watch.live.path, None)
            else:
                alive.append(watch)
        self.watches = alive
        return not alive

    # --- slots and pins -----------------------------------------------------------------------------------

    def renew_stock(self) -> None:
        """After a reset, keep apart the slots granted before it: what is copied into them is not stored."""
        tier = self.namespace.tier
        if tier is not None:
            granted_before = set(self.stock).difference(*self.stale_stock.values())
            self.stale_stock[self.stock_lease] = granted_before
            self.stock_lease = tier.open_lease()
            self._release_stale_leases()

    def by_lease(self, slots: list[int]) -> dict[int, list[int]]:
        """Return the positions of these stocked slots by the lease that holds them."""
        groups: dict[int, list[int]] = {}
        for position, slot in enumerate(slots):
            lease = next((each for each, held in self.stale_stock.items() if slot in held), self.stock_lease)
            groups.setdefault(lease, []).append(position)
        return groups

    def remove_stock(self, slots: list[int]) -> None:
        """Remove slots whose copies have ended from the stock."""
        for slot in slots:
            del self.stock[slot]
        for held in self.stale_stock.values():
            held.difference_update(slots)
        self._release_stale_leases()

    def _release_stale_leases(self) -> None:
        tier = self.namespace.tier
        for lease in [each for each, held in self.stale_stock.items() if not held]:
            del self.stale_stock[lease]
            if tier is not None:
                tier.release(lease)

    def hear(self) -> None:
        """Record that it is alive."""
        self.heartbeat_at = time.monotonic()
        if self.silent:
            self.silent = False
            if self.namespace.feed is not None:
                self.namespace.feed.show_device(self.session)

    def take_runs(self) -> None:
        """Carry out what it has pinned and unpinned by itself."""
        if self.ring_error:
            return
        try:
            records = self.ring.take()
            if self.ring_guard.has_lost:
                raise ValueError("its file was truncated")
            if records:
                self.hear()
            for run, start, path in records:
                if len(path):
                    self.lookups += 1
                    self._pin_found(run, path, start)
                else:
                    self.unpin([run])
        except Exception as error:  # of this client alone
            self.ring_error = f"its ring of runs is malformed: {error}"
            self.ring.close()
            self.release_runs()
            unforeseen = None if isinstance(error, ValueError) else error
            log.warning("client %s: %s", self.name, self.ring_error, exc_info=unforeseen)

    def _pin_found(self, run: int, path: HashArray, start: int) -> None:
        if run < 1 or run in self.runs:
            raise ValueError(f"run {run} is not a new number above 0")
        self.pin(run, path, start)

    def pin(self, run: int, path: HashArray, start: int) -> Run | None:
        """Pin the leading run of a path from block ``start`` on. Return None if there is none, or no more may be."""
        if len(self.runs) >= MAX_RUNS:
            self.namespace.history.count_refused(len(path) - start, MissReason.TOO_MANY_RUNS)
            return None
        found = self.namespace.match(path, start)
        if found is not None:
            self.runs[run] = found.lease
        return found

    def unpin(self, runs: Iterable[int]) -> None:
        """Unpin runs; numbers of which nothing is pinned are ignored."""
        tier = self.namespace.tier
        for run in runs:
            if (lease := self.runs.pop(run, None)) is not None and tier is not None:
                tier.finish(lease)

    def release_runs(self) -> int:
        """Unpin all of its look-ups. Return how many.

        A load that still reads there finds another generation in the slot's header, and fails.
        """
        count = len(self.runs)
        self.unpin(list(self.runs))
        return count

    def release_all(self) -> None:
        """Free its slots, pins and reads. Only for a client that said goodbye or is proved dead."""
        self.take_runs()  # they count, although nothing stays pinned
        self.fetches.end_all()
        self.release_runs()
        with suppress(OSError):
            self.ring_path.unlink(missing_ok=True)
        if self.namespace.tier is not None:
            for lease in (self.stock_lease, *self.stale_stock):
                self.namespace.tier.release(lease)
        self.stale_stock.clear()
        self.stock.clear()
        for watch in self.watches:
            watch.close()
        self.watches = []


class Clients(dict[int, RegisteredClient]):
    """The registered clients by session.

    ``earlier`` are live processes that were clients of the service before this one. Until each of them has registered
    again or is gone, no slot is granted and no namespace gives memory away.
    """

    def __init__(
        self,
        runtime_dir: Path,
        namespaces: Namespaces,
        reads_of: Callable[[Namespace], StorageReads | None],
        totals: ServiceTotals,
    ) -> None:
        super().__init__()
        self._runtime_dir = runtime_dir
        self._namespaces = namespaces
        self._reads_of = reads_of
        self._totals = totals
        self._serial = count(1)
        self._salt = randbits(31) << 32
        self.earlier: list[Watch] = []

    def watch_earlier(self) -> None:
        """Find the live clients of an earlier service."""
        self.earlier = [Watch(live) for live in live_processes(self._runtime_dir)]

    # --- registration -------------------------------------------------------------------------------------

    def register(self, identity: bytes, request: Register) -> RegisteredClient:
        """Open a session, which replaces an earlier one of the same process.

        Raises ``RefusedError`` for a bad live file, too many clients, or no memory for the layout, and
        ``FdcacheError`` for an invalid layout.
        """
        if len(request.layout) > MAX_LAYOUT_BYTES:
            raise RefusedError("malformed", f"layout: more than {MAX_LAYOUT_BYTES} bytes")
        self._check_live(request.live)
        layout = KVLayout.from_json(request.layout)
        if layout.record_ranks > (extents := self._namespaces.arena.manifest.extents):
            raise RefusedError(
                "no_memory",
                f"layout.tp_size: {layout.record_ranks} ranks need an extent each, and the arena has {extents}; give "
                "the service more --host-memory",
            )
        for client in [each for each in self.values() if each.live.path == request.live.path]:
            self.remove(client)
        for watch in [each for each in self.earlier if each.live.engine == request.live.path]:
            watch.close()
            self.earlier.remove(watch)
        if len(self) >= MAX_CLIENTS:
            raise RefusedError("too_many", f"{MAX_CLIENTS} clients are registered already")
        namespace = self._namespaces.open(layout)
        if not namespace.num_extents and not self.make_room(namespace):
            raise RefusedError(
                "no_memory",
                f"no extents are left for this namespace on {namespace.ranks} ranks; give the service more "
                "--host-memory, or reset a namespace that is no longer used",
            )
        assert namespace.tier is not None
        session = self._new_session()
        ring_path = Path(namespace.geometry.ring_path(session))
        try:
            ring_memory = create_shared(ring_path, RING_BYTES)
        except OSError as error:
            raise RefusedError(
                "no_memory", f"{ring_path}: no room for {RING_BYTES} bytes: {error}; enlarge its file system"
            ) from error
        client = RegisteredClient(
            session=session,
            identity=identity,
            namespace=namespace,
            num_ranks=layout.tp_size,
            live=request.live,
            name=request.name[:MAX_NAME_LENGTH],
            wants_events=request.events,
            watches=[Watch(request.live)],
            stock_lease=namespace.tier.open_lease(),
            fetches=FetchTable(
                lambda: self._reads_of(namespace),
                request.fetches,
                most_blocks=MAX_FETCHED_BLOCKS,
                keep_done=False,
            ),
            ring=RunRing(ring_memory),
            ring_guard=MemoryGuard(ring_memory),
            ring_path=ring_path,
        )
        namespace.take_runs = partial(self.take_runs, namespace)
        self[client.session] = client
        self._totals.clients_registered += 1
        log.info("client %s registered: process %d, namespace %s", client.name, client.live.pid, namespace.id)
        return client

    def attach(self, session: int, request: Attach) -> RegisteredClient:
        """Add a worker to the client with this session, or with session 0 to any client of its engine.

        Raises ``RefusedError`` if there is no such client or rank.
        """
        self._check_live(request.live)
        for client in self.values():
            if client.live.path == request.live.engine and session in (0, client.session):
                if not 0 <= request.rank < client.num_ranks:
                    raise RefusedError("malformed", f"rank {request.rank} is not below {client.num_ranks}")
                if len(client.watches) >= MAX_WATCHES * client.num_ranks + 1:
                    raise RefusedError(
                        "too_many", f"{len(client.watches)} processes work for this engine already"
                    )
                client.watch(request.live, request.rank)
                return client
        raise RefusedError(
            "no_session", "the engine of this worker is not registered here, or has registered again"
        )

    def _check_live(self, live: Live) -> None:
        if not is_live_file(Path(live.path), self._runtime_dir):
            raise RefusedError("malformed", f"live.path: not a live file in {self._runtime_dir}")

    def _new_session(self) -> int:
        return self._salt | next(self._serial)

    def end_sessions(self, namespace: Namespace) -> None:
        """Make the clients of a namespace register again. They keep their slots until then."""
        for client in self.of(namespace):
            del self[client.session]
            namespace.forget_client(client.session)
            client.session = self._new_session()
            self[client.session] = client

    def take_runs(self, namespace: Namespace | None = None) -> None:
        """Carry out what the clients of a namespace, or all clients, have pinned and unpinned by themselves."""
        for client in self.values():
            if namespace is None or client.namespace is namespace:
                client.take_runs()

    def remove(self, client: RegisteredClient) -> None:
        """End the session of a client that said goodbye or is proved dead."""
        client.release_all()
        client.namespace.forget_client(client.session)
        client.namespace.last_used = time.monotonic()
        del self[client.session]

    def make_room(self, namespace: Namespace) -> bool:
        """Grow a namespace, if need be at the cost of others. Return True if it grew."""
        used = {client.namespace.id for client in self.values()}
        return self._namespaces.make_room(namespace, used, keep_others=bool(self.earlier))

    # --- heartbeats ---------------------------------------------------------------------------------------

    def heard_from(self, session: int) -> RegisteredClient:
        """Return the client of a request, which counts as a heartbeat. Raises ``RefusedError`` if it is unknown."""
        client = self.get(session)
        if client is None:
            raise RefusedError("no_session", f"session {session} is unknown here; register again")
        client.hear()
        return client

    def of(self, namespace: Namespace) -> list[RegisteredClient]:
        """Return the registered clients that share a namespace."""
        return [client for client in self.values() if client.namespace is namespace]

    def reap(self, timeout: float) -> None:
        """Remove dead clients, and release the pins of those without a heartbeat for ``timeout`` seconds."""
        for client in list(self.values()):
            try:
                self._reap(client, timeout)
            except Exception:
                # A fault with one client. It must not end the loop, which serves others.
                if not client.has_fault:
                    log.exception("client %s cannot be looked after", client.name)
                client.has_fault = True
        for watch in [each for each in self.earlier if each.is_gone()]:
            watch.remove_file()
            self.earlier.remove(watch)

    def _reap(self, client: RegisteredClient, timeout: float) -> None:
        if client.is_gone():
            log.warning(
                "client %s is gone: taking back %d slots and %d runs",
                client.name,
                len(client.stock),
                len(client.runs),
            )
            self._totals.clients_lost += 1
            self._totals.slots_taken_back += len(client.stock)
            self.remove(client)
        elif time.monotonic() - client.heartbeat_at > timeout and not client.silent:
            client.silent = True
            client.fetches.end_all()
            self._totals.runs_given_up += client.release_runs()
            if client.namespace.feed is not None:
                client.namespace.feed.hide_device(client.session)
            log.warning("client %s is silent: its pins are released, its slots stay its own", client.name)
