"""Run scenarios with one cache manager in this process: ``python -m tests.peers.fastdeploy_main MANAGER [RUN ...]``.

A run is a scenario's name, a JSON object of ``scenario`` and options to change, or ``cost:`` with a number of output
tokens. Prints one JSON object for each. With fdcache, FastDeploy loads the plug-in by the environment alone.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.peers import fastdeploy_source

ENVIRONMENT = {
    "ENABLE_V1_KVCACHE_MANAGER": "1",
    "ENABLE_V1_KVCACHE_SCHEDULER": "1",
    "FDCACHE_LOAD_OR_RECOMPUTE": "always",  # what is cached is loaded, however fast these workers compute
    "FD_USE_NEW_TOKEN_RATIO_RESERVE": "0",
    "FD_RESERVE_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL": "0",
}


def prepare(logs: Path) -> None:
    """Import the modules that FastDeploy's engine and workers share, which load their plug-ins."""
    os.environ.update({**ENVIRONMENT, **os.environ})
    fastdeploy_source.install(fastdeploy_source.unpack(), logs)
    importlib.import_module("fastdeploy.reasoning")


def main(manager: str, runs: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if manager == "fdcache":
            os.environ["FD_PLUGINS"] = "fdcache"
        os.environ.setdefault("FDCACHE_RUNTIME_DIR", folder)
        prepare(Path(folder) / "log")
        from tests.peers.fastdeploy_cost import schedule_cost
        from tests.peers.fastdeploy_scenarios import SCENARIOS, play

        for index, run in enumerate(runs or SCENARIOS):
            port = 20000 + os.getpid() % 10000 + index
            if run.startswith("cost:"):
                print(json.dumps({"scenario": run, **schedule_cost(manager, int(run[5:]), port)}))  # noqa: T201
                continue
            given = json.loads(run) if run.startswith("{") else {"scenario": run}
            name = given.pop("scenario")
            result = play(name, manager, port, **given)
            printed = {
                "scenario": name,
                **dataclasses.asdict(result),
                "tracebacks": tracebacks(Path(folder) / "log"),
            }
            print(json.dumps(printed, default=str), flush=True)  # noqa: T201


def tracebacks(logs: Path) -> list[str]:
    """Return the last lines of the tracebacks in FastDeploy's log files so far."""
    found = []
    for file in sorted(logs.rglob("*.log")):
        parts = file.read_text(errors="replace").split("Traceback (most recent call last)")[1:]
        found += [f"{file.name}: {part.strip()[:600]}" for part in parts]
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
