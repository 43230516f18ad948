"""Commands about prefixes and quotas of a running service, and what each did in words."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import typer

from fdcache.service.client.control import Control, Prefix
from fdcache.service.wire.control_views import MoveView, PinView, PrefetchView
from fdcache.settings.kinds import printable, readable_size
from fdcache_cli import errors, output
from fdcache_cli.app import confirm
from fdcache_cli.service_view import connect, seconds, show_live, table

_POLL_SECONDS = 0.1
_LARGEST_PROMPT = 64 << 20

View = TypeVar("View", PrefetchView, MoveView)


def read_tokens(path: Path) -> list[int]:
    """Return the token ids in a file. Raises ``typer.BadParameter``."""
    words = _words(path, "--tokens", "token id")
    wrong = next((word for word in words if not re.fullmatch(r"\d{1,10}", word, re.ASCII)), None)
    if wrong is not None:
        raise typer.BadParameter(f"{path}: {wrong[:40]!r} is not a token id", param_hint="--tokens")
    return [int(word) for word in words]


def _read_hashes(path: Path) -> list[str]:
    words = [word.strip("\"'").lower() for word in _words(path, "--hashes", "hash")]
    wrong = next((word for word in words if not re.fullmatch(r"[0-9a-f]{64}", word)), None)
    if wrong is not None:
        raise typer.BadParameter(f"{path}: {wrong[:70]!r} is not a hash", param_hint="--hashes")
    return words


def _words(path: Path, option: str, kind: str) -> list[str]:
    """Return the words of a file, with spaces or single commas between them, in brackets or not."""
    text = _text(path, option)
    words = re.split(r"\s*,\s*|\s+", text.removeprefix("[").removesuffix("]").strip())
    if text.startswith("[") != text.endswith("]"):
        wrong = ": a list without its beginning or its end; it was cut"
    elif words == [""]:
        wrong = f" has no {kind}"
    elif "" in words:
        last = words.index("") - 1
        place = f"after the comma behind {words[last][:40]!r}" if last >= 0 else "before the first comma"
        wrong = f": no {kind} {place}"
    else:
        return words
    raise typer.BadParameter(f"{path}{wrong}", param_hint=option)


def _text(path: Path, option: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_PROMPT + 1)
        text = content.decode().strip()
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint=option) from error
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{path} is no text: {error.reason}", param_hint=option) from error
    if len(content) > _LARGEST_PROMPT:
        wrong = f"{path} has more than {readable_size(_LARGEST_PROMPT)}, which is no prompt"
        raise typer.BadParameter(wrong, param_hint=option)
    return text


def prefix_of(
    tokens: Path | None,
    hashes: Path | None,
    namespace: str | None,
    tenant: str | None,
    adapter: str | None,
    lookahead: int | None,
) -> Prefix:
    """Return the prefix that options name. Raises ``typer.BadParameter`` unless they have one of two files."""
    from fdcache.service.wire.address import load_settings

    if (tokens is None) == (hashes is None):
        raise typer.BadParameter("give --tokens or --hashes, one of the two", param_hint="--tokens")
    ahead = load_settings({"FDCACHE_LOOKAHEAD_TOKENS": lookahead}).cache.lookahead_tokens
    if tokens is None:
        assert hashes is not None
        return Prefix(hashes=_read_hashes(hashes), namespace=namespace)
    return Prefix(
        tokens=read_tokens(tokens), namespace=namespace, tenant=tenant, adapter=adapter, lookahead=ahead
    )


def _show(answer: msgspec.Struct, words: str, json: bool) -> None:
    if json:
        output.print_json(msgspec.to_builtins(answer))
    else:
        output.print_line(printable(words))


def pin(server: str | None, prefix: Prefix, time_left: float, most_blocks: int | None, *, json: bool) -> None:
    """Pin what the host tier has of a prefix, and say how many blocks that is."""
    with connect(server) as client:
        found = Control(client).pin(prefix, time_left, most_blocks)
    if found.pin is None:
        words = f"nothing was pinned: {found.host} of {found.blocks} blocks are in the host tier"
    else:
        words = f"pin {found.pin}: {found.pinned} of {found.blocks} blocks for {seconds(found.seconds)}"
    if found.over_budget:
        words += f"; {found.over_budget} more are there, but as many as may be are pinned"
    _show(found, words, json)


def unpin(server: str | None, pin: int | Prefix, *, json: bool) -> None:
    """End pins; exit with 1 if there is none."""
    with connect(server) as client:
        found = Control(client).unpin(pin)
    if found.pins:
        words = f"ended {found.pins} {'pin' if found.pins == 1 else 'pins'} of {found.blocks} blocks"
    else:
        words = "no such pin is in force; fdcache inspect pins lists them"
    _show(found, words, json)
    if not found.pins:
        raise typer.Exit(errors.FAILED)


def show_pins(server: str | None, *, json: bool, watch: bool) -> None:
    """Show the pins in force."""
    with connect(server) as client:

        def show() -> None:
            pins = Control(client).pins()
            if json:
                output.print_json(msgspec.to_builtins(pins))
            else:
                output.print_table(*table(pins, PinView))

        show_live(show, watch)


def prefetch(server: str | None, prefix: Prefix, source: str | None, wait: float, *, json: bool) -> None:
    """Read a prefix from storage; exit with 1 if that is still under way, or a source did not give it."""
    with connect(server) as client:
        found = _await(lambda: Control(client).prefetch(prefix, source), wait)
    words = f"{found.host} of {found.blocks} blocks are in the host tier"
    if found.refused is not None:
        words += f"; {found.refused}"
    _show(found, words if found.done else f"{words}; reading", json)
    if not found.done or found.refused is not None:
        raise typer.Exit(errors.FAILED)


def move(server: str | None, prefix: Prefix, wait: float, *, json: bool) -> None:
    """Move a prefix to storage; exit with 1 if that is still under way."""
    with connect(server) as client:
        found = _await(lambda: Control(client).move(prefix), wait)
    words = f"{found.stored} of {found.blocks} blocks are stored, {found.freed} left the host tier"
    if found.kept:
        words += f", {found.kept} stay there: they are in use, or others continue them"
    _show(found, words if found.done else f"{words}; {found.waiting} are still to be written", json)
    if not found.done:
        raise typer.Exit(errors.FAILED)


def _await(ask: Callable[[], View], wait: float) -> View:
    deadline = time.monotonic() + wait
    while not (found := ask()).done and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return found


def delete(server: str | None, prefix: Prefix, start: int, *, dry_run: bool, yes: bool, json: bool) -> None:
    """Delete blocks of a prefix."""
    with connect(server) as client:
        control = Control(client)
        if not dry_run and not yes:
            planned = control.delete(prefix, start, dry_run=True)
            confirm(
                "Delete them, and all that continue them?",
                [f"{planned.deleted_host} blocks in the host tier, {planned.deleted_storage} in storage"],
            )
        found = control.delete(prefix, start, dry_run=dry_run)
    verb = "would delete" if dry_run else "deleted"
    words = f"{verb} {found.deleted_host} blocks of the host tier and {found.deleted_storage} of storage"
    _show(found, words, json)


def set_quota(server: str | None, tenant: str, share: float, *, json: bool) -> None:
    """Set a tenant's share, and say what it was before."""
    with connect(server) as client:
        found = Control(client).set_quota(tenant, share)
    _show(found, f"{found.tenant}: {found.share:g} of each namespace, {found.before:g} before", json)
