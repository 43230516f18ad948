"""Replays on a GPU, with every reused block compared byte by byte."""

from __future__ import annotations

import pytest

from fdcache.replay.config import ReplayConfig, Shape, VerifyBytes
from fdcache.replay.devices import DeviceName
from fdcache.replay.engine import replay
from fdcache.replay.workloads import WorkloadName, generate
from fdcache.settings.cache import CacheSettings, CopySettings, SwapMethod, WritePolicy
from tests.gpu.test_cuda_swaps import METHODS
from tests.property.test_round_trips import LAYOUTS


@pytest.mark.parametrize("policy", list(WritePolicy))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["uniform", "fp8", "mla"])
def test_no_reused_block_is_corrupt(name: str, method: str, policy: WritePolicy) -> None:
    layout = LAYOUTS[name]
    config = ReplayConfig(
        layout=layout,
        cache=CacheSettings(
            device_blocks=512, host_memory=2048 * layout.record_bytes, write_policy=policy, clean_reserve=16
        ),
        transfer=CopySettings(swap_method=SwapMethod(method)),
        verify=VerifyBytes.ALL,
        device=DeviceName.CUDA,
    )
    report = replay(generate(WorkloadName.CHAT, 30, seed=1), config)
    assert report.tally.verified_blocks > 0 and report.tally.h2d.bytes > 0
    assert report.tally.corrupt_blocks == 0


@pytest.mark.parametrize(("groups", "blocks"), [("all/16,last:256/32", 700), ("state,state,all", 240)])
def test_no_reused_block_of_several_groups_of_layers_is_corrupt(groups: str, blocks: int) -> None:
    layout = Shape(groups=groups).build(block_size=64, ranks=1)
    cache = CacheSettings(device_blocks=blocks, host_memory=16 << 20, write_policy=WritePolicy.WRITE_THROUGH)
    report = replay(
        generate(WorkloadName.CHAT, 30, seed=1),
        ReplayConfig(layout=layout, cache=cache, verify=VerifyBytes.ALL, device=DeviceName.CUDA),
    )
    assert report.tally.verified_blocks > 0 and report.tally.h2d.bytes > 0
    assert report.tally.corrupt_blocks == 0
