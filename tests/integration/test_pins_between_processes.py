"""A client in a process of its own pins runs while the service evicts: no slot that is pinned gets another block."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import numpy as np

from fdcache._core import PresenceWriter, RunRing
from fdcache.service.server.host_pool import HostPool
from fdcache.service.wire.shared_memory import RING_BYTES, create_shared, table_bytes
from tests.service_help import next_line, spawned
from tests.unit.test_shared_memory import ROOT, path, rows

SLOTS, PATHS, LENGTH = 64, 40, 8

_CLIENT = """
import random, sys, time
from pathlib import Path
import numpy as np
from fdcache.service.wire.shared_memory import open_runs, open_table, table_bytes
from tests.integration.test_pins_between_processes import PATHS, LENGTH, SLOTS
from tests.unit.test_shared_memory import path, rows
folder, rng = Path(sys.argv[1]), random.Random(5)
runs = open_runs(open_table(folder / "table", table_bytes(SLOTS)), folder / "ring")
generations = np.memmap(folder / "generations", np.uint32, "r")
paths = [rows(*path(str(number), LENGTH)) for number in range(PATHS)]
pinned = lost = refused = 0
print("begins", flush=True)
while pinned < int(sys.argv[2]):
    hashes = rng.choice(paths)
    found = runs.find(hashes, 0)
    if rng.random() < 0.1:
        time.sleep(rng.random() * 1e-3)
    run = runs.pin(hashes, found)
    if not run:
        refused += len(found) > 0
        continue
    pinned += 1
    end = time.perf_counter() + rng.random() * 4e-4
    while time.perf_counter() < end:
        lost += bool((generations[found.slots] != found.generations).any())
    runs.unpin(run)
print(lost, refused, flush=True)
"""


def test_a_pinned_block_keeps_its_slot_until_it_is_unpinned(tmp_path: Path) -> None:
    table = create_shared(tmp_path / "table", table_bytes(SLOTS))
    ring = RunRing(create_shared(tmp_path / "ring", RING_BYTES))
    generations = create_shared(tmp_path / "generations", 4096).view(np.uint32)
    leases: dict[int, int] = {}

    def take_runs() -> None:
        for run, start, hashes in ring.take():
            if not len(hashes):
                pool.release(leases.pop(run))
                continue
            leases[run] = pool.open_lease()
            pool.match(leases[run], hashes, start)
        time.sleep(1e-4)  # as if the service were held up before it removes blocks

    pool = HostPool(SLOTS, 0, PresenceWriter(table), take_runs)
    pool.mirror(table)
    paths = [path(str(number), LENGTH) for number in range(PATHS)]
    rng = random.Random(7)
    with spawned(sys.executable, "-c", _CLIENT, str(tmp_path), "400") as client:
        assert next_line(client).strip() == "begins"
        while client.poll() is None:
            keys = rng.choice(paths)
            lease = pool.open_lease()
            have = len(pool.match(lease, rows(*keys)))
            count = min(LENGTH - have, pool.available)
            taken = pool.reserve(lease, count) if count else None
            if taken is not None and not taken.missing:
                generations[taken.slots] = taken.generations
                pool.commit(lease, keys[have - 1] if have else ROOT, rows(*keys[have:]), taken.slots)
            pool.release(lease)
            time.sleep(rng.random() * 3e-4)
        lost, refused = map(int, next_line(client).split())
    take_runs()
    assert lost == 0
    assert refused > 0
    assert leases == {}
    assert pool.stats().evictions > 100
    assert pool.check_integrity() == []
