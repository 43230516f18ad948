"""The publisher of events: what late, slow and restarted readers get; and the file of the notes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from fdcache.errors import ConfigurationError
from fdcache.service.server import event_publisher
from fdcache.service.server.event_publisher import MOST_RANKS, EventPublisher, LayoutEvents
from fdcache.service.server.notes_file import HEAD, ROW, NotesFile
from fdcache.service.wire.router_events import Origin, RouterBlock, RouterBlockRemoved, fields_of, runs_of
from tests.service_help import until

SNAPSHOT = MOST_RANKS - 1 + 2
"""Messages that tell all of ``stream``: those that empty the other ranks, and two of blocks."""


def removed(*names: int) -> list[Any]:
    return [RouterBlockRemoved(list(names), "CPU")]


class Reader:
    """A subscriber; ``numbers`` and ``events`` of all it has received."""

    def __init__(self, address: str, most_unread: int = 1000) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, most_unread)
        self.socket.setsockopt(zmq.RCVBUF, 4096)
        self.socket.connect(address)
        self.socket.subscribe(b"")
        self.numbers: list[int] = []
        self.events: list[dict[str, Any]] = []
        self.ranks: list[int] = []

    def read(self) -> int:
        """Receive what has come; return how many messages that are so far."""
        while self.socket.poll(20):
            _, number, payload = self.socket.recv_multipart()
            self.numbers.append(int.from_bytes(number, "big"))
            _, events, rank = msgspec.msgpack.decode(payload)
            self.events += events
            self.ranks += [rank] * len(events)
        return len(self.numbers)

    @property
    def names(self) -> list[int]:
        return [name for event in self.events for name in event.get("block_hashes", [])]


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    made = EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    yield made
    made.close()


@pytest.fixture
def stream(publisher: EventPublisher) -> LayoutEvents:
    made = publisher.stream("kv@node@m").join(lambda: iter([removed(1), removed(2)]))
    until(lambda: publisher.published == SNAPSHOT, "all blocks are told, to nobody yet")
    return made


@pytest.fixture
def reader(publisher: EventPublisher, stream: LayoutEvents) -> Iterator[Reader]:
    made = Reader(publisher.address)
    until(lambda: made.read() >= SNAPSHOT, "it has all blocks")
    yield made
    made.socket.close()


def test_a_subscriber_gets_all_blocks_and_then_the_changes(stream: LayoutEvents, reader: Reader) -> None:
    assert [event["type"] for event in reader.events[-3:]] == [
        "AllBlocksCleared",
        "BlockRemoved",
        "BlockRemoved",
    ]
    had = reader.read()
    stream.publish(lambda: [])
    stream.publish(lambda: removed(3))
    until(lambda: reader.read() == had + 1, "it has the change")
    assert reader.names[-1] == 3
    assert reader.numbers == list(range(reader.numbers[0], reader.numbers[0] + had + 1)), "none for nothing"


def test_layouts_of_a_model_share_the_numbers_and_each_has_a_rank(
    publisher: EventPublisher, stream: LayoutEvents, reader: Reader
) -> None:
    had = reader.read()
    second = publisher.stream("kv@node@m").join(lambda: iter([removed(11)]))
    until(lambda: reader.read() == had + SNAPSHOT + 1, "the blocks of both are told")
    told = list(zip(reader.events, reader.ranks, strict=True))[-MOST_RANKS - 3 :]
    cleared = [event["type"] == "AllBlocksCleared" for event, _ in told]
    assert cleared == [True] * MOST_RANKS + [False] * 3, "all is empty before the first block"
    assert sorted(rank for _, rank in told[:MOST_RANKS]) == list(range(MOST_RANKS))
    assert [(event["block_hashes"], rank) for event, rank in told[-3:]] == [([1], 0), ([2], 0), ([11], 1)]
    for source, name in ((second, 12), (stream, 3), (second, 13)):
        source.publish(lambda name=name: removed(name))  # type: ignore[misc]
    until(lambda: reader.read() and reader.names[-1] == 13, "the changes have come")
    assert (reader.names[-3:], reader.ranks[-3:]) == ([12, 3, 13], [1, 0, 1])
    assert reader.numbers == list(range(reader.numbers[0], reader.numbers[0] + len(reader.numbers)))


def test_a_slow_subscriber_loses_messages_and_sees_that_by_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_publisher, "MOST_UNREAD", 4)
    monkeypatch.setattr(event_publisher, "MOST_RANKS", 1)
    publisher = EventPublisher("tcp://127.0.0.1:*", None)
    stream = publisher.stream("kv@node@m").join(lambda: iter([removed(1)]))
    until(lambda: publisher.published == 1, "all blocks are told, to nobody yet")
    slow = Reader(publisher.address, most_unread=4)
    until(slow.read, "it has all blocks")
    before, text = publisher.published, list(range(100_000))
    for i in range(60):
        stream.publish(lambda i=i: removed(i, *text))  # type: ignore[misc]
    until(lambda: publisher.published == before + 60, "all are sent, as far as there was room")

    def goes_on() -> bool:
        stream.publish(lambda: removed(-1))  # lost as well, as long as there is no room
        slow.read()
        return slow.names[-1] == -1

    until(goes_on, "it goes on")
    steps = [later - earlier for earlier, later in zip(slow.numbers, slow.numbers[1:], strict=False)]
    assert min(steps) == 1
    assert max(steps) > 1
    slow.socket.close()
    publisher.close()


def test_a_stream_that_falls_behind_begins_again(
    stream: LayoutEvents, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_publisher, "MOST_WAITING", 0)
    had = reader.read()
    stream.publish(lambda: removed(7))
    until(lambda: reader.read() >= had + SNAPSHOT, "all blocks are told")
    assert 7 not in reader.names
    assert reader.events[-3]["type"] == "AllBlocksCleared"


def test_after_an_event_that_cannot_be_made_all_blocks_are_told(stream: LayoutEvents, reader: Reader) -> None:
    had = reader.read()
    stream.publish(lambda: [1 // 0])
    until(lambda: reader.read() >= had + SNAPSHOT, "all blocks are told")
    assert reader.names[-2:] == [1, 2]
    stream.publish(lambda: removed(5))
    until(lambda: reader.read() and reader.names[-1] == 5, "and then the changes")


def test_an_address_that_cannot_be_bound_is_named(publisher: EventPublisher) -> None:
    with pytest.raises(ConfigurationError, match=r"FDCACHE_KV_EVENTS: .*cannot be bound"):
        EventPublisher("tcp://203.0.113.7:1", None)
    with pytest.raises(ConfigurationError, match="FDCACHE_KV_EVENTS_REPLAY"):
        EventPublisher("tcp://127.0.0.1:*", publisher.address)


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:99999", "tcp://127.0.0.1", "inproc://x", "127.0.0.1:5557", "   ", "tcp://*:-1"],
)
def test_an_address_that_no_reader_could_have_is_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match=r"FDCACHE_KV_EVENTS: .* is no address; give"):
        EventPublisher(address, None)


def test_a_run_ends_where_a_block_does_not_follow() -> None:
    one, other = Origin(salt="a"), Origin(salt="b")
    blocks = [
        RouterBlock(1, None, [1, 2], one, group=0),
        RouterBlock(2, 1, [3, 4], one, group=0),
        RouterBlock(4, 3, [5, 6], one, group=0),
        RouterBlock(5, 4, [7, 8], other, group=0),
        RouterBlock(6, 5, [9, 9], Origin(salt="b"), group=0),
    ]
    runs = list(runs_of(blocks))
    assert [[block.name for block in run] for run in runs] == [[1, 2], [4], [5, 6]]
    fields = fields_of(runs[0], "CPU", 2)
    assert (fields["token_ids"], fields["cache_salt"]) == ([1, 2, 3, 4], "a")
    assert "extra_keys" not in fields


ROWS = [(bytes([i]) * 32, bytes([i]) * (i + 1)) for i in range(1, 6)]


class TestNotesFile:
    def written(self, path: Path) -> dict[bytes, bytes]:
        file = NotesFile(path)
        file.add(ROWS)
        file.close()
        return dict(ROWS)

    @staticmethod
    def read(path: Path) -> dict[bytes, bytes]:
        file = NotesFile(path)
        found = file.load().result()
        file.close()
        return found

    def test_rows_are_found_again_by_this_user_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "a.notes"
        assert self.read(path) == {}
        rows = self.written(path)
        assert self.read(path) == rows
        assert path.stat().st_mode & 0o777 == 0o600

    def test_every_torn_end_costs_its_own_row(self, tmp_path: Path) -> None:
        path = tmp_path / "a.notes"
        self.written(path)
        whole = path.read_bytes()
        last = len(whole) - ROW.size - 32 - len(ROWS[-1][1])
        for size in (last + 1, last + ROW.size, len(whole) - 1):
            path.write_bytes(whole[:size])
            assert self.read(path) == dict(ROWS[:-1])
            assert path.stat().st_size == last, "what follows is cut off"
            file = NotesFile(path)
            assert file.load().result()
            file.add(ROWS[-1:])
            file.close()
            assert path.read_bytes() == whole

    @pytest.mark.parametrize("at", [0, HEAD.size - 1, HEAD.size, HEAD.size + 5, HEAD.size + 20])
    def test_a_flipped_byte_is_never_believed(self, tmp_path: Path, at: int) -> None:
        path = tmp_path / "a.notes"
        self.written(path)
        data = bytearray(path.read_bytes())
        data[at] ^= 0x40
        path.write_bytes(data)
        assert self.read(path) == {}

    def test_a_rewrite_leaves_the_rows_given(self, tmp_path: Path) -> None:
        path = tmp_path / "a.notes"
        self.written(path)
        file = NotesFile(path)
        assert len(file.load().result()) == file.rows == 5
        file.rewrite(ROWS[:2])
        file.add(ROWS[3:4])
        file.close()
        assert self.read(path) == dict([*ROWS[:2], ROWS[3]])

    def test_a_folder_that_cannot_be_written_is_logged_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = NotesFile(tmp_path / "none" / "a.notes")
        file.add(ROWS)
        file.add(ROWS)
        file.close()
        assert len([record for record in caplog.records if "is not kept" in record.message]) == 1
