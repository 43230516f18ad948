"""Table of the commands."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

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
    Command("pin", "fdcache_cli.control", "pin", "Keep the blocks of a prefix in the host tier."),
    Command("unpin", "fdcache_cli.control", "unpin", "End a pin."),
    Command("prefetch", "fdcache_cli.control", "prefetch", "Read a prefix from storage to the host tier."),
    Command("move", "fdcache_cli.control", "move", "Move a prefix from the host tier to storage."),
    Command("delete", "fdcache_cli.control", "delete", "Delete the blocks of a prefix."),
    Command("quota", "fdcache_cli.control", "quota", "Set the quota of a tenant."),
)

app = new_group(
    COMMANDS,
    help="fdcache: the KV-cache layer of an LLM serving engine. Start with `fdcache init --check`. "
    "`fdcache --version` prints the version.",
    completion=True,
)


def find_command(arguments: Sequence[str]) -> Callable[[], object]:
    """Import the command that ``arguments`` name, and return a function that runs it."""
    # A command runs without its groups: Typer would load pydantic to read their options.
    chosen = next((command for command in COMMANDS if arguments[:1] == [command.name]), None)
    if chosen is None:
        return partial(app, arguments, prog_name="fdcache")
    command: Any = chosen.load()
    name, rest = f"fdcache {chosen.name}", arguments[1:]
    inner = command.get_command(None, rest[0]) if rest and hasattr(command, "get_command") else None
    if inner is not None:
        command, name, rest = inner, f"{name} {rest[0]}", rest[1:]
    return partial(command, rest, prog_name=name)
