"""Sessions: who is registered, from first word to goodbye or death, and who is left of an earlier service."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from secrets import randbits

from fdcache.layout import KVLayout
from fdcache.service.server.clients import Client, ClientFetches
from fdcache.service.server.history import Totals
from fdcache.service.server.layout_storage import LayoutStorage
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.shares import Shares
from fdcache.service.wire.liveness import Watch, live_processes
from fdcache.service.wire.protocol import Attach, RefusalError, Register

log = logging.getLogger("fdcache.service.server")

MOST_CLIENTS = 1024
MOST_LAYOUT_BYTES = 1 << 20


class Sessions:
    """The clients by session. Nothing is given up that a living process may be writing.

    ``earlier`` are clients of the service before this one: until each is back or gone, no layout gives memory away.
    """

    def __init__(
        self,
        runtime_dir: Path,
        shares: Shares,
        storage_of: Callable[[Namespace], LayoutStorage | None],
        totals: Totals,
    ) -> None:
        self._runtime_dir = runtime_dir
        self._shares = shares
        self._storage_of = storage_of
        self._totals = totals
        self._serial = count(1)
        self._salt = randbits(31) << 32
        self.clients: dict[int, Client] = {}
        self.earlier: list[Watch] = []

    def watch_earlier(self) -> None:
        """Wait for the clients of an earlier service: no slot is given away before they are back or gone."""
        self.earlier = [Watch(live) for live in live_processes(self._runtime_dir)]

    # --- beginning and end --------------------------------------------------------------------------------

    def register(self, identity: bytes, request: Register) -> Client:
        """A new client, in place of the former one of the same process.

        Raises ``RefusalError`` for what it says of itself, for too many, and without memory for its layout;
        ``FdcacheError`` for the layout.
        """
        if len(request.layout) > MOST_LAYOUT_BYTES:
            raise RefusalError("malformed", f"layout: more than {MOST_LAYOUT_BYTES} bytes")
        self._check_live(request.live.path)
        for client in [each for each in self.clients.values() if each.live.path == request.live.path]:
            self.remove(client)
        for watch in [each for each in self.earlier if each.live.engine == request.live.path]:
            watch.close()
            self.earlier.remove(watch)
        if len(self.clients) >= MOST_CLIENTS:
            raise RefusalError("too_many", f"{MOST_CLIENTS} clients are registered already")
        namespace = self._shares.open(KVLayout.from_json(request.layout))
        if not namespace.num_extents and not self.make_room(namespace):
            raise RefusalError(
                "no_memory",
                f"no extents are left for this layout on {namespace.ranks} ranks; give the service more "
                "--host-memory, or reset a layout that is no longer used",
            )
        assert namespace.tier is not None
        client = Client(
            session=self._salt | next(self._serial),
            identity=identity,
            namespace=namespace,
            live=request.live,
            name=request.name[:200],
            wants_events=request.events,
            watches=[Watch(request.live)],
            stock_lease=namespace.tier.open_lease(),
            fetches=ClientFetches(lambda: self._storage_of(namespace), request.fetches),
        )
        self.clients[client.session] = client
        self._totals.clients_registered += 1
        log.info("client %s registered: process %d, layout %s", client.name, client.live.pid, namespace.id)
        return client

    def attach(self, session: int, request: Attach) -> Client:
        """A worker copies for a client, which is returned: the one with this session, 0 for any of its engine.

        Raises ``RefusalError`` when there is none, or no such rank.
        """
        self._check_live(request.live.path)
        for client in self.clients.values():
            if client.live.path == request.live.engine and session in (0, client.session):
                if not 0 <= request.rank < client.namespace.ranks:
                    raise RefusalError(
                        "malformed", f"rank {request.rank} is not below {client.namespace.ranks}"
                    )
                client.watch(request.live, request.rank)
                return client
        raise RefusalError(
            "no_session", "the engine of this worker is not registered here, or has registered anew"
        )

    def _check_live(self, path: str) -> None:
        given = Path(path)
        if given.parent != self._runtime_dir or not given.exists():
            raise RefusalError("malformed", f"live.path: not a file in {self._runtime_dir}")

    def remove(self, client: Client) -> None:
        """It has said goodbye, or is proved gone."""
        client.take_everything_back()
        client.namespace.used_until = time.monotonic()
        del self.clients[client.session]

    # --- who is there -------------------------------------------------------------------------------------

    def heard(self, session: int) -> Client:
        """The client that has just said something. Raises ``RefusalError`` for an unknown session."""
        client = self.clients.get(session)
        if client is None:
            raise RefusalError("no_session", f"session {session} is unknown here; register again")
        client.seen = time.monotonic()
        client.silent = False
        return client

    def of(self, namespace: Namespace) -> list[Client]:
        """The clients of a layout."""
        return [client for client in self.clients.values() if client.namespace is namespace]

    def make_room(self, namespace: Namespace) -> bool:
        """Let a layout grow, if need be at the cost of others; whether it did."""
        used = {client.namespace.id for client in self.clients.values()}
        return self._shares.make_room(namespace, used, spare_all=bool(self.earlier))

    def look_after(self, timeout: float) -> None:
        """Remove those that are gone, and take the pins of those that were silent for ``timeout`` seconds."""
        now = time.monotonic()
        for client in list(self.clients.values()):
            if client.is_gone():
                self._bury(client)
            elif now - client.seen > timeout and not client.silent:
                client.silent = True
                client.fetches.end_all()
                self._totals.runs_given_up += client.give_up_runs()
                log.warning("client %s is silent: its slots stay its own, its pins are given up", client.name)
        for watch in [each for each in self.earlier if each.is_gone()]:
            watch.remove_file()
            self.earlier.remove(watch)

    def _bury(self, client: Client) -> None:
        log.warning(
            "client %s is gone: %d slots and %d runs are taken back",
            client.name,
            len(client.stock),
            len(client.runs),
        )
        self._totals.clients_lost += 1
        self._totals.slots_taken_back += len(client.stock)
        self.remove(client)
