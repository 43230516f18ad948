"""The Mooncake client's options, circuit breaker and call lanes."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from fdcache.errors import StorageError
from fdcache.integrations.mooncake.client import (
    CallLane,
    CallOverdueError,
    ClientOptions,
    LaneBlockedError,
)
from fdcache.integrations.mooncake.variables import MooncakeSettings
from fdcache.storage.breaker import CircuitBreaker


def test_the_configuration_file_goes_before_the_variables(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.json"
    file.write_text(
        json.dumps(
            {
                "master_server_address": "127.0.0.1:50051",
                "protocol": "tcp",
                "global_segment_size": "2GiB",
                "device_name": "mlx5_0,mlx5_1",
            }
        )
    )
    settings = MooncakeSettings(config_path=file, master="elsewhere:1", protocol="rdma", local_buffer_size=99)
    options = ClientOptions.resolve(settings, rank=3)
    assert (options.master, options.protocol) == ("127.0.0.1:50051", "tcp")
    assert (options.segment_bytes, options.buffer_bytes) == (2 << 30, 99)
    assert options.device == "mlx5_1"
    assert options.local_hostname == "127.0.0.1"
    assert ClientOptions.resolve(settings, rank=None).segment_bytes == 0, "a scheduler offers no memory"


def test_settings_that_cannot_work_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="needs MOONCAKE_MASTER_SERVER_ADDR"):
        ClientOptions.resolve(MooncakeSettings(), 0)
    with pytest.raises(StorageError, match="this machine on every node"):
        ClientOptions.resolve(MooncakeSettings(master="10.1.2.3:50051", local_hostname="localhost"), 0)
    with pytest.raises(StorageError, match="write host and port"):
        ClientOptions.resolve(MooncakeSettings(master="nowhere"), 0)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(StorageError, match=r"broken\.json cannot be read"):
        ClientOptions.resolve(MooncakeSettings(config_path=broken), 0)


def test_the_breaker_refuses_after_a_failure_and_lets_one_call_try_again() -> None:
    now = [0.0]
    breaker = CircuitBreaker(5.0, clock=lambda: now[0])
    assert breaker.refuses() is None
    breaker.failed("no answer")
    assert breaker.refuses() == "no answer"
    now[0] = 5.0
    assert breaker.refuses() is None, "one call may try"
    assert breaker.refuses() == "no answer", "the others wait for its result"
    breaker.succeeded()
    assert breaker.refuses() is None


def test_a_call_given_up_at_its_deadline_blocks_the_lane_until_it_ends() -> None:
    lane, release = CallLane("test"), threading.Event()
    with pytest.raises(CallOverdueError) as overdue:
        lane.ask(release.wait, 0.01)
    with pytest.raises(LaneBlockedError, match="an earlier call has not returned yet"):
        lane.ask(lambda: 1, 60)
    release.set()
    assert overdue.value.call.result(60)
    assert lane.ask(lambda: 1, 60) == 1
    lane.close()
