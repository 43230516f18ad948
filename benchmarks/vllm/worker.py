"""A process that runs one engine: its job is a JSON object, what it measures goes to standard output, a line each."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

BEGIN = time.perf_counter()

from benchmarks.vllm.driver import started, used_memory  # noqa: E402
from benchmarks.vllm.parts import PARTS, warm_up  # noqa: E402
from benchmarks.vllm.shapes import LOADS, SHAPES, write_random_weights  # noqa: E402
from benchmarks.vllm.timing import FOLDER  # noqa: E402


@dataclass(frozen=True)
class Job:
    """What an engine process does.

    ``parts`` are names of loads; ``orders`` the steps of the part that compares tokens (``tokens.follow``). With
    ``link_bytes`` no engine is started: the link between host and device is measured.
    """

    shape: str
    load: str
    arguments: dict[str, Any] = field(default_factory=dict)
    connector: dict[str, Any] | None = None
    parts: list[str] = field(default_factory=list)
    orders: list[dict[str, Any]] = field(default_factory=list)
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
    """Start the engine, do the parts and write the result of each as it ends."""
    from benchmarks.vllm.tokens import follow

    shape, load = SHAPES[job.shape], LOADS[job.load]
    has_connector = job.connector is not None
    arguments = dict(job.arguments)
    if job.connector is not None:
        from vllm.config import KVTransferConfig

        arguments["kv_transfer_config"] = KVTransferConfig(**job.connector)
    if shape.has_random_weights:
        write_random_weights(shape, Path(arguments["model"]))
    used, imported = used_memory(), time.perf_counter()
    async with started(arguments, shape, Path(os.environ[FOLDER])) as driver:
        ready = time.perf_counter()
        write(
            output,
            {
                "part": "start",
                "import_s": round(imported - BEGIN, 2),
                "engine_s": round(ready - imported, 2),
                "used_bytes": used_memory() - used,
            },
        )
        if job.orders:
            write(output, {"part": "tokens", "asked": await follow(driver, load, job.orders)})
            return
        await warm_up(driver, load)
        for name in job.parts:
            if name not in {"fill", "reread"}:
                await driver.forget_device(load.settle_s)
            result = await PARTS[name](driver, load, has_connector)
            if "used_bytes" in result:
                result["used_bytes"] -= used
            write(output, {"part": name, **result})


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
