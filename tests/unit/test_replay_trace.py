"""The reader of Mooncake traces: valid lines, and errors of invalid ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdcache.errors import TraceError
from fdcache.replay.trace import read_trace
from fdcache.replay.workloads import VOCABULARY

GOOD = {"timestamp": 27, "input_length": 1000, "output_length": 3, "hash_ids": [7, 9]}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_line_becomes_a_request_with_its_lengths(tmp_path: Path) -> None:
    (item,) = read_trace(write(tmp_path / "t.jsonl", GOOD))
    assert (item.timestamp_ms, item.prompt_length, item.output_length) == (27.0, 1000, 3)
    assert item.computed_length == 1002
    assert item.clipped_tokens == 0


def test_equal_hash_ids_give_equal_tokens_and_outputs_are_unique(tmp_path: Path) -> None:
    other = {**GOOD, "hash_ids": [7, 10]}
    first, second = (item.tokens(0) for item in read_trace(write(tmp_path / "t.jsonl", GOOD, other)))
    assert first.dtype == np.int32
    assert first.shape == (1003,)
    assert first.min() >= 0
    assert first.max() < VOCABULARY
    assert (first[:512] == second[:512]).all()
    assert (first[512:1000] != second[512:1000]).mean() > 0.99
    assert (first[1000:] != second[1000:]).any()


def test_tokens_depend_on_the_seed_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD)
    (first,), (again,) = read_trace(path), read_trace(path)
    assert (first.tokens(5) == again.tokens(5)).all()
    assert (first.tokens(5) != again.tokens(6)).mean() > 0.99


def test_blank_lines_are_skipped_and_the_limit_counts_requests(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, "", GOOD, "not read")
    assert [item.index for item in read_trace(path, limit=2)] == [0, 1]


def test_a_prompt_longer_than_its_ids_is_clipped_and_counted(tmp_path: Path) -> None:
    (item,) = read_trace(write(tmp_path / "t.jsonl", {**GOOD, "input_length": 2000}))
    assert (item.prompt_length, item.clipped_tokens) == (1024, 976)


def test_ids_of_other_traces_stand_for_other_numbers_of_tokens(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {**GOOD, "input_length": 100, "hash_ids": [7, 9]})
    (item,) = read_trace(path, id_tokens=64)
    assert (item.streams.tolist(), item.lengths.tolist(), item.clipped_tokens) == ([7, 9], [64, 36], 0)
    (first,) = read_trace(path)
    assert first.streams.tolist() == [7]  # one of 512 tokens holds all


def test_ids_beyond_the_prompt_are_not_used(tmp_path: Path) -> None:
    (item,) = read_trace(write(tmp_path / "t.jsonl", {**GOOD, "input_length": 512}))
    assert item.streams.tolist() == [7]
    assert item.prompt_length == 512


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timestamp", -1),
        ("timestamp", "soon"),
        ("input_length", 0),
        ("input_length", 2.5),
        ("output_length", -1),
        ("output_length", None),
        ("hash_ids", []),
        ("hash_ids", [1, -2]),
        ("hash_ids", [1 << 62]),
        ("hash_ids", "7"),
    ],
)
def test_an_invalid_field_is_reported_with_file_and_line(tmp_path: Path, field: str, value: Any) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, {**GOOD, field: value})
    with pytest.raises(TraceError, match=rf"t\.jsonl, line 2, field {field}: "):
        list(read_trace(path))


@pytest.mark.parametrize("field", sorted(GOOD))
def test_a_missing_field_is_reported_with_file_and_line(tmp_path: Path, field: str) -> None:
    path = write(tmp_path / "t.jsonl", {name: value for name, value in GOOD.items() if name != field})
    with pytest.raises(TraceError, match=rf"t\.jsonl, line 1, field {field}: "):
        list(read_trace(path))


@pytest.mark.parametrize("text", ["{", "[1]", '"a"', '{"timestamp": }', "\x80"])
def test_invalid_json_is_reported_with_file_and_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\n" + text.encode("latin-1") + b"\n")
    with pytest.raises(TraceError, match=r"t\.jsonl, line 3, field the whole line: "):
        list(read_trace(path))


@pytest.mark.parametrize("lines", [(), ("", " ")])
def test_a_trace_without_a_request_is_reported(tmp_path: Path, lines: tuple[str, ...]) -> None:
    with pytest.raises(TraceError, match=r"t\.jsonl: the trace has no request"):
        list(read_trace(write(tmp_path / "t.jsonl", *lines)))


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"absent\.jsonl: the trace cannot be read: No such file"):
        list(read_trace(tmp_path / "absent.jsonl"))


def test_a_line_that_never_ends_is_reported() -> None:
    with pytest.raises(TraceError, match=r"/dev/zero, line 1, .* more than 64 MiB"):
        next(read_trace(Path("/dev/zero")))
