"""From text to values and back: one small parser per kind of value. Each raises ValueError."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import GetCoreSchemaHandler, PlainSerializer, SecretStr
from pydantic_core import CoreSchema, core_schema

MASK = "********"

_LARGEST = 2**63 - 1

_FLAGS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def parse_flag(value: object) -> bool:
    """Read a flag from 0/1, true/false, yes/no or on/off in any case."""
    flag = _FLAGS.get(str(value).strip().lower())
    if flag is None:
        raise ValueError("not a flag")
    return flag


def parse_integer(value: object) -> int:
    """Read a whole number; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("not an integer")
    number = int(value)
    if abs(number) > _LARGEST:
        raise ValueError("not a 64-bit integer")
    return number


def parse_number(value: object) -> float:
    """Read a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("not a finite number")
    return number


def parse_text(value: object) -> str:
    """Take a text that UTF-8 can write and that has no NUL characters."""
    if not isinstance(value, str) or b"\0" in value.encode():
        raise ValueError("not a text")
    return value


def parse_path(value: object) -> Path:
    """Read a path as it stands."""
    if isinstance(value, Path):
        return value
    return Path(parse_text(value))


def parse_home_path(value: object) -> Path:
    """Read a path whose ``~`` is the user's home."""
    try:
        return parse_path(value).expanduser()
    except RuntimeError as error:
        raise ValueError("a home folder that cannot be found") from error


def parse_path_or_none(value: object) -> Path | None:
    """Read a path, or none."""
    return None if value is None or str(value).lower() == "none" else parse_path(value)


def parse_url(value: object) -> str:
    """Read an address: ``scheme://host...`` or ``host:port``."""
    text = parse_text(value)
    parts = urlsplit(text)
    if any(c.isspace() for c in text) or not (parts.netloc or re.fullmatch(r"[^/:@]+(:\d+)?(/.*)?", text)):
        raise ValueError("not an address")
    return text


def mask_url(url: str) -> str:
    """Give the address with the user and password in it hidden; any text will do."""
    return re.sub(r"^([a-zA-Z][a-zA-Z0-9+.-]*://)?.*@", rf"\1{MASK}@", url, flags=re.DOTALL)


_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *(?:([kmgt]?|[kmgt]i)b?)", re.IGNORECASE | re.ASCII)


def parse_size(value: object) -> int:
    """Read a number of bytes: ``1073741824``, ``512MiB`` or ``8Gi`` (1024s), ``4GB`` or ``4G`` (1000s)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or ("." in match[1] and not match[2]):
        raise ValueError("not a size")
    unit = match[2].lower()
    factor = _BINARY.get(unit) or _DECIMAL[unit]
    return parse_integer(int(Decimal(match[1]) * factor))


_SHARE = re.compile(r"(0?\.\d+)|(\d+(?:\.\d+)?) *%", re.ASCII)


def parse_memory(value: object) -> int | float:
    """Read a size above 0, or a share of the memory that is there: ``0.9`` or ``90%``."""
    match = _SHARE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None and not isinstance(value, float):
        size = parse_size(value)
        if size < 1:
            raise ValueError("not above 0")
        return size
    return _share(value)


def format_memory(value: float) -> str:
    """Write a size or a share."""
    return repr(value) if isinstance(value, float) else format_size(value)


def parse_megabytes(value: object) -> int:
    """Read a size as a whole number of MiB: a plain number is that number, others have a unit."""
    if isinstance(value, str) and value.strip().isdigit():
        return parse_integer(value)
    if isinstance(value, int):
        return parse_integer(value)
    size = parse_size(value)
    if size % 2**20:
        raise ValueError("not a whole number of MiB")
    return size >> 20


def format_size(size: int) -> str:
    """Write a number of bytes with the largest binary unit that keeps it exact."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def printable(text: str) -> str:
    """Write what would move the cursor or begin a line as an escape: names of clients may hold anything."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def readable_size(size: float) -> str:
    """Write a number of bytes in four digits, as 1.5GiB."""
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size /= 1024
        unit += 1
    return f"{size:.4g}{_UNITS[unit]}"


_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?) *(ms|s|m|h|d)", re.ASCII)


def parse_duration(value: object, unit: str = "s") -> float:
    """Read a duration as a number of ``unit``: a plain number, or one with ms, s, m, h or d behind it."""
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return parse_number(value)
    return parse_number(match[1]) * _SECONDS[match[2]] / _SECONDS[unit]


def whole(parse: Callable[[Any], float]) -> Callable[[Any], int]:
    """Make a parser of numbers one of whole numbers."""

    def parse_whole(value: object) -> int:
        number = parse(value)
        if not math.isfinite(number) or number != int(number):
            raise ValueError("not a whole number")
        return int(number)

    return parse_whole


def items(value: object) -> list[Any]:
    """Split a comma list, leaving empty items out."""
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    if isinstance(value, Iterable):
        return list(value)
    raise ValueError("not a list")


def parse_list(value: object) -> tuple[str, ...]:
    """Read a comma list; empty items are left out."""
    texts = tuple(parse_text(item) for item in items(value))
    if any("," in text or not text.strip() for text in texts):
        raise ValueError("an item of a comma list is empty or holds a comma")
    return texts


def parse_shares(value: object) -> tuple[tuple[str, float], ...]:
    """Read ``name=0.5,other=10%``; no name twice."""
    pairs = [item if isinstance(item, tuple) else str(item).rpartition("=")[::2] for item in items(value)]
    shares = {parse_text(name).strip(): _share(share) for name, share in pairs}
    if "" in shares or len(shares) != len(pairs):
        raise ValueError("a name is empty or stands twice")
    return tuple(shares.items())


def _share(value: object) -> float:
    match = _SHARE.fullmatch(value.strip()) if isinstance(value, str) else None
    share = parse_number(value) if match is None else float(match[1] or float(match[2]) / 100)
    if not 0 < share <= 1:
        raise ValueError("not a share")
    return share


def render_shares(value: Iterable[tuple[str, float]]) -> str:
    """Write ``name=0.5,other=0.1``."""
    return ",".join(f"{name}={render_number(share)}" for name, share in value)


def parse_port(value: object) -> int:
    """Read a port, 1 to 65535."""
    port = parse_integer(value)
    if not 1 <= port <= 65535:
        raise ValueError("not a port")
    return port


def parse_integers(value: object) -> tuple[int, ...]:
    """Read integers with commas between them, brackets around them or not."""
    bracketed = re.fullmatch(r"\[(.*)\]", value.strip()) if isinstance(value, str) else None
    return tuple(parse_integer(item) for item in items(bracketed[1] if bracketed else value))


def parse_power_of_two(value: object) -> int:
    """Read a positive power of two."""
    number = parse_integer(value)
    if number < 1 or number & (number - 1):
        raise ValueError("not a positive power of two")
    return number


def parse_secret(value: object) -> SecretStr:
    """Take a text that is not to be shown."""
    return value if isinstance(value, SecretStr) else SecretStr(parse_text(value))


def parse_secrets(value: object) -> tuple[SecretStr, ...]:
    """Read a comma list that is not to be shown."""
    plain = [item.get_secret_value() if isinstance(item, SecretStr) else item for item in items(value)]
    return tuple(SecretStr(item) for item in parse_list(plain))


def join(values: Iterable[object]) -> str:
    """Write a comma list."""
    return ",".join(str(value) for value in values)


def render_number(value: float) -> str:
    """Write a number, without a fraction where it has none."""
    return str(int(value)) if value == int(value) else repr(value)


Schema = Mapping[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What stands in ``Annotated[type, Kind]``: the parser pydantic runs first, and words for messages.

    ``expects`` completes "... is not", ``example`` completes "use".
    """

    name: str
    expects: str
    example: str
    parse: Callable[[Any], Any]
    render: Callable[[Any], str] = str
    schema: Schema = field(default_factory=lambda: {"type": "string"})
    secret: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.parse, handler(source))


_INTEGER: Schema = {"type": "integer"}
_TIME = "a number with an optional unit, such as 30, 30s, 500ms, 2m or 1h"

FLAG = Kind(
    "flag",
    "a flag",
    "0 or 1, true or false, yes or no, on or off",
    parse_flag,
    lambda value: str(int(value)),
    {"type": "string", "enum": ["0", "1", "true", "false", "yes", "no", "on", "off"]},
)
INTEGER = Kind("integer", "an integer", "a whole number", parse_integer, schema=_INTEGER)
NUMBER = Kind("number", "a number", "a finite number", parse_number, render_number, {"type": "number"})
TEXT = Kind("text", "a text", "any text", parse_text)
PATH = Kind("path", "a path", "a folder or file such as /var/lib/fdcache", parse_path)
HOME_PATH = Kind("path", "a path", "a folder such as ~/.config/fastdeploy", parse_home_path)
PATH_OR_NONE = Kind("path", "a path", "a folder or file, or none", parse_path_or_none)
URL = Kind("address", "an address", "an address such as http://collector:4317", parse_url)
SIZE = Kind(
    "size",
    "a size",
    "a number of bytes with an optional unit, such as 512MiB, 8GiB, 4GB or 1073741824",
    parse_size,
    format_size,
)
MEMORY = Kind(
    "size or share",
    "a size or a share of the memory there is",
    "a size such as 40GiB, or a share such as 0.9 or 90%",
    parse_memory,
    format_memory,
)
MEGABYTES = Kind(
    "size",
    "a size in whole MiB",
    "a number of MiB, or one with a unit, such as 8, 8MiB or 1GiB",
    parse_megabytes,
)
SECONDS = Kind("duration", "a duration", _TIME, parse_duration, render_number)
WHOLE_SECONDS = Kind("duration", "a duration in whole seconds", _TIME, whole(parse_duration))
MILLISECONDS = Kind(
    "duration",
    "a duration in whole milliseconds",
    "a number of milliseconds, or one with a unit, such as 500, 500ms or 2s",
    whole(lambda value: parse_duration(value, "ms")),
)
LIST = Kind("list", "a comma list", "items with commas between them, such as a,b", parse_list, join)
SHARES = Kind(
    "shares",
    "a comma list of NAME=SHARE",
    "names and shares above 0 and up to 1, such as search=0.5,batch=10%",
    parse_shares,
    render_shares,
)
PORT = Kind("port", "a port", "a number from 1 to 65535", parse_port, schema=_INTEGER)
PORTS = Kind(
    "ports",
    "a comma list of ports",
    "numbers from 1 to 65535 with commas between them, such as 8202,8203",
    lambda value: tuple(parse_port(item) for item in items(value)),
    join,
)
INTEGERS = Kind(
    "integers",
    "a list of integers",
    "numbers in brackets, such as [80,90]",
    parse_integers,
    lambda value: f"[{join(value)}]",
)
POWER_OF_TWO = Kind(
    "integer",
    "a positive power of two",
    "a power of two such as 16, 32 or 64",
    parse_power_of_two,
    schema={"type": "integer", "enum": [1 << bit for bit in range(63)]},
)
SECRET = Kind("secret", "a text", "any text", parse_secret, lambda value: MASK, secret=True)
SECRETS = Kind(
    "secrets",
    "a comma list",
    "keys with commas between them",
    parse_secrets,
    lambda value: MASK,
    secret=True,
)

Flag = Annotated[bool, FLAG]
Integer = Annotated[int, INTEGER]
Number = Annotated[float, NUMBER]
Text = Annotated[str, TEXT]
FilePath = Annotated[Path, PATH]
HomePath = Annotated[Path, HOME_PATH]
FilePathOrNone = Annotated[Path | None, PATH_OR_NONE]
Url = Annotated[str, URL, PlainSerializer(mask_url, when_used="json")]
Size = Annotated[int, SIZE]
Memory = Annotated[int | float, MEMORY]
Megabytes = Annotated[int, MEGABYTES]
Seconds = Annotated[float, SECONDS]
WholeSeconds = Annotated[int, WHOLE_SECONDS]
Milliseconds = Annotated[int, MILLISECONDS]
TextList = Annotated[tuple[str, ...], LIST]
Shares = Annotated[tuple[tuple[str, float], ...], SHARES]
Port = Annotated[int, PORT]
Ports = Annotated[tuple[int, ...], PORTS]
Integers = Annotated[tuple[int, ...], INTEGERS]
PowerOfTwo = Annotated[int, POWER_OF_TWO]
Secret = Annotated[SecretStr, SECRET]
Secrets = Annotated[tuple[SecretStr, ...], SECRETS]
