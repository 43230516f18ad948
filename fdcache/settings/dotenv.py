"""Dotenv files: ``NAME=value`` lines, read strictly and rewritten without touching anything else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_LINE = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_.-]*)\s*=\s*(.*?)\s*", re.DOTALL)
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"\s*(?:#.*)?')
_SINGLE = re.compile(r"'([^']*)'\s*(?:#.*)?")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One assignment of a dotenv file; ``line`` counts from 1."""

    name: str
    line: int
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no assignment. What stands on it is not kept, since it may hold a secret."""

    line: int
    reason: str


def parse(content: str) -> Iterator[Entry | BadLine]:
    """Read the assignments of a file, in order.

    A value is taken as it stands up to `` #``; in single quotes literally; in double quotes with
    ``\\n``, ``\\r``, ``\\t`` and ``\\"`` escapes. Nothing is substituted in it.
    """
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            yield BadLine(number, "it is not of the form NAME=value")
            continue
        text = _unquote(match[2])
        yield BadLine(number, "a quote is not closed") if text is None else Entry(match[1], number, text)


def _unquote(value: str) -> str | None:
    if value.startswith('"'):
        match = _DOUBLE.fullmatch(value)
        return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), match[1]) if match else None
    if value.startswith("'"):
        match = _SINGLE.fullmatch(value)
        return match[1] if match else None
    return re.sub(r"(^|\s+)#.*", "", value)


def quote(text: str) -> str:
    """Write a value so that ``parse`` reads the same text back."""
    if re.fullmatch(r"[A-Za-z0-9_./:,@%+~<>\[\]=-]*", text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") + '"'


def rename(content: str, names: dict[str, str]) -> str:
    """Give the file with variables renamed, old name to new; everything else stays byte for byte.

    A line whose new name is assigned in the file already is dropped: it had no effect.
    """
    assigned = {entry.name for entry in parse(content) if isinstance(entry, Entry)}
    lines = []
    for line in re.split(r"(?<=\n)", content):
        match = _LINE.match(line)
        old = match[1] if match and not line.lstrip().startswith("#") else None
        new = names.get(old) if old else None
        if new in assigned:
            continue
        lines.append(line.replace(old, new, 1) if old and new else line)
    return "".join(lines)
