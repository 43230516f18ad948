"""Write blocks into a slab file: python -m tests.slab_writer FOLDER FSYNC BATCHES SEED.

Batches of one path each go into random slots, so that slots are overwritten often; the slots and hashes of each
finished batch are written to FOLDER/stored.acks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from fdcache.settings.cache import FsyncPolicy
from tests.storage_help import Records, open_store, path_hashes, storage_layout

LAYOUT = storage_layout(num_layers=2)
SIZE = 512 << 10
MOST_SLOTS = 40


def main(folder: Path, fsync: FsyncPolicy, batches: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    store = open_store(folder, LAYOUT, size=SIZE, fsync=fsync, fsync_interval=0.02)
    records = Records(LAYOUT, 16)
    generation = int(store.scan().generations.max(initial=0))
    acks = os.open(folder / "stored.acks", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    print("ready", flush=True)  # noqa: T201
    for batch in range(batches):
        generation += 1
        count = int(random.integers(1, 9))
        hashes = path_hashes(count, seed=seed * 1_000_003 + batch)
        slots = random.choice(min(MOST_SLOTS, store.num_slots), count, replace=False)
        result = store.put(records.full_batch(hashes, slots=slots.tolist(), generation=generation), 60)
        if not result.ok.all():
            raise SystemExit(f"not stored: {result.error}")
        lines = [
            f"{slot} {row.tobytes().hex()} {generation}\n" for slot, row in zip(slots, hashes, strict=True)
        ]
        data = "".join(lines).encode()
        os.pwrite(acks, data, 0)
    store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), FsyncPolicy(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
