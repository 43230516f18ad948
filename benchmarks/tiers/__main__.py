"""Run a part: ``python -m benchmarks.tiers [blocks|evictions|runs|trace|pairs|plan-runs|hindsight|several-nodes]``."""

from __future__ import annotations

import sys

from benchmarks.harness import run
from benchmarks.tiers import blocks, evictions, hindsight, pairs, plan_runs, runs, several_nodes, trace

if __name__ == "__main__":
    sys.exit(run("tiers", (blocks, evictions, runs, trace, pairs, plan_runs, hindsight, several_nodes)))
