"""Serve generated traffic without and with fdcache, and compare: ``python -m examples.paddle_engine``."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

from examples.paddle_engine.baseline import FreshBlocks
from examples.paddle_engine.comparison import Agreement, Run, plot, show
from examples.paddle_engine.config import EngineConfig, ModelConfig
from examples.paddle_engine.engine import Engine, KVCache
from examples.paddle_engine.kv_cache import FdcacheBlocks, Prompt
from examples.paddle_engine.ranks import RankProcesses
from examples.paddle_engine.worker import Worker
from examples.paddle_engine.workload import Traffic
from fdcache import WritePolicy


@dataclass(frozen=True, slots=True)
class Demo:
    """What the flags say."""

    model: ModelConfig
    engine: EngineConfig
    traffic: Traffic

    def run(self, cache: KVCache, reference: Run | None = None) -> Run:
        """Serve the traffic; later turns quote the answers of ``reference``, so that both runs see equal prompts."""
        kind = Worker if self.engine.ranks == 1 else RankProcesses
        workers = kind(self.model, self.engine, cache.host_cache)
        cache.restore(workers.storage_scans())
        warm_up = Engine(self.engine, FreshBlocks(self.engine), workers)
        warm_up.submit(Prompt("warm-up", [0] * self.engine.step_tokens, max_tokens=4))
        warm_up.run()
        answers = None
        if reference:
            pairs = zip(self.traffic.items, reference.tasks, strict=True)
            answers = {item.index: [sample.token for sample in task.samples] for item, task in pairs}
        start = time.perf_counter()
        tasks = self.traffic.serve(Engine(self.engine, cache, workers), answers)
        seconds = time.perf_counter() - start
        workers.shutdown()
        cache.close()
        return Run(tasks, seconds)


def parse(arguments: list[str] | None = None) -> tuple[Demo, Path | None]:
    """The demo that the flags describe, and where its plot goes. Exits with status 2 when they make no sense."""
    parser = argparse.ArgumentParser(prog="python -m examples.paddle_engine", description=__doc__)
    add, usual = parser.add_argument, EngineConfig()
    add("--workload", default="chat", choices=["chat", "agent", "rag", "unique"])
    add("--requests", type=int, default=40)
    add("--users", type=int, default=4, help="requests served at a time")
    add("--scale", type=int, default=2, help="by how much the workload's prompts are shortened")
    add("--answer-scale", type=int, default=16, help="by how much its answers are")
    add("--temperature", type=float, default=0.0, help="above 0: seeded sampling")
    add("--ordinary", action="store_true", help="ordinary instead of deterministic mode")
    add("--plot", type=Path, metavar="FILE")
    for field in fields(ModelConfig):  # --layers, --latent-dim, --kv-dtype, --seed, ...
        add(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    add("--device-blocks", type=int, default=200)
    add("--host-blocks", type=int, default=800)
    add("--block-size", type=int, default=usual.block_size)
    add("--ranks", type=int, default=1, help="tensor-parallel ranks, each a process")
    add("--write-policy", default=usual.write_policy, choices=list(map(str, WritePolicy)))
    add("--storage", type=Path, metavar="DIR", help="a folder that keeps blocks from run to run")
    add("--server", metavar="ADDRESS", help="a running `fdcache serve`, whose host tier is used")
    flags = vars(parser.parse_args(arguments))
    traffic = {
        name: flags[name] for name in ("scale", "answer_scale", "vocab", "seed", "users", "temperature")
    }
    engine = {field.name: flags[field.name] for field in fields(EngineConfig) if field.name in flags}
    if flags["ordinary"]:
        engine["grid"] = 0
    try:
        demo = Demo(
            ModelConfig(**{field.name: flags[field.name] for field in fields(ModelConfig)}),
            EngineConfig(**engine),
            Traffic.generate(flags["workload"], flags["requests"], **traffic),
        )
        demo.model.layout(demo.engine.block_size, demo.engine.ranks)
    except ValueError as error:
        parser.error(str(error))
    return demo, flags["plot"]


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 1 if one token differs."""
    demo, path = parse(arguments)
    without = demo.run(FreshBlocks(demo.engine))
    cache = FdcacheBlocks(demo.model, demo.engine)
    with_cache = demo.run(cache, reference=without)
    counters = cache.manager.get_stats().counters
    agreement = Agreement.of(without, with_cache, exact=demo.engine.grid > 0)
    show(without, with_cache, counters, agreement)
    if path:
        plot(without, with_cache, counters, path)
    return 1 if agreement.differences else 0


if __name__ == "__main__":
    sys.exit(main())
