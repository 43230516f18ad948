"""``fdcache env show``: the settings in force in this environment, or in a running service."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import typer

from fdcache.settings import Variable, read_settings
from fdcache.settings.effective import EffectiveValue, effective_values
from fdcache_cli import errors, output
from fdcache_cli.env_report import Report, choose, reveal, written
from fdcache_cli.running_service import RunningService, ask_service, find_service


def show(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Tell all of these.")] = None,
    *,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="Show what is in force in this running service; without an address the one of FDCACHE_SERVER, else "
            "of the default socket.",
        ),
    ] = None,
    group: Annotated[str | None, typer.Option(help="Only one group, such as cache.")] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what differs from its default.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Every setting, the engine's too.")] = False,
    used: Annotated[bool, typer.Option("--used", help="Only what has an effect in fdcache.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    show_secrets: Annotated[bool, typer.Option("--show-secrets", help="Unmask, on a terminal.")] = False,
) -> None:
    """Show the settings in force, here or in a running service, and where they come from.

    The table leaves out what has no effect in fdcache and is at its default unless --all asks for it; JSON has all.
    Options of `fdcache serve` override settings in the service alone: where one runs, it is said what they changed.
    """
    if show_secrets and server is not None:
        raise typer.BadParameter(
            "a service tells no secrets; leave --server out", param_hint="--show-secrets"
        )
    if show_secrets and not output.on_terminal():
        raise typer.BadParameter("secrets are shown on a terminal only")

    pick = partial(
        choose, names=names or [], group=group, changed=changed, used=used, everything=everything or json
    )
    if server is not None:
        from fdcache_cli.service_view import connect

        with connect(server) as client:
            service = ask_service(client)
        _print(
            Report(service.settings), pick(service.settings), _record(service), stories=bool(names), json=json
        )
        return
    found = read_settings()
    settings = effective_values(found.settings, found.rejected)
    chosen = pick(settings)
    running = find_service(found.settings)
    overrides = running.overrides(settings) if running else {}
    report = Report(
        reveal(settings, found.settings) if show_secrets else settings, _in_service(running, overrides)
    )
    told = None
    if running is not None:
        told = {**_record(running), "overrides": [_override(*each) for each in overrides.items()]}
    _print(report, chosen, told, stories=bool(names), json=json)
    if running and not (names or json):
        sys.stderr.write(f"note: {tell(running, overrides)}\n")
    errors.print_problems(found.errors, sys.stderr)
    if found.errors:
        raise typer.Exit(errors.BAD_CONFIGURATION)


def tell(service: RunningService, overrides: Mapping[str, EffectiveValue]) -> str:
    """Say in a line which service runs here, and what its options made other than in this environment."""
    options = ", ".join(
        f"{name}={written(state)} ({state.origins[0].place.split()[0]})" for name, state in overrides.items()
    )
    differs = f"its options set {options}" if overrides else "its options change nothing of this"
    return (
        f"the service at {service.address} (process {service.pid}) runs here; {differs}; "
        f"`fdcache env show --server {service.address}` shows its settings"
    )


def _in_service(
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
    report: Report, chosen: Sequence[Variable], service: dict[str, Any] | None, *, stories: bool, json: bool
) -> None:
    if json:
        output.print_json({"settings": [report.record(each) for each in chosen], "service": service})
    elif stories:
        for variable in chosen:
            output.print_line("\n".join(report.story(variable)) + "\n")
    else:
        output.print_table(Report.HEADER, [report.row(each) for each in chosen])
