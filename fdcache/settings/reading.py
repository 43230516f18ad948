"""How pydantic-settings reads the layers: one source of its kind for each, which keeps what it met."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from fdcache.settings import names
from fdcache.settings.problems import Problem, error, warning
from fdcache.settings.sources import (
    ENV_FILE,
    SECRETS_DIRECTORY,
    Candidate,
    Layer,
    Source,
    candidates,
    dotenv_layer,
    environment_layer,
    explicit_layer,
    secrets_layer,
)
from fdcache.settings.tree import GROUPS, KNOWN_NAMES, VARIABLES
from fdcache.settings.variable import Variable


class Values(dict[str, Any]):
    """Values by group. It does not show them: pydantic-settings logs what its sources give when it debugs."""

    def __repr__(self) -> str:
        return f"values of {', '.join(self) or 'no group'}"


class LayerSource(PydanticBaseSettingsSource):
    """Gives the values of one layer by group and field.

    A wrong value becomes a problem and the default stands in for it, so that every problem is found at once.
    """

    def __init__(self, settings_cls: type[BaseSettings], layer: Layer) -> None:
        super().__init__(settings_cls)
        self.__name__ = layer.source.value
        self.layer = layer
        self.candidates: dict[str, tuple[Candidate, ...]] = {}
        self.problems: list[Problem] = []
        self.rejected: set[str] = set()

    def __call__(self) -> dict[str, Any]:
        """Give the values of every group that has some."""
        groups = self.settings_cls.model_fields.items()
        given = [self.get_field_value(field, name) for name, field in groups]
        return Values({name: values for values, name, _ in given if values})

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[dict[str, Any], str, bool]:
        """Give the values of one group by field."""
        return dict(self._values(field_name)), field_name, False

    def _values(self, group: str) -> Iterator[tuple[str, Any]]:
        if group == "files" and self.layer.source not in (Source.ARGUMENT, Source.ENVIRONMENT):
            return  # where further files stand is not said in those files
        stronger = self.current_state.get(group, {})
        for variable in GROUPS[group]:
            found = tuple(candidates(variable, [self.layer], self.problems))
            self.candidates[variable.name] = found
            if found and variable.field not in stronger:
                yield variable.field, self._check(variable, found[0])

    def _check(self, variable: Variable, candidate: Candidate) -> Any:
        try:
            value = variable.parse(candidate.value)
        except ValidationError:
            self.rejected.add(variable.name)
            self.problems.append(rejection(variable, candidate))
            return variable.default
        if not variable.knows(value):
            self.problems.append(rejection(variable, candidate))
        return value


class FileSource(LayerSource):
    """A layer in files that a variable of the stronger sources names."""

    def __init__(
        self,
        settings_cls: type[BaseSettings],
        source: Source,
        named_by: str,
        read: Callable[[Path, list[Problem]], Layer],
    ) -> None:
        super().__init__(settings_cls, Layer(source, {}))
        self._named_by, self._read = VARIABLES[named_by], read

    def __call__(self) -> dict[str, Any]:
        """Open the layer, then give its values."""
        path = self.current_state.get(self._named_by.group, {}).get(self._named_by.field)
        if path is not None:
            self.layer = self._read(path, self.problems)
        return super().__call__()


def open_sources(
    settings_cls: type[BaseSettings],
    environ: Mapping[str, str] | None,
    arguments: Mapping[str, object],
    defaults: Mapping[str, object],
) -> tuple[LayerSource, ...]:
    """Give the sources in order of precedence, the strongest first."""
    return (
        LayerSource(settings_cls, explicit_layer(Source.ARGUMENT, arguments)),
        LayerSource(settings_cls, environment_layer(os.environ if environ is None else environ)),
        FileSource(settings_cls, Source.SECRETS, SECRETS_DIRECTORY, read_secrets),
        FileSource(settings_cls, Source.DOTENV, ENV_FILE, dotenv_layer),
        LayerSource(settings_cls, explicit_layer(Source.DEFAULT, defaults)),
    )


def read_secrets(directory: Path, problems: list[Problem]) -> Layer:
    """Read a folder whose files are named after variables."""
    return secrets_layer(directory, KNOWN_NAMES, problems)


def rejection(variable: Variable, candidate: Candidate) -> Problem:
    """Say why a value is wrong, without repeating it where it is a secret.

    The engine may know more choices for what it alone uses: an unknown one is a warning.
    """
    shown = "the value, which is not shown," if variable.secret else variable.show(candidate.value)
    wrong, right = f"{shown} is not {variable.kind.expects}", f"use {variable.kind.example}"
    if variable.choices:
        wrong = f"{shown} is not {variable.expects}"
        meant = names.suggest(str(candidate.value), variable.choices)
        right = f"did you mean {meant}?" if meant else f"use {variable.expects}"
    elif (bound := variable.exceeds(candidate.value)) is not None:
        wrong, right = f"{shown} is {bound}", f"use {variable.expects}"
    if names.is_link_address(candidate.value):
        right += "; it is a Kubernetes service link, which enableServiceLinks: false in the pod prevents"
    make = warning if variable.accepts(candidate.value) else error
    return make(candidate.name, candidate.place, wrong, right)
