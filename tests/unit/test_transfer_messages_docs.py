"""docs/transfer.md describes the messages of hand-overs as they are sent."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import msgspec
import pytest

from fdcache.transfer import messages
from fdcache.transfer.decode import FetchEnd
from fdcache.transfer.messages import AnyMessage, Envelope, Stranger, encode
from fdcache.transfer.prefill import SendEnd

PAGE = (Path(__file__).parents[2] / "docs/transfer.md").read_text()
ROWS = {
    name: (int(number), fields)
    for number, name, fields in re.findall(r"^\| (\d+) \| (\w+) \| [^|]+ \| ([^|]+) \|$", PAGE, re.MULTILINE)
}
MESSAGES = {each.__name__: each for each in typing.get_args(AnyMessage)}


def test_every_message_has_a_row() -> None:
    assert set(ROWS) == set(MESSAGES)


@pytest.mark.parametrize("name", MESSAGES)
def test_a_row_has_the_number_and_as_many_fields_as_the_message(name: str) -> None:
    number, fields = ROWS[name]
    kind = MESSAGES[name]
    assert kind.__struct_config__.tag == number
    listed = re.split(r", (?![^(]*\))", fields.partition(":")[0] if name == "End" else fields)
    if name not in ("Stranger",):
        assert len(listed) == len(kind.__struct_fields__), listed


def test_the_header_is_laid_out_as_described() -> None:
    data = encode(Envelope(b"s" * 16, b"t" * 16), Stranger(b"u" * 16))
    parts = dict(re.findall(r"^\| (\d+-\d*) \| (.+) \|$", PAGE, re.MULTILINE))
    assert parts["0-3"] == f"`{data[:4].decode()}`"
    assert f"version, {messages.PROTOCOL_VERSION}," in parts["4-5"]
    assert data[4:8] == bytes([messages.PROTOCOL_VERSION, 0, 0, 0])
    assert "sender" in parts["8-23"] and data[8:24] == b"s" * 16
    assert "addressee" in parts["24-39"] and data[24:40] == b"t" * 16
    assert "msgpack array" in parts["40-"]
    assert msgspec.msgpack.decode(data[40:]) == [11, b"u" * 16]


def test_every_result_has_a_row() -> None:
    results = {*SendEnd, *FetchEnd}
    assert {each.value for each in results} <= set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))


EXAMPLES: list[messages.AnyMessage] = [
    messages.LinkRefused("rank", "0", "1"),
    messages.AskForBlocks("r", 1, 2, bytes(range(32)), 500),
    messages.BlocksGranted("r", 1, 0),
    messages.Ready("r", 1, 1, 2, 1, 0, 4, (7,)),
    messages.Last("r", 1, 2, bytes(range(32)), bytes(range(8))),
    messages.Renew("r", 1, 3, 2, 500),
    messages.End("r", 1, 0),
    messages.Failed("r", 1, "no"),
    Stranger(bytes(range(16))),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_the_page_has_the_bytes_of_an_example(message: messages.AnyMessage) -> None:
    data = encode(Envelope(bytes(16), bytes(16)), message)[40:]
    assert f"| {type(message).__name__} | `{data.hex(' ')}` |" in PAGE
