"""A prefill or a decode instance around FastDeploy's real scheduler, engine loops, queue and protocol, without a GPU.

    python -m tests.peers.fastdeploy_splitwise OPTIONS

reads one JSON object with a request on each line, and prints one for each answer. An empty line ends it: then it prints
the summary. FastDeploy loads the plug-in by the environment alone.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import os
import pickle
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.peers import fastdeploy_main, fastdeploy_source

END = 2
"""Token with which FastDeploy's workers end an answer."""


@dataclass
class RoleOptions:
    """Options of an instance. ``port``: where its peers reach it; ``queue``: where its workers do."""

    role: str = "prefill"
    policy: str = "write_through"
    port: int = 0
    queue: int = 0
    ranks: int = 1
    blocks: int = 60
    failing: float = 0.0


def prepare(logs: Path) -> None:
    """Import FastDeploy's engine, without the parts that talk to users."""
    fastdeploy_main.prepare(logs)
    fastdeploy_source.stand_in("fastdeploy.entrypoints.openai.tool_parsers", ToolParserManager=None)
    fastdeploy_source.stand_in("fastdeploy.input.preprocess", InputPreprocessor=None)
    fastdeploy_source.stand_in("fastdeploy.model_executor.guided_decoding", schema_checker=None)
    importlib.import_module("fastdeploy.engine.common_engine")


class Instance:
    """One instance: the threads that FastDeploy's engine has, and the workers in one more."""

    def __init__(self, options: RoleOptions) -> None:
        from fastdeploy.engine.common_engine import EngineService
        from fastdeploy.inter_communicator import EngineWorkerQueue
        from fastdeploy.scheduler.local_scheduler import LocalScheduler
        from fastdeploy.splitwise.splitwise_connector import SplitwiseConnector

        from tests.peers import fastdeploy_engine as engine
        from tests.peers.fastdeploy_worker import ControllerCopier

        self.options = options
        common = engine.Options(
            policy=options.policy,
            blocks=options.blocks,
            ranks=options.ranks,
            role=options.role,
            port=options.queue,
            failing=options.failing,
        )
        config = engine.make_config(common)
        config.cache_config.local_pd_comm_port = options.port
        self.scheduler = engine.make_scheduler(config, common)
        self.clients = LocalScheduler(0, 900, True, 1, 1, 0)
        queue = {"address": ("127.0.0.1", options.queue), "num_client": options.ranks}
        self._server = EngineWorkerQueue(is_server=True, **queue)
        line = EngineWorkerQueue(is_server=False, client_id=0, **queue)
        self._lines = [
            EngineWorkerQueue(is_server=False, client_id=rank, **queue) for rank in range(options.ranks)
        ]
        connector = SplitwiseConnector(config, line, self.scheduler)
        self.tokens = engine.make_token_processor(config, self.scheduler, self.clients)
        self.tokens.engine_worker_queue, self.tokens.split_connector = line, connector
        self.parts = SimpleNamespace(
            cfg=config,
            scheduler=self.clients,
            resource_manager=self.scheduler,
            split_connector=connector,
            engine_worker_queue=line,
            token_processor=self.tokens,
            llm_logger=logging.getLogger("fastdeploy.engine"),
            running=True,
            is_paused=False,
            enable_decode_cache_task=False,
            _pause_cond=threading.Condition(),
            _get_scheduler_unhandled_request_num=lambda: 0,
        )
        self.workers = [
            engine.make_worker(common, rank, ControllerCopier(config, rank, **self._parts(engine)))
            for rank in range(options.ranks)
        ]
        self._thread(connector.start_receiver)
        self._thread(EngineService._schedule_request_to_worker_v1, self.parts)
        if options.role == "decode":
            EngineService._decode_process_splitwise_requests(self.parts)
        self._stepping = self._thread(self._step)
        self._thread(self._answer)
        self._answers: dict[str, list[int]] = {}

    def _parts(self, engine: Any) -> dict[str, Any]:
        if not self.options.failing:
            return {}
        from tests.faults import FailingLoadsDevice

        return {"device": FailingLoadsDevice(engine.Failures(self.options.failing, 5).choose)}

    def _thread(self, target: Any, *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        return thread

    def add(self, name: str, prompt: list[int], outputs: int, info: dict[str, Any]) -> None:
        """Add a request, as FastDeploy's router sends it to both instances."""
        from tests.peers.fastdeploy_engine import Job, make_request

        request = make_request(Job(name, prompt, outputs))
        request.disaggregate_info = dict(info)
        now = request.metrics.arrival_time = time.time()
        request.metrics.preprocess_end_time = request.metrics.scheduler_recv_req_time = now
        self._answers[name] = []
        self.clients.put_requests([request])

    def _step(self) -> None:
        """Run the workers as their processes do."""
        from fastdeploy.output.stream_transfer_data import DecoderState, StreamTransferData

        while self.parts.running:
            if self._lines[0].exist_tasks():
                for worker, line in zip(self.workers, self._lines, strict=True):
                    for tasks in line.get_tasks()[0]:
                        worker.insert(pickle.dumps(tasks))
            if self.options.role == "prefill":
                for worker in self.workers:
                    worker.limit_to_first_token()
            outputs, *_ = [worker.step() for worker in self.workers]
            received = [
                StreamTransferData(DecoderState.TEXT, index, tokens=np.array(self._with_end(index, tokens)))
                for index, (_, tokens) in outputs.items()
            ]
            if received:
                self.tokens._reschedule_preempt_task_use_zmq(received)
                self.tokens.postprocess(self.tokens._process_batch_output_use_zmq(received))
            else:
                time.sleep(0.001)

    def _with_end(self, index: int, tokens: list[int]) -> list[int]:
        ends = self.options.role == "decode" and tokens[-1] >= 0 and not self.workers[0].has(index)
        return [*tokens, END] if ends else tokens

    def _answer(self) -> None:
        """Print the answers, as FastDeploy's server sends them."""
        while self.parts.running:
            for name, outputs in self.clients.get_results().items():
                for output in outputs:
                    self._answers[name] += output.outputs.token_ids if output.outputs else []
                    if output.finished:
                        answer = {"name": name, "tokens": self._answers.pop(name), "error": output.error_msg}
                        print(json.dumps(answer), flush=True)  # noqa: T201
            time.sleep(0.002)

    def summary(self, logs: Path) -> dict[str, Any]:
        """Return what the instance has found, and whether it has given everything back."""
        manager = self.scheduler.cache_manager

        def held() -> dict[str, int]:
            stats = manager.core.get_stats()
            blocks = manager.num_gpu_blocks - stats.device.free - stats.device.evictable
            return {
                "plans": stats.plans_in_flight,
                "blocks": blocks,
                "requests": len(self.scheduler.requests),
            }

        deadline = time.monotonic() + 30
        while any(held().values()) and time.monotonic() < deadline:
            time.sleep(0.02)
        counts = manager.core.get_stats().handovers
        return {
            "held": held(),
            "wrong": [dataclasses.asdict(found) for worker in self.workers for found in worker.wrong],
            "checked": sum(worker.checked for worker in self.workers),
            "handovers": {each.result: each.transfers for each in counts},
            "blocks": sum(each.blocks for each in counts),
            "tracebacks": fastdeploy_main.tracebacks(logs),
        }


def main(options: RoleOptions) -> None:
    os.environ["FD_PLUGINS"] = "fdcache"
    logs = Path(os.environ["FDCACHE_RUNTIME_DIR"]) / f"logs-{options.role}"
    prepare(logs)
    instance = Instance(options)
    print(json.dumps({"ready": True}), flush=True)  # noqa: T201
    for line in sys.stdin:
        if not line.strip():
            break
        instance.add(**json.loads(line))
    print(json.dumps({"summary": instance.summary(logs)}, default=str), flush=True)  # noqa: T201
    sys.stdout.flush()
    os._exit(0)  # FastDeploy's threads have no end


if __name__ == "__main__":
    main(RoleOptions(**json.loads(sys.argv[1])))
