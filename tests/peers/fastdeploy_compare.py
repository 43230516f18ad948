"""The table of docs/fastdeploy.md: FastDeploy's own v1 cache manager and fdcache in the same scenarios.

``python -m tests.peers.fastdeploy_compare``. FastDeploy's copies are made as its controller orders them, at once and
without failures, because its operators need a GPU.
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
MANAGERS = {"fastdeploy": "FastDeploy's own v1 manager", "fdcache": "fdcache"}
POLICIES = ("write_through_selective", "write_through", "write_back")
SWAPPED = "swapped, write_back"
NAMES = [name for name in SCENARIOS if not name.startswith("swapped") or name == SWAPPED]


def main() -> None:
    print(f"`python -m tests.peers.fastdeploy_compare`, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}\n")  # noqa: T201
    columns = (f"{name}, `{policy}`" for name in MANAGERS.values() for policy in POLICIES)
    print(f"| scenario | {' | '.join(columns)} |")  # noqa: T201
    print("|---" * (1 + len(MANAGERS) * len(POLICIES)) + "|")  # noqa: T201
    results = [_results(manager, policy) for manager in MANAGERS for policy in POLICIES]
    for name in NAMES:
        outcomes = " | ".join(_outcome(result[name]) for result in results)
        print(f"| {name.partition(',')[0]} | {outcomes} |")  # noqa: T201
    costs = {manager: _run(manager, *(f"cost:{outputs}" for outputs in OUTPUTS)) for manager in MANAGERS}
    print(f"\n| `schedule()`, CPU time, median / mean | {' | '.join(MANAGERS.values())} |\n|---|---|---|")  # noqa: T201
    for outputs in OUTPUTS:
        found = " | ".join(_milliseconds(cost[f"cost:{outputs}"]) for cost in costs.values())
        print(f"| {outputs:,} output tokens each | {found} |")  # noqa: T201


def _results(manager: str, policy: str) -> dict[str, dict[str, Any]]:
    names = [name for name in NAMES if manager == "fdcache" or name != "failed loads"]
    results = _run(manager, *(json.dumps({"scenario": name, "policy": policy}) for name in names))
    return {"failed loads": {}, **results}


def _run(manager: str, *runs: str) -> dict[str, dict[str, Any]]:
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
    """Return the number of requests that read wrong KV and "stalls" if the engine stopped, or the number that ended."""
    if not result:
        return "unsupported"
    misled = len({read["request_id"] for read in result["wrong"]})
    words = [f"**{misled} wrong**"] if misled else []
    words += ["**stalls**"] if result["stalled"] else []
    return ", ".join(words) or f"{result['finished'] + result['aborted']} right"


def _milliseconds(cost: dict[str, Any]) -> str:
    return f"{cost['median_ms']:.2f} / {cost['mean_ms']:.2f} ms"


if __name__ == "__main__":
    main()
