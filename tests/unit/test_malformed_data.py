"""Data that cannot be decoded is an error of its reader, whatever is wrong with it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fdcache.errors import ProtocolError, TraceError
from fdcache.machine.calibration import calibrated_link
from fdcache.replay.trace import read_trace
from fdcache.service.server.arena import decode_manifest
from fdcache.service.wire.protocol import VERSION, RequestFrame, decode_answer, decode_request, is_question
from fdcache.storage.calibration import StorageSpeed, load_storage_speed, save_storage_speed
from fdcache.transfer.messages import MAGIC, NO_BOOT, PROTOCOL_VERSION, decode

DEEP = b"\x91" * 100_000 + b"\xc0"
NO_TEXT = b"\xa3\xed\xb3\xbf"
JSON = {"deep": b'{"a":' + b"[" * 100_000, "no text": b'{"a":"\xff"}', "other": b"[]"}


@pytest.mark.parametrize(
    "body", [b"\x95\x09\xa1r\x01\x00" + DEEP, b"\x94\x09" + NO_TEXT + b"\x01\x00"], ids=["deep", "no text"]
)
def test_a_message_of_a_peer_that_cannot_be_decoded_is_a_protocol_error(body: bytes) -> None:
    header = MAGIC + PROTOCOL_VERSION.to_bytes(2, "little") + b"\0\0" + 2 * NO_BOOT
    with pytest.raises(ProtocolError):
        decode(header + body)


@pytest.mark.parametrize("field", [DEEP, NO_TEXT], ids=["deep", "no text"])
def test_a_request_that_cannot_be_decoded_is_a_protocol_error(field: bytes) -> None:
    frame = RequestFrame(VERSION, 1, 1, msgspec.Raw(b"\x81\xa4type" + field))
    assert not is_question(frame)
    with pytest.raises(ProtocolError):
        decode_request(frame)
    with pytest.raises(ProtocolError):
        decode_answer(msgspec.msgpack.encode((VERSION, 1, msgspec.Raw(b"\x81\xa4type" + field))))


@pytest.mark.parametrize("name", JSON)
def test_a_file_that_cannot_be_decoded_is_no_measurement_and_no_arena(tmp_path: Path, name: str) -> None:
    speed = StorageSpeed(
        format=1, folder=str(tmp_path), device=0, measured_at="", bytes_per_second=1e9, latency_seconds=0.1
    )
    save_storage_speed(speed, tmp_path).write_bytes(JSON[name])
    (tmp_path / "gpu.json").write_bytes(JSON[name])
    assert load_storage_speed(tmp_path, tmp_path) is None
    assert calibrated_link(tmp_path) == 0.0
    assert decode_manifest(JSON[name]) is None


@pytest.mark.parametrize("name", JSON)
def test_a_trace_that_cannot_be_decoded_is_a_trace_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(JSON[name] + b"\n")
    with pytest.raises(TraceError, match="line 1"):
        list(read_trace(path))
