"""Serve generated traffic without and with fdcache, and compare: ``python -m examples.paddle_engine``."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from examples.paddle_engine.comparison import Agreement, Run, plot, show
from examples.paddle_engine.config import EngineConfig, ModelConfig
from examples.paddle_engine.engine import Engine
from examples.paddle_engine.kv_cache import FdcacheBlocks, FreshBlocks, Prompt
from examples.paddle_engine.ranks import RankProcesses
from examples.paddle_engine.worker import Worker
from examples.paddle_engine.workload import Traffic


@dataclass(frozen=True, slots=True)
class Demo:
    """What the flags say."""

    model: ModelConfig
    engine: EngineConfig
    traffic: Traffic

    def workers(self, *, cached: bool) -> Worker | RankProcesses:
        """One worker in this process, or one process per rank."""
        if self.engine.ranks == 1:
            return Worker(self.model, self.engine, cached=cached)
        return RankProcesses(self.model, self.engine, cached=cached)

    def run(self, cache: FreshBlocks | FdcacheBlocks, reference: Run | None = None) -> Run:
        """Serve the traffic; later turns quote the answers of ``reference``, so that both runs see equal prompts."""
        workers = self.workers(cached=isinstance(cache, FdcacheBlocks))
        if isinstance(cache, FdcacheBlocks):
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
        return Run(tasks, seconds)


def parse(arguments: list[str] | None = None) -> tuple[Demo, Path | None]:
    """The demo that the flags describe, and where its plot goes."""
    parser = argparse.ArgumentParser(prog="python -m examples.paddle_engine", description=__doc__)
    parser.add_argument("--workload", default="chat", choices=["chat", "agent", "rag", "unique"])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--users", type=int, default=4, help="requests served at a time")
    parser.add_argument(
        "--scale", type=int, default=2, help="by how much the workload's prompts are shortened"
    )
    parser.add_argument("--answer-scale", type=int, default=16, help="by how much its answers are")
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0: seeded sampling")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ordinary", action="store_true", help="ordinary instead of deterministic mode")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    model, engine = ModelConfig(), EngineConfig()
    for name in (
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn",
        "vocab",
        "latent_dim",
        "draft_layers",
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(model, name))
    parser.add_argument("--kv-dtype", default=model.kv_dtype, choices=["float32", "bfloat16", "fp8"])
    for name, default in (("device_blocks", 200), ("host_blocks", 800), ("block_size", engine.block_size)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks, each a process")
    parser.add_argument("--write-policy", default=engine.write_policy)
    parser.add_argument(
        "--storage", type=Path, metavar="DIR", help="a folder that keeps blocks from run to run"
    )
    flags = parser.parse_args(arguments)
    demo = Demo(
        ModelConfig(
            vocab=flags.vocab,
            hidden=flags.hidden,
            layers=flags.layers,
            heads=flags.heads,
            kv_heads=flags.kv_heads,
            head_dim=flags.head_dim,
            ffn=flags.ffn,
            latent_dim=flags.latent_dim,
            draft_layers=flags.draft_layers,
            kv_dtype=flags.kv_dtype,
            seed=flags.seed,
        ),
        EngineConfig(
            block_size=flags.block_size,
            device_blocks=flags.device_blocks,
            host_blocks=flags.host_blocks,
            grid=0 if flags.ordinary else engine.grid,
            ranks=flags.ranks,
            write_policy=flags.write_policy,
            storage=flags.storage,
        ),
        Traffic.generate(
            flags.workload,
            flags.requests,
            scale=flags.scale,
            answer_scale=flags.answer_scale,
            vocab=flags.vocab,
            seed=flags.seed,
            users=flags.users,
            temperature=flags.temperature,
        ),
    )
    return demo, flags.plot


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
