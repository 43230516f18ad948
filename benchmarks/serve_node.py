"""The processes of the service's benchmark: the service, an empty echo beside it, and their clients."""

from __future__ import annotations

import logging
import threading
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TypeAlias

import numpy as np
import zmq

from fdcache.layout import KVLayout
from fdcache.manager import Request
from fdcache.service.client.connection import Connection
from fdcache.service.server.lifecycle import Server
from fdcache.service.server.namespace import Namespace
from fdcache.service.wire.liveness import LiveFile
from fdcache.service.wire.protocol import Match, Matched, Register, Registered, Release
from fdcache.settings import Settings

BLOCKS = 2048
BLOCK = 64
Results: TypeAlias = "Queue[list[float]]"


def layout() -> KVLayout:
    return KVLayout.uniform(
        model="bench", revision="1", block_size=BLOCK, num_layers=1, kv_heads=1, head_dim=8, dtype="uint8"
    )


def path_hashes() -> np.ndarray:
    shape = layout()
    return Request("x", list(range(BLOCKS * BLOCK)))._bind(BLOCK, shape.fingerprint).hashes.copy()


def serve(directory: str, ready: Event, stop: Event) -> None:
    logging.getLogger("fdcache").setLevel(logging.ERROR)
    settings = Settings.load(
        environ={},
        arguments={
            "FDCACHE_SERVER": f"ipc://{directory}/fdcache.sock",
            "FDCACHE_HTTP_ADDRESS": "off",
            "FDCACHE_HOST_MEMORY": "64MiB",
            "FDCACHE_RUNTIME_DIR": directory,
        },
    )
    server = Server(settings)
    server.start()
    namespace = server.service.namespaces.open(layout())
    while namespace.num_slots < 2 * BLOCKS and namespace.grow():
        pass
    fill(namespace)
    ready.set()

    def end() -> None:
        stop.wait()
        server.stop(force=True)

    threading.Thread(target=end, daemon=True).start()
    server.run()
    server.close()


def fill(namespace: Namespace) -> None:
    """Make every block of the path an entry, as if clients had stored it."""
    hashes = path_hashes()
    parents = np.concatenate((np.zeros((1, 32), np.uint8), hashes[:-1]))
    assert namespace.tier is not None
    lease = namespace.tier.open_lease()
    slots = namespace.tier.reserve(lease, BLOCKS).slots
    ones, sums = np.ones(BLOCKS, np.uint8), np.zeros(BLOCKS, np.uint64)
    namespace.tier.publish(lease, parents, hashes, slots, ones, sums)
    namespace.tier.release(lease)


def echo(directory: str, ready: Event, stop: Event) -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind(f"ipc://{directory}/echo.sock")
    ready.set()
    while not stop.is_set():
        if socket.poll(100):
            while True:
                try:
                    socket.send_multipart(socket.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    break


def ask_echo(directory: str, seconds: float, results: Results) -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(f"ipc://{directory}/echo.sock")
    times = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        socket.send(b"")
        socket.recv()
        times.append(time.perf_counter() - began)
    results.put(times[len(times) // 10 :])


def ask_service(directory: str, seconds: float, results: Results) -> None:
    line = Connection(f"ipc://{directory}/fdcache.sock")
    live = LiveFile(Path(directory))
    registered, _ = line.call(Register(layout().to_json().encode(), live.live, "bench"), 30)
    assert isinstance(registered, Registered)
    line.session = registered.session
    hashes = path_hashes()
    body = Match(
        np.array([len(hashes)], np.int32).tobytes(), np.zeros(1, np.int32).tobytes(), hashes.tobytes()
    )
    times = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        answer, _ = line.call(body, 30)
        times.append(time.perf_counter() - began)
        assert isinstance(answer, Matched)
        assert len(answer.slots) == 4 * BLOCKS
        line.send(Release(answer.leases))
    live.close()
    results.put(times[len(times) // 10 :])
