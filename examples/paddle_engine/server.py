"""Serve the prompts of a router, as the prefill or the decode side of a deployment, or as both."""

from __future__ import annotations

import signal
import uuid
from dataclasses import replace

import msgspec
import zmq

from examples.paddle_engine.config import EngineConfig, ModelConfig
from examples.paddle_engine.engine import Engine
from examples.paddle_engine.kv_cache import FdcacheBlocks, Prompt
from examples.paddle_engine.ranks import RankProcesses
from examples.paddle_engine.worker import Worker
from fdcache.manager.requests import PeerSource
from fdcache.settings.peers import TransferRole

_IDLE_MS = 20


class Ask(msgspec.Struct, tag=True):
    """A prompt. ``hands_over``: another engine goes on from its blocks; ``peer``: fetch them from these addresses."""

    name: str
    tokens: list[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    hands_over: bool = False
    peer: tuple[str, ...] = ()
    attempt: int = 1


class Hello(msgspec.Struct, tag=True):
    """Ask an engine who it is. ``peer``: the prefill instance that it will fetch from."""

    peer: tuple[str, ...] = ()


class Here(msgspec.Struct, tag=True):
    """An engine's answer: its process, the addresses of its ranks for peers, and how its hand-overs have ended."""

    boot: str
    addresses: tuple[str, ...]
    ended: dict[str, int] = {}


class Answer(msgspec.Struct, tag=True):
    """The tokens generated for a prompt; none, and why, if the engine refuses it."""

    name: str
    tokens: list[int]
    refusal: str = ""


def serve(model: ModelConfig, config: EngineConfig, address: str) -> None:
    """Serve a router until SIGTERM or SIGINT."""
    config = replace(config, idle_seconds=_IDLE_MS / 1000)
    stopped: list[int] = []
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, frame: stopped.append(number))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        server = _Server(model, config, socket)
        while not stopped:
            server.step()
        server.close()


class _Server:
    def __init__(self, model: ModelConfig, config: EngineConfig, socket: zmq.Socket[bytes]) -> None:
        self._settings, self._socket = config.settings, socket
        self._cache = FdcacheBlocks(config)
        kind = Worker if config.ranks == 1 else RankProcesses
        self._workers = kind(model, config, self._cache.host_cache)
        self._cache.restore(self._workers.storage_scans())
        self._here = Here(uuid.uuid4().hex, tuple(self._workers.addresses()))
        self._engine = Engine(config, self._cache, self._workers)
        self._asked: dict[str, bytes] = {}

    def step(self) -> None:
        """Take what has arrived, do one step, and answer."""
        engine = self._engine
        busy = engine.waiting or engine.running or self._cache.is_handing_over
        if self._socket.poll(0 if busy else _IDLE_MS):
            route, data = self._socket.recv_multipart()
            message = msgspec.msgpack.decode(data, type=Ask | Hello)
            if isinstance(message, Hello):
                self._workers.connect_peers(message.peer)
                self._send(route, msgspec.structs.replace(self._here, ended=self._cache.handovers()))
            elif refusal := self._refusal(message):
                self._send(route, Answer(message.name, [], refusal))
            elif message.name not in self._asked:
                self._asked[message.name] = route
                engine.submit(_prompt(message))
        for task in engine.step():
            self._send(
                self._asked.pop(task.name), Answer(task.name, [sample.token for sample in task.samples])
            )

    def close(self) -> None:
        self._workers.shutdown()
        self._cache.close()

    def _refusal(self, ask: Ask) -> str:
        """Return why that cannot be done, empty if it can."""
        role = self._settings.peers_in_force.role
        if role is TransferRole.PREFILL and not ask.hands_over:
            return "a prefill engine generates no answers; set FD_PD_CHANGEABLE=1"
        if role is TransferRole.DECODE and ask.hands_over:
            return "a decode engine hands nothing over; set FD_PD_CHANGEABLE=1"
        if ask.hands_over and self._cache.is_sending(ask.name):
            return "the blocks of another prompt of this name are being handed over"
        return ""

    def _send(self, route: bytes, message: Here | Answer) -> None:
        self._socket.send_multipart([route, msgspec.msgpack.encode(message)])


def _prompt(ask: Ask) -> Prompt:
    source = PeerSource(ask.name, ask.peer, ask.attempt) if ask.peer else None
    most = 1 if ask.hands_over else ask.max_tokens
    return Prompt(
        ask.name,
        ask.tokens,
        most,
        temperature=ask.temperature,
        seed=ask.seed,
        hands_over=ask.hands_over,
        source=source,
    )
