"""Replays of prefill and decode on GPUs, one for each if there are two, with every reused block compared."""

from __future__ import annotations

from typing import Any

import pytest

from fdcache.replay.devices import DeviceName
from fdcache.replay.faults import parse_faults
from fdcache.replay.pd import RANDOM_FAULTS, FaultKind, PdConfig, PdReport, replay_pd
from fdcache.replay.workloads import WorkloadName, generate
from fdcache.settings.cache import CacheSettings, CopySettings
from fdcache.settings.peers import PeerSettings
from tests.property.test_round_trips import LAYOUTS

pytestmark = pytest.mark.slow

REQUESTS = 60


def play(faults: str, ranks: tuple[int, int] | None = None, **transfer: Any) -> PdReport:
    config = PdConfig(
        layout=LAYOUTS["uniform"],
        cache=CacheSettings(device_blocks=512, host_memory=0),
        transfer=CopySettings(**transfer),
        peers=PeerSettings(connector="ipc", timeout=10.0, lease=5.0),
        faults=parse_faults(faults, tuple(FaultKind), RANDOM_FAULTS),
        ranks=ranks,
        device=DeviceName.CUDA,
    )
    return replay_pd(generate(WorkloadName.CHAT, REQUESTS, seed=1), config)


def test_every_block_that_is_handed_over_is_right_and_nothing_is_left() -> None:
    report = play("stop=2,abort=4,reset=4,kill=2")
    assert report.requests == REQUESTS and report.compared_blocks
    assert report.wrong_blocks == 0 and not +report.left
    assert report.transfers["fetch done"]


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
def test_heads_are_split_between_gpus(ranks: tuple[int, int]) -> None:
    report = play("abort=2", ranks)
    assert report.clean and report.compared_blocks
    assert report.transfers["fetch done"]


def test_bytes_that_change_on_the_gpu_are_found() -> None:
    report = play("flip=8", verify="all")
    assert report.faults["flip"] and report.transfers["fetch corrupt"]
    assert report.clean
