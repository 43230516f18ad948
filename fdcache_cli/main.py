"""The entry point: the table of commands."""

import sys

from fdcache import __version__
from fdcache_cli import errors
from fdcache_cli.app import Command, new_group

COMMANDS = (
    Command("env", "fdcache_cli.env", "app", "Show, check and convert the settings."),
    Command("inspect", "fdcache_cli.inspect", "app", "Look into what fdcache keeps."),
    Command("replay", "fdcache_cli.replay", "replay", "Replay a workload through the real cache and report."),
    Command("reset", "fdcache_cli.reset", "app", "Remove what fdcache keeps."),
)

app = new_group(
    COMMANDS,
    help="fdcache: the KV-cache layer of an LLM serving engine. `fdcache --version` prints the version.",
)


@app.callback()
def main() -> None:
    """Hold the commands together."""


def run() -> None:
    """Run the command line; the exit status is 0, 1 (failed), 2 (wrong usage) or 78 (bad configuration)."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        sys.stdout.write(f"fdcache {__version__}\n")
        return
    # A command runs by itself, since Typer loads pydantic to read the options that stand before it.
    chosen = next((command for command in COMMANDS if arguments[:1] == [command.name]), None)
    if chosen is None:
        errors.guard(lambda: app(arguments, prog_name="fdcache"))
    else:
        errors.guard(lambda: chosen.load()(arguments[1:], prog_name=f"fdcache {chosen.name}"))
