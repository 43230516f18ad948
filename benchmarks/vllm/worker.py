"""A process that runs one engine: its job is a JSON object, what it measures goes to standard output, a line each.

When the engine is ready the process waits for orders on standard input, a line of JSON each, and writes a last record
behind the results of each. So engines can start at the same time and be measured one after the other.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

BEGIN = time.perf_counter()

from benchmarks.vllm.driver import Driver, started, used_memory  # noqa: E402
from benchmarks.vllm.parts import PARTS, warm_up  # noqa: E402
from benchmarks.vllm.shapes import LOADS, SHAPES, Load, write_random_weights  # noqa: E402
from benchmarks.vllm.timing import FOLDER  # noqa: E402

DONE = "done"
"""The part of the record behind the results of an order."""


@dataclass(frozen=True)
class Job:
    """What an engine process does.

    The host memory that an engine takes is known only if no other starts beside it (``is_alone``). With ``link_bytes``
    no engine is started: the link between host and device is measured.
    """

    shape: str
    load: str
    arguments: dict[str, Any] = field(default_factory=dict)
    connector: dict[str, Any] | None = None
    is_warmed_up: bool = True
    is_alone: bool = True
    link_bytes: int = 0

    def as_json(self) -> str:
        """Return the job as it is given to the process."""
        return json.dumps(asdict(self))


def measure_link(size: int) -> dict[str, Any]:
    """Return how long the bytes of a prompt take from pinned memory to the device in one piece."""
    import torch

    on_gpu = torch.cuda.is_available()
    source = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
    source.fill_(1)
    target = torch.empty(size, dtype=torch.uint8, device="cuda" if on_gpu else "cpu")
    found = []
    for _ in range(6):
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) * 1000)
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    return {"part": "link", "device": device, "bytes": size, "ms": round(min(found), 4)}


async def run(job: Job, output: TextIO) -> None:
    """Start the engine, and carry out orders until there are no more."""
    shape, load = SHAPES[job.shape], LOADS[job.load]
    arguments = dict(job.arguments)
    if job.connector is not None:
        from vllm.config import KVTransferConfig

        arguments["kv_transfer_config"] = KVTransferConfig(**job.connector)
    if shape.has_random_weights:
        write_random_weights(shape, Path(arguments["model"]))
    used, imported = used_memory(), time.perf_counter()
    async with started(arguments, shape, Path(os.environ[FOLDER])) as driver:
        ready = time.perf_counter()
        if job.is_warmed_up:
            await warm_up(driver, load)
        write(
            output,
            {
                "part": "start",
                "import_s": round(imported - BEGIN, 2),
                "engine_s": round(ready - imported, 2),
                "warm_up_s": round(time.perf_counter() - ready, 2),
                **({"used_bytes": used_memory() - used} if job.is_alone else {}),
            },
        )
        while line := await asyncio.to_thread(sys.stdin.readline):
            async for record in carried_out(json.loads(line), driver, load, job.connector is not None):
                write(output, record)
            write(output, {"part": DONE})


async def carried_out(
    order: dict[str, Any], driver: Driver, load: Load, has_connector: bool
) -> AsyncIterator[dict[str, Any]]:
    """Carry out an order: ``parts`` are names of loads, ``ask`` steps of the part that compares tokens.

    ``agents`` has users play the sessions of a trace, ``answer`` is a prompt, perhaps one of a hand-over, and
    ``forget`` drops the prefixes on the device.
    """
    if (asked := order.get("answer")) is not None:
        found = await driver.ask(asked["prompt"], asked["replies"], transfer=asked["transfer"])
        told = {"ttft_ms": found.ttft_ms, "tokens": found.tokens, "cached": found.cached}
        yield {"part": "answer", "transfer": found.transfer, **told}
        return
    if order.get("forget"):
        await driver.forget_device(load.settle_s)
        return
    if (asked := order.get("agents")) is not None:
        from benchmarks.vllm import agents

        how = agents.AGENTS[asked["scale"]]
        sessions = agents.read_sessions(Path(asked["trace"]), how, asked["longest"])
        played = agents.users_of(sessions, asked["labels"]["users"])
        await driver.forget_device(load.settle_s)
        yield {"part": "agents", **asked["labels"], **await agents.agents(driver, played, how)}
        return
    if "ask" in order:
        from benchmarks.vllm.tokens import follow

        yield {"part": "tokens", "asked": await follow(driver, load, order["ask"])}
        return
    for name in order["parts"]:
        if name not in {"fill", "reread"}:
            await driver.forget_device(load.settle_s)
        yield {"part": name, **await PARTS[name](driver, load, has_connector)}


def write(output: TextIO, record: dict[str, Any]) -> None:
    """Write a record as one line."""
    output.write(json.dumps(record) + "\n")
    output.flush()


def main() -> None:
    """Do the job that the first argument describes."""
    job = Job(**json.loads(sys.argv[1]))
    # What an imported package prints goes to the log, so that it cannot be taken for a result.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if job.link_bytes:
        write(output, measure_link(job.link_bytes))
        return
    asyncio.run(run(job, output))


if __name__ == "__main__":
    main()
