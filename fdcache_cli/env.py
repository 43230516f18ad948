"""``fdcache env``: show, check and convert the settings."""

from __future__ import annotations

import dataclasses
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fdcache_cli import errors, output
from fdcache_cli.app import Command, ServerCommand, new_group
from fdcache_cli.errors import print_problems

if TYPE_CHECKING:
    from fdcache.settings import LoadResult, Settings

COMMANDS = (
    Command(
        "show",
        __name__,
        "show",
        "Show the settings in effect, here or in a service, and where they come from.",
        ServerCommand,
    ),
    Command("check", __name__, "check", "Check every setting, and what it names; list all problems at once."),
    Command(
        "diff",
        __name__,
        "diff",
        "Compare two dotenv files, or one or a running service with the environment.",
        ServerCommand,
    ),
    Command("template", __name__, "template", "Write a file with every setting and its meaning."),
    Command(
        "migrate",
        __name__,
        "migrate",
        "Rewrite deprecated names in a dotenv file, and drop settings that are gone.",
    ),
)

app = new_group(COMMANDS, help="Show, check and convert the settings.")


Json = Annotated[bool, typer.Option("--json", help="Write JSON.")]


class Format(StrEnum):
    """Formats of ``template``."""

    DOTENV = "dotenv"
    COMPOSE = "compose"
    HELM = "helm"
    MARKDOWN = "markdown"
    JSON_SCHEMA = "json-schema"


def show(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Describe these settings in full.")
    ] = None,
    *,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="Show the settings of this running service. Default address: FDCACHE_SERVER, else the default socket.",
        ),
    ] = None,
    group: Annotated[str | None, typer.Option(help="Only one group, such as cache.")] = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only settings that differ from their default.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Every setting, including the engine's.")] = False,
    used: Annotated[bool, typer.Option("--used", help="Only settings with an effect in fdcache.")] = False,
    json: Json = False,
    show_secrets: Annotated[
        bool, typer.Option("--show-secrets", help="Unmask secrets; on a terminal only.")
    ] = False,
) -> None:
    """Show the settings in effect, here or in a running service, and where they come from.

    The table omits settings without an effect in fdcache that are at their default; --all and --json show them.
    Options of `fdcache serve` change settings in the service alone; if one runs here, the differences are listed.

    Example: `fdcache env show FDCACHE_HOST_MEMORY` lists every place where it was set, and which one wins.
    """
    if show_secrets and server is not None:
        raise typer.BadParameter(
            "a service reveals no secrets; leave --server out", param_hint="--show-secrets"
        )
    if show_secrets and not output.on_terminal():
        raise typer.BadParameter("secrets are shown on a terminal only")
    from fdcache_cli.env_show import Choice, show_environment, show_service

    choice = Choice(tuple(names or ()), group, changed, used, everything or json)
    if server is not None:
        show_service(server, choice, json=json)
    else:
        show_environment(choice, json=json, show_secrets=show_secrets)


def check(
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as errors.")] = False,
    json: Json = False,
) -> None:
    """Check every setting, and the directories, addresses and memory that they name; exit 78 if there is an error.

    It starts nothing, so that it can run as an init container.

    Example: `FDCACHE_ENV_FILE=fdcache.env fdcache env check --strict`
    """
    from fdcache.service.server.preflight import check_environment
    from fdcache.settings import Severity, read_settings
    from fdcache.settings.problems import strictly

    found = read_settings()
    checked = check_environment(found.settings)
    problems = [*found.problems, *(each for each in checked if found.rejected.isdisjoint(each.variables))]
    if strict:
        problems = [strictly(problem) for problem in problems]
    failed = any(problem.severity is Severity.ERROR for problem in problems)
    if json:
        records = [{**dataclasses.asdict(problem), "source": problem.source} for problem in problems]
        output.print_json({"ok": not failed, "problems": records, "fingerprint": found.settings.fingerprint})
    else:
        print_problems(problems, sys.stdout)
        if not failed:
            output.print_line(f"the configuration is valid; fingerprint {found.settings.fingerprint}")
    if failed:
        raise typer.Exit(errors.BAD_CONFIGURATION)


def diff(
    first: Annotated[
        Path | None, typer.Argument(metavar="A", help="A dotenv file.", exists=True, dir_okay=False)
    ] = None,
    second: Annotated[
        Path | None,
        typer.Argument(metavar="B", help="Another. Default: the environment.", exists=True, dir_okay=False),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="Compare this running service with the environment. Default address: FDCACHE_SERVER, else the "
            "default socket.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Compare two dotenv files, or a file or a running service with the environment; exit 1 if any setting differs.

    Example: `fdcache env diff prod.env test.env`
    """
    from fdcache.settings import VARIABLES, read_settings

    if server is not None:
        if first is not None:
            raise typer.BadParameter(
                "a service is compared with the environment; give no files", param_hint="--server"
            )
        _diff_with_service(server, json)
        return
    if first is None:
        raise typer.BadParameter("give a file, or --server")
    left = _readable(_read_file(first))
    right = _readable(read_settings() if second is None else _read_file(second))
    comparable = [name for name, variable in VARIABLES.items() if variable.group != "files"]
    differing = [name for name in comparable if left.value(name) != right.value(name)]
    if json:
        pairs = [(VARIABLES[name], left.value(name), right.value(name)) for name in differing]
        differences = [{"name": v.name, "a": v.to_json(a), "b": v.to_json(b)} for v, a, b in pairs]
        output.print_json({"differences": differences})
    elif differing:
        header = ("NAME", str(first), str(second) if second else "environment")
        rows = [(name, left.render(name) or "-", right.render(name) or "-") for name in differing]
        output.print_table(header, rows)
    if differing:
        raise typer.Exit(errors.FAILED)


def _diff_with_service(server: str, json: bool) -> None:
    from fdcache.settings import VARIABLES, read_settings
    from fdcache.settings.effective import effective_values
    from fdcache_cli.env_show import given_by, written
    from fdcache_cli.running_service import ask_service
    from fdcache_cli.service_view import connect

    mine = effective_values(_readable(read_settings()))
    with connect(server) as client:
        theirs = ask_service(client).settings
    differing = [
        variable
        for name, variable in VARIABLES.items()
        if variable.group != "files" and not variable.secret and name in theirs
        if theirs[name].text != mine[name].text
    ]
    pairs = [(variable, theirs[variable.name], mine[variable.name]) for variable in differing]
    if json:
        records = [
            {"name": v.name, "a": a.value, "b": b.value, "a_source": a.source, "b_source": b.source}
            for v, a, b in pairs
        ]
        output.print_json({"differences": records})
    elif pairs:
        header = ("NAME", "service", "GIVEN BY", "environment", "GIVEN BY")
        rows = [(v.name, written(a), given_by(v, a), written(b), given_by(v, b)) for v, a, b in pairs]
        output.print_table(header, rows)
    if pairs:
        raise typer.Exit(errors.FAILED)


def template(
    template_format: Annotated[Format, typer.Option("--format", help="Format of the file.")] = Format.DOTENV,
    output_file: Annotated[Path | None, typer.Option("--output", help="Write to this file.")] = None,
    check_only: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if --output differs.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that differs.")] = False,
) -> None:
    """Write a file with every setting and its meaning, to start from; or the reference page.

    Example: `fdcache env template --output fdcache.env`
    """
    from fdcache.settings.templates import FORMATS

    if check_only and output_file is None:
        raise typer.BadParameter("--check needs --output FILE to compare")
    text = FORMATS[template_format]()
    if output_file is None:
        sys.stdout.write(text)
    elif not check_only:
        if not force and output_file.is_file() and _read(output_file) != text:
            errors.fail(
                f"{output_file} exists and differs; name another file, or overwrite it with --force",
                errors.FAILED,
            )
        _write(output_file, text)
    elif not output_file.is_file() or _read(output_file) != text:
        errors.fail(
            f"{output_file} differs from what `fdcache env template --format {template_format}` writes",
            errors.FAILED,
        )


def migrate(
    file: Annotated[Path, typer.Argument(help="A dotenv file.", exists=True, dir_okay=False)],
    write: Annotated[bool, typer.Option("--write", help="Change the file.")] = False,
) -> None:
    """Show how deprecated names in a dotenv file are replaced, and which settings are gone; with --write, change it."""
    from fdcache.settings import VARIABLES
    from fdcache.settings.checks import REMOVED
    from fdcache.settings.sources import FILE_SUFFIX, rename

    old_names = {alias: name for name, variable in VARIABLES.items() for alias in variable.aliases}
    old_names |= {f"{alias}{FILE_SUFFIX}": f"{name}{FILE_SUFFIX}" for alias, name in old_names.items()}
    gone = {name: remedy.removeprefix("unset it; ") for name, remedy in REMOVED.items()}
    gone |= {f"{name}{FILE_SUFFIX}": remedy for name, remedy in gone.items()}
    text, changes = rename(_read(file), old_names | dict.fromkeys(gone))
    if not changes:
        output.print_line(f"{file} has no deprecated names, and no settings that are gone")
        return
    for change in changes:
        if change.new is None:
            then = f"dropped, the setting is gone; {gone[change.old]}"
        else:
            then = f"dropped, {change.new} is set too" if change.dropped else f"becomes {change.new}"
        output.print_line(f"{file}:{change.line}: {change.old} {then}")
    if write:
        _write(file, text)
    else:
        output.print_line("the file is unchanged; --write changes it")


def _read_file(file: Path) -> LoadResult:
    """Load the settings of a dotenv file alone; its problems name the file instead of FDCACHE_ENV_FILE."""
    from fdcache.settings import read_settings

    found = read_settings(environ={}, arguments={"FDCACHE_ENV_FILE": file})
    problems = [
        dataclasses.replace(each, variables=(str(file),), right=each.right.replace(", or unset it", ""))
        if each.variables == ("FDCACHE_ENV_FILE",)
        else each
        for each in found.problems
    ]
    return dataclasses.replace(found, problems=tuple(problems))


def _readable(found: LoadResult) -> Settings:
    """Return settings to compare, even if nothing could start with them. Raises ``SettingsError`` for bad values."""
    from fdcache.settings import SettingsError

    if found.value_errors:
        raise SettingsError(found.value_errors)
    return found.settings


def _read(file: Path) -> str:
    from fdcache.settings.sources import read_text

    try:
        return read_text(file)
    except (OSError, ValueError) as reason:
        errors.fail(f"{file} cannot be read: {reason}", errors.FAILED)


def _write(file: Path, text: str) -> None:
    from fdcache.machine.files import write_text

    try:
        write_text(file, text)
    except OSError as reason:
        errors.fail(f"{file} cannot be written: {reason.strerror}", errors.FAILED)
