"""Typer applications from tables of commands, each command loaded when it is called.

Typer builds a command's parameters with pydantic, so that even ``--help`` of a group would load it.
"""

import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

_NEGATIVE = re.compile(r"-\.?\d\S*")


class _PlainRefusals:
    """What parses arguments, with refusals that begin with the value, and not with the name of pydantic's error."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; a negative number is one, and no option."""
        ctx.ignore_unknown_options = any(_NEGATIVE.fullmatch(word) for word in args)
        try:
            parsed: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise
        return parsed


class PlainCommand(_PlainRefusals, TyperCommand):
    """Command with plain refusals."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Ctrl-C at a question ends it as anywhere else; Typer takes it for a no."""
        try:
            return super().invoke(ctx)
        except typer.Abort as abort:
            if not isinstance(abort.__context__, KeyboardInterrupt):
                raise
            typer.echo(err=True)  # ends the line of the question
            raise KeyboardInterrupt from abort


@dataclass(frozen=True, slots=True)
class Command:
    """Subcommand: ``attribute`` of ``module`` is an annotated function or a ``typer.Typer``."""

    name: str
    module: str
    attribute: str
    help: str
    shape: type[PlainCommand] = PlainCommand

    def load(self) -> Any:
        """Import the module and build the command."""
        target = getattr(importlib.import_module(self.module), self.attribute)
        if not isinstance(target, typer.Typer):
            function, target = target, new_app()
            target.command(self.name, cls=self.shape, help=function.__doc__ or self.help)(function)
        return get_command(target)


class ServerCommand(PlainCommand):
    """Command whose option ``--server`` takes an optional address; an address is a word with a slash."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert an empty address after a ``--server`` without one."""
        options = list(takewhile(lambda word: word != "--", args))
        return super().parse_args(ctx, [*_with_addresses(options), *args[len(options) :]])


def _with_addresses(words: Sequence[str]) -> Iterator[str]:
    for word, following in zip_longest(words, words[1:], fillvalue="-"):
        yield word
        if word == "--server" and following and (following.startswith("-") or "/" not in following):
            yield ""


def new_app(*, completion: bool = False, **options: Any) -> typer.Typer:
    """Return a Typer application with plain help and no tracebacks of its own."""
    return typer.Typer(
        rich_markup_mode=None,
        add_completion=completion,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        **options,
    )


def new_group(
    commands: Sequence[Command],
    help: str,  # noqa: A002
    *,
    completion: bool = False,
) -> typer.Typer:
    """Return a group that prints its help from a table and imports a command only to run it.

    ``completion`` adds the options that install the completion of a shell.
    """
    table = {command.name: command for command in commands}

    class LazyGroup(_PlainRefusals, TyperGroup):
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

    app = new_app(cls=LazyGroup, help=help, completion=completion)

    @app.callback()
    def group() -> None:
        """Keep the application a group, whatever the number of its commands."""

    return app


def _no_command(name: str, names: Iterable[str]) -> str:
    import difflib

    if name == "help":
        return f"there is no command {name!r}; did you mean --help?"
    close = difflib.get_close_matches(name.casefold(), list(names), n=1)
    remedy = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
    return f"there is no command {name!r}; {remedy}"


def refuse_options_of_group(context: typer.Context) -> None:
    """Raise ``BadParameter`` for options of a group given before one of its commands, which would ignore them."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(
                f"give options of {context.invoked_subcommand!r} after it", param_hint=option
            )


def confirm(question: str, planned: Iterable[str]) -> None:
    """Print what is planned and ask on the terminal, both on standard error, since the result may be JSON.

    Raises ``BadParameter`` without a terminal, and ``Abort`` on a no.
    """
    from fdcache.settings.kinds import printable  # which loads pydantic

    if not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal to ask on; give --yes")
    for line in planned:
        sys.stderr.write(f"{printable(line)}\n")
    typer.confirm(question, abort=True, err=True)
