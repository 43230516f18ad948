"""The processes of a replay of prefill and decode."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fdcache.replay.pd_instance import Abort, Ended, InstanceSpec, PairWork
from fdcache.replay.pd_process import InstanceProcess
from fdcache.settings.cache import CacheSettings, CopySettings
from fdcache.settings.peers import PeerSettings, TransferRole
from tests.transfer_help import LAYOUT

COUNT = 5_000
"""Commands that a pipe does not hold."""


def test_a_stopped_process_stops_nobody_and_gets_its_work_when_it_goes_on(tmp_path: Path) -> None:
    peers = PeerSettings(
        connector="ipc", role=TransferRole.PREFILL, address=f"ipc://{tmp_path}/p", directory=tmp_path
    )
    cache = CacheSettings(device_blocks=16, host_memory=0)
    spec = InstanceSpec(LAYOUT, cache, CopySettings(), peers, 1024, 1.0, tmp_path)
    process = InstanceProcess(TransferRole.PREFILL, spec)
    process.stop()
    for index in range(COUNT):
        process.send(Abort(index))
    process.send(PairWork(COUNT, 1, np.arange(40, dtype=np.int32), "r"))
    process.resume()
    ended = process.receive(60.0)
    assert isinstance(ended, Ended)
    assert ended.index == COUNT
    process.kill()
