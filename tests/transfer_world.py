"""Two instances, one of them in a process of its own, and the network between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fdcache.manager import Request
from fdcache.manager.requests import PeerSource
from fdcache.manager.results import LoadOutcome, LoadStatus
from tests.service_help import TIMEOUT
from tests.transfer_help import BLOCK, Instance, prompt_of
from tests.transfer_peer import GATE, Clock, Peer
from tests.transfer_wire import Fault, Parcel, Wire

BLOCKS = 6
LATE_SECONDS = 300.0
MESSAGES = ("LinkHello", "LinkWelcome", "AskForBlocks", "BlocksGranted", "Ready", "Last", "Renew", "End")


def quick(*names: str, of: tuple[str, ...] = MESSAGES) -> list[object]:
    """Return parameters: these in every run, the others in the long one."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in of]


class World:
    """``mine``, an instance of this process, ``peer``, one of another process, and the ``wire`` between them."""

    def __init__(self, folder: Path, clock: Clock, role: str, peer_blocks: int = 64, **options: Any) -> None:
        self._peer_blocks = peer_blocks
        self._folder, self._other_role = folder, "decode" if role == "prefill" else "prefill"
        self.clock = clock
        self.mine = Instance(role, folder, role, connector="gated", clock=clock.__call__, **options)
        self.peer = self.start_peer()
        self.wire = Wire(folder, self.mine.address if role == "prefill" else self.peer.addresses[0])

    def start_peer(self, name: str = "peer") -> Peer:
        """Start the other process, at the same address each time."""
        self.peer = Peer(self._other_role, self._folder, name, connector="gated", blocks=self._peer_blocks)
        return self.peer

    def close(self) -> None:
        GATE.reset()
        self.peer.close()
        self.mine.__exit__()
        self.wire.close()

    def source(self, transfer: str, attempt: int = 1) -> PeerSource:
        return PeerSource(transfer, (self.wire.address,), attempt)

    def step(self) -> None:
        self.wire.move()
        self.mine.step()

    def until(self, condition: Callable[[], object], *, late: bool = False) -> None:
        """Let messages pass until something is true; ``late``: as if every deadline of this process had passed."""
        end = time.perf_counter() + TIMEOUT
        self.step()
        while not condition():
            assert time.perf_counter() < end, f"a hand-over between processes: not within {TIMEOUT:g} s"
            time.sleep(0.002)
            self.clock.ahead += late * LATE_SECONDS
            self.step()

    def at(self, kind: str, fault: Fault) -> Callable[[], bool]:
        """Let a fault handle the first message of a kind; return a function that tells if it came."""
        done: list[str] = []

        def handle(parcel: Parcel) -> None:
            if parcel.kind == kind and not done:
                done.append(kind)
                fault(parcel)
            else:
                parcel.deliver()

        self.wire.fault = handle
        return lambda: bool(done)

    def kill_at(self, kind: str) -> Callable[[], bool]:
        """Kill the other process just before the first message of a kind arrives."""
        return self._end_at(kind, self.peer.kill)

    def stop_at(self, kind: str) -> Callable[[], bool]:
        """Stop the other process just before the first message of a kind arrives."""
        return self._end_at(kind, self.peer.stop)

    def _end_at(self, kind: str, end: Callable[[], None]) -> Callable[[], bool]:
        def fault(parcel: Parcel) -> None:
            end()
            parcel.deliver()

        return self.at(kind, fault)

    # --- with decode in this process --------------------------------------------------------------------------

    def fetch(self, name: str, seed: int, attempt: int = 1, blocks: int = BLOCKS) -> Request:
        request = Request(name, prompt_of(seed, blocks))
        assert self.mine.fetch(request, self.source(name, attempt)) == blocks
        return request

    def outcome(self, *, late: bool = False) -> LoadOutcome:
        """Wait for the one outcome of a fetch, and remove it."""
        self.until(lambda: self.mine.outcomes, late=late)
        (outcome,) = self.mine.outcomes
        self.mine.outcomes.clear()
        return outcome

    def read_by_mine(self, name: str, seed: int, fault: Fault = Parcel.arrive) -> None:
        """Hand blocks over to this process, and compare them."""
        self.wire.fault = fault
        self.peer.ask("send", name, seed, BLOCKS)
        request = self.fetch(name, seed)
        outcome = self.outcome()
        assert outcome.status is LoadStatus.CONFIRMED, outcome
        assert self.mine.wrong_blocks(request, 0, BLOCKS) == []
        self.mine.manager.finish([request])
        self.until(lambda: self.mine.is_clean and self.peer.ask("is_clean"))

    def take_whole(self, request: Request, *, late: bool = False) -> LoadOutcome:
        """Wait for the outcome of a fetch, compare what it calls whole, and end the request."""
        outcome = self.outcome(late=late)
        whole = outcome.recompute_from // BLOCK
        assert self.mine.wrong_blocks(request, 0, whole) == []
        assert (outcome.status is LoadStatus.CONFIRMED) == (whole == len(request.block_hashes))
        self.mine.manager.finish([request])
        return outcome

    # --- with prefill in this process -------------------------------------------------------------------------

    def send(self, name: str, seed: int, computed: int = BLOCKS) -> Request:
        request = Request(name, prompt_of(seed, BLOCKS))
        self.mine.start(request)
        self.mine.handovers.send([(request, name)])
        self.mine.step()
        if computed:
            self.mine.compute(request, name, 0, computed)
        if computed == BLOCKS:
            self.mine.manager.finish([request])
        return request

    def read_by_peer(self, name: str, seed: int, fault: Fault = Parcel.arrive) -> None:
        """Hand blocks over to the other process, which compares them."""
        self.wire.fault = fault
        before = len(self.peer.ask("outcomes"))
        self.send(name, seed)
        assert self.peer.ask("fetch", name, seed, BLOCKS, self.source(name)) == BLOCKS
        self.until(lambda: len(self.peer.ask("outcomes")) > before)
        assert self.peer.ask("outcomes")[-1][:2] == ("confirmed", BLOCKS)
        assert self.peer.ask("wrong", name, BLOCKS) == []
        self.peer.ask("finish", name)
        self.until(lambda: self.mine.is_clean and self.peer.ask("is_clean"))
