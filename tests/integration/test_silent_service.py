"""A service that stops answering is noticed by an engine that asks it nothing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from fdcache.manager import CacheManager, MatchStatus, Request
from fdcache.service.client.remote_tier import RemoteHostTier
from fdcache.settings.cache import CacheSettings
from tests.service_engine import layout
from tests.service_help import service_process, until


@pytest.mark.slow
def test_an_engine_without_hits_notices_that_the_service_is_silent(tmp_path: Path) -> None:
    with service_process(tmp_path / "s") as service:
        with CacheManager(CacheSettings(server=service.address, rpc_timeout=5.0), layout()) as manager:
            host = manager._host
            assert isinstance(host, RemoteHostTier)
            assert host.connected
            assert service.process is not None
            service.process.send_signal(signal.SIGSTOP)
            until(lambda: not host.connected, "the silence is noticed")
            request = Request("r", [1] * 9)
            assert manager.match_prefix([request])[0].status is MatchStatus.MATCHED
            manager.request_finish([request])
            service.process.send_signal(signal.SIGCONT)
            until(lambda: host.connected, "the engine is back")
            assert service.ask("integrity") == []
        until(lambda: not service.ask("clients"), "the engine has said goodbye")
        assert service.terminate() == 0
