"""A node of Mooncake Store in a process of its own: python -m tests.mooncake_node MASTER LAYOUT-NAME BLOCKS.

It stores the first blocks of the path of that name in its own memory, prints "stored", and waits to be killed.
"""

from __future__ import annotations

import signal
import subprocess
import sys

from fdcache.integrations.mooncake.store import MooncakeConnector
from fdcache.integrations.mooncake.variables import MooncakeSettings
from fdcache.settings.cache import StorageTierSettings
from fdcache.storage.connector import ConnectorContext
from fdcache.testing.storage import KnownRecords, conformance_layout, path_of
from tests.mooncake_master import stop


class Node:
    """Process of a node."""

    def __init__(self, master: str, name: str, blocks: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.mooncake_node", master, name, str(blocks)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "stored\n"

    def freeze(self) -> None:
        stop(self.process.pid)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def main(master: str, name: str, blocks: int) -> None:
    layout = conformance_layout(name)
    settings = MooncakeSettings(master=master, protocol="tcp", global_segment_size=32 << 20)
    tier = StorageTierSettings(connector="mooncake")
    connector = MooncakeConnector(ConnectorContext(layout, 0, tier, settings))
    records = KnownRecords(layout, blocks)
    connector.register(records.table)
    assert connector.put(records.fill(path_of(blocks, name)), 30).ok.all()
    print("stored", flush=True)  # noqa: T201
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
