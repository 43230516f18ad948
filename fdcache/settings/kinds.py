"""The kinds of values a variable can have: how text becomes a value, and how a value is written as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, PlainSerializer, SecretStr
from pydantic_core import CoreSchema, core_schema

from fdcache.settings import parsing
from fdcache.settings.parsing import MASK

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
    parsing.parse_flag,
    lambda value: str(int(value)),
    {"type": "string", "enum": ["0", "1", "true", "false", "yes", "no", "on", "off"]},
)
INTEGER = Kind("integer", "an integer", "a whole number", parsing.parse_integer, schema=_INTEGER)
NUMBER = Kind(
    "number", "a number", "a finite number", parsing.parse_number, parsing.render_number, {"type": "number"}
)
TEXT = Kind("text", "a text", "any text", parsing.parse_text)
PATH = Kind("path", "a path", "a folder or file such as /var/lib/fdcache", parsing.parse_path)
HOME_PATH = Kind("path", "a path", "a folder such as ~/.config/fastdeploy", parsing.parse_home_path)
PATH_OR_NONE = Kind("path", "a path", "a folder or file, or none", parsing.parse_path_or_none)
URL = Kind("address", "an address", "an address such as http://collector:4317", parsing.parse_url)
SIZE = Kind(
    "size",
    "a size",
    "a number of bytes with an optional unit, such as 512MiB, 8GiB, 4GB or 1073741824",
    parsing.parse_size,
    parsing.format_size,
)
MEMORY = Kind(
    "size or share",
    "a size or a share of the memory there is",
    "a size such as 40GiB, or a share such as 0.9 or 90%",
    parsing.parse_memory,
    parsing.format_memory,
)
MEGABYTES = Kind(
    "size",
    "a size in whole MiB",
    "a number of MiB, or one with a unit, such as 8, 8MiB or 1GiB",
    parsing.parse_megabytes,
)
SECONDS = Kind("duration", "a duration", _TIME, parsing.parse_duration, parsing.render_number)
WHOLE_SECONDS = Kind("duration", "a duration in whole seconds", _TIME, parsing.whole(parsing.parse_duration))
MILLISECONDS = Kind(
    "duration",
    "a duration in whole milliseconds",
    "a number of milliseconds, or one with a unit, such as 500, 500ms or 2s",
    parsing.whole(lambda value: parsing.parse_duration(value, "ms")),
)
LIST = Kind(
    "list", "a comma list", "items with commas between them, such as a,b", parsing.parse_list, parsing.join
)
SHARES = Kind(
    "shares",
    "a comma list of NAME=SHARE",
    "names and shares above 0 and up to 1, such as search=0.5,batch=10%",
    parsing.parse_shares,
    parsing.render_shares,
)
PORT = Kind("port", "a port", "a number from 1 to 65535", parsing.parse_port, schema=_INTEGER)
PORTS = Kind(
    "ports",
    "a comma list of ports",
    "numbers from 1 to 65535 with commas between them, such as 8202,8203",
    lambda value: tuple(parsing.parse_port(item) for item in parsing.items(value)),
    parsing.join,
)
INTEGERS = Kind(
    "integers",
    "a list of integers",
    "numbers in brackets, such as [80,90]",
    parsing.parse_integers,
    lambda value: f"[{parsing.join(value)}]",
)
POWER_OF_TWO = Kind(
    "integer",
    "a positive power of two",
    "a power of two such as 16, 32 or 64",
    parsing.parse_power_of_two,
    schema={"type": "integer", "enum": [1 << bit for bit in range(63)]},
)
SECRET = Kind("secret", "a text", "any text", parsing.parse_secret, lambda value: MASK, secret=True)
SECRETS = Kind(
    "secrets",
    "a comma list",
    "keys with commas between them",
    parsing.parse_secrets,
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
Url = Annotated[str, URL, PlainSerializer(parsing.mask_url, when_used="json")]
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
