"""Memory of a large tier, and the failure to allocate a larger one."""

import subprocess
import sys

import pytest

FILL = """
import numpy as np, psutil
from fdcache import _core

def resident():
    return psutil.Process().memory_info().rss

entries, path = 1_000_000, 1000
hashes = np.random.default_rng(1).integers(1, 255, (entries, 32), np.uint8)
before = resident()
tier = _core.Tier(entries)
for first in range(0, entries, path):
    lease = tier.open_lease()
    taken = tier.reserve(lease, path).slots
    tier.commit(lease, bytes(32), hashes[first:first + path], taken)
stats = tier.stats()
assert (stats.ready, stats.pins, stats.free) == (entries, entries, 0)
assert tier.check_integrity() == []
print(stats.memory_bytes / entries - 32, (resident() - before) / entries - 32)
"""

STARVE = """
import resource, psutil
from fdcache import _core

tier = _core.Tier(1000)
kept = tier.open_lease()
taken = tier.reserve(kept, 10).slots
refused = 0
for size in (2_000_000, 3_000_000, 4_000_000, 2_000_000_000):
    room = psutil.Process().memory_info().vms + (180 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
    before = tier.stats()
    try:
        tier.resize(size)
    except MemoryError:
        refused += 1
        after = tier.stats()
        assert (after.slots, after.free, after.pins) == (before.slots, before.free, before.pins)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert tier.check_integrity() == []
    lease = tier.open_lease()
    assert tier.reserve(lease, 100).missing == 0
    tier.release(lease)
print(refused)
"""


def output_of(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_an_entry_takes_at_most_128_bytes_beside_its_hash() -> None:
    counted, resident = map(float, output_of(FILL))
    assert counted <= 128
    assert resident <= 128


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_failed_growth_leaves_the_tier_unchanged() -> None:
    assert output_of(STARVE) == ["4"]
