"""``fdcache env``: show, check and convert the settings."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from fdcache_cli import errors, output
from fdcache_cli.app import Command, new_group

if TYPE_CHECKING:
    from fdcache.settings import Problem, Settings

COMMANDS = (
    Command("show", __name__, "show", "Show the settings in force and where they come from."),
    Command("check", __name__, "check", "Check every setting and list all problems at once."),
    Command("diff", __name__, "diff", "Compare two dotenv files, or one with the environment."),
    Command("template", __name__, "template", "Write every setting as a file to start from."),
    Command("migrate", __name__, "migrate", "Rewrite deprecated names in a dotenv file."),
)

app = new_group(COMMANDS, help="Show, check and convert the settings.")


@app.callback()
def env() -> None:
    """Hold the commands together."""


Json = Annotated[bool, typer.Option("--json", help="Write JSON.")]


class Format(StrEnum):
    """What ``template`` can write."""

    DOTENV = "dotenv"
    COMPOSE = "compose"
    HELM = "helm"
    MARKDOWN = "markdown"
    JSON_SCHEMA = "json-schema"


def show(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Tell all of these.")] = None,
    *,
    group: Annotated[str | None, typer.Option(help="Only one group, such as cache.")] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what differs from its default.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Every setting, the engine's too.")] = False,
    used: Annotated[bool, typer.Option("--used", help="Only what fdcache itself uses.")] = False,
    json: Json = False,
    show_secrets: Annotated[bool, typer.Option("--show-secrets", help="Unmask, on a terminal.")] = False,
) -> None:
    """Show the settings in force and where they come from.

    The table leaves out the engine's settings at their defaults unless --all asks for them; JSON has all.
    """
    from fdcache.settings import survey
    from fdcache_cli.env_report import Report, choose

    if show_secrets and not output.on_terminal():
        raise typer.BadParameter("secrets are shown on a terminal only")
    found = survey()
    report = Report(found, show_secrets)
    chosen = choose(
        found.settings, names or [], group=group, changed=changed, used=used, everything=everything or json
    )
    if json:
        output.print_json({"settings": [report.record(variable) for variable in chosen]})
    elif names:
        for variable in chosen:
            output.print_line("\n".join(report.story(variable)) + "\n")
    else:
        output.print_table(Report.HEADER, [report.row(variable) for variable in chosen])
    _print_problems(found.errors, sys.stderr)
    if found.errors:
        raise typer.Exit(errors.BAD_CONFIGURATION)


def check(
    strict: Annotated[bool, typer.Option("--strict", help="Take warnings for errors.")] = False,
    json: Json = False,
) -> None:
    """Check every setting and list all problems at once; exit 78 if there is an error.

    It starts nothing, so that it can run as an init container.
    """
    from fdcache.settings import survey
    from fdcache.settings.problems import as_error

    found = survey()
    problems = [as_error(problem) for problem in found.problems] if strict else found.problems
    failed = bool(problems if strict else found.errors)
    if json:
        told = [dataclasses.asdict(problem) for problem in problems]
        output.print_json({"ok": not failed, "problems": told, "fingerprint": found.settings.fingerprint})
    else:
        _print_problems(problems, sys.stdout)
        if not failed:
            output.print_line(f"the configuration is right; fingerprint {found.settings.fingerprint}")
    if failed:
        raise typer.Exit(errors.BAD_CONFIGURATION)


def diff(
    first: Annotated[
        Path | None, typer.Argument(metavar="A", help="A dotenv file.", exists=True, dir_okay=False)
    ] = None,
    second: Annotated[
        Path | None,
        typer.Argument(metavar="B", help="Another; else the environment.", exists=True, dir_okay=False),
    ] = None,
    server: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Compare the environment with this service instead.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare two dotenv files, or one or a running service with the environment; exit 1 if any setting differs."""
    from fdcache.settings import VARIABLES, Settings

    if (first is None) == (server is None):
        raise typer.BadParameter("give a file, or --server")
    if first is None:
        _diff_with_service(server, json)
        return
    left = _settings_of(first)
    right = _settings_of(second) if second else Settings.load()
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


def _diff_with_service(server: str | None, json: bool) -> None:
    from fdcache.settings import VARIABLES, Settings
    from fdcache_cli.service_view import connect

    with connect(server) as client:
        theirs = client.ask("config")["settings"]
    mine = Settings.load()
    compared = [
        name for name, variable in VARIABLES.items() if variable.group != "files" and not variable.secret
    ]
    rows = [
        (name, theirs.get(name) or "-", mine.render(name) or "-")
        for name in compared
        if theirs.get(name) != mine.render(name)
    ]
    if json:
        output.print_json({"differences": [{"name": name, "a": a, "b": b} for name, a, b in rows]})
    elif rows:
        output.print_table(("NAME", "service", "environment"), rows)
    if rows:
        raise typer.Exit(errors.FAILED)


def template(
    template_format: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.DOTENV,
    output_file: Annotated[Path | None, typer.Option("--output", help="Write this file.")] = None,
    check_only: Annotated[
        bool, typer.Option("--check", help="Only say whether --output is as it should be.")
    ] = False,
) -> None:
    """Write every setting as a file to start from, or as the reference page."""
    from fdcache.settings.templates import FORMATS

    if check_only and output_file is None:
        raise typer.BadParameter("--check needs --output FILE to look at")
    text = FORMATS[template_format]()
    if output_file is None:
        sys.stdout.write(text)
    elif not check_only:
        _write(output_file, text)
    elif not output_file.is_file() or _read(output_file) != text:
        errors.fail(
            f"{output_file} is not what `fdcache env template --format {template_format}` writes",
            errors.FAILED,
        )


def migrate(
    file: Annotated[Path, typer.Argument(help="A dotenv file.", exists=True, dir_okay=False)],
    write: Annotated[bool, typer.Option("--write", help="Change the file instead of showing how.")] = False,
) -> None:
    """Rewrite deprecated names in a dotenv file; shows the change first and writes only with --write."""
    from fdcache.settings import VARIABLES
    from fdcache.settings.dotenv import rename

    old_names = {alias: name for name, variable in VARIABLES.items() for alias in variable.aliases}
    old_names |= {f"{alias}_FILE": f"{name}_FILE" for alias, name in old_names.items()}
    text, changes = rename(_read(file), old_names)
    if not changes:
        output.print_line(f"{file} has no deprecated names")
        return
    for change in changes:
        then = f"dropped, {change.new} is set too" if change.dropped else f"becomes {change.new}"
        output.print_line(f"{file}:{change.line}: {change.old} {then}")
    if write:
        _write(file, text)
    else:
        output.print_line("nothing is written; --write does it")


def _settings_of(file: Path) -> Settings:
    from fdcache.settings import Settings

    return Settings.load(environ={}, arguments={"FDCACHE_ENV_FILE": file})


def _read(file: Path) -> str:
    from fdcache.settings.sources import read_text

    try:
        return read_text(file)
    except (OSError, ValueError) as reason:
        errors.fail(f"{file} cannot be read: {reason}", errors.FAILED)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as reason:
        errors.fail(f"{file} cannot be written: {reason}", errors.FAILED)


def _print_problems(problems: Iterable[Problem], stream: TextIO) -> None:
    for problem in problems:
        stream.write(f"{problem.severity}: {problem}\n")
