"""Run a part: ``python -m benchmarks.tiers [blocks|evictions|runs|trace|pairs|plan-runs|hindsight|all]``."""

from __future__ import annotations

import sys

from benchmarks.harness import run
from benchmarks.tiers import blocks, evictions, hindsight, pairs, plan_runs, runs, trace

if __name__ == "__main__":
    sys.exit(run("tiers", (blocks, evictions, runs, trace, pairs, plan_runs, hindsight)))
