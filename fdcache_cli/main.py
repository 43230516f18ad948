"""Entry point of the command line, and the table of its commands."""

import sys

from fdcache import __version__
from fdcache_cli import errors
from fdcache_cli.app import Command, new_group

COMMANDS = (
    Command(
        "init",
        "fdcache_cli.init",
        "init",
        "Check this machine, prepare it, and measure its GPU links.",
    ),
    Command("env", "fdcache_cli.env", "app", "Show, check and convert the settings."),
    Command("serve", "fdcache_cli.serve", "serve", "Serve one host tier to all engines of this node."),
    Command("inspect", "fdcache_cli.inspect", "app", "Look into a running service, or into files on disk."),
    Command(
        "replay",
        "fdcache_cli.replay",
        "replay",
        "Replay a workload through the real cache and report.",
    ),
    Command("reset", "fdcache_cli.reset", "app", "Drop cached blocks, of a running service or on disk."),
)

app = new_group(
    COMMANDS,
    help="fdcache: the KV-cache layer of an LLM serving engine. Start with `fdcache init --check`. "
    "`fdcache --version` prints the version.",
)


def run() -> None:
    """Run the command line. Exit status: 0, 1 (failed), 2 (wrong usage), 78 (bad configuration) or 130 (Ctrl-C)."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        sys.stdout.write(f"fdcache {__version__}\n")
        return
    # A command runs without its group: Typer would load pydantic to read the group's options.
    chosen = next((command for command in COMMANDS if arguments[:1] == [command.name]), None)
    if chosen is None:
        errors.guard(lambda: app(arguments, prog_name="fdcache"))
    else:
        errors.guard(lambda: chosen.load()(arguments[1:], prog_name=f"fdcache {chosen.name}"))


if __name__ == "__main__":
    run()
