"""SharedHostArena: a service that is slow to attach a worker, and one whose extents are missing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from fdcache.controller.cache_controller import CacheController
from fdcache.metadata import SLOT_HEADER_BYTES
from fdcache.service.client import shared_arena
from fdcache.service.wire.protocol import Attached, decode_request_frame, encode_answer
from fdcache.service.wire.shared_memory import Geometry
from fdcache.settings.cache import CopySettings
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
    monkeypatch.setattr(shared_arena, "ATTACH_TIMEOUT", PATIENCE)
    with CacheController(CopySettings(), uniform_layout()) as controller:
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


def test_extents_that_are_missing_hide_none_of_those_that_are_there(
    tmp_path: Path, door: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a service starts again: the plan that needs the missing one fails, the next plan is copied."""
    monkeypatch.setattr(shared_arena, "ATTACH_TIMEOUT", PATIENCE)
    layout = uniform_layout()
    extent_bytes = 2 * (layout.record_bytes + SLOT_HEADER_BYTES)
    geometry = Geometry(str(tmp_path), "extent", 1, extent_bytes, layout.record_bytes, 0)
    Path(geometry.path(0, 0)).write_bytes(bytes(extent_bytes))

    def attach() -> None:
        caller, frame = door.recv_multipart()
        request = decode_request_frame(frame)
        door.send_multipart([caller, encode_answer(request.id, Attached(geometry, layout.fingerprint))])

    with CacheController(CopySettings(), layout) as controller:
        controller.initialize_kv_cache(4)
        controller.initialize_host_cache(HostCache(server=f"ipc://{tmp_path}/fdcache.sock"))
        service = threading.Thread(target=attach)
        service.start()
        for number, slot, copied in ((1, 3, False), (2, 1, True)):
            wanted = plan(number, backup=[(0, slot)])
            controller.submit_swap_tasks(msgspec.structs.replace(wanted, arena=f"1/1/{tmp_path}/engine"))
            (report,) = controller.wait_reports(PATIENCE)
            assert (len(report.results[0].failed) == 0) == copied
        service.join(PATIENCE)
