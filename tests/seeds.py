"""Number of seeds and examples that the long tests run.

``FDCACHE_TEST_SEEDS`` is a percentage of the full number: 10 by default, 6 in ``make check``, 100 in ``make nightly``.
"""

from __future__ import annotations

import os

VARIABLE = "FDCACHE_TEST_SEEDS"
PERCENT = int(os.environ.get(VARIABLE, "10"))


def budget(full: int) -> int:
    """Return the share of ``full`` seeds or examples that this run has time for, at least one."""
    return max(full * PERCENT // 100, 1)
