"""Traces of agents from recorded sessions: files of a dozen sessions each, none of them in another trace.

    python -m benchmarks.tiers.sessions FOLDER OUT [--without agents-12.jsonl]

``FOLDER`` has a file of JSON for each session, as `callanjfox/kv-cache-tester` publishes them in ``traces``: requests
with ``t`` in seconds, ``in`` and ``out`` in tokens, and ``hash_ids`` of blocks of 64 tokens, local to the session.
Sessions are chosen at random, one of those that begin alike, and begin at random times, 120 an hour. What sub-agents
asked is left out.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FEWEST_REQUESTS = 8
AN_HOUR = 120
_OF_THE_SESSION = ("n", "s")

Session = list[dict[str, Any]]


def read_sessions(folder: Path, without: set[tuple[int, int]]) -> list[Session]:
    """Return the sessions of a folder whose first request has none of these lengths, one of those that begin alike."""
    found: dict[tuple[int, int], Session] = {}
    for path in sorted(folder.glob("*.json")):
        requests = json.loads(path.read_bytes())["requests"]
        session = [each for each in requests if each["type"] in _OF_THE_SESSION]
        if len(session) >= FEWEST_REQUESTS:
            found.setdefault((session[0]["in"], session[0]["out"]), session)
    return [session for lengths, session in found.items() if lengths not in without]


def first_lengths(trace: Path) -> set[tuple[int, int]]:
    """Return the lengths of prompt and output with which the sessions of a trace begin."""
    found: dict[int, tuple[int, int]] = {}
    for text in trace.read_text().splitlines():
        line = json.loads(text)
        found.setdefault(line["hash_ids"][0], (line["input_length"], line["output_length"]))
    return set(found.values())


def interleaved(sessions: Sequence[Session], chance: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the lines of a trace of sessions that begin one after the other."""
    lines, begin, first = [], 0.0, 1
    for session in sessions:
        for each in session:
            ids = [first + number for number in each["hash_ids"]]
            lines.append((begin + each["t"] * 1000, each["in"], max(each["out"], 1), ids))
        first = max(max(ids) for _, _, _, ids in lines) + 1
        begin += chance.expovariate(AN_HOUR / 3600) * 1000
    for at, prompt, output, ids in sorted(lines, key=lambda line: line[0]):
        yield {"timestamp": round(at), "input_length": prompt, "output_length": output, "hash_ids": ids}


def main() -> int:
    """Write the traces."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, help="folder of the traces, other-0.jsonl and so on")
    parser.add_argument("--without", type=Path, metavar="TRACE", help="leave out its sessions")
    parser.add_argument("--files", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--sessions", type=int, default=12, help="of each file; default: %(default)s")
    parser.add_argument("--seed", type=int, default=35, help="default: %(default)s")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    found = read_sessions(options.folder, first_lengths(options.without) if options.without else set())
    chance.shuffle(found)
    for number in range(options.files):
        chosen = found[number * options.sessions :][: options.sessions]
        path = options.out / f"other-{number}.jsonl"
        lines = list(interleaved(chosen, chance))
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(f"{path}: {len(chosen)} sessions, {len(lines)} requests")
    return 0


if __name__ == "__main__":
    sys.exit(main())
