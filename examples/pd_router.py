"""Route prompts to a prefill and a decode engine.

    python -m examples.paddle_engine --role prefill --listen ipc:///tmp/prefill &
    python -m examples.paddle_engine --role decode --listen ipc:///tmp/decode &
    python -m examples.pd_router ipc:///tmp/prefill ipc:///tmp/decode

Prefill gets each prompt to compute, decode gets it to answer, and where to fetch the blocks. Neither waits for the
other: decode computes what it cannot fetch, so a dead prefill costs time. What a dead decode owes is asked for again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import zmq

from examples.paddle_engine.server import Answer, Ask, Hello, Here

_HELLO_SECONDS = 0.1


@dataclass
class _Engine:
    socket: zmq.Socket[bytes]
    here: Here | None = None

    def send(self, message: Ask | Hello) -> None:
        self.socket.send(msgspec.msgpack.encode(message))


class Router:
    """A router that knows two addresses."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.prefill, self.decode = (self._connect(address) for address in (prefill, decode))
        self.pending: dict[str, Ask] = {}
        self.answers: dict[str, list[int]] = {}
        self._attempt, self._next_hello = 1, 0.0

    def _connect(self, address: str) -> _Engine:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        return _Engine(socket)

    def ask(self, prompt: Ask) -> None:
        """Send a prompt to both engines; every other one to decode first."""
        self.pending[prompt.name] = prompt
        steps = [self._prefill, self._decode]
        for step in steps if len(self.pending) % 2 else reversed(steps):
            step(prompt)

    def _prefill(self, prompt: Ask) -> None:
        if self.prefill.here:
            self.prefill.send(msgspec.structs.replace(prompt, hands_over=True))

    def _decode(self, prompt: Ask) -> None:
        peer = self.prefill.here.addresses if self.prefill.here else ()
        self.decode.send(msgspec.structs.replace(prompt, peer=peer, attempt=self._attempt))

    def step(self) -> None:
        """Take what the engines have answered, and look for engines that were started again."""
        if time.monotonic() >= self._next_hello:
            self._next_hello = time.monotonic() + _HELLO_SECONDS
            self.prefill.send(Hello())
            self.decode.send(Hello(self.prefill.here.addresses if self.prefill.here else ()))
        for engine in (self.prefill, self.decode):
            while engine.socket.poll(5):
                message = msgspec.msgpack.decode(engine.socket.recv(), type=Here | Answer)
                if isinstance(message, Here):
                    former, engine.here = engine.here, message
                    if engine is self.decode and former and former.boot != message.boot:
                        self._attempt += 1
                        for prompt in self.pending.values():
                            self._decode(prompt)
                elif engine is self.decode and message.name in self.pending:
                    del self.pending[message.name]
                    self.answers[message.name] = message.tokens

    def serve(self, prompts: Sequence[Ask]) -> dict[str, list[int]]:
        """Return the tokens generated for each prompt."""
        while not (self.prefill.here and self.decode.here):
            self.step()
        for prompt in prompts:
            self.ask(prompt)
        while self.pending:
            self.step()
        return self.answers


if __name__ == "__main__":
    text = [Ask(f"prompt {n}", list(range(n, n + 100)), 8) for n in range(4)]
    for name, tokens in Router(*sys.argv[1:3]).serve(text).items():
        print(name, tokens)
