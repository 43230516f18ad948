"""The entry point: one table of commands, each loaded when it is called."""

import importlib
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from fdcache_cli import errors


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: ``attribute`` of ``module`` is an annotated function or a ``typer.Typer``."""

    name: str
    module: str
    attribute: str
    help: str

    def load(self) -> Any:
        """Import the module and build the command."""
        target = getattr(importlib.import_module(self.module), self.attribute)
        if not isinstance(target, typer.Typer):
            function, target = target, new_app()
            target.command(self.name, help=function.__doc__ or self.help)(function)
        return get_command(target)


COMMANDS = (
    Command("env", "fdcache_cli.env", "app", "Show, check and convert the settings."),
    Command("replay", "fdcache_cli.replay", "replay", "Replay a workload through the real cache and report."),
)


class LazyGroup(TyperGroup):
    """A group that prints its help from the table and imports a command only to run it."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Give the names of the table, in its order."""
        return [command.name for command in COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Load the command, or give None where there is none of that name."""
        return next((command.load() for command in COMMANDS if command.name == cmd_name), None)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the table's one-line helps."""
        with formatter.section("Commands"):
            formatter.write_dl([(command.name, command.help) for command in COMMANDS])


def new_app(**options: Any) -> typer.Typer:
    """Make a Typer application as every command module wants it: plain help, no traceback of its own."""
    return typer.Typer(
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        **options,
    )


app = new_app(cls=LazyGroup, help="fdcache: the KV-cache layer of an LLM serving engine.")


def _print_version(wanted: bool) -> None:
    if wanted:
        from fdcache import __version__

        sys.stdout.write(f"fdcache {__version__}\n")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def run() -> None:
    """Run the command line; the exit status is 0, 1 (failed), 2 (wrong usage) or 78 (bad configuration)."""
    errors.guard(app)
