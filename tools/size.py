"""Print the size of the package by room: lines, and code without docstrings, comments and blank lines."""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OPTIONAL = ("fdcache/integrations", "fdcache/replay", "fdcache/service/server", "fdcache/transfer")
"""Rooms of the package that are not its core."""
BESIDE = ("fdcache_cli", "benchmarks", "examples", "tests", "tools")
NATIVE = {".cpp", ".hpp", ".cu"}
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


def measure(root: Path) -> dict[str, Size]:
    """Return the size of each room."""
    rooms: dict[str, Size] = defaultdict(Size)
    for path in sources(root):
        text = path.read_text()
        code = native_code(text) if path.suffix in NATIVE else python_code(text)
        name = room(path.relative_to(root))
        rooms[name] = rooms[name].plus(Size(1, len(text.splitlines()), code))
    return rooms


def total(rooms: dict[str, Size], *, core: bool) -> Size:
    """Return the size of the package, or of its core."""
    sums = Size()
    for name, size in rooms.items():
        if not name.startswith(BESIDE) and (is_core(name) or not core):
            sums = sums.plus(size)
    return sums


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, nargs="?", default=Path(__file__).parent.parent)
    rooms = measure(parser.parse_args().root)
    rows = sorted(rooms.items(), key=lambda row: (row[0].startswith(BESIDE), not is_core(row[0]), row[0]))
    rows += [("core", total(rooms, core=True)), ("package", total(rooms, core=False))]
    print(f"{'room':<26}{'files':>7}{'lines':>9}{'code':>9}")
    for name, size in rows:
        print(f"{name:<26}{size.files:>7,}{size.lines:>9,}{size.code:>9,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
