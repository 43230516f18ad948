"""The connector ``ipc``: conformance, and memory that cannot be shared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fdcache.devices.shared_planes import SharedPlanes
from fdcache.errors import TransferError
from fdcache.layout import KVLayout
from fdcache.settings.peers import PeerSettings
from fdcache.testing.transfer import OpenPeer, PeerPlanes, TransferConformance, transfer_layout
from fdcache.transfer.connector import LocalPlanes, TransferContext
from fdcache.transfer.ipc import IpcConnector

IPC = PeerSettings(connector="ipc")


class TestIpc(TransferConformance):
    @pytest.fixture
    def open_peer(self, tmp_path: Path) -> OpenPeer:
        def open_one(layout: KVLayout, num_blocks: int) -> tuple[PeerPlanes, IpcConnector]:
            planes = PeerPlanes(layout, num_blocks, tmp_path)
            return planes, IpcConnector(planes.context(IPC))

        return open_one


def test_planes_in_private_memory_are_refused_with_the_remedy(tmp_path: Path) -> None:
    peer = PeerPlanes(transfer_layout(), 4, tmp_path)
    private = LocalPlanes(
        peer.layout, peer.planes.table, 4, (4096,) * peer.layout.num_planes, peer.planes.strides
    )
    with pytest.raises(TransferError, match="initialize_kv_cache"):
        IpcConnector(TransferContext(private, IPC, peer.boot, lambda: None))


def test_another_file_of_the_same_name_is_not_mapped(tmp_path: Path) -> None:
    source, target = (PeerPlanes(transfer_layout(), 4, tmp_path) for _ in range(2))
    described = IpcConnector(source.context(IPC)).memory
    connector = IpcConnector(target.context(IPC))
    source.shared.path.unlink()
    assert "cannot be opened" in (connector.connect(b"1" * 16, described) or "")
    source.shared.path.write_bytes(bytes(source.shared.nbytes))
    assert "does not match the peer's description" in (connector.connect(b"2" * 16, described) or "")


def test_what_is_no_file_of_planes_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    """A pipe that a peer names as its planes would be waited for until somebody writes to it."""
    source, target = (PeerPlanes(transfer_layout(), 4, tmp_path) for _ in range(2))
    described = IpcConnector(source.context(IPC)).memory
    connector = IpcConnector(target.context(IPC))
    source.shared.path.unlink()
    os.mkfifo(source.shared.path)
    reasons: list[str | None] = []
    thread = threading.Thread(
        target=lambda: reasons.append(connector.connect(b"1" * 16, described)), daemon=True
    )
    thread.start()
    thread.join(10.0)
    assert reasons and "does not match the peer's description" in (reasons[0] or "")


def test_the_file_of_a_killed_process_is_removed_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib\n"
        "from fdcache.testing.transfer import transfer_layout\n"
        "from fdcache.devices.shared_planes import SharedPlanes\n"
        "planes = SharedPlanes(transfer_layout(), 4, pathlib.Path(sys.argv[1]))\n"
        "print(planes.path, flush=True)\n"
        "time.sleep(100)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    path = Path(other.stdout.readline().strip())
    mine = SharedPlanes(transfer_layout(), 4, tmp_path)
    assert path.exists()
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    other.stdout.close()
    third = SharedPlanes(transfer_layout(), 4, tmp_path)
    assert not path.exists()
    assert mine.path.exists()
    third.close()
    assert not third.path.exists()
