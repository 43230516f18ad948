"""Kinds of values: text to value, value to text, and the words for messages.

pydantic validates the values. Their text is read here because pydantic's own types (``ByteSize``, ``timedelta``,
JSON lists) read other spellings, never write the text back, and know no wording for a remedy.
"""

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

from fdcache.machine.session import expand_home

Schema = Mapping[str, object]

MASK = "********"
"""Shown in place of a secret."""


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Metadata in ``Annotated[type, Kind]``: the parser that pydantic runs first, and words for messages.

    ``parse`` takes a text or a value and raises ``ValueError``. ``expects`` completes "... is not", ``example``
    completes "use". ``mask`` hides what is secret in a text that is shown.
    """

    name: str
    expects: str
    example: str
    parse: Callable[[Any], Any]
    render: Callable[[Any], str] = str
    schema: Schema = field(default_factory=lambda: {"type": "string"})
    secret: bool = False
    mask: Callable[[str], str] = str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.parse, handler(source))


# --- flags and texts ----------------------------------------------------------------------------------------

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
    """Parse 0/1, true/false, yes/no or on/off in any case."""
    flag = _FLAGS.get(str(value).strip().lower())
    if flag is None:
        raise ValueError("not a flag")
    return flag


def parse_text(value: object) -> str:
    """Accept a text that UTF-8 can encode and that has no NUL character."""
    if not isinstance(value, str) or b"\0" in value.encode():
        raise ValueError("not a text")
    return value


def printable(text: str) -> str:
    """Escape control characters, so that a text from elsewhere cannot move the cursor or begin a line."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


FLAG = Kind(
    "flag",
    "a flag",
    "0 or 1, true or false, yes or no, on or off",
    parse_flag,
    lambda value: str(int(value)),
    {"type": "string", "enum": ["0", "1", "true", "false", "yes", "no", "on", "off"]},
)
TEXT = Kind("text", "a text", "any text", parse_text)
Flag = Annotated[bool, FLAG]
Text = Annotated[str, TEXT]


# --- paths and addresses ------------------------------------------------------------------------------------


_LONGEST_PATH, _LONGEST_NAME = 4095, 255  # bytes, on Linux


def parse_path(value: object) -> Path:
    """Parse a path as written, of a length that the system takes."""
    path = value if isinstance(value, Path) else Path(parse_text(value))
    if len(bytes(path)) > _LONGEST_PATH or any(len(part.encode()) > _LONGEST_NAME for part in path.parts):
        raise ValueError("too long")
    return path


def parse_home_path(value: object) -> Path:
    """Parse a path and expand ``~``."""
    return expand_home(parse_path(value))


def parse_path_or_none(value: object) -> Path | None:
    """Parse a path, or the word none."""
    return None if value is None or str(value).lower() == "none" else parse_path(value)


def parse_url(value: object) -> str:
    """Accept ``scheme://host...`` or ``host:port``."""
    text = parse_text(value)
    parts = urlsplit(text)
    if any(c.isspace() for c in text) or not (parts.netloc or re.fullmatch(r"[^/:@]+(:\d+)?(/.*)?", text)):
        raise ValueError("not an address")
    return text


def mask_url(url: str) -> str:
    """Hide the user and password of an address; accepts any text."""
    return re.sub(r"^([a-zA-Z][a-zA-Z0-9+.-]*://)?.*@", rf"\1{MASK}@", url, flags=re.DOTALL)


PATH = Kind("path", "a path", "a folder or file such as /var/lib/fdcache", parse_path)
HOME_PATH = Kind("path", "a path", "a folder such as ~/.config/fastdeploy", parse_home_path)
PATH_OR_NONE = Kind("path", "a path", "a folder or file, or none", parse_path_or_none)
URL = Kind("address", "an address", "an address such as http://collector:4317", parse_url, mask=mask_url)
FilePath = Annotated[Path, PATH]
HomePath = Annotated[Path, HOME_PATH]
FilePathOrNone = Annotated[Path | None, PATH_OR_NONE]
Url = Annotated[str, URL, PlainSerializer(mask_url, when_used="json")]


# --- numbers ------------------------------------------------------------------------------------------------


def _ascii(value: Any) -> Any:
    """Refuse digits of other scripts, which ``int`` and ``float`` read."""
    if isinstance(value, str) and not value.isascii():
        raise ValueError("not ASCII")
    return value


def parse_integer(value: object) -> int:
    """Parse a 64-bit integer; a bool is refused."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("not an integer")
    number = int(_ascii(value))
    if abs(number) >= 2**63:
        raise ValueError("not a 64-bit integer")
    return number


def parse_number(value: object) -> float:
    """Parse a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a number")
    try:
        number = float(_ascii(value))
    except OverflowError:  # of an integer
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("not a finite number")
    return number


def render_number(value: float) -> str:
    """Write a number, without a fraction where it has none."""
    return str(int(value)) if value == int(value) else repr(value)


def parse_port(value: object) -> int:
    """Parse a port, 1 to 65535."""
    port = parse_integer(value)
    if not 1 <= port <= 65535:
        raise ValueError("not a port")
    return port


def is_port(text: str) -> bool:
    """Return True for the digits of a port; 0 is any free port."""
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65535


def parse_power_of_two(value: object) -> int:
    """Parse a positive power of two."""
    number = parse_integer(value)
    if number < 1 or number & (number - 1):
        raise ValueError("not a positive power of two")
    return number


_INTEGER: Schema = {"type": "integer"}

INTEGER = Kind("integer", "an integer", "a whole number", parse_integer, schema=_INTEGER)
NUMBER = Kind("number", "a number", "a finite number", parse_number, render_number, {"type": "number"})
PORT = Kind("port", "a port", "a number from 1 to 65535", parse_port, schema=_INTEGER)
POWER_OF_TWO = Kind(
    "integer",
    "a positive power of two",
    "a power of two such as 16, 32 or 64",
    parse_power_of_two,
    schema={"type": "integer", "enum": [1 << bit for bit in range(63)]},
)
Integer = Annotated[int, INTEGER]
Number = Annotated[float, NUMBER]
Port = Annotated[int, PORT]
PowerOfTwo = Annotated[int, POWER_OF_TWO]


# --- sizes and shares ---------------------------------------------------------------------------------------

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *(?:([kmgt]?|[kmgt]i)b?)", re.IGNORECASE | re.ASCII)
_SHARE = re.compile(r"(0?\.\d+)|(\d+(?:\.\d+)?) *%", re.ASCII)
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_LONGEST = 64
"""Characters of a number with a unit; ``Decimal`` cannot multiply one of a million digits."""


def parse_size(value: object) -> int:
    """Parse a number of bytes: ``1073741824``, ``512MiB`` or ``8Gi`` (1024s), ``4GB`` or ``4G`` (1000s)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) and len(value) <= _LONGEST else None
    if match is None or ("." in match[1] and not match[2]):
        raise ValueError("not a size")
    unit = match[2].lower()
    factor = _BINARY.get(unit) or _DECIMAL[unit]
    return parse_integer(int(Decimal(match[1]) * factor))


def parse_memory(value: object) -> int | float:
    """Parse a size above 0, or a share of all memory: ``0.9`` or ``90%``."""
    if isinstance(value, float) or (isinstance(value, str) and _SHARE.fullmatch(value.strip())):
        return _parse_share(value)
    size = parse_size(value)
    if size < 1:
        raise ValueError("not above 0")
    return size


def parse_megabytes(value: object) -> int:
    """Parse a size in whole MiB, the unit of a plain number."""
    if isinstance(value, int) or (isinstance(value, str) and value.isascii() and value.strip().isdigit()):
        return parse_integer(value)
    size = parse_size(value)
    if size % 2**20:
        raise ValueError("not a whole number of MiB")
    return size >> 20


def _parse_share(value: object) -> float:
    match = _SHARE.fullmatch(value.strip()) if isinstance(value, str) else None
    share = parse_number(value) if match is None else float(match[1] or float(match[2]) / 100)
    if not 0 < share <= 1:
        raise ValueError("not a share")
    return share


def format_size(size: int) -> str:
    """Write a number of bytes exactly, with the largest binary unit that divides it."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def format_memory(value: float) -> str:
    """Write a size or a share."""
    return repr(value) if isinstance(value, float) else format_size(value)


def readable_size(size: float) -> str:
    """Write a number of bytes rounded to four digits, such as 1.5GiB."""
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size /= 1024
        unit += 1
    return f"{size:.4g}{_UNITS[unit]}"


SIZE = Kind(
    "size",
    "a size",
    "a number of bytes with an optional unit, such as 512MiB, 8GiB, 4GB or 1073741824",
    parse_size,
    format_size,
)
MEMORY = Kind(
    "size or share",
    "a size or a share of the memory",
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
Size = Annotated[int, SIZE]
Memory = Annotated[int | float, MEMORY]
Megabytes = Annotated[int, MEGABYTES]


# --- durations ----------------------------------------------------------------------------------------------

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?) *(ms|s|m|h|d)", re.ASCII)
_TIME = "a number with an optional unit, such as 30, 30s, 500ms, 2m or 1h, up to 36500d"
_LONGEST_SECONDS = 36_500 * 86_400
"""A hundred years, which clocks and system calls can count."""


def parse_duration(value: object, unit: str = "s") -> float:
    """Parse a duration into a number of ``unit``: a plain number, or one followed by ms, s, m, h or d.

    Raises:
        ValueError: it is no duration, or longer than a hundred years.
    """
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    number = parse_number(value if match is None else match[1])
    if match is not None:
        number = number * _SECONDS[match[2]] / _SECONDS[unit]
    if abs(number) * _SECONDS[unit] > _LONGEST_SECONDS:
        raise ValueError("longer than a hundred years")
    return number


def _whole_duration(unit: str) -> Callable[[object], int]:
    def parse(value: object) -> int:
        number = parse_duration(value, unit)
        if number != int(number):
            raise ValueError("not a whole number")
        return int(number)

    return parse


SECONDS = Kind("duration", "a duration", _TIME, parse_duration, render_number)
WHOLE_SECONDS = Kind("duration", "a duration in whole seconds", _TIME, _whole_duration("s"))
MILLISECONDS = Kind(
    "duration",
    "a duration in whole milliseconds",
    "a number of milliseconds, or one with a unit, such as 500, 500ms or 2s, up to 36500d",
    _whole_duration("ms"),
)
Seconds = Annotated[float, SECONDS]
WholeSeconds = Annotated[int, WHOLE_SECONDS]
Milliseconds = Annotated[int, MILLISECONDS]


# --- lists --------------------------------------------------------------------------------------------------


def _items(value: object) -> list[Any]:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    if isinstance(value, Iterable):
        return list(value)
    raise ValueError("not a list")


def _join(values: Iterable[object]) -> str:
    return ",".join(str(value) for value in values)


def parse_list(value: object) -> tuple[str, ...]:
    """Parse a comma list; empty items are left out."""
    texts = tuple(parse_text(item) for item in _items(value))
    if any("," in text or not text.strip() for text in texts):
        raise ValueError("an item of a comma list is empty or contains a comma")
    return texts


NO_TENANT_NAME = "(none)"
"""What views call the tenant of blocks without one."""


def parse_shares(value: object) -> tuple[tuple[str, float], ...]:
    """Parse ``name=0.5,other=10%``; a name must not repeat, nor stand for blocks without a tenant."""
    pairs = [item if isinstance(item, tuple) else str(item).rpartition("=")[::2] for item in _items(value)]
    shares = {parse_text(name).strip(): _parse_share(share) for name, share in pairs}
    if "" in shares or len(shares) != len(pairs):
        raise ValueError("a name is empty or repeated")
    if NO_TENANT_NAME in shares:
        raise ValueError(f"{NO_TENANT_NAME} stands for blocks without a tenant, which have no quota")
    return tuple(shares.items())


def _render_shares(value: Iterable[tuple[str, float]]) -> str:
    return _join(f"{name}={render_number(share)}" for name, share in value)


def _parse_ports(value: object) -> tuple[int, ...]:
    return tuple(parse_port(item) for item in _items(value))


def parse_integers(value: object) -> tuple[int, ...]:
    """Parse integers separated by commas, with or without brackets around them."""
    bracketed = re.fullmatch(r"\[(.*)\]", value.strip()) if isinstance(value, str) else None
    return tuple(parse_integer(item) for item in _items(bracketed[1] if bracketed else value))


LIST = Kind("list", "a comma list", "items separated by commas, such as a,b", parse_list, _join)
SHARES = Kind(
    "shares",
    "a comma list of NAME=SHARE",
    f"names and shares above 0 and up to 1, such as search=0.5,batch=10%; {NO_TENANT_NAME} is no tenant's name",
    parse_shares,
    _render_shares,
)
PORTS = Kind(
    "ports",
    "a comma list of ports",
    "numbers from 1 to 65535 separated by commas, such as 8202,8203",
    _parse_ports,
    _join,
)
INTEGERS = Kind(
    "integers",
    "a list of integers",
    "numbers in brackets, such as [80,90]",
    parse_integers,
    lambda value: f"[{_join(value)}]",
)
TextList = Annotated[tuple[str, ...], LIST]
Shares = Annotated[tuple[tuple[str, float], ...], SHARES]
Ports = Annotated[tuple[int, ...], PORTS]
Integers = Annotated[tuple[int, ...], INTEGERS]


# --- secrets ------------------------------------------------------------------------------------------------


def _mask(_: object) -> str:
    return MASK


def parse_secret(value: object) -> SecretStr:
    """Wrap a text that must not be shown."""
    return value if isinstance(value, SecretStr) else SecretStr(parse_text(value))


def parse_secrets(value: object) -> tuple[SecretStr, ...]:
    """Parse a comma list whose items must not be shown."""
    plain = [item.get_secret_value() if isinstance(item, SecretStr) else item for item in _items(value)]
    return tuple(SecretStr(item) for item in parse_list(plain))


SECRET = Kind("secret", "a text", "any text", parse_secret, _mask, secret=True)
SECRETS = Kind("secrets", "a comma list", "keys separated by commas", parse_secrets, _mask, secret=True)
Secret = Annotated[SecretStr, SECRET]
Secrets = Annotated[tuple[SecretStr, ...], SECRETS]
