"""NodeServer: answers other nodes that ask for blocks, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import zmq

from fdcache.errors import ProtocolError, StorageError
from fdcache.transfer.access import Gatekeeper, LinkKeys
from fdcache.transfer.nodes.holdings import Holdings
from fdcache.transfer.nodes.leases import ReadLeases
from fdcache.transfer.nodes.messages import (
    MOST_READ,
    AskHeld,
    EndLease,
    Held,
    Records,
    Request,
    decode_request,
    encode,
    packed,
    rows,
)

log = logging.getLogger(__name__)

_MOST_REQUEST = 1 << 20
_MOST_UNSENT = 16
"""Answers that wait for a node that does not take them; further ones are dropped, and it asks again or computes."""
_HEARTBEAT_MS, _SILENT_MS = 1000, 5000
_HANDSHAKE_MS = 5000

Kept = tuple[Holdings, int]
"""Holdings of a rank, and the bytes of a record."""


class NodeServer:
    """Serves holdings at an address. Raises ``StorageError`` if that cannot be used.

    ``kept``: the holdings by layout and rank, as they are when a question comes.
    """

    def __init__(
        self, address: str, keys: LinkKeys, kept: Callable[[], Mapping[tuple[bytes, int], Kept]]
    ) -> None:
        self.address = address
        self.served_records = self.served_bytes = self.protocol_errors = 0
        self.leases = ReadLeases()
        self._kept = kept
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = Gatekeeper(self._context, keys)
        self._router = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, _MOST_UNSENT),
            (zmq.MAXMSGSIZE, _MOST_REQUEST),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _SILENT_MS),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
        ):
            self._router.setsockopt(option, value)
        keys.protect_server(self._router)
        self._ours, self._theirs = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._ours.bind("inproc://end")
        self._theirs.connect("inproc://end")
        try:
            self._router.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StorageError(
                f"FDCACHE_NODES_ADDRESS={address} cannot be used: {error}; set it to another address of this node"
            ) from error
        self._thread = threading.Thread(target=self._run, name="fdcache-nodes", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        for each in (self._router, self._gate.socket, self._ours):
            poller.register(each, zmq.POLLIN)
        while True:
            next_end = self.leases.expire()
            ready = dict(poller.poll(None if next_end is None else int(next_end * 1000) + 1))
            if self._ours in ready:
                self.leases.end_all()
                return
            if self._gate.socket in ready:
                self._gate.answer()
            if self._router in ready:
                self._serve(self._router.recv_multipart())

    def _serve(self, frames: list[bytes]) -> None:
        """Answer one message. What cannot be read or answered is dropped by itself."""
        try:
            route, number, body = frames
            answer = self._answer(route, decode_request(body))
        except (ProtocolError, ValueError) as error:
            self.protocol_errors += 1
            log.debug("a message of another node was dropped: %s", error)
            return
        except Exception:
            self.protocol_errors += 1
            log.exception("a question of another node could not be answered")
            return
        if answer is None:
            return
        try:
            self._router.send_multipart([route, number, *answer], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            log.debug("an answer was not sent: %s", error)

    def _answer(self, reader: bytes, request: Request) -> list[Any] | None:
        if isinstance(request, EndLease):
            self.leases.end(reader, request.lease)
            return None
        hashes = rows(request.hashes)
        kept = self._kept()
        found = kept.get((request.layout, request.rank))
        if isinstance(request, AskHeld):
            if request.lease and found is not None:
                self.leases.grant(reader, request.lease, request.lease_ms, found[0], hashes)
            ours = {rank: each for (layout, rank), (each, _) in kept.items() if layout == request.layout}
            return [encode(Held({rank: packed(each.has(hashes)) for rank, each in ours.items()}))]
        self.leases.renew(reader, request.lease)
        if found is None:
            return [encode(Records([b""] * len(hashes)))]
        return self._read(*found, hashes)

    def _read(self, holdings: Holdings, record_bytes: int, hashes: list[bytes]) -> list[Any]:
        headers: list[bytes] = []
        records: list[np.ndarray] = []
        most = max(MOST_READ // record_bytes, 1)
        for key in hashes:
            if len(records) == most:
                break
            record = np.empty(record_bytes, np.uint8)
            header = holdings.read(key, record)
            headers.append(b"" if header is None else header.to_bytes())
            if header is not None:
                records.append(record)
        self.served_records += len(records)
        self.served_bytes += len(records) * record_bytes
        return [encode(Records(headers)), *records]

    def close(self) -> None:
        """Answer nobody any more."""
        if self._thread.is_alive():
            self._theirs.send(b"")
            self._thread.join()
        self._gate.close()
        self._context.destroy(linger=0)
