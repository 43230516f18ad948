"""``fdcache env show``: the settings in effect and where they come from."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import typer

from fdcache.settings import VARIABLES, Settings, Source, Variable, read_settings
from fdcache.settings.checks import suggest
from fdcache.settings.effective import EffectiveValue, GivenValue, effective_values
from fdcache.settings.tree import GROUPS
from fdcache_cli import errors, output
from fdcache_cli.running_service import RunningService, ask_service, find_service


@dataclass(frozen=True, slots=True)
class Choice:
    """Which settings are shown, and whether in full."""

    names: tuple[str, ...]
    """Those to describe in full; empty for a table."""
    group: str | None
    changed: bool
    used: bool
    everything: bool


def show_service(server: str, choice: Choice, *, json: bool) -> None:
    """Show the settings of a running service."""
    from fdcache_cli.service_view import connect

    with connect(server) as client:
        service = ask_service(client)
    chosen = choose(service.settings, choice)
    _print(SettingsReport(service.settings), chosen, _record(service), detailed=bool(choice.names), json=json)


def show_environment(choice: Choice, *, json: bool, show_secrets: bool) -> None:
    """Show the settings in effect here, and those that the options of a running service override."""
    found = read_settings()
    settings = effective_values(found.settings, found.rejected)
    chosen = choose(settings, choice)
    running = find_service(found.settings)
    overrides = running.overrides(settings) if running else {}
    report = SettingsReport(
        reveal(settings, found.settings) if show_secrets else settings, _override_notes(running, overrides)
    )
    record = None
    if running is not None:
        record = {**_record(running), "overrides": [_override(*each) for each in overrides.items()]}
    _print(report, chosen, record, detailed=bool(choice.names), json=json)
    if running and not (choice.names or json):
        sys.stderr.write(f"note: {service_note(running, overrides)}\n")
    errors.print_problems(found.errors, sys.stderr)
    if found.errors:
        raise typer.Exit(errors.BAD_CONFIGURATION)


def service_note(service: RunningService, overrides: Mapping[str, EffectiveValue]) -> str:
    """Return a line about the service that runs here, and the settings that its options changed."""
    options = ", ".join(
        f"{name}={written(state)} ({state.origins[0].place.split()[0]})" for name, state in overrides.items()
    )
    differs = f"its options set {options}" if overrides else "its options change no setting"
    return (
        f"the service at {service.address} (process {service.pid}) runs here; {differs}; "
        f"`fdcache env show --server {service.address}` shows its settings"
    )


def _override_notes(
    service: RunningService | None, overrides: Mapping[str, EffectiveValue]
) -> Mapping[str, Mapping[str, str]]:
    if service is None:
        return {}
    where = f"in the service at {service.address} (process {service.pid})"
    return {
        name: {"overridden": f"{written(state)} {where}, by {state.origins[0].place}"}
        for name, state in overrides.items()
    }


def _record(service: RunningService) -> dict[str, Any]:
    return {
        "address": service.address,
        "version": service.version,
        "pid": service.pid,
        "fingerprint": service.fingerprint,
    }


def _override(name: str, state: EffectiveValue) -> dict[str, Any]:
    return {"name": name, "value": state.value, "place": state.origins[0].place}


def _print(
    report: SettingsReport,
    chosen: Sequence[Variable],
    service: dict[str, Any] | None,
    *,
    detailed: bool,
    json: bool,
) -> None:
    if json:
        output.print_json({"settings": [report.record(each) for each in chosen], "service": service})
    elif detailed:
        for variable in chosen:
            output.print_line("\n".join(report.details(variable)) + "\n")
    else:
        output.print_table(SettingsReport.HEADER, [report.row(each) for each in chosen])


def choose(settings: Mapping[str, EffectiveValue], choice: Choice) -> list[Variable]:
    """Select variables of ``settings``; raise ``BadParameter`` for an unknown name or group."""
    renamed = {alias: variable.name for variable in VARIABLES.values() for alias in variable.aliases}
    names = [renamed.get(name, name) for name in choice.names]
    for name in names:
        if name not in VARIABLES:
            raise typer.BadParameter(f"there is no setting {name}{_hint(name, VARIABLES)}")
    group = choice.group
    if group is not None and group not in GROUPS:
        raise typer.BadParameter(f"there is no group {group}{_hint(group, GROUPS)}: {', '.join(GROUPS)}")
    chosen = [VARIABLES[name] for name in names or VARIABLES if name in settings]
    if not (names or group or choice.changed or choice.used or choice.everything):
        return [v for v in chosen if v.used_in or settings[v.name].changed]
    return [
        variable
        for variable in chosen
        if (group is None or variable.group == group)
        and (not choice.changed or settings[variable.name].changed)
        and (not choice.used or variable.used_in)
    ]


def _hint(name: str, known: Any) -> str:
    meant = suggest(name, known)
    return f"; did you mean {meant}?" if meant else ""


def reveal(states: Mapping[str, EffectiveValue], settings: Settings) -> dict[str, EffectiveValue]:
    """Return ``states`` with the secrets of ``settings`` unmasked."""
    return {
        name: replace(state, text=_clear(settings.value(name)))
        if VARIABLES[name].secret and state.text
        else state
        for name, state in states.items()
    }


def _clear(value: Any) -> str:
    keys = value if isinstance(value, tuple) else (value,)
    return ",".join(key.get_secret_value() for key in keys)


class SettingsReport:
    """Settings as table rows, JSON records and details; ``notes`` adds labelled lines to the details of a name."""

    HEADER: ClassVar = ("NAME", "VALUE", "SOURCE", "DEFAULT", "CHANGED")

    def __init__(
        self, settings: Mapping[str, EffectiveValue], notes: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        self._settings = settings
        self._notes = notes or {}

    def row(self, variable: Variable) -> tuple[str, ...]:
        """Return the cells under ``HEADER``."""
        state = self._settings[variable.name]
        default = variable.render(variable.default)
        changed = "yes" if state.changed else "no"
        return (variable.name, written(state), given_by(variable, state), _or_dash(default), changed)

    def record(self, variable: Variable) -> dict[str, Any]:
        """Return a setting for JSON."""
        state = self._settings[variable.name]
        winner = state.origins[0] if state.origins else None
        return {
            "name": variable.name,
            "value": state.value,
            "source": state.source.value,
            "default": variable.to_json(variable.default),
            "type": variable.type,
            "group": variable.group,
            "description": variable.meaning,
            "unit": variable.unit,
            "range": variable.range or None,
            "choices": list(variable.choices) or None,
            "changed": state.changed,
            "valid": state.valid,
            "secret": variable.secret,
            "used_by": variable.used_by.value,
            "used_in": list(variable.used_in),
            "checked_against": variable.checked_against,
            "since": variable.since,
            "takes_effect": variable.takes_effect.value,
            "given_as": winner.name if winner else None,
            "place": winner.place if winner else None,
            "deprecated_names": list(variable.aliases),
        }

    def details(self, variable: Variable) -> Iterator[str]:
        """Yield the lines that describe a setting, with every candidate for its value."""
        state = self._settings[variable.name]
        default = _or_dash(variable.render(variable.default))
        yield variable.name
        yield f"  {variable.meaning}"
        facts = {
            "value": written(state),
            **self._notes.get(variable.name, {}),
            "default": default,
            "type": variable.type,
            "unit": variable.unit,
            "range": variable.range,
            "choices": ", ".join(variable.choices),
            "secret": "yes" if variable.secret else "",
            "group": variable.group,
            "effect": variable.effect,
            "in fdcache": variable.acts or "",
            "since": variable.since,
            "takes effect": variable.takes_effect.value,
            "old names": ", ".join(variable.aliases),
        }
        yield from (f"  {fact + ':':14}{text}" for fact, text in facts.items() if text)
        yield "  candidates, first wins:"
        for origin in state.origins:
            yield f"    {origin.source.value:13}{_described(origin)}"
        yield f"    {'default':13}{default}"


def given_by(variable: Variable, state: EffectiveValue) -> str:
    """Return the source of a value: an option, or the kind of source."""
    if not state.origins:
        return Source.DEFAULT.value
    winner = state.origins[0]
    if winner.source is Source.ARGUMENT:
        return winner.place
    return winner.source.value if winner.name == variable.name else f"{winner.source.value} ({winner.name})"


def _described(origin: GivenValue) -> str:
    if origin.source is Source.ARGUMENT:
        return f"{origin.text} by {origin.place}"
    if origin.source is Source.DERIVED:
        return f"{origin.text} as {origin.place}"
    return f"{origin.text} as {origin.name} in {origin.place}"


def written(state: EffectiveValue) -> str:
    """Return a value as a cell of a table."""
    return _or_dash(state.text) if state.valid else "(not valid)"


def _or_dash(text: str | None) -> str:
    return "-" if text is None else text or "''"
