"""A node in a process of its own: stores paths one after another until it is killed, or reads them.

    python -m tests.object_node (URL | FOLDER) write FIRST COUNT
    python -m tests.object_node (URL | FOLDER) read FIRST COUNT

It prints a line for each path: its number, and how many of its blocks were stored or read.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from fdcache.storage.connector import Outcome
from fdcache.storage.objects.connector import ObjectConnector
from fdcache.testing.storage import KnownRecords, conformance_layout, path_of
from tests.object_help import Bucket, open_bucket, open_folder

LAYOUT = conformance_layout("processes")
BLOCKS = 12
TIER: dict[str, Any] = {"object_bytes": 4 * LAYOUT.record_bytes}


def connect(place: str, **tier: Any) -> ObjectConnector:
    tier = {**TIER, **tier}
    if "://" in place:
        return open_bucket(Bucket(place, os.environ.get("TEST_ENDPOINT")), LAYOUT, **tier)
    return open_folder(Path(place), LAYOUT, **tier)


def main() -> None:
    place, what, first, count = sys.argv[1:]
    connector, records = connect(place), KnownRecords(LAYOUT, BLOCKS)
    for number in range(int(first), int(first) + int(count)):
        hashes = path_of(BLOCKS, f"path {number}")
        if what == "write":
            done = int(connector.put(records.fill(hashes), 30.0).ok.sum())
        else:
            records.wipe()
            found = connector.get(records.batch(hashes), 30.0)
            for slot, outcome in enumerate(found.outcomes.tolist()):
                intact = records.holds(slot, hashes[slot].tobytes())
                assert intact == (outcome == Outcome.OK), f"block {slot} of path {number}: {outcome}"
            done = int(found.ok.sum())
        sys.stdout.write(f"{number} {done}\n")
        sys.stdout.flush()
    connector.close()


if __name__ == "__main__":
    main()
