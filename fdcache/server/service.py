"""Service: what the node's cache knows and decides. One thread owns it, and it touches no socket."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from secrets import randbits

import numpy as np

from fdcache.errors import FdcacheError, LayoutError, ProtocolError
from fdcache.layout import KVLayout
from fdcache.node.arrays import hashes_from, int32_from, uint8_from, uint64_from
from fdcache.node.liveness import Watch, earlier_processes
from fdcache.node.protocol import (
    MAX_BLOCKS,
    MAX_PATHS,
    TIER_FIGURES,
    Alive,
    Answer,
    Ask,
    Attach,
    Attached,
    Bye,
    Done,
    Events,
    Granted,
    Heartbeat,
    LoadEnded,
    Match,
    Matched,
    Publish,
    Published,
    Refill,
    Refused,
    Register,
    Registered,
    Release,
    RequestFrame,
    decode_request,
)
from fdcache.server.arena import Arena
from fdcache.server.clients import Client
from fdcache.server.latency import Latencies
from fdcache.server.namespace import Namespace
from fdcache.server.recovery import recover
from fdcache.settings.server import ServerSettings

log = logging.getLogger("fdcache.server")

MOST_CLIENTS = 1024
MOST_RUNS = 65536
MOST_LAYOUT_BYTES = 1 << 20
_DROPPED = 3
_SHARE_OF_STOCK = 4  # all clients of a layout together stock at most a quarter of its slots

Teller = Callable[[bytes, Answer], bool]


class RefusalError(FdcacheError):
    """A request that is not carried out."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class Totals:
    """Totals of the service since it started."""

    requests: int = 0
    refused: int = 0
    undelivered: int = 0
    clients_registered: int = 0
    clients_lost: int = 0
    slots_taken_back: int = 0
    runs_given_up: int = 0
    latencies: Latencies = field(default_factory=Latencies)


class Service:
    """Namespaces, clients and their requests.

    ``tell(identity, notice)`` sends a notice and says whether it was taken. Nothing here blocks, and nothing
    is freed that a living process may be writing.
    """

    def __init__(self, settings: ServerSettings, arena: Arena, runtime_dir: Path) -> None:
        self.settings = settings
        self.arena = arena
        self.runtime_dir = runtime_dir
        self.namespaces: dict[bytes, Namespace] = {}
        self.clients: dict[int, Client] = {}
        self.totals = Totals()
        self.started = time.time()
        self.paused = False
        self.draining = False
        self.answer_tool: Callable[[Ask], Answer] = lambda ask: Refused("unknown", "no tools here")
        self._serial = count(1)
        self._salt = randbits(31) << 32
        self.earlier: list[Watch] = []
        self._handlers: dict[type, Callable[..., Answer]] = {
            Match: self._match,
            Release: self._release,
            Refill: self._refill,
            Publish: self._publish,
            LoadEnded: self._load_ended,
            Heartbeat: self._heartbeat,
            Bye: self._bye,
        }

    # --- start --------------------------------------------------------------------------------------------

    def recover(self, assigned: list[tuple[str, int, int]]) -> int:
        """Take over the blocks in the extents of an earlier service; how many."""
        by_namespace: dict[str, set[tuple[int, int]]] = {}
        for name, rank, index in assigned:
            by_namespace.setdefault(name, set()).add((rank, index))
        recovered = 0
        for name, extents in by_namespace.items():
            recovered += self._recover_namespace(name, extents)
        return recovered

    def _recover_namespace(self, name: str, extents: set[tuple[int, int]]) -> int:
        path = Path(f"{self.arena.directory}/{self.arena.prefix}-{name}.layout")
        whole, layout = 0, None
        try:
            layout = KVLayout.from_json(path.read_bytes())
            while all((rank, whole) in extents for rank in range(layout.tp_size)):
                whole += 1
        except (LayoutError, FileNotFoundError) as error:
            log.warning("the blocks of layout %s are lost: %s", name, error)
        prefix = f"{self.arena.directory}/{self.arena.prefix}-{name}"
        torn = [f"{prefix}-r{rank}-{index:05d}" for rank, index in sorted(extents) if index >= whole]
        self.arena.take_back(torn)
        if layout is None or not whole:
            path.unlink(missing_ok=True)
            return 0
        namespace = self._new_namespace(layout)
        namespace.adopt(whole)
        return recover(namespace)

    def watch_earlier(self) -> None:
        """Wait for the clients of an earlier service: no slot is given away before they are back or gone."""
        self.earlier = [Watch(live) for live in earlier_processes(self.runtime_dir)]

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
        client = self.clients.get(session)
        if self.draining and isinstance(request, Match):
            raise RefusalError("draining", "the service is about to end")
        if client is None:
            raise RefusalError("no_session", f"session {session} is unknown here; register again")
        client.seen = time.monotonic()
        client.silent = False
        return self._handlers[type(request)](client, request)

    def _register(self, identity: bytes, request: Register) -> Answer:
        if self.draining:
            raise RefusalError("draining", "the service is about to end; try again later")
        if len(request.layout) > MOST_LAYOUT_BYTES:
            raise RefusalError("malformed", f"layout: more than {MOST_LAYOUT_BYTES} bytes")
        self._check_live(request.live.path)
        for client in [each for each in self.clients.values() if each.live.path == request.live.path]:
            self._remove(client)
        for watch in [each for each in self.earlier if each.live.engine == request.live.path]:
            watch.close()
            self.earlier.remove(watch)
        if len(self.clients) >= MOST_CLIENTS:
            raise RefusalError("too_many", f"{MOST_CLIENTS} clients are registered already")
        layout = KVLayout.from_json(request.layout)
        namespace = self.namespaces.get(layout.fingerprint) or self._new_namespace(layout)
        if not namespace.num_extents and not self._make_room(namespace):
            raise RefusalError(
                "no_memory",
                f"no extents are left for this layout on {namespace.ranks} ranks; give the service more "
                "--host-memory, or reset a layout that is no longer used",
            )
        assert namespace.tier is not None
        session = self._salt | next(self._serial)
        self.clients[session] = Client(
            session=session,
            identity=identity,
            namespace=namespace,
            live=request.live,
            name=request.name[:200],
            wants_events=request.events,
            watches=[Watch(request.live)],
            stock_lease=namespace.tier.open_lease(),
        )
        self.totals.clients_registered += 1
        log.info(
            "client %s registered: process %d, layout %s", request.name[:200], request.live.pid, namespace.id
        )
        return Registered(session, namespace.geometry, namespace.num_slots)

    def _check_live(self, path: str) -> None:
        given = Path(path)
        if given.parent != self.runtime_dir or not given.exists():
            raise RefusalError("malformed", f"live.path: not a file in {self.runtime_dir}")

    def _attach(self, session: int, request: Attach) -> Answer:
        self._check_live(request.live.path)
        for client in self.clients.values():
            if client.live.path == request.live.engine and session in (0, client.session):
                if not 0 <= request.rank < client.namespace.ranks:
                    raise RefusalError(
                        "malformed", f"rank {request.rank} is not below {client.namespace.ranks}"
                    )
                client.watch(request.live, request.rank)
                return Attached(client.namespace.geometry)
        raise RefusalError(
            "no_session", "the engine of this worker is not registered here, or has registered anew"
        )

    def _match(self, client: Client, request: Match) -> Answer:
        counts = int32_from(request.counts, "counts")
        starts = int32_from(request.starts, "starts", len(counts))
        hashes = hashes_from(request.hashes)
        if len(counts) > MAX_PATHS or len(hashes) > MAX_BLOCKS:
            raise RefusalError(
                "too_many", f"more than {MAX_PATHS} paths or {MAX_BLOCKS} blocks in one look-up"
            )
        if (
            (counts < 0).any()
            or int(counts.sum()) != len(hashes)
            or (starts < 0).any()
            or (starts > counts).any()
        ):
            raise ProtocolError("counts and starts do not fit the hashes")
        namespace = client.namespace
        leases: list[int] = []
        lengths: list[int] = []
        slots, generations = [], []
        end = 0
        client.lookups += len(counts)
        for size, start in zip(counts.tolist(), starts.tolist(), strict=True):
            first, end = end, end + size
            full = len(client.runs) >= MOST_RUNS
            try:
                run = None if self.paused or full else namespace.match(hashes[first:end], start)
            except ValueError:
                self._release(client, Release(leases))  # nobody will hear of them
                raise
            if run is None:
                leases.append(0)
                lengths.append(0)
                continue
            client.runs.add(run.lease)
            leases.append(run.lease)
            lengths.append(len(run.slots))
            slots.append(run.slots)
            generations.append(run.generations)
        found = np.concatenate(slots) if slots else np.empty(0, np.int32)
        marks = b""
        if namespace.unverified and len(found):
            unverified = namespace.unverified
            marks = bytes(slot in unverified for slot in found.tolist())
        return Matched(
            leases=leases,
            counts=np.array(lengths, np.int32).tobytes(),
            slots=found.tobytes(),
            generations=(np.concatenate(generations) if slots else found).tobytes(),
            unverified=marks,
        )

    def _release(self, client: Client, request: Release) -> Answer:
        tier = client.namespace.tier
        for lease in request.leases:
            if lease in client.runs and tier is not None:
                client.runs.discard(lease)
                tier.release(lease)
        return Done()

    def _refill(self, client: Client, request: Refill) -> Answer:
        namespace = client.namespace
        nothing = np.empty(0, np.int32)
        slots, generations = nothing, nothing.view(np.uint32)
        if not (self.paused or self.draining or self.earlier):
            if namespace.tier is not None and namespace.tier.stats().free < request.count:
                self._make_room(namespace)
            fellows = sum(other.namespace is namespace for other in self.clients.values())
            most = max(namespace.most_slots // (_SHARE_OF_STOCK * fellows), 1) - len(client.stock)
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
            self._release(client, Release(answer.leases))
        elif isinstance(answer, Granted):
            slots = int32_from(answer.slots, "slots")
            self._take_back(client, slots, np.full((len(slots), 32), 255, np.uint8))

    def _take_back(self, client: Client, slots: np.ndarray, hashes: np.ndarray) -> None:
        nothing, sums = np.zeros(len(slots), np.bool_), np.zeros(len(slots), np.uint64)
        self._end_copies(client, slots, hashes, hashes, nothing, sums)

    def _end_copies(
        self,
        client: Client,
        slots: np.ndarray,
        parents: np.ndarray,
        hashes: np.ndarray,
        copied: np.ndarray,
        checksums: np.ndarray,
    ) -> np.ndarray:
        status = np.full(len(slots), _DROPPED, np.uint8)
        for lease, positions in client.by_lease(slots.tolist()).items():
            status[positions] = client.namespace.publish(
                lease,
                *(
                    np.ascontiguousarray(each[positions])
                    for each in (slots, parents, hashes, copied, checksums)
                ),
            )
        client.ended(slots.tolist())
        return status

    def _publish(self, client: Client, request: Publish) -> Answer:
        slots = int32_from(request.slots, "slots")
        hashes = hashes_from(request.hashes)
        parents = hashes_from(request.parents, "parents")
        copied = uint8_from(request.copied, "copied", len(slots))
        checksums = uint64_from(request.checksums, "checksums", len(slots))
        if len(hashes) != len(slots) or len(parents) != len(slots):
            raise ProtocolError("slots, hashes and parents differ in length")
        numbers = slots.tolist()
        if len(set(numbers)) != len(numbers) or not client.stock.keys() >= set(numbers):
            raise RefusalError(
                "not_yours", "slots: some were not granted to this session, or are named twice"
            )
        generations = np.array([client.stock[slot] for slot in numbers], np.uint32)
        namespace = client.namespace
        good = np.zeros(len(slots), np.bool_)
        wanted = np.flatnonzero(copied)
        if len(wanted):
            good[wanted] = namespace.arrived(slots[wanted], generations[wanted], hashes[wanted])
        status = self._end_copies(client, slots, parents, hashes, good, checksums)
        client.stored += int((status == 0).sum())
        return Published(request.hashes, status.tobytes())

    def _load_ended(self, client: Client, request: LoadEnded) -> Answer:
        slots = int32_from(request.slots, "slots")
        hashes = hashes_from(request.hashes)
        if len(hashes) != len(slots):
            raise ProtocolError("slots and hashes differ in length")
        client.namespace.load_ended(slots, hashes, uint8_from(request.copied, "copied", len(slots)))
        return Done()

    def _heartbeat(self, client: Client, request: Heartbeat) -> Answer:
        client.figures = request.figures[:65536]
        client.device_resets_applied = max(client.device_resets_applied, request.resets)
        tier = client.namespace.tier
        figures = tier.stats() if tier is not None else None
        return Alive(
            [int(getattr(figures, name)) for name in TIER_FIGURES] if figures else [],
            device_resets=client.device_resets,
        )

    def _bye(self, client: Client, request: Bye) -> Answer:
        self._remove(client)
        log.info("client %s said goodbye", client.name)
        return Done()

    # --- upkeep -------------------------------------------------------------------------------------------

    def tick(self, tell: Teller) -> None:
        """What time brings: deaths, silence, events to be told."""
        now = time.monotonic()
        for client in list(self.clients.values()):
            if client.is_gone():
                log.warning(
                    "client %s is gone: %d slots and %d runs are taken back",
                    client.name,
                    len(client.stock),
                    len(client.runs),
                )
                self.totals.clients_lost += 1
                self.totals.slots_taken_back += len(client.stock)
                self._remove(client)
            elif now - client.seen > self.settings.session_timeout and not client.silent:
                client.silent = True
                self.totals.runs_given_up += client.give_up_runs()
                log.warning("client %s is silent: its slots stay its own, its pins are given up", client.name)
        for watch in [each for each in self.earlier if each.is_gone()]:
            watch.bury()
            self.earlier.remove(watch)
        self.tell_events(tell)

    def tell_events(self, tell: Teller) -> None:
        """Tell clients what entered and left their layout's tier."""
        for namespace in self.namespaces.values():
            namespace.collect_events()
            while namespace.pending_events:
                kinds, hashes, parents = namespace.pending_events.popleft()
                everything = Events(kinds.tobytes(), hashes.tobytes(), parents.tobytes())
                matters = kinds != 0
                gone = Events(kinds[matters].tobytes(), hashes[matters].tobytes(), parents[matters].tobytes())
                for client in self.clients.values():
                    if client.namespace is namespace and (client.wants_events or matters.any()):
                        tell(client.identity, everything if client.wants_events else gone)

    def _remove(self, client: Client) -> None:
        client.take_everything_back()
        del self.clients[client.session]

    def forget_unused(self) -> None:
        """Give back the extents of layouts without blocks and without clients."""
        used = {id(client.namespace) for client in self.clients.values()}
        for fingerprint, namespace in list(self.namespaces.items()):
            if id(namespace) in used:
                continue
            while namespace.num_extents and namespace.tier is not None and not namespace.tier.stats().ready:
                if not namespace.shrink():
                    break
            if not namespace.num_extents:
                namespace.close()
                del self.namespaces[fingerprint]

    def _new_namespace(self, layout: KVLayout) -> Namespace:
        namespace = Namespace(self.arena, layout, self.settings.namespace_quota, self.settings.eviction_log)
        self.namespaces[layout.fingerprint] = namespace
        return namespace

    def _make_room(self, namespace: Namespace) -> bool:
        """Let a layout grow, at the cost of one that has more than its share; whether it did.

        A layout without clients gives first. Slots in use stay where they are.
        """
        self.forget_unused_but(namespace)
        if self.earlier and self.arena.num_free < namespace.ranks:
            return False
        used = {id(client.namespace) for client in self.clients.values()}
        share = self.arena.manifest.extents // max(len(self.namespaces), 1)
        givers = sorted(
            (each for each in self.namespaces.values() if each is not namespace and each.num_extents),
            key=lambda each: (id(each) in used, -each.num_extents * each.ranks),
        )
        for giver in givers:
            while (
                self.arena.num_free < namespace.ranks
                and namespace.num_extents * namespace.ranks < share
                and (id(giver) not in used or giver.num_extents * giver.ranks > share)
                and giver.num_extents > 1
                and giver.shrink()
            ):
                pass
        return namespace.grow()

    def forget_unused_but(self, namespace: Namespace) -> None:
        """As ``forget_unused``, sparing a layout that is about to be used."""
        spared = self.namespaces.pop(namespace.layout.fingerprint, None)
        self.forget_unused()
        if spared is not None:
            self.namespaces[namespace.layout.fingerprint] = spared

    def check_integrity(self) -> list[str]:
        """Every invariant that does not hold, in words."""
        broken = [
            f"layout {namespace.id}: {text}"
            for namespace in self.namespaces.values()
            if namespace.tier is not None
            for text in namespace.tier.check_integrity()
        ]
        for namespace in self.namespaces.values():
            if namespace.tier is None:
                continue
            clients = [client for client in self.clients.values() if client.namespace is namespace]
            figures = namespace.tier.stats()
            stocked = sum(len(client.stock) for client in clients)
            leases = sum(1 + len(client.runs) + len(client.former) for client in clients)
            if figures.writing < stocked:
                broken.append(
                    f"layout {namespace.id}: {figures.writing} slots are written, {stocked} granted"
                )
            if figures.leases != leases:
                broken.append(f"layout {namespace.id}: {figures.leases} leases, {leases} known")
        return broken
