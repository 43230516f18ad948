"""Session of an engine: it survives malformed answers, and notices a silent service."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from fdcache.service.client import session_keeper
from fdcache.service.client.remote_tier import RemoteHostTier
from fdcache.service.wire.protocol import (
    Alive,
    Answer,
    Granted,
    Heartbeat,
    Refill,
    Refused,
    Register,
    Registered,
    decode_request,
    decode_request_frame,
    encode_answer,
)
from fdcache.service.wire.shared_memory import RING_BYTES, Geometry, create_shared
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.host import find_only
from tests.service_engine import layout
from tests.service_help import TIMEOUT, service_process, until


class ScriptedService:
    """Service that answers registrations and heartbeats, and every request for slots with ``grant``."""

    def __init__(self, directory: Path, grant: Answer) -> None:
        self.address = f"ipc://{directory}/fdcache.sock"
        self.registrations = 0
        self._grant = grant
        shape = layout()
        self._geometry = Geometry(str(directory), "fdcache-scripted", 1, 1 << 20, shape.record_bytes, 4096)
        create_shared(Path(self._geometry.table_path), 4096)
        create_shared(Path(self._geometry.ring_path(1)), RING_BYTES)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(self.address)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        while not self._ended.is_set():
            if not self._socket.poll(20):
                continue
            client, data = self._socket.recv_multipart()
            frame = decode_request_frame(data)
            self._socket.send_multipart([client, encode_answer(frame.id, self._answer(frame))])

    def _answer(self, frame: msgspec.Struct) -> Answer:
        request = decode_request(frame)  # type: ignore[arg-type]
        if isinstance(request, Register):
            self.registrations += 1
            return Registered(self.registrations, self._geometry, 16, self._geometry.ring_path(1))
        if isinstance(request, Refill):
            return self._grant
        if isinstance(request, Heartbeat):
            return Alive([])
        return Refused("unknown", "not in the script")


HASHES = np.ones((2, 32), np.uint8)
MALFORMED = Granted(b"123", b"", 16)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ScriptedService]:
    running = ScriptedService(tmp_path, MALFORMED)
    yield running
    running.close()


def test_a_malformed_answer_ends_the_session_and_the_engine_registers_again(service: ScriptedService) -> None:
    tier = RemoteHostTier(CacheSettings(server=service.address, rpc_timeout=TIMEOUT), layout())
    until(lambda: service.registrations > 2, "the engine registers again")
    assert tier.index.contains(HASHES).tolist() == [0, 0]
    tier.close()


@pytest.mark.slow
def test_an_engine_without_hits_notices_a_silent_service(tmp_path: Path) -> None:
    with service_process(tmp_path / "s") as service:
        tier = RemoteHostTier(CacheSettings(server=service.address, rpc_timeout=5.0), layout())
        assert tier.connected
        assert service.process is not None
        service.process.send_signal(signal.SIGSTOP)
        until(lambda: not tier.connected, "the silence is noticed")
        assert [find_only(tier, HASHES, 0).lease] == [0]
        service.process.send_signal(signal.SIGCONT)
        until(lambda: tier.connected, "the engine is back")
        assert service.ask("integrity") == []
        tier.close()
        until(lambda: not service.ask("clients"), "the engine has said goodbye")
        assert service.terminate() == 0


def test_a_service_that_is_away_is_told_once_and_so_is_its_return(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(session_keeper, "_HEARTBEAT_SECONDS", 0.2)
    settings = CacheSettings(server=f"ipc://{tmp_path}/fdcache.sock", rpc_timeout=0.1)

    def lines(level: int) -> list[str]:
        here = [each for each in caplog.records if each.name == "fdcache.service.client.session_keeper"]
        told = [each.getMessage() for each in here if each.levelno == level]
        return [each for each in told if not each.startswith("session at the service lost")]

    with caplog.at_level(logging.DEBUG, "fdcache"):
        tier = RemoteHostTier(settings, layout())
        try:
            until(
                lambda: any(line.startswith("no session at the service") for line in lines(logging.DEBUG)),
                "more attempts at a service that is away",
            )
            (told,) = lines(logging.WARNING)
            assert "computes what it would have found" in told
            assert str(settings.server) in told
            with service_process(tmp_path):
                until(lambda: len(lines(logging.WARNING)) == 2, "the service's return")
                assert "again, after" in lines(logging.WARNING)[-1]
            until(lambda: len(lines(logging.WARNING)) == 3, "the second absence")
            assert "computes what it would have found" in lines(logging.WARNING)[-1]
        finally:
            tier.close()
