"""SharedHostArena: a service that is slow to attach a worker, and one whose extents are missing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import msgspec
import pytest
import zmq

from fdcache.controller.cache_controller import CacheController
from fdcache.metadata import SLOT_HEADER_BYTES
from fdcache.service.client import shared_arena
from fdcache.service.wire.protocol import Attached, decode_request_frame, encode_answer
from fdcache.service.wire.shared_memory import Extent, Geometry
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
    with attached(tmp_path / "arena", tmp_path, door) as (copied, extent):
        make_extent(extent)
        assert [copied(3), copied(1)] == [False, True]


def test_an_extent_whose_file_is_other_memory_by_now_is_mapped_again(
    tmp_path: Path, door: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are looked at again after a name of their folder has changed, and not before."""
    looks: list[str | Path] = []
    is_still = Extent.is_still

    def looked(extent: Extent, path: str | Path) -> bool:
        looks.append(path)
        return is_still(extent, path)

    monkeypatch.setattr(shared_arena, "ATTACH_TIMEOUT", PATIENCE)
    monkeypatch.setattr(Extent, "is_still", looked)
    with attached(tmp_path / "arena", tmp_path, door) as (copied, extent):
        make_extent(extent)
        os.utime(extent.parent, (1, 1))  # the last change is long ago
        assert copied(1)
        looks.clear()
        assert copied(1)
        assert not looks
        other = extent.with_name("other")
        make_extent(other)
        other.rename(extent)
        assert copied(1)
        assert looks
        assert any(extent.read_bytes()), "the copy is in the file of that name"


def make_extent(path: Path) -> None:
    layout = uniform_layout()
    path.write_bytes(bytes(2 * (layout.record_bytes + SLOT_HEADER_BYTES)))


@contextmanager
def attached(
    folder: Path, home: Path, door: zmq.Socket[bytes]
) -> Iterator[tuple[Callable[[int], bool], Path]]:
    """Attach a worker to a service with extents of two records; yield a backup into a slot and the first file."""
    folder.mkdir()
    layout, numbers = uniform_layout(), count(1)
    extent_bytes = 2 * (layout.record_bytes + SLOT_HEADER_BYTES)
    geometry = Geometry(str(folder), "extent", 1, extent_bytes, layout.record_bytes, 0)

    def attach() -> None:
        caller, frame = door.recv_multipart()
        request = decode_request_frame(frame)
        door.send_multipart([caller, encode_answer(request.id, Attached(geometry, layout.fingerprint))])

    def copied(slot: int) -> bool:
        wanted = plan(next(numbers), backup=[(0, slot)])
        controller.submit_swap_tasks(msgspec.structs.replace(wanted, arena=f"1/1/{home}/engine"))
        (report,) = controller.wait_reports(PATIENCE)
        return not len(report.results[0].failed)

    with CacheController(CopySettings(), layout) as controller:
        controller.initialize_kv_cache(4)
        controller.initialize_host_cache(HostCache(server=f"ipc://{home}/fdcache.sock"))
        service = threading.Thread(target=attach)
        service.start()
        yield copied, Path(geometry.path(0, 0))
        service.join(PATIENCE)
