"""Random faults of prefill and decode instances, by connector and ranks: no wrong byte, nothing left, and healed."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.commands import fdcache
from tests.handover_engine import DEVICE_BLOCKS, Engine
from tests.integration.test_transfer_namespaces import BLOCKS, KEY, Elsewhere, send
from tests.network_help import Network
from tests.service_help import until
from tests.transfer_help import require_nixl

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

FAULTS, PARTED = 200, 200
"""Faults of each run in one network, and of the run in two."""


@pytest.mark.parametrize("ranks", ["1:1", "1:2", "2:1"])
@pytest.mark.parametrize("connector", ["ipc", "rdma"])
def test_kills_stops_aborts_and_resets_leave_nothing_and_change_no_byte(connector: str, ranks: str) -> None:
    if connector == "rdma":
        require_nixl()
    sizes = ["--device-blocks", "1200", "--block-size", "32", "--host-memory", "0", "--kv-heads", "2"]
    faults = ["--faults", str(FAULTS), "--requests", "800", "--seed", "5"]
    found = fdcache(
        "replay",
        "--pd",
        "--json",
        *sizes,
        *faults,
        "--transfer",
        connector,
        "--pd-ranks",
        ranks,
    )
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout)
    assert sum(report["faults"].values()) == FAULTS
    assert report["wrong_blocks"] == 0 and not report["left"]
    assert report["compared_blocks"] > 1000 and report["fetched_blocks"] > 1000


class Decode(Elsewhere):
    """A decode instance that can be asked whether it has answered, and killed."""

    def answer(self) -> str | None:
        """Return the next line that it has said, None if there is none."""
        assert self.process.stdout is not None
        return self.read() if select.select([self.process.stdout], [], [], 0.01)[0] else None

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()
        for line in (self.process.stdin, self.process.stdout):
            assert line is not None
            line.close()


class Faults:
    """A prefill instance here, a decode instance in a network of its own, and what befalls them."""

    def __init__(self, network: Network, folder: Path, prefill: Engine) -> None:
        self._network, self._folder, self._prefill = network, folder, prefill
        self._random = np.random.default_rng(7)
        self._number = 0
        self.decode = self._start()

    def _start(self) -> Decode:
        enter = ["ip", "netns", "exec", self._network.name]
        return Decode(enter, self._folder, f"tcp://{self._network.there}:7401")

    def _begin(self) -> None:
        """Begin to hand a prompt over."""
        prefill, self._number = self._prefill, self._number + 1
        if len(prefill._free) < 2 * BLOCKS:
            prefill.until(lambda: prefill.is_clean)
            prefill._free = list(range(1, DEVICE_BLOCKS))
        send(prefill, f"r{self._number}", self._number)
        self.decode.ask(f"r{self._number}", self._number, prefill.address)

    def _end(self) -> bool:
        """Return whether the blocks have arrived, once that is known. No block arrives with other bytes."""
        answer = None
        while answer is None:
            self._prefill.step()
            answer = self.decode.answer()
        status, right, *_ = answer.split()
        assert status != "confirmed" or right == "True", answer
        return status == "confirmed"

    def strike(self, kind: str) -> None:
        """Let a fault befall a hand-over."""
        self._begin()
        for _ in range(int(self._random.integers(4))):
            self._prefill.step()
        if kind == "kill":
            self.decode.kill()
            self.decode = self._start()
            return
        if kind == "stop":
            os.kill(self.decode.process.pid, signal.SIGSTOP)
        else:
            self._network.set("down")
        over = time.monotonic() + float(self._random.uniform(0, 0.8))
        while time.monotonic() < over:
            self._prefill.step()
        if kind == "stop":
            os.kill(self.decode.process.pid, signal.SIGCONT)
        else:
            self._network.set("up")
        self._end()

    def is_healed(self) -> bool:
        """Return True if blocks arrive."""
        self._begin()
        return self._end()


def test_networks_that_part_heal_and_change_no_byte(network: Network, tmp_path: Path) -> None:
    """Each fault is followed by hand-overs until one arrives."""
    random = np.random.default_rng(8)
    address = f"tcp://{network.here}:7402"
    with Engine("prefill", tmp_path, "p", address=address, key=KEY, wait=2.0) as prefill:
        faults = Faults(network, tmp_path, prefill)
        try:
            for _ in range(PARTED):
                faults.strike(str(random.choice(["kill", "stop", "part"])))
                until(faults.is_healed, "hand-overs arrive again")
            prefill.until(lambda: prefill.is_clean)
        finally:
            faults.decode.close()
