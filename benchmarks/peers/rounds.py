"""The peers' processes, and their work in turns: a slice of one, the same slice of the next, and all again.

A machine that is busy for a while then slows all of them down. Every call is made once in each round, and the fastest
counts.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.environments import Peer, command_of
from benchmarks.peers.scenarios import Memory, Slice

ROOT = Path(__file__).parent.parent.parent

Tick = Callable[[], None]


@dataclass(frozen=True)
class Cost:
    """Nanoseconds by phase, those left out, and what was done in them. Costs of one after the other add up."""

    ns: Counter[str] = field(default_factory=Counter)
    left_out_ns: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.ns + other.ns,
            self.left_out_ns + other.left_out_ns,
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.hit_tokens + other.hit_tokens,
        )

    def us(self, *phases: str) -> float:
        """Return microseconds for each request in some phases; in all of them if none is named."""
        return sum(self.ns[phase] for phase in phases or self.ns) / 1000 / self.requests

    @property
    def us_without_hashing(self) -> float:
        """Microseconds for each request in all phases but one."""
        return self.us(*(phase for phase in self.ns if phase != "hash"))

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were cached."""
        return self.hit_tokens / self.prompt_tokens


class WorkerError(Exception):
    """A peer's process has ended; the message names it, its last line, and its log."""


class PeerProcess:
    """A process of ``benchmarks.peers.worker`` for one peer."""

    def __init__(self, peer: Peer, home: Path, log: Path) -> None:
        python, options = command_of(peer, home)
        self.peer = peer
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", "benchmarks.peers.worker", peer.adapter, json.dumps(options)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def wait_until_ready(self) -> None:
        """Return when the peer is imported."""
        self._answer()

    def order(self, *words: object) -> Any:
        """Have an order of ``worker`` carried out; return the answer. Raises ``WorkerError`` if the process ends."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._stopped() from error
        return self._answer()

    def advance(self, count: int) -> Slice:
        """Do a slice of the scenario in progress."""
        return Slice(**self.order("advance", count))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._stopped()
        return json.loads(line)

    def _stopped(self) -> WorkerError:
        status = self._process.wait()
        lines = self._log.read_text().splitlines() or [f"status {status}"]
        return WorkerError(f"{self.peer.name} has stopped: {lines[-1]} (all of it in {self._log})")


@contextmanager
def started(peers: Sequence[Peer], home: Path, logs: Path) -> Iterator[list[PeerProcess]]:
    """Start the processes of all peers, and end them with the context."""
    with ExitStack() as stack:
        processes = []
        for peer in peers:
            process = PeerProcess(peer, home, logs / f"{peer.name}.log")
            stack.callback(process.close)
            processes.append(process)
        for process in processes:
            process.wait_until_ready()
        yield processes


def in_turns(
    processes: Sequence[PeerProcess],
    scenario: str,
    settings: Mapping[str, Any],
    slices: Sequence[int],
    rounds: int,
    tick: Tick,
) -> dict[str, list[list[Slice]]]:
    """Run a scenario ``rounds`` times from the beginning; return each peer's rounds, one list of slices each.

    ``slices``: the count that ``advance`` gets for each slice. The order of peers changes from slice to slice.
    """
    found: dict[str, list[list[Slice]]] = {process.peer.name: [] for process in processes}
    for _ in range(rounds):
        for process in processes:
            process.order("begin", scenario, settings)
            found[process.peer.name].append([])
            tick()
        for index, count in enumerate(slices):
            first = index % len(processes)
            for process in [*processes[first:], *processes[:first]]:
                found[process.peer.name][-1].append(process.advance(count))
                tick()
        for process in processes:
            process.order("end")
    return found


def ticks_of(processes: Sequence[PeerProcess], slices: Sequence[int], rounds: int) -> int:
    """Return how often ``in_turns`` calls ``tick``."""
    return rounds * len(processes) * (1 + len(slices))


def fastest(equal: Sequence[Slice]) -> Cost:
    """Return the cost of a slice that was done several times: of each call the least time.

    Raises ``ValueError`` if the slices were not the same work.
    """
    work = {(one.requests, one.prompt_tokens, one.hit_tokens) for one in equal}
    if len(work) != 1:
        raise ValueError(f"slices of different work: {sorted(work)}")
    ns = {phase: int(np.min([one.ns[phase] for one in equal], axis=0).sum()) for phase in equal[0].ns}
    return Cost(Counter(ns), min(one.left_out_ns for one in equal), *work.pop())


def memory_of(process: PeerProcess, blocks: int) -> Memory:
    """Return what a full pool takes; the first order that a process gets."""
    return Memory(**process.order("memory", {"blocks": blocks}))
