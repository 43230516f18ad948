"""Prefill and decode in two engines of vLLM, with fdcache and with vLLM's NixlConnector, both through NIXL.

    python -m benchmarks.vllm.handover --rounds 5

Needs vLLM for the CPU (``python -m tests.vllm.setup``) and NIXL in that environment, or on PYTHONPATH. Every connector
has a prefill and a decode engine, all of them run at the same time, and requests are given to one after the other. A
request takes, at decode, to its first token: computed there, handed over, and found in decode's own prefix cache. Then
prefill is killed while decode waits for it, and decode while prefill holds blocks for it. Exits 1 for tokens that are
not those of an engine without a connector. On GPUs, or with ``--no-http``, see ``benchmarks.vllm.handover_engines``.
"""

from __future__ import annotations

import argparse
import http.client
import json
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, Table
from benchmarks.vllm import handover_engines
from benchmarks.vllm.shapes import SHAPES
from fdcache.integrations.vllm.handover import ASKED_OF_PREFILL
from tests.vllm.engine import connector_config, install_plugin, make_model, make_tokenizer
from tests.vllm.environments import PACKAGES, VERSIONS, default_home, interpreter
from tests.vllm.served import Server, completion, free_port, running, start_engine

OURS, NIXL = "fdcache", "NixlConnector"
LENGTHS = (100, 400, 900)
_OPTIONS: dict[str, object] = {
    "num-gpu-blocks-override": 400,
    "max-model-len": 1024,
    "max-num-batched-tokens": 1024,
}
_TOKENS = 8
_PATIENCE = 90.0
_BLOCK_BYTES = 3 * 2 * 16 * 2 * 16 * 4
"""Bytes of a block of the small model: layers, keys and values, tokens, heads, elements of four bytes."""
_READ = {
    OURS: ("vllm:fdcache_blocks_fetched_total", _BLOCK_BYTES),
    NIXL: ("vllm:nixl_bytes_transferred_sum", 1),
}


class Pair:
    """A prefill and a decode engine with one connector."""

    def __init__(self, connector: str, model: Path, logs: Path) -> None:
        self.connector, self._model, self._logs = connector, model, logs
        self.prefill, self.decode = self.start("kv_producer"), self.start("kv_consumer")

    def start(self, role: str) -> Server:
        """Start an engine."""
        port = free_port()
        if self.connector == OURS:
            config = connector_config(FDCACHE_HOST_MEMORY="64MiB", FDCACHE_TRANSFER="rdma")
        else:
            config = {"kv_connector": NIXL, "kv_buffer_device": "cpu", "kv_load_failure_policy": "recompute"}
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
        log = self._logs / f"{self.connector}-{role}-{port}.log"
        return start_engine(self._model, log, config | {"kv_role": role}, **_OPTIONS)

    def prefilled(self, prompt: Sequence[int]) -> tuple[dict[str, Any] | None, float]:
        """Compute a prompt at prefill; return the parameters for decode, and the seconds."""
        body = {"model": "model", "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
        start = time.perf_counter()
        answer = self.prefill.post("/v1/completions", {**body, "kv_transfer_params": ASKED_OF_PREFILL})
        return answer.get("kv_transfer_params"), time.perf_counter() - start

    def kill(self) -> None:
        """End both."""
        self.prefill.kill()
        self.decode.kill()


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


class Measured:
    """Seconds of one connector for prompts of one length, and answers that were wrong."""

    def __init__(self) -> None:
        self.prefill: list[float] = []
        self.computed: list[float] = []
        self.handed_over: list[float] = []
        self.cached: list[float] = []
        self.wrong = 0

    def take(self, pair: Pair, alone: Server, prompts: Sequence[list[int]]) -> None:
        """Serve a prompt that is handed over twice, and one that decode computes."""
        given, computed = prompts
        parameters, seconds = pair.prefilled(given)
        self.prefill.append(seconds)
        seconds, answer = first_token(pair.decode, given, kv_transfer_params=parameters)
        self.handed_over.append(seconds)
        self.wrong += answer != alone.tokens(given, _TOKENS)
        self.cached.append(first_token(pair.decode, given)[0])
        self.computed.append(first_token(pair.decode, computed)[0])

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
            "wrong": self.wrong,
        }


def read_bytes(pair: Pair) -> float:
    """Return the bytes that decode has read so far."""
    name, size = _READ[pair.connector]
    return size * pair.decode.counter(name)


def measure(pairs: Sequence[Pair], alone: Server, rounds: int) -> tuple[Table, Table, int]:
    """Return the times by length and connector, the bytes by connector, and how many answers were wrong."""
    chosen = random.Random(1)
    rows, moved, wrong = [], [], 0
    before = {pair.connector: read_bytes(pair) for pair in pairs}
    for length in LENGTHS:
        results = {pair.connector: Measured() for pair in pairs}
        for number in range(rounds + 1):
            prompts = [[chosen.randrange(3, 500) for _ in range(length)] for _ in range(2 * len(pairs))]
            for index, pair in enumerate(pairs if number % 2 else reversed(pairs)):
                target = results[pair.connector] if number else Measured()  # the first connects the engines
                target.take(pair, alone, prompts[2 * index : 2 * index + 2])
        for connector, result in results.items():
            rows.append(result.row(connector, length))
            wrong += result.wrong
    asked = sum(LENGTHS) * (rounds + 1)
    for pair in pairs:
        read = read_bytes(pair) - before[pair.connector]
        moved.append({"connector": pair.connector, "prompt tokens": asked, "bytes read": f"{read:.0f}"})
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
        outcome = "right" if answer == alone.tokens(prompt, _TOKENS) else f"wrong, {len(answer)} tokens"
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
        two_ranks=options.two_ranks,
    )
    return 1 if wrong else 0


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm.handover", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-kill", action="store_true", help="do not kill engines")
    parser.add_argument("--version", choices=VERSIONS, default=VERSIONS[-1], help="of vLLM")
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: without HTTP")
    parser.add_argument("--no-http", action="store_true", help="engines that answer orders, also on a CPU")
    parser.add_argument("--shape", choices=SHAPES, help="model of engines without HTTP")
    parser.add_argument(
        "--connectors", nargs="*", help="without HTTP: fdcache-ipc, fdcache-rdma, NixlConnector"
    )
    parser.add_argument("--tokens", type=int, nargs="+", help="whole blocks of 16 and one more, without HTTP")
    parser.add_argument("--two-ranks", action="store_true", help="then one engine of two ranks, without HTTP")
    options = parser.parse_args(arguments)
    if options.device == "cuda" or options.no_http:
        return _without_http(options)
    python = interpreter(default_home(), options.version)
    if not Path(sys.prefix).samefile(python.parent.parent):
        packages = {PACKAGES: sysconfig.get_path("purelib")}
        command = [str(python), "-m", "benchmarks.vllm.handover", *(arguments or sys.argv[1:])]
        return subprocess.run(command, env=os.environ | packages, check=False).returncode
    with tempfile.TemporaryDirectory(prefix="fdcache-handover-") as folder:
        install_plugin(Path(folder))
        model = make_tokenizer(make_model(Path(folder) / "model"))
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        alone = start_engine(model, logs / "alone.log", None, **_OPTIONS)
        pairs = [Pair(connector, model, logs) for connector in (OURS, NIXL)]
        report = Report()
        try:
            with running(alone, *(each for pair in pairs for each in (pair.prefill, pair.decode))):
                times, moved, wrong = measure(pairs, alone, options.rounds)
                report.table("times to the first token", times)
                report.table("bytes", moved)
                if not options.no_kill:
                    killed = [row for pair in pairs for row in kill_each(pair, alone)]
                    report.table("kill -9", killed)
        finally:
            for pair in pairs:
                pair.kill()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
