"""SharedHostArena: a service that is slow to attach a worker delays its submission, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from fdcache.controller.cache_controller import CacheController
from fdcache.service.client import arena
from fdcache.settings.cache import TransferSettings
from fdcache.tiers.host import HostCache
from tests.swaps import PATIENCE, plan, uniform_layout


@pytest.fixture
def door(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    """Return the socket of a service that answers when the test does."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"ipc://{tmp_path}/fdcache.sock")
    yield socket
    context.destroy(linger=0)


def test_reports_are_polled_while_a_submission_waits_for_the_service(
    tmp_path: Path, door: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "ATTACH_TIMEOUT", PATIENCE)
    with CacheController(TransferSettings(), uniform_layout()) as controller:
        controller.initialize_kv_cache(4)
        controller.initialize_host_cache(HostCache(server=f"ipc://{tmp_path}/fdcache.sock"))
        wanted = msgspec.structs.replace(plan(1, load=[(0, 1)]), arena=f"1/1/{tmp_path}/engine")
        submission = threading.Thread(target=controller.submit_swap_tasks, args=(wanted,))
        submission.start()
        assert door.poll(int(PATIENCE * 1000)), "the worker asks to be let in"
        caller, _ = door.recv_multipart()
        assert controller.poll() == [], "the plan waits for the answer, and the poll does not"
        assert submission.is_alive()
        door.send_multipart([caller, b"go away"])
        submission.join(PATIENCE)
        (report,) = controller.wait_reports(PATIENCE)
        assert report.results[0].failed.tolist() == [0]
        assert "arena cannot be used" in str(report.results[0].error_message)
