"""CPU time of vLLM's scheduler and of a connector's hooks in each step, without a model and without a GPU.

vLLM's own scheduler plans the steps of the conversations of ``benchmarks.vllm``, two in flight as with asynchronous
scheduling; each step gives every request that has computed its prompt one token. Pages are a few bytes, and copies take
no time of the thread: those of vLLM's connectors end two steps later, fdcache's are made. vLLM 0.26.

Every round has the same steps, and of each the least time of all rounds counts, so that a busy machine changes little.
Connectors take turns, a process and ``--rounds`` rounds each.

    python -m benchmarks.vllm.steps --turns 2 --rounds 3
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.vllm.engines import Places, environment, make
from benchmarks.vllm.processes import variables
from benchmarks.vllm.shapes import BLOCK, LOADS, SHAPES, Load, Shape, model_folder
from tests.vllm.environments import default_home, interpreter

CONNECTORS = ("none", "offloading", "simple", "simple-lazy", "fdcache")
SHAPE = Shape("steps", 1, 64, 128, 4, 1, 1, 512, "float32", SHAPES["8b"].device_blocks, 8192, 16384)
HOST_BLOCKS = 32768
SLOT_BYTES = 4096
"""Least bytes of one of fdcache's host slots."""
STEPS_OF_A_COPY = 2


@dataclass
class Times:
    """Nanoseconds of the thread of each call by part of a step, and what the steps did.

    ``beyond``: matches that end behind the last token whose KV was ever computed.
    """

    steps: int = 0
    schedule: list[int] = field(default_factory=list)
    update: list[int] = field(default_factory=list)
    hooks: list[int] = field(default_factory=list)
    hit_tokens: int = 0
    beyond: int = 0

    def least(self, other: Times) -> Times:
        """Return the least time of each call; those of the shorter run if they did not make the same calls."""
        both = self, other
        if len({tuple(map(len, each.parts)) for each in both}) > 1:
            return min(both, key=lambda each: sum(map(sum, each.parts)))
        schedule, update, hooks = (
            list(map(min, *parts)) for parts in zip(self.parts, other.parts, strict=True)
        )
        return Times(self.steps, schedule, update, hooks, self.hit_tokens, self.beyond)

    @property
    def parts(self) -> tuple[list[int], list[int], list[int]]:
        """Those of the scheduler, its update and the hooks."""
        return self.schedule, self.update, self.hooks

    def us_per_step(self) -> list[float]:
        """Return the microseconds of a step: all of it, and its parts."""
        parts = [sum(part) / self.steps / 1000 for part in self.parts]
        return [sum(parts), *parts]


class Ended:
    """A copy that is over after so many polls."""

    def __init__(self) -> None:
        self._left = STEPS_OF_A_COPY

    def query(self) -> bool:
        """Return True once it is over."""
        self._left -= 1
        return self._left < 0

    def synchronize(self) -> None:
        """End it."""
        self._left = 0

    def record(self, *_: Any) -> None:
        """Take the stream."""


class Launcher:
    """Stands for SimpleCPUOffload's copy thread."""

    def launch_copy(
        self, source: Any, target: Any, is_store: bool, event_idx: int, events_list: Any, **_: Any
    ) -> None:
        """Begin a copy."""
        events_list.append((event_idx, Ended()))


class Transfers:
    """Stands for OffloadingConnector's transfers."""

    def __init__(self) -> None:
        self._jobs: dict[int, Ended] = {}

    def submit_store(self, job: int, *_: Any) -> bool:
        """Begin a copy."""
        self._jobs[job] = Ended()
        return True

    submit_load = submit_store

    def get_finished(self) -> list[Any]:
        """Return the copies that are over."""
        from vllm.v1.kv_offload.base import TransferResult

        ended = [job for job, copy in self._jobs.items() if copy.query()]
        for job in ended:
            del self._jobs[job]
        return [TransferResult(job, True, 1, 1e-3) for job in ended]

    def wait(self, jobs: set[int]) -> None:
        """End copies."""
        for job in jobs & self._jobs.keys():
            self._jobs[job].synchronize()

    def shutdown(self) -> None:
        """Forget the copies."""
        self._jobs.clear()


class Engine:
    """vLLM's scheduler, and a connector's hooks on the worker."""

    def __init__(self, name: str, model: Path) -> None:
        import torch
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            KVCacheTensor,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        layer = "model.layers.0.self_attn.attn"
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        connector = make(name, Places(model, HOST_BLOCKS * spec.page_size_bytes)).connector
        if name == "fdcache" and connector is not None:
            connector["kv_connector_extra_config"] = {
                "FDCACHE_HOST_MEMORY": str(HOST_BLOCKS * SLOT_BYTES),
                "FDCACHE_LOAD_OR_RECOMPUTE": "always",
            }
        config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype=SHAPE.dtype,
            block_size=BLOCK,
            num_gpu_blocks_override=SHAPE.device_blocks,
            max_model_len=SHAPE.longest,
            max_num_seqs=64,
            max_num_batched_tokens=SHAPE.batch_tokens,
            enable_prefix_caching=True,
            kv_cache_memory_bytes=1 << 28,
            kv_transfer_config=KVTransferConfig(**connector) if connector else None,
            async_scheduling=True,
            seed=0,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = blocks = SHAPE.device_blocks
        caches = KVCacheConfig(
            blocks,
            [KVCacheTensor(spec.page_size_bytes * blocks, [layer])],
            [KVCacheGroupSpec([layer], spec)],
        )
        self.worker = _worker(name, config, caches, {layer: torch.zeros(blocks, 1, BLOCK, 2)})
        self.scheduler = AsyncScheduler(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._tokens: dict[str, int] = {}
        self._in_flight: deque[tuple[Any, Any]] = deque()
        self.times = Times()

    def ask(self, name: str, prompt: list[int], replies: int, token: int) -> None:
        """Add a request whose every reply is ``token``."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        options = SamplingParams(temperature=0, max_tokens=replies, ignore_eos=True, detokenize=False)
        self._tokens[name] = token
        self.scheduler.add_request(Request(name, prompt, options, None, block_hasher=self._hasher))

    def step(self) -> list[str]:
        """Schedule a step and read the one before; return the requests that have ended."""
        output = self._timed("schedule", self.scheduler.schedule)
        self._in_flight.append((output, self._timed("hooks", self._execute, output)))
        self.times.steps += output.total_num_scheduled_tokens > 0
        if len(self._in_flight) < 2 and output.total_num_scheduled_tokens:
            return []
        updated = self._timed("update", self.scheduler.update_from_output, *self._in_flight.popleft())
        for each in updated.values():
            stats = each.scheduler_stats
            if stats is not None and stats.connector_prefix_cache_stats is not None:
                self.times.hit_tokens += stats.connector_prefix_cache_stats.hits
        return [
            answer.request_id
            for each in updated.values()
            for answer in each.outputs
            if answer.finish_reason is not None
        ]

    def close(self) -> None:
        """End the connector, if there is one."""
        if self.worker is not None:
            self.worker.shutdown()
            self.scheduler.connector.shutdown()

    def _timed(self, part: str, function: Any, *arguments: Any) -> Any:
        begin = time.thread_time_ns()
        found = function(*arguments)
        getattr(self.times, part).append(time.thread_time_ns() - begin)
        return found

    def _execute(self, output: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        names, found, worker = list(output.num_scheduled_tokens), None, self.worker
        if worker is not None:
            found = KVConnectorOutput()
            worker.handle_preemptions(output.kv_connector_metadata)
            worker.bind_connector_metadata(output.kv_connector_metadata)
            worker.start_load_kv(None)
            if names:
                worker.wait_for_save()
            found.finished_sending, found.finished_recving = worker.get_finished(output.finished_req_ids)
            found.invalid_block_ids = worker.get_block_ids_with_load_errors()
            found.kv_connector_stats = worker.get_kv_connector_stats()
            found.kv_connector_worker_meta = worker.build_connector_worker_meta()
            worker.clear_connector_metadata()
        requests = [self.scheduler.requests[name] for name in names]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[
                [self._tokens[each.request_id]] if each.num_computed_tokens >= each.num_prompt_tokens else []
                for each in requests
            ],
            kv_connector_output=found,
        )


def _worker(name: str, config: Any, caches: Any, pages: dict[str, Any]) -> Any:
    """Return the worker's side of a connector, whose copies end by themselves unless it is fdcache's."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    if config.kv_transfer_config is None:
        return None
    worker: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
    if name == "fdcache":
        worker.register_kv_caches(pages)
    elif name == "offloading":
        worker.connector_worker.worker = Transfers()
    else:
        torch.cuda.current_stream = lambda *_: None
        worker.worker_handler._backend = Launcher()
        worker.worker_handler._store_compute_done = Ended()
    return worker


def converse(engine: Engine, load: Load) -> None:
    """Run the conversations of a load, so many at a time in turn."""
    texts: list[list[int]] = [[] for _ in range(load.conversations)]
    computed = [0] * load.conversations
    waiting = deque((turn, number) for turn in range(load.turns) for number in range(load.conversations))
    running: dict[str, tuple[int, int]] = {}
    _count_beyond(engine, running, computed)
    while waiting or running:
        while waiting and len(running) < load.in_flight:
            turn, number = waiting.popleft()
            length = load.later_turn if turn else load.first_turn
            random = np.random.default_rng(1000 * number + turn)
            texts[number] += random.integers(3, SHAPE.vocabulary, length).tolist()
            running[f"r{turn}-{number}"] = (turn, number)
            engine.ask(f"r{turn}-{number}", list(texts[number]), load.reply, 3 + turn)
        for name in engine.step():
            turn, number = running.pop(name)
            texts[number] += [3 + turn] * load.reply
            computed[number] = len(texts[number]) - 1


def _count_beyond(engine: Engine, running: dict[str, tuple[int, int]], computed: list[int]) -> None:
    connector = engine.scheduler.connector
    if connector is None:
        return
    match = connector.get_num_new_matched_tokens

    def counted(request: Any, device_tokens: int) -> Any:
        found = match(request, device_tokens)
        end = device_tokens + (found[0] or 0)
        engine.times.beyond += bool(found[0]) and end > computed[running[request.request_id][1]]
        return found

    connector.get_num_new_matched_tokens = counted


def rounds_of(name: str, rounds: int) -> Times:
    """Return the least times of some rounds of a connector."""
    found: Times | None = None
    for _ in range(rounds):
        engine = Engine(name, model_folder(SHAPE, Path.cwd()))
        converse(engine, LOADS["full"])
        engine.close()
        found = engine.times if found is None else found.least(engine.times)
        del engine
        gc.collect()
    assert found is not None
    return found


def measured(
    python: str, kept: Path, names: list[str], turns: int, rounds: int
) -> Iterator[tuple[str, Times]]:
    """Yield what each connector took in each turn, in a process of its own, one after the other."""
    with tempfile.TemporaryDirectory(prefix="fdcache-steps-") as folder:
        home = Path(folder)
        found = variables(home, "cpu") | environment("cpu", kept) | {"VLLM_LOGGING_LEVEL": "ERROR"}
        for _ in range(turns):
            for name in names:
                command = [python, "-m", "benchmarks.vllm.steps", "--measure", name, "--rounds", str(rounds)]
                done = subprocess.run(
                    command, env=found, cwd=home, capture_output=True, text=True, check=False
                )
                if done.returncode != 0:
                    raise SystemExit(f"{name}: {(done.stderr.splitlines() or ['no output'])[-1]}")
                yield name, Times(**json.loads(done.stdout.splitlines()[-1]))


def main(arguments: list[str] | None = None) -> None:
    """Print the CPU time of a step by connector, in microseconds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm.steps", description=__doc__)
    parser.add_argument("--python", default=str(interpreter(default_home(), "0.26.0")))
    parser.add_argument("--home", type=Path, default=default_home().with_name("fdcache-vllm-bench"))
    parser.add_argument("--connectors", nargs="+", choices=CONNECTORS, default=list(CONNECTORS))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="in each turn")
    parser.add_argument("--measure", choices=CONNECTORS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(asdict(rounds_of(options.measure, options.rounds))), flush=True)
        return
    best: dict[str, Times] = {}
    for name, times in measured(
        options.python, options.home, options.connectors, options.turns, options.rounds
    ):
        best[name] = times if name not in best else best[name].least(times)
    print("| | us a step | schedule | update | worker's hooks | hit tokens | beyond what was computed |")
    print("|---|---|---|---|---|---|---|")
    for name, times in best.items():
        figures = [f"{part:.0f}" for part in times.us_per_step()]
        print(f"| {' | '.join([name, *figures, f'{times.hit_tokens:,}', str(times.beyond)])} |")


if __name__ == "__main__":
    main(sys.argv[1:])
