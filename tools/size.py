"""Print the size of the package by room, and of its core by what it can do.

Counted are lines, and code without docstrings, comments and blank lines.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

OPTIONAL = ("fdcache/integrations", "fdcache/replay", "fdcache/service/server", "fdcache/transfer")
"""Rooms of the package that are not its core."""
BESIDE = ("fdcache_cli", "benchmarks", "examples", "tests", "tools")
NATIVE = {".cpp", ".hpp", ".cu"}
MECHANISMS = {
    "load or recompute": r"fdcache/manager/(cost|speeds|load_choices)\.py",
    "groups of layers, windows, states": (
        r"fdcache/(layout.*|groups|block_owners|manager/states)\.py|csrc/tier/tier_states\.cpp"
    ),
    "runs without a known parent": r"csrc/tier/orphans\..*",
    "records that ranks hold alike": r"fdcache/controller/shares\.py",
    "events, control and page of a service": (
        r"fdcache/service/(wire/(control_views|page_views|router_events)|client/(control|block_notes)|page/.*)\.py"
        r"|fdcache/tiers/events\.py"
    ),
    "hints": r"csrc/tier/hints\.hpp|fdcache/(hints|tiers/hint_book|service/client/remote_hints)\.py",
    "a service's tier in its engines": r"fdcache/service/.*|csrc/tier/(shared_|presence|run_ring|outgoing).*",
    "eviction": r"csrc/tier/(learned_|lru_|eviction|ghosts|reuse_|survival|trust|leaf_order).*|fdcache/tiers/reuse\.py",
    "tenants": r"csrc/tier/tenants\.hpp",
    "the tier: slots, tree, leases, copies, recovery": r"csrc/tier/.*|fdcache/tiers/(pool|host)\.py",
    "requests, plans, loads, the way out": r"fdcache/(manager|plans)/.*|csrc/(scheduler|plan)/.*",
    "copies on a GPU": r"csrc/(cuda|swap)/.*|fdcache/devices/(cuda|frameworks|topology|calibration).*",
    "the worker, and copies on a CPU": r"fdcache/(controller|devices)/.*|fdcache/tasks\.py|csrc/copy/.*",
    "objects in a bucket or folder": r"fdcache/storage/objects/.*",
    "storage: files, index, queue, reads, writes": (
        r"fdcache/storage/.*|csrc/slab/.*|fdcache/tiers/(storage|fetches|waiting_|remote_index).*"
    ),
    "hashes and checksums": r"csrc/hash/.*|fdcache/hashing\.py",
    "settings": r"fdcache/settings/.*|fdcache/envs\.py",
    "figures and spans": r"fdcache/(tracing|tiers/statistics)\.py",
    "memory, processes and files of the machine": r"fdcache/machine/.*",
    "suites that connectors must pass": r"fdcache/testing/.*",
    "a stand-in for a model": r"csrc/replay/.*",
    "words, errors and the module's bindings": r".*",
}
"""What the core can do, with the files of each; the first that fits counts."""
LAYOUT_TOKENS = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Size(NamedTuple):
    """Files, their lines, and the lines with code."""

    files: int = 0
    lines: int = 0
    code: int = 0

    def plus(self, other: Size) -> Size:
        """Return the sum."""
        return Size(*(mine + its for mine, its in zip(self, other, strict=True)))


def python_code(text: str) -> int:
    """Return the number of lines with code, docstrings not counted."""
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT_TOKENS and token.type != tokenize.COMMENT:
            used.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(ast.Constant(str())):
                used.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(used)


def native_code(text: str) -> int:
    """Return the number of lines of C++ with code."""
    text = re.sub(r"/\*.*?\*/", lambda found: "\n" * found.group().count("\n"), text, flags=re.DOTALL)
    return sum(bool(line.strip()) and not line.lstrip().startswith("//") for line in text.splitlines())


def sources(root: Path) -> Iterator[Path]:
    """Yield the source files, generated stubs left out."""
    for top in ("fdcache", "csrc", *BESIDE):
        for path in sorted((root / top).rglob("*")):
            if path.suffix == ".py" or path.suffix in NATIVE:
                yield path


def room(path: Path) -> str:
    """Return the room of a file: its folder, the service's one level deeper."""
    depth = (
        3 if path.parts[:2] == ("fdcache", "service") else 2 if path.parts[0] in {"fdcache", "csrc"} else 1
    )
    return "/".join(path.parts[:-1][:depth])


def is_core(name: str) -> bool:
    """Whether a room is part of the package's core."""
    return not name.startswith(OPTIONAL + BESIDE)


def mechanism(path: Path) -> str:
    """Return what a file of the core is for."""
    return next(name for name, files in MECHANISMS.items() if re.fullmatch(files, path.as_posix()))


def measure(root: Path) -> tuple[dict[str, Size], dict[str, Size]]:
    """Return the size of each room, and of the core by what it can do."""
    rooms: dict[str, Size] = defaultdict(Size)
    mechanisms: dict[str, Size] = dict.fromkeys(MECHANISMS, Size())
    for path in sources(root):
        text, relative = path.read_text(), path.relative_to(root)
        code = native_code(text) if path.suffix in NATIVE else python_code(text)
        size, name = Size(1, len(text.splitlines()), code), room(relative)
        rooms[name] = rooms[name].plus(size)
        if is_core(name):
            what = mechanism(relative)
            mechanisms[what] = mechanisms[what].plus(size)
    return rooms, mechanisms


def total(rooms: dict[str, Size], *, core: bool) -> Size:
    """Return the size of the package, or of its core."""
    sums = Size()
    for name, size in rooms.items():
        if not name.startswith(BESIDE) and (is_core(name) or not core):
            sums = sums.plus(size)
    return sums


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, nargs="?", default=Path(__file__).parent.parent)
    rooms, mechanisms = measure(parser.parse_args().root)
    rows = sorted(rooms.items(), key=lambda row: (row[0].startswith(BESIDE), not is_core(row[0]), row[0]))
    show("room", [*rows, ("core", total(rooms, core=True)), ("package", total(rooms, core=False))])
    print()
    show("of the core", sorted(mechanisms.items(), key=lambda row: -row[1].code))
    return 0


def show(title: str, rows: Iterable[tuple[str, Size]]) -> None:
    """Print a table."""
    print(f"{title:<48}{'files':>7}{'lines':>9}{'code':>9}")
    for name, size in rows:
        print(f"{name:<48}{size.files:>7,}{size.lines:>9,}{size.code:>9,}")


if __name__ == "__main__":
    sys.exit(main())
