"""Prefill and decode in two engines of vLLM, with fdcache and with vLLM's NixlConnector, both through NIXL.

    python -m benchmarks.vllm.handover --rounds 5

Needs vLLM for the CPU (``python -m tests.vllm.setup``) and NIXL in that environment, or on PYTHONPATH. Every connector
has a prefill and a decode engine, all of them run at the same time, and requests are given to one after the other. A
request takes, at decode, to its first token: computed there, handed over, and found in decode's own prefix cache. Then
prefill is killed while decode waits for it, and decode while prefill holds blocks for it. Exits 1 for tokens that are
not those of an engine without a connector. With ``--proxy`` a prompt goes through vLLM's own proxy too. On GPUs
without it, or with ``--no-http``, see ``benchmarks.vllm.handover_engines``.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, Table
from benchmarks.vllm import handover_engines
from benchmarks.vllm.engines import arguments as arguments_of
from benchmarks.vllm.engines import environment
from benchmarks.vllm.shapes import BLOCK, SHAPES, model_folder, write_random_weights
from fdcache.integrations.vllm.handover import ASKED_OF_PREFILL
from tests.vllm.engine import connector_config, install_plugin, make_model, make_tokenizer
from tests.vllm.environments import PACKAGES, VERSIONS, default_home, interpreter
from tests.vllm.served import Server, completion, free_port, running, start_engine

OURS, NIXL = "fdcache", "NixlConnector"
LENGTHS = (100, 400, 900)
_OPTIONS: dict[str, object] = {
    "num-gpu-blocks-override": 400,
    "max-model-len": 2048,
    "max-num-batched-tokens": 2048,
}
_TOKENS = 8
_PATIENCE = 90.0
_BLOCK_BYTES = 3 * 2 * 16 * 2 * 16 * 4
"""Bytes of a block of the small model: layers, keys and values, tokens, heads, elements of four bytes."""
_OURS_READ, _NIXL_READ = "vllm:fdcache_blocks_fetched_total", "vllm:nixl_bytes_transferred_sum"


@dataclass(frozen=True)
class Engines:
    """Starts ``vllm serve`` of one model: the tests' small one on a CPU, a shape's with a GPU for each role."""

    model: Path
    logs: Path
    block_bytes: int
    options: Mapping[str, object]
    variables: Mapping[str, str] = field(default_factory=dict)
    gpus: Mapping[str, int] = field(default_factory=dict)
    proxy: Path | None = None

    def start(self, connector: str | None, role: str) -> Server:
        """Start an engine of a role; without a connector, one that is on decode's GPU."""
        if connector is None:
            config = None
        elif connector == NIXL:
            device = "cuda" if self.gpus else "cpu"
            config = {"kv_connector": NIXL, "kv_buffer_device": device, "kv_role": role}
            config["kv_load_failure_policy"] = "recompute"
        else:
            _, _, transfer = connector.partition("-")
            memory = "1GiB" if self.gpus else "64MiB"
            config = connector_config(FDCACHE_HOST_MEMORY=memory, FDCACHE_TRANSFER=transfer or "rdma")
            config["kv_role"] = role
        port = free_port()
        variables = {**self.variables, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        if self.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = str(self.gpus[role])
        log = self.logs / f"{connector or 'alone'}-{role}-{port}.log"
        return start_engine(self.model, log, config, variables, **self.options)

    def route(self, prefill: Server, decode: Server) -> Server | None:
        """Start vLLM's proxy for two engines, if it is there."""
        if self.proxy is None:
            return None
        port = free_port()
        command = [sys.executable, str(self.proxy), "--port", str(port), "--host", "127.0.0.1"]
        command += ["--prefiller-hosts", "127.0.0.1", "--prefiller-ports", str(prefill.port)]
        command += ["--decoder-hosts", "127.0.0.1", "--decoder-ports", str(decode.port)]
        return Server(command, port, self.logs / f"proxy-{port}.log", health="/healthcheck")


class Pair:
    """A prefill and a decode engine with one connector."""

    def __init__(self, connector: str, engines: Engines) -> None:
        self.connector, self._engines = connector, engines
        self.prefill, self.decode = self.start("kv_producer"), self.start("kv_consumer")
        self.proxy = engines.route(self.prefill, self.decode)

    @property
    def servers(self) -> list[Server]:
        """The processes."""
        return [self.prefill, self.decode, *([] if self.proxy is None else [self.proxy])]

    def start(self, role: str) -> Server:
        """Start an engine."""
        return self._engines.start(self.connector, role)

    def read_bytes(self) -> float:
        """Return the bytes that decode has read so far."""
        if self.connector == NIXL:
            return self.decode.counter(_NIXL_READ)
        return self._engines.block_bytes * self.decode.counter(_OURS_READ)

    def prefilled(self, prompt: Sequence[int]) -> tuple[dict[str, Any] | None, float]:
        """Compute a prompt at prefill; return the parameters for decode, and the seconds."""
        body = {"model": "model", "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
        start = time.perf_counter()
        answer = self.prefill.post("/v1/completions", {**body, "kv_transfer_params": ASKED_OF_PREFILL})
        return answer.get("kv_transfer_params"), time.perf_counter() - start

    def kill(self) -> None:
        """End all."""
        for each in self.servers:
            each.kill()


def first_token(server: Server, prompt: Sequence[int], **fields: Any) -> tuple[float, list[int]]:
    """Return the seconds to the first token of a streamed answer, and all its tokens."""
    body = json.dumps(completion(prompt, _TOKENS, stream=True, **fields))
    line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=_PATIENCE)
    start = time.perf_counter()
    line.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    first, tokens = 0.0, list[int]()
    for text in line.getresponse():
        if text.startswith(b"data: {"):
            chosen = json.loads(text[6:]).get("choices") or [{}]
            tokens += chosen[0].get("token_ids") or []
            first = first or (time.perf_counter() - start if tokens else 0.0)
    line.close()
    return first, tokens


def both_ways(alone: Server, prompt: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the tokens of an engine that computes the whole prompt, then those with the prompt in its cache."""
    return alone.tokens(prompt, _TOKENS), alone.tokens(prompt, _TOKENS)


def expected(alone: Server, prompt: Sequence[int]) -> list[int]:
    """Return the tokens of an engine that has the prompt in its cache, as decode has: other shapes give near ties."""
    return both_ways(alone, prompt)[1]


def gap(alone: Server, prompt: Sequence[int], answer: Sequence[int], right: Sequence[int]) -> float:
    """Return by how much the right token is likelier than the one in its place: the difference of their logarithms."""
    at = next(index for index, pair in enumerate(zip(answer, right, strict=True)) if pair[0] != pair[1])
    body = completion([*prompt, *right[:at]], 1, logprobs=20, return_tokens_as_token_ids=True)
    found = alone.post("/v1/completions", body)["choices"][0]["logprobs"]["top_logprobs"][0]
    by_token = {int(name.rpartition(":")[2]): value for name, value in found.items()}
    return float(by_token[right[at]] - by_token.get(answer[at], -math.inf))


class Measured:
    """Seconds of one connector for prompts of one length, and answers that were wrong."""

    def __init__(self) -> None:
        self.prefill: list[float] = []
        self.computed: list[float] = []
        self.handed_over: list[float] = []
        self.cached: list[float] = []
        self.proxied: list[float] = []
        self.gaps: list[float] = []
        """Of each wrong answer, by how much the right token was likelier."""
        self.compared = self.own = self.as_computed = 0
        """Answers; those that the engine alone gives otherwise if it computes the prompt; wrong ones that are these."""

    def take(self, pair: Pair, alone: Server, prompts: Sequence[list[int]]) -> None:
        """Serve a prompt that is handed over twice, one that decode computes, and one through vLLM's proxy."""
        given, computed, routed = prompts
        parameters, seconds = pair.prefilled(given)
        self.prefill.append(seconds)
        seconds, answer = first_token(pair.decode, given, kv_transfer_params=parameters)
        self.handed_over.append(seconds)
        self._compare(alone, given, answer)
        self.cached.append(first_token(pair.decode, given)[0])
        self.computed.append(first_token(pair.decode, computed)[0])
        if pair.proxy is not None:
            seconds, answer = first_token(pair.proxy, routed)
            self.proxied.append(seconds)
            self._compare(alone, routed, answer)

    def _compare(self, alone: Server, prompt: list[int], answer: list[int]) -> None:
        computed, right = both_ways(alone, prompt)
        self.compared += 1
        self.own += computed != right
        if answer != right:
            self.as_computed += answer == computed
            self.gaps.append(gap(alone, prompt, answer, right) if len(answer) == len(right) else math.inf)

    def row(self, connector: str, length: int) -> dict[str, Any]:
        """Return the medians."""
        names = ("prefill", "computed", "handed_over", "cached")
        median = {name: 1e3 * statistics.median(getattr(self, name)) for name in names}
        return {
            "connector": connector,
            "tokens": length,
            "prefill answers, ms": f"{median['prefill']:.1f}",
            "decode: computed, ms": f"{median['computed']:.1f}",
            "handed over, ms": f"{median['handed_over']:.1f}",
            "in its own cache, ms": f"{median['cached']:.1f}",
            "added, ms": f"{median['handed_over'] - median['cached']:.1f}",
            **(
                {"through vLLM's proxy, ms": f"{1e3 * statistics.median(self.proxied):.1f}"}
                if self.proxied
                else {}
            ),
            "wrong": f"{len(self.gaps)} of {self.compared}",
            "of them, as the engine alone computes": self.as_computed,
            "its own that differ, computed and cached": f"{self.own} of {self.compared}",
            "right token likelier by": " ".join(f"{each:.4f}" for each in self.gaps),
        }


def measure(
    pairs: Sequence[Pair], alone: Server, rounds: int, lengths: Sequence[int]
) -> tuple[Table, Table, int]:
    """Return the times by length and connector, the bytes by connector, and how many answers were wrong."""
    chosen = random.Random(1)
    rows, moved, wrong = [], [], 0
    before = {pair.connector: pair.read_bytes() for pair in pairs}
    for length in lengths:
        results = {pair.connector: Measured() for pair in pairs}
        for number in range(rounds + 1):
            prompts = [[chosen.randrange(3, 500) for _ in range(length)] for _ in range(3 * len(pairs))]
            for index, pair in enumerate(pairs if number % 2 else reversed(pairs)):
                target = results[pair.connector] if number else Measured()  # the first connects the engines
                target.take(pair, alone, prompts[3 * index : 3 * index + 3])
        for connector, result in results.items():
            rows.append(result.row(connector, length))
            wrong += len(result.gaps)
    asked = sum(lengths) * (rounds + 1)
    for pair in pairs:
        read, prompts_read = (
            pair.read_bytes() - before[pair.connector],
            asked * (1 if pair.proxy is None else 2),
        )
        moved.append(
            {"connector": pair.connector, "prompt tokens": prompts_read, "bytes read": f"{read:.0f}"}
        )
    return rows, moved, wrong


def kill_each(pair: Pair, alone: Server) -> Table:
    """Kill prefill while decode waits for it, and decode while prefill holds blocks for it."""
    chosen = random.Random(2)
    prompts = [[chosen.randrange(3, 500) for _ in range(LENGTHS[-1])] for _ in range(3)]
    rows = []
    parameters, _ = pair.prefilled(prompts[0])
    os.killpg(pair.prefill.process.pid, signal.SIGSTOP)
    killer = threading.Timer(0.3, pair.prefill.kill)
    killer.start()
    rows.append(_answered(pair, alone, "prefill", prompts[0], parameters))
    killer.join()
    pair.prefill = pair.start("kv_producer")
    pair.prefill.wait()
    rows.append(
        _answered(pair, alone, "prefill, the next request", prompts[1], pair.prefilled(prompts[1])[0])
    )
    parameters, _ = pair.prefilled(prompts[2])
    pair.decode.kill()
    pair.decode = pair.start("kv_consumer")
    pair.decode.wait()
    rows.append(_answered(pair, alone, "decode", prompts[2], parameters))
    return rows


def _answered(
    pair: Pair, alone: Server, killed: str, prompt: list[int], parameters: dict[str, Any] | None
) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        _, answer = first_token(pair.decode, prompt, kv_transfer_params=parameters)
    except OSError as error:
        outcome = f"no answer: {error or type(error).__name__}"
    else:
        outcome = "right" if answer == expected(alone, prompt) else f"wrong, {len(answer)} tokens"
    seconds = time.perf_counter() - start
    return {"connector": pair.connector, "killed": killed, "answer": outcome, "s": f"{seconds:.2f}"}


def _without_http(options: argparse.Namespace) -> int:
    on_gpu = options.device == "cuda"
    python = sys.executable if on_gpu else str(interpreter(default_home(), options.version))
    wrong = handover_engines.run(
        Report(),
        python,
        options.device,
        options.shape or ("random" if on_gpu else "tiny-random"),
        [*(("fdcache-ipc",) if on_gpu else ()), "fdcache-rdma", NIXL]
        if options.connectors is None
        else options.connectors,
        options.tokens or ((1025, 8193) if on_gpu else (97, 401)),
        options.rounds,
        options.logs,
        of_ranks=options.of_ranks,
    )
    return 1 if wrong else 0


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm.handover", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-kill", action="store_true", help="do not kill engines")
    parser.add_argument("--version", choices=VERSIONS, default=VERSIONS[-1], help="of vLLM")
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU for each role")
    parser.add_argument("--no-http", action="store_true", help="engines that answer orders, also on a CPU")
    parser.add_argument("--shape", choices=SHAPES, help="model of engines without HTTP")
    parser.add_argument(
        "--connectors", nargs="*", help="without HTTP: fdcache-ipc, fdcache-rdma, NixlConnector"
    )
    parser.add_argument("--tokens", type=int, nargs="+", help="whole blocks of 16 and one more, without HTTP")
    parser.add_argument(
        "--of-ranks",
        nargs="+",
        choices=SHAPES,
        default=[],
        help="then engines of one and two ranks, without HTTP",
    )
    parser.add_argument("--proxy", type=Path, help="vLLM's toy_proxy_server.py; on GPUs with it, over HTTP")
    options = parser.parse_args(arguments)
    if options.no_http or (options.device == "cuda" and options.proxy is None):
        return _without_http(options)
    if options.device == "cpu":
        python = interpreter(default_home(), options.version)
        if not Path(sys.prefix).samefile(python.parent.parent):
            packages = {PACKAGES: sysconfig.get_path("purelib")}
            command = [str(python), "-m", "benchmarks.vllm.handover", *(arguments or sys.argv[1:])]
            return subprocess.run(command, env=os.environ | packages, check=False).returncode
    with tempfile.TemporaryDirectory(prefix="fdcache-handover-") as folder:
        engines = _engines(options, Path(folder))
        engines.logs.mkdir(parents=True, exist_ok=True)
        alone = engines.start(None, "kv_consumer")
        ours = (f"{OURS}-ipc", f"{OURS}-rdma") if engines.gpus else (OURS,)
        pairs = [Pair(connector, engines) for connector in options.connectors or (*ours, NIXL)]
        report = Report()
        try:
            with running(alone, *(each for pair in pairs for each in pair.servers)):
                times, moved, wrong = measure(pairs, alone, options.rounds, options.tokens or LENGTHS)
                report.table("times to the first token", times)
                report.table("bytes", moved)
                if not options.no_kill:
                    killed = [row for pair in pairs for row in kill_each(pair, alone)]
                    report.table("kill -9", killed)
        finally:
            for pair in pairs:
                pair.kill()
    return 1 if wrong else 0


def _engines(options: argparse.Namespace, folder: Path) -> Engines:
    logs, proxy = options.logs or folder / "logs", options.proxy
    if options.device == "cpu":
        install_plugin(folder)
        model = make_tokenizer(make_model(folder / "model"))
        return Engines(model, logs, _BLOCK_BYTES, _OPTIONS, proxy=proxy)
    shape = SHAPES[options.shape or "random"]
    shape = replace(shape, device_blocks=min(shape.device_blocks, handover_engines.DEVICE_BLOCKS))
    model = make_tokenizer(model_folder(shape, folder), shape.vocabulary)
    if shape.has_random_weights:
        write_random_weights(shape, model)
    given = arguments_of(shape, model, device="cuda", eager=True)
    left_out = ("model", "skip_tokenizer_init", "enforce_eager", "enable_prefix_caching", "disable_log_stats")
    named = {name.replace("_", "-"): value for name, value in given.items() if name not in left_out}
    taken = named | {"compilation-config": None}
    variables = environment("cuda", folder)
    gpus = {"kv_producer": 0, "kv_consumer": 1}
    return Engines(model, logs, BLOCK * shape.token_bytes, taken, variables, gpus, proxy)


if __name__ == "__main__":
    sys.exit(main())
