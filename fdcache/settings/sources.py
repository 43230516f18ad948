"""Dotenv files: ``NAME=value`` lines, read strictly and rewritten without touching anything else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from fdcache.settings.problems import Problem, disagreement, error
from fdcache.settings.variable import Variable

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


ENV_FILE = "FDCACHE_ENV_FILE"
SECRETS_DIRECTORY = "FDCACHE_SECRETS_DIR"
FILE_SUFFIX = "_FILE"
OWN_PREFIX = "FDCACHE_"
PREFIXES = ("FD_", OWN_PREFIX)

_LARGEST_FILE = 1 << 20


class Source(StrEnum):
    """The kinds of source, the strongest first."""

    ARGUMENT = "argument"
    ENVIRONMENT = "environment"
    SECRETS = "secrets"
    DOTENV = "dotenv"
    DERIVED = "derived"
    """From another variable, where no stronger source gives a value."""
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One value that someone gave for a variable: by which name, and where it stands."""

    source: Source
    name: str
    place: str
    value: object = field(repr=False)


@dataclass(frozen=True, slots=True)
class Sourced:
    """A text in a layer and the place it stands at."""

    place: str
    value: object = field(repr=False)


@dataclass(frozen=True, slots=True)
class Layer:
    """One source: what is given under which name. Empty texts count as unset and are not in it."""

    source: Source
    given: Mapping[str, Sourced]


def explicit_layer(source: Source, values: Mapping[str, object]) -> Layer:
    """Make a layer of values that a caller passes, keyed by variable name; None counts as not given.

    A ``Sourced`` among them says where its value comes from, as from an option of a command.
    """
    given = {
        name: value if isinstance(value, Sourced) else Sourced(source.value, value)
        for name, value in values.items()
    }
    return Layer(source, {name: each for name, each in given.items() if each.value not in (None, "")})


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """Make the layer of a process environment."""
    return Layer(
        Source.ENVIRONMENT, {name: Sourced("environment", text) for name, text in environ.items() if text}
    )


def dotenv_layer(path: Path, problems: list[Problem]) -> Layer:
    """Read a dotenv file; the last assignment of a name counts."""
    given: dict[str, Sourced] = {}
    try:
        content = read_text(path)
    except (OSError, ValueError) as reason:
        problems.append(_unreadable(ENV_FILE, path, reason))
        content = ""
    for entry in parse(content):
        place = f"{path}:{entry.line}"
        if isinstance(entry, BadLine):
            problems.append(
                error(
                    ENV_FILE,
                    place,
                    entry.reason,
                    "write NAME=value, and quote a value that holds # or quotes",
                )
            )
        elif entry.text:
            given[entry.name] = Sourced(place, entry.text)
        else:
            given.pop(entry.name, None)
    return Layer(Source.DOTENV, given)


def secrets_layer(directory: Path, names: Iterable[str], problems: list[Problem]) -> Layer:
    """Read a folder of secrets: the files that are named after a variable, and the names that look like one."""
    given: dict[str, Sourced] = {}
    try:
        present = {path.name for path in directory.iterdir()}
    except OSError as reason:
        problems.append(_unreadable(SECRETS_DIRECTORY, directory, reason))
        present = set()
    known = set(names)
    for name in sorted(present):
        path = directory / name
        if name not in known:
            if name.startswith(PREFIXES):
                given[name] = Sourced(str(path), None)
            continue
        try:
            text = _value_in(path)
        except (OSError, ValueError) as reason:
            problems.append(_unreadable(name, path, reason))
            continue
        if text:
            given[name] = Sourced(str(path), text)
    return Layer(Source.SECRETS, given)


def candidates(variable: Variable, layers: Iterable[Layer], problems: list[Problem]) -> Iterator[Candidate]:
    """Give every value that is there for a variable, the winner first.

    Within a layer the variable's own name is stronger than a deprecated one. In the environment and in a
    dotenv file ``NAME_FILE`` stands for ``NAME``; both at once are an error.
    """
    for layer in layers:
        for name in (variable.name, *variable.aliases):
            given = layer.given.get(name)
            if layer.source in (Source.ENVIRONMENT, Source.DOTENV):
                given = _from_file(name, given, layer, problems)
            if given is not None:
                yield Candidate(layer.source, name, given.place, given.value)


def _from_file(name: str, given: Sourced | None, layer: Layer, problems: list[Problem]) -> Sourced | None:
    pointer = layer.given.get(name + FILE_SUFFIX)
    if pointer is None:
        return given
    if given is not None:
        problems.append(
            disagreement(
                {name: given.place, name + FILE_SUFFIX: pointer.place},
                "both are set, and they are two ways to give one value",
                "unset one of them",
            )
        )
        return given
    path = Path(str(pointer.value))
    try:
        text = _value_in(path)
    except (OSError, ValueError) as reason:
        problems.append(_unreadable(name + FILE_SUFFIX, path, reason))
        return None
    return Sourced(f"{path}, named by {name}{FILE_SUFFIX}", text) if text else None


def read_text(path: Path) -> str:
    """Read a text file of at most 1 MiB.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large or no UTF-8; the message holds nothing of it.
    """
    if "\0" in str(path):
        raise ValueError("the path holds a NUL character")
    if path.exists() and not path.is_file():
        raise ValueError("it is not a regular file")
    with path.open("rb") as file:
        content = file.read(_LARGEST_FILE + 1)
    if len(content) > _LARGEST_FILE:
        raise ValueError("it is larger than 1 MiB")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None


def _value_in(path: Path) -> str:
    return read_text(path).rstrip("\r\n")


def _unreadable(name: str, path: Path, reason: Exception) -> Problem:
    why = (reason.strerror or "it cannot be read") if isinstance(reason, OSError) else str(reason)
    return error(
        name, str(path), why[:1].lower() + why[1:], "name a file that this user can read, or unset it"
    )
