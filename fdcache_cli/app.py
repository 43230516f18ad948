"""How every Typer application of the command line is set up."""

from typing import Any

import typer


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
