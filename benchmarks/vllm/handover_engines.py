"""Prefill and decode in engines without HTTP, on GPUs: ``python -m benchmarks.vllm.handover --device cuda``.

Prefill is on the first GPU and decode on the second, or both on one if there is no other.

Each engine is a process that answers orders (``benchmarks.vllm.worker``); the parameters of vLLM's protocol go from one
to the other as a router passes them on. Prompts are one token longer than whole blocks: decode computes that token,
from blocks that were handed over, or that are in an engine's own prefix cache, so that answers are the same bits.
"""

from __future__ import annotations

import random
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, Table
from benchmarks.vllm import engines
from benchmarks.vllm.processes import Process, Processes, variables
from benchmarks.vllm.shapes import BLOCK, SHAPES, Shape, model_folder
from benchmarks.vllm.worker import Job
from fdcache.devices.topology import visible_gpus
from fdcache.integrations.vllm.handover import ADDRESSES, ASKED_OF_PREFILL, TRANSFER_ID
from tests.vllm.served import free_port

NIXL = "NixlConnector"
_REPLIES = 16
DEVICE_BLOCKS = 2048
"""Three engines share a GPU."""
_START_S, _ROUNDS_AHEAD, _ROUNDS_OF_RANKS = 500.0, 1, 5
_OF_OURS = "fdcache-"
ROOM = re.compile(r"host memory has room for ([\d,]+) tokens")


class Engines:
    """Starts engines of one shape."""

    def __init__(self, processes: Processes, shape: Shape, device: str, stack: ExitStack) -> None:
        self._processes, self._shape, self._stack, self._device = processes, shape, stack, device
        self._decode_gpu = min(len(visible_gpus()) - 1, 1) if device == "cuda" else 0
        self._model = model_folder(shape, processes.folder)

    def start(self, name: str, connector: dict[str, Any] | None, *gpus: int, **settings: str) -> Process:
        """Start an engine on these GPUs."""
        arguments = engines.arguments(self._shape, self._model, device=self._device, eager=True)
        environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), **settings}
        if self._device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        if len(gpus) > 1:
            arguments |= {"tensor_parallel_size": len(gpus), "distributed_executor_backend": "mp"}
        job = Job(self._shape.name, "brief", arguments, connector, is_warmed_up=False, is_alone=False)
        return self._stack.enter_context(self._processes.started(name, job, environment))

    def with_ranks(self) -> dict[int, Process]:
        """Start engines of one and of two ranks, which keep blocks in host memory."""
        config = {"kv_connector": "FdcacheConnector", "kv_role": "kv_both"}
        config["kv_connector_module_path"] = "fdcache.integrations.vllm"
        memory = "8GiB" if self._device == "cuda" else "64MiB"
        settings = {"FDCACHE_HOST_MEMORY": memory, "FDCACHE_LOAD_OR_RECOMPUTE": "always"}
        name = f"{self._shape.name}-ranks"
        return {count: self.start(f"{name}-{count}", config, *range(count), **settings) for count in (1, 2)}

    def alone(self) -> Process:
        """Start an engine without a connector beside decode."""
        return self.start("alone", None, self._decode_gpu)

    def pair(self, connector: str) -> Pair:
        """Start prefill on the first GPU and decode on the second, or on the only one."""
        made = []
        for gpu, role in ((0, "kv_producer"), (self._decode_gpu, "kv_consumer")):
            if connector == NIXL:
                config = {
                    "kv_connector": NIXL,
                    "kv_buffer_device": self._device,
                    "kv_load_failure_policy": "recompute",
                }
                made.append(self.start(f"{connector}-{role}", config | {"kv_role": role}, gpu))
            else:
                settings = {"FDCACHE_HOST_MEMORY": "1GiB", "FDCACHE_LOAD_OR_RECOMPUTE": "always"}
                settings["FDCACHE_TRANSFER"] = connector.removeprefix(_OF_OURS)
                config = {"kv_connector": "FdcacheConnector", "kv_role": role}
                config["kv_connector_module_path"] = "fdcache.integrations.vllm"
                made.append(self.start(f"{connector}-{role}", config, gpu, **settings))
        return Pair(connector, *made)


class Pair:
    """A prefill and a decode engine."""

    def __init__(self, connector: str, prefill: Process, decode: Process) -> None:
        self.connector, self.prefill, self.decode = connector, prefill, decode


def ready(process: Process) -> None:
    """Wait until an engine has started."""
    for _ in process.results("start", _START_S):
        pass


def answer(process: Process, prompt: Sequence[int], replies: int, transfer: object = None) -> dict[str, Any]:
    """Return an engine's answer: seconds, tokens, and the parameters that it gives back."""
    order = {"prompt": list(prompt), "replies": replies, "transfer": transfer}
    (found,) = process.order({"answer": order})
    return found


def answers_at_once(pair: Pair, prompt: Sequence[int], name: str, addresses: Sequence[str]) -> dict[str, Any]:
    """Ask prefill and decode at once, as a router may; return decode's answer, whose seconds are those through both."""
    asked = {**ASKED_OF_PREFILL, TRANSFER_ID: name}
    pair.prefill.begin({"answer": {"prompt": list(prompt), "replies": 1, "transfer": asked}})
    told = {"do_remote_prefill": True, TRANSFER_ID: name, ADDRESSES: list(addresses)}
    found = answer(pair.decode, prompt, _REPLIES, told)
    for _ in pair.prefill.results():
        pass
    return found


def rounds_of(pair: Pair, alone: Process, prompts: Callable[[], list[int]], rounds: int) -> dict[str, Any]:
    """Return the median milliseconds of a pair for prompts of one length, and how many answers were wrong."""
    taken: dict[str, list[float]] = {"prefill": [], "handed over": [], "cached": [], "computed": []}
    at_once: list[float] = []
    wrong = 0
    for number in range(-_ROUNDS_AHEAD, rounds):  # the first connects the engines, and is not counted
        prompt = prompts()
        first = answer(pair.prefill, prompt, 1, ASKED_OF_PREFILL)
        handed = answer(pair.decode, prompt, _REPLIES, first["transfer"])
        cached = answer(pair.decode, prompt, _REPLIES)
        computed = answer(pair.decode, prompts(), 1)
        answer(alone, prompt, 1)
        wrong += handed["tokens"] != answer(alone, prompt, _REPLIES)["tokens"] or first["transfer"] is None
        if pair.connector != NIXL:
            prompt = prompts()
            both = answers_at_once(pair, prompt, f"at-once-{number}", first["transfer"][ADDRESSES])
            answer(alone, prompt, 1)
            wrong += both["tokens"] != answer(alone, prompt, _REPLIES)["tokens"]
            at_once += [both["ttft_ms"]] * (number >= 0)
        if number >= 0:
            for name, found in zip(taken, (first, handed, cached, computed), strict=True):
                taken[name].append(found["ttft_ms"])
    median = {name: statistics.median(values) for name, values in taken.items()}
    return {
        "prefill answers, ms": f"{median['prefill']:.1f}",
        "decode: computed, ms": f"{median['computed']:.1f}",
        "handed over, ms": f"{median['handed over']:.1f}",
        "in its own cache, ms": f"{median['cached']:.1f}",
        "added, ms": f"{median['handed over'] - median['cached']:.1f}",
        "TTFT through both, ms": f"{median['prefill'] + median['handed over']:.1f}",
        "asked at once, ms": f"{statistics.median(at_once):.1f}" if at_once else "-",
        "wrong": wrong,
    }


def measure_pairs(
    started: Engines, shape: Shape, connectors: Sequence[str], lengths: Sequence[int], rounds: int
) -> tuple[Table, int]:
    """Return the times by connector and length, and how many answers were wrong."""
    alone = started.alone()
    pairs = [started.pair(each) for each in connectors]
    for process in (alone, *(each for pair in pairs for each in (pair.prefill, pair.decode))):
        ready(process)
    chosen, rows, wrong = random.Random(1), [], 0
    for length in lengths:

        def prompt(length: int = length) -> list[int]:
            return [chosen.randrange(3, shape.vocabulary) for _ in range(length)]

        for pair in pairs:
            found = rounds_of(pair, alone, prompt, rounds)
            mebibytes = length // BLOCK * BLOCK * shape.token_bytes / (1 << 20)
            about = {"connector": pair.connector, "tokens": length, "MiB": f"{mebibytes:.0f}"}
            rows.append(about | found)
            wrong += found["wrong"]
    return rows, wrong


def measure_ranks(ranks: dict[int, Process], shape: Shape, length: int) -> tuple[Table, int]:
    """Return what engines of one and of two ranks load back from host memory: times, and whether tokens are the same.

    Both have as much host memory; ``room`` is for how many tokens it has room.
    """
    rows, wrong = [], 0
    for count, engine in ranks.items():
        chosen = random.Random(2)
        for number in range(-_ROUNDS_AHEAD, _ROUNDS_OF_RANKS):
            prompt = [chosen.randrange(3, shape.vocabulary) for _ in range(length)]
            computed = answer(engine, prompt, 1)
            cached = answer(engine, prompt, _REPLIES)
            for _ in engine.order({"forget": True}):
                pass
            loaded = answer(engine, prompt, _REPLIES)
            is_wrong = loaded["tokens"] != cached["tokens"] or loaded["cached"] < length - BLOCK
            wrong += is_wrong
            if number < 0:
                continue
            nbytes = length // BLOCK * BLOCK * shape.token_bytes
            rows.append(
                {
                    "ranks": count,
                    "room": ROOM.findall(engine.log())[-1],
                    "prompt": number,
                    "computed, ms": f"{computed['ttft_ms']:.1f}",
                    "on the device, ms": f"{cached['ttft_ms']:.1f}",
                    "from host memory, ms": f"{loaded['ttft_ms']:.1f}",
                    "GB/s": f"{nbytes / max(loaded['ttft_ms'] - cached['ttft_ms'], 0.1) / 1e6:.1f}",
                    "tokens": "differ" if is_wrong else "equal",
                }
            )
    return rows, wrong


def run(
    report: Report,
    python: str,
    device: str,
    shape: str,
    connectors: Sequence[str],
    lengths: Sequence[int],
    rounds: int,
    logs: Path | None,
    *,
    of_ranks: Sequence[str],
) -> int:
    """Measure and print; return how many answers were wrong. ``of_ranks``: shapes for engines of one and two ranks."""
    with tempfile.TemporaryDirectory(prefix="fdcache-handover-") as name:
        folder = Path(name)
        environment = variables(folder, device) | engines.environment(device, folder)
        processes = Processes(python, folder, logs or folder / "logs", None, environment)
        wrong = 0

        def engines_of(name: str, stack: ExitStack) -> Engines:
            made = SHAPES[name]
            made = replace(made, device_blocks=min(made.device_blocks, DEVICE_BLOCKS))
            return Engines(processes, made, device, stack)

        if connectors:
            with ExitStack() as stack:
                started = engines_of(shape, stack)
                rows, wrong = measure_pairs(started, SHAPES[shape], connectors, lengths, rounds)
                report.table(f"times to the first token, {shape}", rows)
        with ExitStack() as stack:
            made = {each: engines_of(each, stack).with_ranks() for each in of_ranks}
            for engine in (engine for ranks in made.values() for engine in ranks.values()):
                ready(engine)
            for each, ranks in made.items():
                rows, more = measure_ranks(ranks, SHAPES[each], lengths[-1])
                wrong += more
                report.table(f"one engine of one and of two ranks, {each}", rows)
        return wrong
