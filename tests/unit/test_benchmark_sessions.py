"""Traces that benchmarks make of recorded sessions."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.tiers.sessions import FEWEST_REQUESTS, first_lengths, interleaved, read_sessions
from fdcache.replay.trace import read_trace


def request(at: float, prompt: int, kind: str = "n") -> dict[str, Any]:
    return {"t": at, "type": kind, "in": prompt, "out": 7, "hash_ids": list(range(1, prompt // 64 + 1))}


def record(folder: Path, name: str, prompt: int, requests: int = FEWEST_REQUESTS) -> None:
    made = [request(10.0 * turn, prompt + 64 * turn) for turn in range(requests)]
    text = json.dumps({"requests": [*made, request(5.0, 640, kind="subagent")]})
    (folder / f"{name}.json").write_text(text)


def test_a_trace_has_other_sessions_that_share_nothing(tmp_path: Path) -> None:
    for name, prompt in (("a", 128), ("alike", 128), ("b", 256), ("known", 512)):
        record(tmp_path, name, prompt)
    record(tmp_path, "short", 1024, requests=FEWEST_REQUESTS - 1)
    known = tmp_path / "known.jsonl"
    known.write_text(
        "".join(json.dumps(line) + "\n" for line in interleaved([[request(0, 512)]], random.Random(1)))
    )
    sessions = read_sessions(tmp_path, first_lengths(known))
    assert [session[0]["in"] for session in sessions] == [128, 256]
    trace = tmp_path / "other.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in interleaved(sessions, random.Random(1))))
    items = list(read_trace(trace, id_tokens=64))
    assert len(items) == 2 * FEWEST_REQUESTS
    assert [item.timestamp_ms for item in items] == sorted(item.timestamp_ms for item in items)
    firsts = {int(item.streams[0]) for item in items}
    assert len(firsts) == 2, "the sessions have no block in common"
