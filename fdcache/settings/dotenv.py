"""Dotenv files: ``NAME=value`` lines, read strictly and rewritten without touching anything else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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


@dataclass(frozen=True, slots=True)
class Renaming:
    """One line that ``rename`` changes; it is dropped where the new name is assigned in the file already."""

    line: int
    old: str
    new: str
    dropped: bool


def rename(content: str, names: Mapping[str, str]) -> tuple[str, list[Renaming]]:
    """Give the file with variables renamed, old name to new; everything else stays byte for byte."""
    assigned = {entry.name for entry in parse(content) if isinstance(entry, Entry)}
    lines, done = [], []
    for number, line in enumerate(re.split(r"(?<=\n)", content), start=1):
        match = _LINE.match(line)
        old = match[1] if match else ""
        if old in names:
            change = Renaming(number, old, names[old], dropped=names[old] in assigned)
            done.append(change)
            line = "" if change.dropped else line.replace(old, change.new, 1)  # noqa: PLW2901
        lines.append(line)
    return "".join(lines), done
