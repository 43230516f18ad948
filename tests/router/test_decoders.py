"""The decoders of vLLM and SGLang read what a service publishes, and so does a client of vLLM's replay socket."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from fdcache.service.server.event_publisher import MOST_RANKS
from tests.router.environments import interpreter
from tests.router.indexer import free_port
from tests.service_engine import BLOCK, PROMPT, Engine
from tests.service_help import LocalService, local_service, until
from tests.vllm import environments as vllm

DECODE = Path(__file__).parent / "decode.py"
BLOCKS = len(PROMPT) // BLOCK
Message = tuple[bytes, int, bytes]


def vllm_interpreter() -> Path | None:
    home, newest = vllm.default_home(), vllm.VERSIONS[-1]
    return vllm.interpreter(home, newest) if vllm.is_complete(home, newest) else None


DECODERS = [
    pytest.param(
        "vllm",
        vllm_interpreter(),
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(vllm_interpreter() is None, reason="vLLM: run python -m tests.vllm.setup"),
        ],
    ),
    pytest.param(
        "sglang",
        interpreter("sglang"),
        marks=pytest.mark.skipif(
            interpreter("sglang") is None, reason="SGLang: run python -m tests.router.setup"
        ),
    ),
]


class Subscriber:
    """A subscriber of a service, with the messages that it has received."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(address)
        self._socket.subscribe(b"")
        self.messages: list[Message] = []

    def receive(self) -> list[dict[str, Any]]:
        """Return the events of all messages so far."""
        while self._socket.poll(50):
            topic, number, payload = self._socket.recv_multipart()
            self.messages.append((topic, int.from_bytes(number, "big"), payload))
        return [event for _, _, payload in self.messages for event in msgspec.msgpack.decode(payload)[1]]

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    addresses = {
        "FDCACHE_KV_EVENTS": f"tcp://127.0.0.1:{free_port()}",
        "FDCACHE_KV_EVENTS_REPLAY": f"tcp://127.0.0.1:{free_port()}",
    }
    with local_service(tmp_path, **addresses) as running:
        yield running


def captured(service: LocalService) -> list[Message]:
    """Messages of a service whose tier gets blocks of a tenant, which are deleted."""
    subscriber = Subscriber(service.server.settings.server.kv_events)

    def told(kind: str) -> set[str]:
        return {each["medium"] for each in subscriber.receive() if each["type"] == kind}

    try:
        engine = Engine(service.address, device_blocks=32)
        until(subscriber.receive, "the subscriber is there")
        engine.serve(PROMPT, tenant="acme", adapter_id="chat")
        until(lambda: told("BlockStored") == {"CPU", "GPU"}, "blocks are told")
        hashes = service.ask("tree", limit=1000)
        service.ask("delete", namespace=hashes[0]["namespace"], hashes=[hashes[0]["hash"]])
        until(lambda: told("BlockRemoved") == {"CPU", "GPU"}, "their end is told, though the engine is idle")
        engine.close()
        return subscriber.messages
    finally:
        subscriber.close()


@pytest.mark.parametrize(("name", "python"), DECODERS)
def test_a_decoder_reads_every_field(name: str, python: Path, service: LocalService, tmp_path: Path) -> None:
    messages = captured(service)
    file = tmp_path / "messages.json"
    file.write_text(json.dumps([payload.hex() for _, _, payload in messages]))
    done = subprocess.run(
        [str(python), str(DECODE), name, str(file)], stdout=subprocess.PIPE, check=True, cwd=tmp_path
    )
    events = [event for batch in json.loads(done.stdout) for event in batch]
    assert events[0]["is"] == "AllBlocksCleared"
    every = [event for event in events if event["is"] == "BlockStored"]
    stored = [event for event in every if event["medium"] == "CPU"]
    ended = [event for event in events if event["is"] == "BlockRemoved"]
    removed, left = sorted(ended, key=lambda event: str(event["medium"]))
    on_device = [event for event in every if event["medium"] == "GPU"]
    assert left["medium"] == "GPU"
    assert sorted(left["block_hashes"]) == sorted(removed["block_hashes"])
    for field in ("token_ids", "block_hashes"):
        assert [each for event in on_device for each in event[field]] == [
            each for event in stored for each in event[field]
        ]
    assert [token for event in stored for token in event["token_ids"]] == PROMPT[: BLOCKS * BLOCK]
    names = [name for event in stored for name in event["block_hashes"]]
    assert len(set(names)) == BLOCKS
    assert sorted(removed["block_hashes"]) == sorted(names)
    assert {(each["medium"], each["lora_name"], each["block_size"]) for each in stored} == {
        ("CPU", "chat", BLOCK)
    }
    assert stored[0]["parent_block_hash"] is None
    if name == "vllm":
        keys = [keys for event in stored for keys in event["extra_keys"]]
        assert keys == [["chat", "acme"], *[["chat"]] * (BLOCKS - 1)]
        assert {(each["group_idx"], each["kv_cache_spec_kind"], each["locality"]) for each in stored} == {
            (0, "full_attention", "LOCAL")
        }
    else:
        assert {event["cache_salt"] for event in stored} == {"acme"}


def test_numbers_follow_each_other_and_are_higher_after_a_restart(tmp_path: Path) -> None:
    addresses = {"FDCACHE_KV_EVENTS": f"tcp://127.0.0.1:{free_port()}"}
    numbers: list[list[int]] = []
    for _ in range(2):
        with local_service(tmp_path, **addresses) as service:
            numbers.append([number for _, number, _ in captured(service)])
    for each in numbers:
        assert each == list(range(each[0], each[0] + len(each)))
    assert numbers[1][0] > numbers[0][-1]


def replayed(address: str, first: int) -> list[tuple[int, list[dict[str, Any]]]]:
    """Ask vLLM's way, and return numbers and events of the answer."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(address)
    socket.send_multipart((b"", first.to_bytes(8, "big")))
    found: list[tuple[int, list[dict[str, Any]]]] = []
    try:
        while socket.poll(10_000):
            _, _, number, payload = socket.recv_multipart()
            if number == (-1).to_bytes(8, "big", signed=True):
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)[1]))
        raise AssertionError("the answer does not end")
    finally:
        socket.close()


def test_missed_messages_are_replayed_and_older_ones_are_all_blocks(service: LocalService) -> None:
    address = service.server.settings.server.kv_events_replay
    messages = captured(service)
    last = messages[-1][1]
    (again,) = replayed(address, last)
    assert again[0] == last
    assert again[1] == msgspec.msgpack.decode(messages[-1][2])[1]
    everything = replayed(address, 0)
    assert [number for number, _ in everything] == list(range(last - MOST_RANKS + 1, last + 1))
    assert {event["type"] for _, events in everything for event in events} == {"AllBlocksCleared"}
    assert replayed(address, last + 1) == []
