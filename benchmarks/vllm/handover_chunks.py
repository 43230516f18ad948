"""What a prompt that goes to decode chunk by chunk saves on a slow network.

    python -m benchmarks.vllm.handover_chunks --mbit 4 16 64

Needs what ``benchmarks.vllm.handover`` does, and root, for a namespace with a network of its own: prefill is in it, and
its cable sends so many megabits a second. Prompts are routed to decode after prefill has answered, and at once; times
are from the question to decode's first token. Exits 1 for tokens that differ from an engine's without a connector.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, Table
from benchmarks.vllm import engines
from benchmarks.vllm.handover_engines import answer, ready
from benchmarks.vllm.processes import Process, Processes, variables
from benchmarks.vllm.shapes import BLOCK, SHAPES, model_folder
from benchmarks.vllm.worker import Job
from fdcache.integrations.vllm.handover import ADDRESSES, ASKED_OF_PREFILL, TRANSFER_ID
from tests.network_help import Network
from tests.vllm.environments import VERSIONS, default_home, interpreter

_SHAPE = SHAPES["tiny-random"]
_REPLIES, _TOKENS, _MEBI = 8, 1009, 1 << 20
_ROUNDS_AHEAD = 1


class Engines:
    """Prefill behind a cable, decode, and an engine without a connector."""

    def __init__(self, processes: Processes, network: Network, stack: ExitStack) -> None:
        self._processes, self._network, self._stack = processes, network, stack
        self._model = model_folder(_SHAPE, processes.folder)
        inside = ["ip", "netns", "exec", network.name]
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)
        self.prefill = self._start("prefill", "kv_producer", network.there, inside)
        self.decode = self._start("decode", "kv_consumer", network.here, [])
        self.alone = self._start("alone", None, "", [])
        for each in (self.prefill, self.decode, self.alone):
            ready(each)

    def _start(self, name: str, role: str | None, host: str, enter: Sequence[str]) -> Process:
        connector: dict[str, Any] | None = None
        environment = {"UCX_TLS": "tcp,self"}  # no shared memory, as between nodes
        if role is not None:
            connector = {"kv_connector": "FdcacheConnector", "kv_role": role}
            connector["kv_connector_module_path"] = "fdcache.integrations.vllm"
            environment |= {
                "FDCACHE_HOST_MEMORY": "64MiB",
                "FDCACHE_LOAD_OR_RECOMPUTE": "always",
                "FDCACHE_TRANSFER": "rdma",
                "FDCACHE_TRANSFER_ADDRESS": f"tcp://{host}:7411",
                "FDCACHE_TRANSFER_KEY": "of-a-benchmark-on-one-machine",
            }
        arguments = engines.arguments(_SHAPE, self._model, device="cpu", eager=True)
        job = Job(_SHAPE.name, "brief", arguments, connector, is_warmed_up=False, is_alone=False)
        return self._stack.enter_context(self._processes.started(name, job, environment, enter))

    def limit(self, mbit: int) -> None:
        """Let prefill's end of the cable send so many megabits a second."""
        cable = f"{self._network.cable[:-1]}b"
        shaped = ["tbf", "rate", f"{mbit}mbit", "burst", "16kb", "latency", "100ms"]
        command = ["ip", "netns", "exec", self._network.name, "tc", "qdisc", "replace", "dev", cable, "root"]
        subprocess.run([*command, *shaped], check=True)

    def after_prefill(self, prompt: list[int]) -> tuple[float, dict[str, Any], dict[str, Any]]:
        """Route as vLLM's protocol says; return the milliseconds, what decode answered, and prefill's parameters."""
        begun = time.perf_counter()
        told = answer(self.prefill, prompt, 1, ASKED_OF_PREFILL)["transfer"]
        between = 1e3 * (time.perf_counter() - begun)
        found = answer(self.decode, prompt, _REPLIES, told)
        return between + found["ttft_ms"], found, told

    def at_once(self, prompt: list[int], name: str, addresses: list[str]) -> tuple[float, dict[str, Any]]:
        """Ask both at once."""
        named = {TRANSFER_ID: name}
        waits = {"do_remote_prefill": True, ADDRESSES: addresses, **named}
        order = {"prompt": prompt, "replies": _REPLIES, "transfer": waits}
        self.decode.begin({"answer": order})
        answer(self.prefill, prompt, 1, {**ASKED_OF_PREFILL, **named})
        (found,) = self.decode.results()
        return found["ttft_ms"], found


def measure(started: Engines, rates: Sequence[int], rounds: int) -> tuple[Table, int]:
    """Return the times by rate, and how many answers were wrong."""
    chosen, numbers = random.Random(1), itertools.count()
    rows, wrong = [], 0
    nbytes = -(-_TOKENS // BLOCK) * _SHAPE.page_bytes * _SHAPE.layers
    last = (_TOKENS - 1) % _SHAPE.batch_tokens + 1
    for mbit in rates:
        started.limit(mbit)
        times: dict[str, list[float]] = {"after": [], "at once": []}
        computed = 0
        for number in range(-_ROUNDS_AHEAD, rounds):
            first, second = (
                [chosen.randrange(3, _SHAPE.vocabulary) for _ in range(_TOKENS)] for _ in range(2)
            )
            after, found, told = started.after_prefill(first)
            at_once, other = started.at_once(second, f"chunks-{next(numbers)}", told[ADDRESSES])
            for prompt, each in ((first, found), (second, other)):
                answer(started.alone, prompt, 1)
                wrong += each["tokens"] != answer(started.alone, prompt, _REPLIES)["tokens"]
            computed += other["cached"] < _TOKENS - BLOCK
            if number >= 0:
                times["after"].append(after)
                times["at once"].append(at_once)
        after, at_once = (statistics.median(each) for each in times.values())
        rows.append(
            {
                "Mbit/s": mbit,
                "MiB": f"{nbytes / _MEBI:.2f}",
                "after prefill has answered, ms": f"{after:.0f}",
                "at once, ms": f"{at_once:.0f}",
                "saved, ms": f"{after - at_once:.0f}",
                "all but the last chunk on the cable, ms": f"{nbytes * (1 - last / _TOKENS) * 8e-3 / mbit:.0f}",
                "at once, and computed by decode": computed,
                "wrong": wrong,
            }
        )
    return rows, wrong


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm.handover_chunks", description=__doc__)
    parser.add_argument("--mbit", type=int, nargs="+", default=[4, 16, 64], help="of prefill's cable")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--version", choices=VERSIONS, default=VERSIONS[-1], help="of vLLM")
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs")
    options = parser.parse_args(arguments)
    network = Network()
    try:
        if not network.make():
            parser.error("namespaces of networks are not allowed here")
        with tempfile.TemporaryDirectory(prefix="fdcache-handover-") as name, ExitStack() as stack:
            folder = Path(name)
            environment = variables(folder, "cpu") | engines.environment("cpu", folder)
            python = str(interpreter(default_home(), options.version))
            processes = Processes(python, folder, options.logs or folder / "logs", None, environment)
            rows, wrong = measure(Engines(processes, network, stack), options.mbit, options.rounds)
    finally:
        network.remove()
    Report().table("times to the first token", rows)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
