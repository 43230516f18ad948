"""Serve generated traffic with and without fdcache and compare: ``python -m examples.paddle_engine``."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

from examples.paddle_engine.comparison import Agreement, Run, plot, show, show_cache
from examples.paddle_engine.config import EngineConfig, ModelConfig
from examples.paddle_engine.engine import Engine, KVCache
from examples.paddle_engine.kv_cache import FdcacheBlocks, FreshBlocks, Prompt
from examples.paddle_engine.ranks import RankProcesses
from examples.paddle_engine.server import serve
from examples.paddle_engine.worker import Worker
from examples.paddle_engine.workload import Traffic
from fdcache import WritePolicy
from fdcache.errors import FdcacheError
from fdcache.service.client.connection import Client
from fdcache.settings.peers import TransferRole


@dataclass(frozen=True, slots=True)
class Demo:
    """Demo described by the flags: a model, an engine and its traffic."""

    model: ModelConfig
    engine: EngineConfig
    traffic: Traffic
    listen: str | None = None
    """Address at which it serves a router instead of the traffic."""

    def check(self) -> None:
        """Raise ``ValueError`` or ``FdcacheError`` if the traffic cannot be served; allocates nothing."""
        longest, room = self.traffic.longest, self.engine.device_blocks * self.engine.block_size
        if longest > self.model.max_positions:
            raise ValueError(
                f"max_positions: {self.model.max_positions} are too few for a prompt and answer of {longest} tokens; "
                "raise it, or scale"
            )
        if max(longest, self.engine.step_tokens + 4) > room:
            raise ValueError(
                f"device_blocks: they hold {room} tokens, a prompt and answer have {longest}; raise it"
            )
        if self.engine.server:
            with Client(self.engine.server) as service:
                service.ask("clients")

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


_CACHE_FLAGS = ("device_blocks", "host_memory", "block_size", "ranks", "write_policy", "server")


def _count(text: str) -> int:
    """Parse a number of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def parse(arguments: list[str] | None = None) -> tuple[Demo, Path | None]:
    """Return the demo and the plot's path. Exits with status 2 for invalid flags."""
    parser = argparse.ArgumentParser(prog="python -m examples.paddle_engine", description=__doc__)
    add = parser.add_argument
    add("--workload", default="chat", choices=["chat", "agent", "rag", "unique"])
    add("--requests", type=_count, default=40)
    add("--users", type=_count, default=4, help="requests served at a time")
    add("--scale", type=_count, default=2, help="divisor of the workload's prompt lengths")
    add("--answer-scale", type=_count, default=16, help="divisor of its answer lengths")
    add("--temperature", type=float, default=0.0, help="above 0: seeded sampling")
    add("--ordinary", action="store_true", help="ordinary instead of deterministic mode")
    add("--plot", type=Path, metavar="FILE")
    for field in fields(ModelConfig):  # --layers, --latent-dim, --kv-dtype, --seed, ...
        add(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    parser.epilog = (
        "The environment sets these flags where they are left out: FDCACHE_DEVICE_BLOCKS and so on."
    )
    add("--device-blocks", type=_count)
    add("--host-memory", metavar="SIZE", help="of all ranks together")
    add("--block-size", type=_count)
    add("--ranks", type=_count, help="tensor-parallel ranks, each a process")
    add("--write-policy", choices=list(map(str, WritePolicy)))
    add("--storage", type=Path, metavar="DIR", help="a directory that keeps blocks from run to run")
    add("--server", metavar="ADDRESS", help="use the host tier of a running `fdcache serve`")
    add(
        "--role",
        choices=list(map(str, TransferRole)),
        help="serve a router (examples/pd_router.py) in this role",
    )
    add("--listen", metavar="ADDRESS", help="with --role: where the router reaches this engine")
    flags = vars(parser.parse_args(arguments))
    if (flags["role"] is None) != (flags["listen"] is None):
        parser.error("--role and --listen: give both or none")
    traffic = {
        name: flags[name] for name in ("scale", "answer_scale", "vocab", "seed", "users", "temperature")
    }
    cache = {f"FDCACHE_{name.upper()}": flags[name] for name in _CACHE_FLAGS}
    if flags["storage"]:
        cache |= {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_DIR": flags["storage"]}
    if flags["role"]:
        cache |= {"FDCACHE_TRANSFER": "ipc", "FDCACHE_TRANSFER_ROLE": flags["role"]}
    try:
        model = ModelConfig(**{field.name: flags[field.name] for field in fields(ModelConfig)})
        demo = Demo(
            model,
            EngineConfig.load(model, cache, grid=0 if flags["ordinary"] else 32),
            Traffic.generate(flags["workload"], flags["requests"], **traffic),
            flags["listen"],
        )
        if demo.listen is None:
            demo.check()
    except (ValueError, FdcacheError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return demo, flags["plot"]


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; return 1 if a token differs or the demo fails."""
    demo, path = parse(arguments)
    try:
        if demo.listen is not None:
            serve(demo.model, demo.engine, demo.listen)
            return 0
        return compare(demo, path)
    except FdcacheError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def compare(demo: Demo, path: Path | None) -> int:
    """Serve twice and show both runs; return 1 if a token differs."""
    cache = FdcacheBlocks(demo.engine)  # first, so that invalid settings fail early
    without = demo.run(FreshBlocks(demo.engine))
    with_cache = demo.run(cache, reference=without)
    counters = cache.manager.get_stats().counters
    agreement = Agreement.of(without, with_cache, exact=demo.engine.grid > 0)
    show_cache(cache.manager)
    show(without, with_cache, counters, agreement)
    if path:
        try:
            plot(without, with_cache, counters, path)
        except (OSError, ValueError) as error:
            print(f"error: --plot: {error}", file=sys.stderr)
            return 1
        print(f"plot: {path}")
    return 1 if agreement.differences else 0


if __name__ == "__main__":
    sys.exit(main())
