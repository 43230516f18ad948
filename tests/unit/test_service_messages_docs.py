"""docs/reference/service-messages.md describes the messages of the service as they are sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from fdcache.service.wire import protocol
from fdcache.service.wire.protocol import decode_answer, decode_request, decode_request_frame
from tests.service_messages import ANSWERS, NUMBER, REPLIES, REQUESTS, SESSION, kinds_of, page, tag_of

PAGE = Path(__file__).parents[2] / "docs/reference/service-messages.md"


def examples(page: str) -> dict[str, bytes]:
    """Return the bytes of the example of each message."""
    sections = page.split("\n### `")[1:]
    return {
        section.partition("`")[0]: bytes.fromhex(section.split("bytes: `")[-1].partition("`")[0])
        for section in sections
    }


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), (
        "run python -m tests.service_messages > docs/reference/service-messages.md"
    )


def test_every_message_has_an_example_and_every_request_an_answer() -> None:
    assert [type(each) for each in REQUESTS] == kinds_of(protocol.Request)
    assert [type(each) for each in REPLIES] == kinds_of(protocol.Answer)
    assert list(ANSWERS) == [tag_of(type(each)) for each in REQUESTS]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: tag_of(type(each)))
def test_the_bytes_of_a_request_are_decoded_to_it(request_: protocol.Request) -> None:
    frame = decode_request_frame(examples(PAGE.read_text())[tag_of(type(request_))])
    assert (frame.session, frame.id) == (SESSION, NUMBER)
    assert decode_request(frame) == request_


@pytest.mark.parametrize("answer", REPLIES, ids=lambda each: tag_of(type(each)))
def test_the_bytes_of_an_answer_are_decoded_to_it(answer: protocol.Answer) -> None:
    number, decoded = decode_answer(examples(PAGE.read_text())[tag_of(type(answer))])
    assert number in (0, NUMBER)
    assert decoded == answer
