"""The table of docs/fastdeploy.md: FastDeploy's own v1 cache manager and fdcache in the same scenarios.

``python -m tests.peers.fastdeploy_compare``. FastDeploy's copies are made as its controller orders them, at once and
without failing, for its operators need a GPU.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from typing import Any

from tests.peers.fastdeploy_scenarios import SCENARIOS

OUTPUTS = (16, 1000, 4000)
MANAGERS = ("fastdeploy", "fdcache")


def main() -> None:
    results = {manager: _results(manager, *SCENARIOS) for manager in MANAGERS}
    costs = {manager: _results(manager, *(f"cost:{outputs}" for outputs in OUTPUTS)) for manager in MANAGERS}
    print(f"`python -m tests.peers.fastdeploy_compare`, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}\n")  # noqa: T201
    print("| scenario | FastDeploy's own v1 manager | fdcache |\n|---|---|---|")  # noqa: T201
    for name in SCENARIOS:
        theirs, ours = (_outcome(results[manager][name]) for manager in MANAGERS)
        theirs = "its copies report no failure" if name == "failed loads" else theirs
        print(f"| {name} | {theirs} | {ours} |")  # noqa: T201
    for outputs in OUTPUTS:
        theirs, ours = (_milliseconds(costs[manager][f"cost:{outputs}"]) for manager in MANAGERS)
        print(f"| `schedule()` at {outputs} outputs, CPU time, median / mean | {theirs} | {ours} |")  # noqa: T201


def _results(manager: str, *runs: str) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.peers.fastdeploy_main", manager, *runs],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"scenario"')]
    return {result["scenario"]: result for result in results}


def _outcome(result: dict[str, Any]) -> str:
    words = (
        [f"{len({read['request_id'] for read in result['wrong']})} requests read wrong KV"]
        if result["wrong"]
        else []
    )
    words += ["stalls"] if result["stalled"] else []
    ended = result["finished"] + result["aborted"]
    return ", ".join(words) or f"{ended} requests end, {result['checked']} tokens' KV right"


def _milliseconds(cost: dict[str, Any]) -> str:
    return f"{cost['median_ms']:.2f} / {cost['mean_ms']:.2f} ms"


if __name__ == "__main__":
    main()
