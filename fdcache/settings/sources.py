"""Sources of values, in order of precedence: arguments, environment, secrets directory, dotenv file, defaults.

pydantic-settings validates and merges what is read here (see ``loading``), and python-dotenv parses dotenv files. The
environment, secrets and dotenv sources of pydantic-settings are not used: they return one value per field, so that
the name and place of a value, the values that lost and misspelt names would be gone. `fdcache env` shows all of them.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from io import StringIO
from pathlib import Path

from dotenv.parser import parse_stream

from fdcache.settings.problems import Problem, disagreement, error, warning
from fdcache.settings.variable import Variable

ENV_FILE = "FDCACHE_ENV_FILE"
SECRETS_DIRECTORY = "FDCACHE_SECRETS_DIR"
FILE_SUFFIX = "_FILE"
OWN_PREFIX = "FDCACHE_"
PREFIXES = ("FD_", OWN_PREFIX)

_LARGEST_FILE = 1 << 20


class Source(StrEnum):
    """Kinds of source, the strongest first."""

    ARGUMENT = "argument"
    ENVIRONMENT = "environment"
    SECRETS = "secrets"
    DOTENV = "dotenv"
    DERIVED = "derived"
    """From another variable, where no stronger source has a value."""
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One value given for a variable: the name it was given under, and where."""

    source: Source
    name: str
    place: str
    value: object = field(repr=False)


@dataclass(frozen=True, slots=True)
class Sourced:
    """A value and the place it comes from, such as an option or a line of ``file``."""

    place: str
    value: object = field(repr=False)
    file: Path | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """Values of one source by name. Empty texts count as unset and are left out."""

    source: Source
    values: Mapping[str, Sourced]


def explicit_layer(source: Source, values: Mapping[str, object]) -> Layer:
    """Return the layer of a caller's values by variable name; None counts as not given.

    A ``Sourced`` value has its own place, such as an option of a command.
    """
    sourced = {
        name: value if isinstance(value, Sourced) else Sourced(source.value, value)
        for name, value in values.items()
    }
    return Layer(source, {name: each for name, each in sourced.items() if each.value not in (None, "")})


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """Return the layer of a process environment."""
    return Layer(
        Source.ENVIRONMENT, {name: Sourced("environment", text) for name, text in environ.items() if text}
    )


def dotenv_layer(path: Path, problems: list[Problem]) -> Layer:
    """Read a dotenv file; the last assignment of a name counts. Problems are appended to ``problems``."""
    values: dict[str, Sourced] = {}
    lines: dict[str, int] = {}
    content = _read_setting(ENV_FILE, path, problems) or ""
    for entry in parse_dotenv(content):
        place = f"{path}:{entry.line}"
        if entry.text is None:
            wrong = "it is not of the form NAME=value, or a quote is not closed"
            remedy = "write NAME=value, and quote a value that contains # or quotes"
            problems.append(error(ENV_FILE, place, wrong, remedy))
            continue
        if entry.name in lines:
            wrong = f"line {lines[entry.name]} sets it too, and the last line counts"
            problems.append(warning(entry.name, place, wrong, "remove one of them"))
        lines[entry.name] = entry.line
        if entry.text:
            values[entry.name] = Sourced(place, entry.text, path)
        else:
            values.pop(entry.name, None)
    return Layer(Source.DOTENV, values)


def secrets_layer(directory: Path, known: Iterable[str], problems: list[Problem]) -> Layer:
    """Read a folder of secrets: files named after the ``known`` variables. Names that only look like one have no value.

    Problems are appended to ``problems``.
    """
    values: dict[str, Sourced] = {}
    try:
        present = sorted(path.name for path in directory.iterdir())
    except OSError as reason:
        problems.append(_unreadable(SECRETS_DIRECTORY, directory, reason))
        present = []
    else:
        problems += _writable_by_others(SECRETS_DIRECTORY, directory)
    known = frozenset(known)
    for name in present:
        path = directory / name
        if name not in known:
            if name.startswith(PREFIXES):
                values[name] = Sourced(str(path), None)
            continue
        text = _read_setting(name, path, problems)
        if text:
            values[name] = Sourced(str(path), text.rstrip("\r\n"), path)
    return Layer(Source.SECRETS, values)


def candidates(variable: Variable, layers: Iterable[Layer], problems: list[Problem]) -> Iterator[Candidate]:
    """Yield every value given for a variable, the one in effect first.

    Within a layer the variable's own name is stronger than a deprecated one. In the environment and in a
    dotenv file ``NAME_FILE`` names a file with the value of ``NAME``; both at once are an error.
    """
    for layer in layers:
        for name in (variable.name, *variable.aliases):
            value = layer.values.get(name)
            if layer.source in (Source.ENVIRONMENT, Source.DOTENV):
                value = _or_from_file(name, value, layer, problems)
            if value is not None:
                if variable.secret and value.file is not None:
                    problems += _readable_by_others(name, value.place, value.file)
                yield Candidate(layer.source, name, value.place, value.value)


def _or_from_file(name: str, value: Sourced | None, layer: Layer, problems: list[Problem]) -> Sourced | None:
    pointer = layer.values.get(name + FILE_SUFFIX)
    if pointer is None:
        return value
    if value is not None:
        places = {name: value.place, name + FILE_SUFFIX: pointer.place}
        wrong = "both are set, and they are two ways to give one value"
        problems.append(disagreement(places, wrong, "unset one of them"))
        return value
    path = Path(str(pointer.value))
    text = (_read_setting(name + FILE_SUFFIX, path, problems) or "").rstrip("\r\n")
    return Sourced(f"{path}, named by {name}{FILE_SUFFIX}", text, path) if text else None


def read_text(path: Path) -> str:
    """Read a text file of at most 1 MiB.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large or not UTF-8; the message contains nothing of it.
    """
    if "\0" in str(path):
        raise ValueError("the path contains a NUL character")
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


def _read_setting(name: str, path: Path, problems: list[Problem]) -> str | None:
    """Read a file that ``name`` names; None, with a problem, if it cannot be read."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as reason:
        problems.append(_unreadable(name, path, reason))
        return None
    problems += _writable_by_others(name, path)
    return text


def _writable_by_others(name: str, path: Path) -> Iterator[Problem]:
    """Yield a warning for a file that every user can change, or a folder whose files every user can replace."""
    with suppress(OSError):  # it was removed meanwhile
        mode = path.stat().st_mode
        if mode & stat.S_IWOTH and not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
            yield warning(name, str(path), "every user of this machine can change it", f"chmod o-w {path}")


def _readable_by_others(name: str, place: str, path: Path) -> Iterator[Problem]:
    with suppress(OSError):
        if path.stat().st_mode & stat.S_IROTH:
            wrong = "it is a secret, and every user of this machine can read the file"
            yield warning(name, place, wrong, f"chmod o-r {path}")


def _unreadable(name: str, path: Path, reason: Exception) -> Problem:
    why = (reason.strerror or "it cannot be read") if isinstance(reason, OSError) else str(reason)
    return error(
        name, str(path), why[:1].lower() + why[1:], "name a file that this user can read, or unset it"
    )


# --- dotenv files -------------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_NEEDS_NO_QUOTES = re.compile(r"[A-Za-z0-9_./:,@%+~<>\[\]=-]*")


@dataclass(frozen=True, slots=True)
class DotenvEntry:
    """One assignment of a dotenv file; ``line`` counts from 1. ``text`` is None for a line that cannot be read."""

    name: str
    line: int
    text: str | None = field(repr=False)


def parse_dotenv(content: str) -> Iterator[DotenvEntry]:
    """Yield the assignments of a dotenv file, in order. Variables in values are not expanded.

    python-dotenv reads one line at a time, so that an open quote cannot pull a secret into another variable's value.
    """
    for number, line in enumerate(content.split("\n"), start=1):
        for binding in parse_stream(StringIO(line)):
            if binding.value is not None and _NAME.fullmatch(binding.key or ""):
                yield DotenvEntry(binding.key or "", number, binding.value)
            elif binding.error or binding.key is not None:
                yield DotenvEntry("", number, None)


def quote(text: str) -> str:
    """Write a value so that ``parse_dotenv`` reads the same text back.

    ``dotenv.set_key`` does not escape a line break.
    """
    if _NEEDS_NO_QUOTES.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") + '"'


@dataclass(frozen=True, slots=True)
class Renaming:
    """One line that ``rename`` changes. It is dropped where there is no new name, or the file assigns that too."""

    line: int
    old: str
    new: str | None
    dropped: bool


def rename(content: str, names: Mapping[str, str | None]) -> tuple[str, list[Renaming]]:
    """Return a dotenv file with variables renamed, old name to new, or dropped, old name to None.

    Everything else stays byte for byte.
    """
    entries = list(parse_dotenv(content))
    assigned = {entry.name for entry in entries}
    lines = re.split(r"(?<=\n)", content)
    renamings = []
    for entry in entries:
        if entry.name not in names:
            continue
        new, at = names[entry.name], entry.line - 1
        is_dropped = new is None or new in assigned
        renamings.append(Renaming(entry.line, entry.name, new, is_dropped))
        lines[at] = "" if new is None or is_dropped else lines[at].replace(entry.name, new, 1)
    return "".join(lines), renamings
