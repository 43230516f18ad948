"""Run a part: ``python -m benchmarks.serve [engines|waits|tenants|page|seen|deletions|all]``."""

from __future__ import annotations

import sys

from benchmarks.harness import run
from benchmarks.serve import deletions, engines, page, seen, tenants, waits

if __name__ == "__main__":
    sys.exit(run("serve", (engines, waits, tenants, page, seen, deletions)))
