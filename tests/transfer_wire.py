"""The network between decode instances and a prefill instance, which a test moves message by message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import zmq

from fdcache.transfer.messages import AnyMessage, decode


@dataclass(frozen=True)
class Parcel:
    """A message under way. ``deliver`` may be called later, several times, or never."""

    message: AnyMessage
    deliver: Callable[[], None]

    @property
    def kind(self) -> str:
        return type(self.message).__name__

    def arrive(self) -> None:
        self.deliver()


Fault = Callable[[Parcel], None]


class Wire:
    """Carries messages between decode instances, which connect to ``address``, and one prefill instance.

    Nothing moves but in ``move``. ``fault`` gets each message before it arrives: it may kill or stop a process first,
    and deliver the message now, later, twice or never.
    """

    def __init__(self, folder: Path, prefill: str) -> None:
        self.address = f"ipc://{folder}/wire"
        self.fault: Fault = Parcel.arrive
        self._prefill = prefill
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._socket(zmq.ROUTER)
        self._router.bind(self.address)
        self._dealers: dict[bytes, zmq.Socket[bytes]] = {}

    def move(self) -> None:
        """Pass on everything that is under way."""
        while self._router.poll(0):
            route, data = self._router.recv_multipart()
            self._pass(data, partial(self._to_prefill, route, data))
        for route, dealer in self._dealers.items():
            while dealer.poll(0):
                data = dealer.recv()
                self._pass(data, partial(self._to_decode, route, data))

    def close(self) -> None:
        self._context.destroy()

    def _pass(self, data: bytes, deliver: Callable[[], None]) -> None:
        self.fault(Parcel(decode(data)[1], deliver))

    def _to_decode(self, route: bytes, data: bytes) -> None:
        self._router.send_multipart([route, data])

    def _to_prefill(self, route: bytes, data: bytes) -> None:
        if route not in self._dealers:
            dealer = self._dealers[route] = self._socket(zmq.DEALER)
            dealer.setsockopt(zmq.ROUTING_ID, route)
            dealer.connect(self._prefill)
        self._dealers[route].send(data)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)  # what is sent to a process that is dead or stopped holds up no test
        socket.setsockopt(zmq.RECONNECT_IVL, 5)
        return socket
