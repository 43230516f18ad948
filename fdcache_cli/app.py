"""How the command line is put together: tables of commands, each loaded when it is called.

Typer builds a command's parameters with pydantic, so that even ``--help`` of a group would load it.
"""

import difflib
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: ``attribute`` of ``module`` is an annotated function or a ``typer.Typer``."""

    name: str
    module: str
    attribute: str
    help: str
    shape: type[TyperCommand] = TyperCommand

    def load(self) -> Any:
        """Import the module and build the command."""
        target = getattr(importlib.import_module(self.module), self.attribute)
        if not isinstance(target, typer.Typer):
            function, target = target, new_app()
            target.command(self.name, cls=self.shape, help=function.__doc__ or self.help)(function)
        return get_command(target)


class ServerCommand(TyperCommand):
    """A command that is about a service where ``--server`` stands; its address, which has a slash, may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put an empty address where none stands."""
        options = list(takewhile(lambda word: word != "--", args))
        return super().parse_args(ctx, [*_with_addresses(options), *args[len(options) :]])


def _with_addresses(words: Sequence[str]) -> Iterator[str]:
    for word, following in zip_longest(words, words[1:], fillvalue="-"):
        yield word
        if word == "--server" and following and (following.startswith("-") or "/" not in following):
            yield ""


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


def new_group(commands: Sequence[Command], help: str) -> typer.Typer:  # noqa: A002
    """Make a group that prints its help from a table and imports a command only to run it."""
    table = {command.name: command for command in commands}

    class LazyGroup(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return list(table)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return table[cmd_name].load() if cmd_name in table else None

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            if args and not args[0].startswith("-") and args[0] not in table:
                ctx.fail(_no_command(args[0], table))
            return super().resolve_command(ctx, args)

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            with formatter.section("Commands"):
                formatter.write_dl([(command.name, command.help) for command in commands])

    return new_app(cls=LazyGroup, help=help)


def _no_command(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.casefold(), list(names), n=1)
    remedy = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
    return f"there is no command {name!r}; {remedy}"


def refuse_options_of_group(context: typer.Context) -> None:
    """Refuse the options of a group that stand before one of its commands, which would ignore them.

    Raises ``BadParameter`` naming the option.
    """
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(
                f"options of {context.invoked_subcommand!r} come after it", param_hint=option
            )


def confirm(question: str, planned: Iterable[str]) -> None:
    """Show what is planned and ask on the terminal; both go to standard error, since the result may be JSON.

    Raises ``BadParameter`` where there is no terminal, and ``Abort`` on a no.
    """
    from fdcache.settings.kinds import printable  # which loads pydantic

    if not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal to ask on; give --yes")
    for line in planned:
        sys.stderr.write(f"{printable(line)}\n")
    typer.confirm(question, abort=True, err=True)
