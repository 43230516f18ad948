"""One variable: a pydantic field that carries its whole description.

    class CacheSettings(Group):
        device_blocks: Integer = variable("FDCACHE_DEVICE_BLOCKS", 1024, "Blocks of the device tier.", gt=0)

Validation, `fdcache env`, templates, docs and ``fdcache.envs`` are derived from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, TypedDict, Union, Unpack, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from fdcache.settings.kinds import MASK, Kind

_KEY = "variable"


class TakesEffect(StrEnum):
    """When a changed value takes effect: at the next start, or while the process runs."""

    START = "start"
    LIVE = "live"


class Actor(StrEnum):
    """The program that acts on a variable."""

    FDCACHE = "fdcache"
    ENGINE = "engine"


class Component(StrEnum):
    """A part of fdcache on which a variable has an effect."""

    EVERYWHERE = "every command"
    MANAGER = "manager"
    CONTROLLER = "controller"
    STORAGE = "storage"
    SERVE = "serve"
    REPLAY = "replay"
    FASTDEPLOY = "FastDeploy adapter"
    VLLM = "vLLM connector"
    SGLANG = "SGLang storage"
    PADDLE = "Paddle engine"
    INIT = "init"
    COMMANDS = "inspect, reset"
    ENVS = "fdcache.envs"


class EngineChoice(StrEnum):
    """Known values of a variable that only the engine uses, in any letter case.

    The engine may know more of them, so that any other value is accepted unchanged.
    """

    @classmethod
    def _missing_(cls, value: object) -> EngineChoice | None:
        if not isinstance(value, str):
            return None
        known = next((each for each in cls if each.value.casefold() == value.casefold()), None)
        return known or cls._unknown(value)

    @classmethod
    def _unknown(cls, value: str) -> EngineChoice:
        member = str.__new__(cls, value)
        member._name_ = member._value_ = value
        return member


class OldType(StrEnum):
    """Type of a variable's value in the old environment module."""

    TEXT = "str"
    INT = "int"
    BOOL = "bool"
    FLOAT = "float"
    LIST = "list"


class Group(BaseModel):
    """Settings of one concern. Frozen; an unknown field is an error; no message repeats a rejected value.

    ``used_in`` is the default for the variables of the group.
    """

    used_in: ClassVar[tuple[Component, ...]] = ()

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            kind, _ = _kind_of(type(self).model_fields[name or ""])
            yield name, kind.mask(value) if isinstance(value, str) else value


class Facts(TypedDict, total=False):
    """Optional parts of a variable's description."""

    unit: str
    used_in: tuple[Component, ...]
    """Components of fdcache that use it, in place of the group's."""
    checked_against: str
    """The variable with which it may conflict."""
    acts: str
    """What it does in fdcache, where the meaning says what it does in the engine."""
    live: bool
    """A changed value takes effect while the process runs."""
    since: str
    alias: str
    """A deprecated name."""
    old: OldType
    """Type in the old environment module; not set if that module has no such variable."""
    old_default: Any
    """Default in that module, unless it is the default in the old type."""
    old_flag: tuple[str, str]
    """False and true as that module spelt them, for a flag of type text."""
    undeclared: bool
    """The engine reads it and its environment module does not describe it."""


def variable(
    name: str,
    default: Any,
    meaning: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    **facts: Unpack[Facts],
) -> Any:
    """Describe one variable, as the field of a group.

    ``default`` is validated like any other value; ``meaning`` is a sentence for people; ``ge``, ``gt`` and ``le`` are
    the bounds.
    """
    extra: dict[str, Any] = {_KEY: {"name": name, **facts}}
    return Field(default=default, description=meaning, ge=ge, gt=gt, le=le, json_schema_extra=extra)


def constant(
    value: Any, meaning: str, *, ge: float | None = None, gt: float | None = None, le: float | None = None
) -> Any:
    """Describe a number that no source sets, as the field of a group: only the constructor's argument changes it."""
    return Field(default=value, description=meaning, ge=ge, gt=gt, le=le)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """Description of one variable, read from its field. ``Facts`` explains the optional parts."""

    name: str
    group: str
    field: str
    model: type[Group]
    kind: Kind
    choices: tuple[str, ...]
    default: Any
    meaning: str
    minimum: float | None
    above: float | None
    maximum: float | None
    used_in: tuple[Component, ...]
    unit: str | None = None
    checked_against: str | None = None
    acts: str | None = None
    live: bool = False
    since: str = "0.1.0"
    alias: str | None = None
    old: OldType | None = None
    old_default: Any = ...
    old_flag: tuple[str, str] = ("0", "1")
    undeclared: bool = False

    @property
    def aliases(self) -> tuple[str, ...]:
        """Deprecated names."""
        return (self.alias,) if self.alias else ()

    @property
    def takes_effect(self) -> TakesEffect:
        """When a changed value takes effect."""
        return TakesEffect.LIVE if self.live else TakesEffect.START

    @property
    def used_by(self) -> Actor:
        """Fdcache, or the engine alone."""
        return Actor.FDCACHE if self.used_in else Actor.ENGINE

    @property
    def effect(self) -> str:
        """Its effect in fdcache, in words."""
        if self.used_in:
            return f"used: {', '.join(self.used_in)}"
        if self.checked_against:
            return f"checked against {self.checked_against}"
        return "passed on"

    @property
    def secret(self) -> bool:
        """True if the value must never be shown."""
        return self.kind.secret

    @property
    def type(self) -> str:
        """Name of its type."""
        return self.kind.name

    @property
    def range(self) -> str:
        """The accepted range in words; empty if unlimited."""
        if self.minimum is not None and self.maximum is not None:
            return f"from {self._bound(self.minimum)} to {self._bound(self.maximum)}"
        low = f"at least {self._bound(self.minimum)}" if self.minimum is not None else ""
        low = low or (f"above {self._bound(self.above)}" if self.above is not None else "")
        high = f"at most {self._bound(self.maximum)}" if self.maximum is not None else ""
        return ", ".join(part for part in (low, high) if part)

    @property
    def expects(self) -> str:
        """The values accepted, in words that complete "is not"."""
        if self.choices:
            return f"one of {', '.join(self.choices)}" if len(self.choices) > 1 else self.choices[0]
        separator = " " if self.range.startswith("from") else ", "
        return separator.join(part for part in (self.kind.expects, self.range) if part)

    def parse(self, value: object) -> Any:
        """Validate one value as its group would.

        Raises:
            pydantic.ValidationError: the variable does not accept the value.
        """
        return getattr(self.model.model_validate({self.field: value}), self.field)

    def knows(self, value: Any) -> bool:
        """Return False for an accepted choice that is not among the known ones."""
        return not isinstance(value, EngineChoice) or value.value in self.choices

    def exceeds(self, value: object) -> str | None:
        """Return the bound that a value violates, in words; None if it violates none or is of another kind."""
        try:
            number = self.kind.parse(value)
        except ValueError:
            return self._below(value)
        if self.minimum is not None and number < self.minimum:
            return f"below {self._bound(self.minimum)}"
        if self.above is not None and number <= self.above:
            return f"not above {self._bound(self.above)}"
        if self.maximum is not None and number > self.maximum:
            return f"above {self._bound(self.maximum)}"
        return None

    def _below(self, value: object) -> str | None:
        """Return the lower bound that a text violates whose kind parses it but for its minus sign."""
        if not isinstance(value, str) or not re.match(r"-[\d.]", value):
            return None
        try:
            self.kind.parse(value[1:])
        except ValueError:
            return None
        if self.minimum is not None:
            return f"below {self._bound(self.minimum)}"
        return None if self.above is None else f"not above {self._bound(self.above)}"

    def _bound(self, number: float) -> str:
        return self.kind.render(int(number) if number == int(number) else number)

    def accepts(self, value: object) -> bool:
        """Return True if the value is valid."""
        try:
            self.parse(value)
        except ValidationError:
            return False
        return True

    def render(self, value: Any) -> str | None:
        """Write a value as text, a secret masked; None if nothing is set."""
        if value is None or (self.secret and not value):
            return None
        if isinstance(value, Enum):
            return str(value.value)
        return self.kind.mask(self.kind.render(value))

    def to_json(self, value: Any) -> Any:
        """Return a value as JSON has it, a secret masked."""
        if value is None or (self.secret and not value):
            return [] if self.secret and value is not None else None
        if self.secret:
            return MASK
        if isinstance(value, tuple):
            return list(value)
        return value if isinstance(value, int | float) else self.render(value)

    def show(self, text: object) -> str:
        """Quote a given value for a message: on one line, a secret masked."""
        if self.secret:
            return MASK
        shown = self.kind.mask(str(text))
        return repr(shown if len(shown) <= 80 else shown[:77] + "...")


CHOICE = Kind("choice", "one of its choices", "one of its choices", str)


def describe(group: str, model: type[Group]) -> Iterator[Variable]:
    """Yield the variables of one group in the order of its fields."""
    for field, info in model.model_fields.items():
        extra = info.json_schema_extra
        if not isinstance(extra, dict) or _KEY not in extra:
            continue
        facts: dict[str, Any] = {"used_in": model.used_in, **extra[_KEY]}  # type: ignore[dict-item]
        kind, choices = _kind_of(info)
        limits = {type(item).__name__: item for item in info.metadata}
        yield Variable(
            group=group,
            field=field,
            model=model,
            kind=kind,
            choices=choices,
            default=info.default,
            meaning=info.description or "",
            minimum=getattr(limits.get("Ge"), "ge", None),
            above=getattr(limits.get("Gt"), "gt", None),
            maximum=getattr(limits.get("Le"), "le", None),
            **facts,
        )


def _kind_of(info: FieldInfo) -> tuple[Kind, tuple[str, ...]]:
    kinds = [item for item in info.metadata if isinstance(item, Kind)]
    if kinds:
        return kinds[0], ()
    members = get_args(info.annotation) if get_origin(info.annotation) in (Union, UnionType) else ()
    inner = next((member for member in members if member is not NoneType), info.annotation)
    if get_origin(inner) is Annotated:
        return next(item for item in get_args(inner) if isinstance(item, Kind)), ()
    if isinstance(inner, type) and issubclass(inner, Enum):
        return CHOICE, tuple(str(member.value) for member in inner)
    raise TypeError(f"the annotation {info.annotation} has no kind; use one of fdcache.settings.kinds")
