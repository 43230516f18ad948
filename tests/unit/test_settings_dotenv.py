"""Dotenv files: what is read, what is refused, what is rewritten."""

import pytest

from fdcache.settings.sources import BadLine, Entry, parse, quote, rename


def entries(content: str) -> dict[str, str]:
    found = list(parse(content))
    assert all(isinstance(entry, Entry) for entry in found)
    return {entry.name: entry.text for entry in found if isinstance(entry, Entry)}


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("A=1", "1"),
        ("export A=1", "1"),
        ("  A = 1  ", "1"),
        ("A=1\r", "1"),
        ("A=", ""),
        ("A=a b # comment", "a b"),
        ("A=a#b", "a#b"),
        ("A=#comment", ""),
        ("A='a # b \"$X\" \\n'", 'a # b "$X" \\n'),
        ('A="a # \\"b\\" \\n\\t\\\\ $X" # comment', 'a # "b" \n\t\\ $X'),
        ("A=$OTHER", "$OTHER"),
        ("A==b", "=b"),
    ],
)
def test_values_are_read_as_described(line: str, value: str) -> None:
    assert entries(line) == {"A": value}


def test_comments_and_blank_lines_are_skipped_and_lines_counted() -> None:
    assert list(parse("# A=1\n\n  # x\nB=2")) == [Entry("B", 4, "2")]


@pytest.mark.parametrize("line", ["A", "1A=2", "A B=2", "A='x", 'A="x', "=x", 'A="x" y'])
def test_what_is_no_assignment_is_named_by_its_line(line: str) -> None:
    (bad,) = parse(line)
    assert isinstance(bad, BadLine)
    assert bad.line == 1


@pytest.mark.parametrize(
    "text", ["", "plain", "two words", "a#b", " # ", "it's", 'say "x"', "a\\nb", "x\ny\tz", "é"]
)
def test_quoted_values_read_back(text: str) -> None:
    assert entries(f"A={quote(text)} # comment") == {"A": text}


def test_rename_touches_nothing_else() -> None:
    before = "# OLD=1\r\nexport OLD = 'x OLD'  # OLD\nOLDER=2\n\nlast=OLD"
    after, changes = rename(before, {"OLD": "NEW"})
    assert after == "# OLD=1\r\nexport NEW = 'x OLD'  # OLD\nOLDER=2\n\nlast=OLD"
    assert [(change.line, change.dropped) for change in changes] == [(2, False)]


def test_rename_drops_a_line_that_had_no_effect() -> None:
    after, changes = rename("OLD=1\nNEW=2\n", {"OLD": "NEW"})
    assert after == "NEW=2\n"
    assert changes[0].dropped
