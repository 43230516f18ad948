"""Table of the commands, and the page that begins with nothing else: it imports no framework."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

TYPE_CHECKING = False  # importing typing would double the time of `fdcache --help`
if TYPE_CHECKING:
    from typing import Any

COMMANDS = {
    "init": "Write the settings for this machine and your engine, and prepare and measure the machine.",
    "doctor": "Check this machine, and name the remedy of every problem.",
    "env": "Show, check and convert the settings.",
    "serve": "Serve one host tier to all engines of this node.",
    "inspect": "Look into a running service, or into files on disk.",
    "replay": "Replay a workload through the real cache and report.",
    "reset": "Drop cached blocks, of a running service or on disk.",
    "pin": "Keep the blocks of a prefix in the host tier.",
    "unpin": "End a pin.",
    "prefetch": "Read a prefix from storage to the host tier.",
    "move": "Move a prefix from the host tier to storage.",
    "delete": "Delete the blocks of a prefix.",
    "quota": "Set the quota of a tenant.",
}
_GROUPS = {"env", "inspect", "reset"}
_CONTROL = {"pin", "unpin", "prefetch", "move", "delete", "quota"}
"""Commands to a running service. The others are each a module of their name."""

ABOUT = "fdcache: the KV-cache layer of an LLM serving engine."
_COMPLETION = "_FDCACHE_COMPLETE"
"""Set by the shell while it completes a word."""


def find_command(arguments: Sequence[str]) -> Callable[[], object]:
    """Import the command that ``arguments`` name, and return a function that runs it."""
    if _COMPLETION not in os.environ:
        if not arguments:
            return _print_first_steps
        if list(arguments) in (["--help"], ["-h"]):
            return _print_help
    # A command runs without its groups: Typer would load pydantic to read their options.
    name = arguments[0] if arguments else ""
    if name not in COMMANDS:
        return partial(make_app(), arguments, prog_name="fdcache")
    command, words, rest = load_command(name), f"fdcache {name}", arguments[1:]
    inner = command.get_command(None, rest[0]) if rest and hasattr(command, "get_command") else None
    if inner is not None:
        command, words, rest = inner, f"{words} {rest[0]}", rest[1:]
    return partial(command, rest, prog_name=words)


def load_command(name: str) -> "Any":
    """Import a command of the table and build it."""
    return next(command for command in _commands() if command.name == name).load()


def make_app() -> "Any":
    """Return the whole command line, with the options that install the completion of a shell."""
    from fdcache_cli.app import new_group

    return new_group(_commands(), help=ABOUT, completion=True)


def _commands() -> "list[Any]":
    from fdcache_cli.app import Command

    return [
        Command(
            name,
            f"fdcache_cli.{'control' if name in _CONTROL else name}",
            "app" if name in _GROUPS else name,
            text,
        )
        for name, text in COMMANDS.items()
    ]


def _print_first_steps() -> None:
    """Say what to do next: first contact, or the commands of a machine that has its settings."""
    from fdcache import __version__

    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111
    named = os.environ.get("FDCACHE_ENV_FILE")
    file = named or f"{home}/fdcache/fdcache.env"
    steps = [
        ("fdcache replay --workload chat", "see it work: chat traffic through the real cache"),
        ("fdcache doctor", "check this machine; every problem has its remedy"),
        ("fdcache init", "write the settings for your engine, and see the line that starts it"),
    ]
    if os.path.exists(file):  # noqa: PTH110
        import shlex

        steps = [
            *(
                []
                if named
                else [(f"export FDCACHE_ENV_FILE={shlex.quote(file)}", "use the settings of `fdcache init`")]
            ),
            ("fdcache env show --changed", "the settings in effect"),
            ("fdcache init", "the line that starts your engine"),
            ("fdcache serve", "one host tier for all engines of this node"),
            ("fdcache inspect", "look into it while it runs"),
        ]
    width = max(len(command) for command, _ in steps)
    lines = [f"  {command:{width}}  {text}\n" for command, text in steps]
    sys.stdout.write(
        f"fdcache {__version__}: {ABOUT.partition(': ')[2]}\n\nNext:\n{''.join(lines)}\n"
        "All commands: fdcache --help\n"
    )


def _print_help() -> None:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}\n" for name, text in COMMANDS.items()]
    sys.stdout.write(
        f"Usage: fdcache [OPTIONS] COMMAND [ARGS]...\n\n  {ABOUT} Alone it says what to do next.\n\n"
        "Options:\n"
        "  --version             Print the version.\n"
        "  --install-completion  Install completion for the current shell.\n"
        "  --show-completion     Show completion for the current shell, to copy it or customize the\n"
        "                        installation.\n"
        "  -h, --help            Show this message and exit.\n\n"
        f"Commands:\n{''.join(lines)}"
    )
