"""Forget the blocks of a running service."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import typer

from fdcache.service.client.connection import Client
from fdcache.service.wire.client_views import ClientView
from fdcache.service.wire.views import InFlightView, ResetView
from fdcache.settings.kinds import printable, readable_size
from fdcache_cli import errors, output
from fdcache_cli.app import confirm
from fdcache_cli.service_view import ask, connect

_POLL_SECONDS = 0.1


def reset_service(
    server: str | None,
    *,
    tier: str,
    namespace: str | None,
    tenant: str | None,
    older_than: float | None,
    dry_run: bool,
    yes: bool,
    wait: float | None,
    acknowledge: float,
    json: bool,
) -> None:
    """Forget the chosen blocks; exit with 1 if loads were in flight, or an engine has not reset its device tier."""
    with connect(server) as client:
        arguments: dict[str, Any] = {
            "tier": tier,
            "namespace": namespace,
            "tenant": None if tenant is None else _key(tenant),
            "tenant_name": tenant,
            "older_than": older_than,
        }
        if not dry_run and not yes:
            planned, _ = ask(client, ResetView, "reset", dry_run=True, **arguments)
            confirm("Forget them?", _report(planned, ()))
        result, answer = _reset(client, wait, {"dry_run": dry_run, **arguments})
        late: list[str] = []
        if not dry_run:
            late = _await_devices(client, result, acknowledge)
    refused = bool(result.in_flight) and not dry_run
    if json:
        output.print_json({**answer, "device_not_acknowledged": late})
    elif refused:
        _print_refusal(result.in_flight, wait)
    else:
        for line in _report(result, late):
            output.print_line(printable(line))
    if late or refused:
        raise typer.Exit(errors.FAILED)


def _key(tenant: str) -> str:
    from fdcache.hashing import tenant_key

    return tenant_key(tenant).hex()


def _reset(client: Client, wait: float | None, arguments: dict[str, Any]) -> tuple[ResetView, Any]:
    """Reset; with ``wait``, drain the loads in flight first."""
    if wait is None:
        return ask(client, ResetView, "reset", in_flight="refuse", **arguments)
    deadline = time.monotonic() + wait
    while True:
        result, answer = ask(client, ResetView, "reset", in_flight="drain", **arguments)
        if not result.in_flight or arguments["dry_run"] or time.monotonic() > deadline:
            return result, answer
        time.sleep(_POLL_SECONDS)


def _await_devices(client: Client, result: ResetView, wait: float) -> list[str]:
    """Wait until engines have reset their device tiers. Return the names of those that have not."""
    waiting = {each.session for each in result.device}
    deadline = time.monotonic() + wait
    while waiting:
        clients, _ = ask(client, list[ClientView], "clients")
        late = [
            each.name
            for each in clients
            if each.session in waiting and each.device_resets_applied < each.device_resets
        ]
        if not late or time.monotonic() > deadline:
            return late
        time.sleep(_POLL_SECONDS)
    return []


def _print_refusal(in_flight: Iterable[InFlightView], wait: float | None) -> None:
    for each in in_flight:
        sys.stderr.write(
            f"error: {printable(each.client)} (process {each.pid}) is loading from {each.pinned_runs} runs of "
            f"{each.namespace}\n"
        )
    remedy = "wait longer" if wait is not None else "let these loads end with --wait 30s"
    sys.stderr.write(f"error: nothing was reset; {remedy}, or pause these engines\n")


def _report(result: ResetView, late: Iterable[str]) -> Iterator[str]:
    verb = "would forget" if result.dry_run else "forgot"
    for loading in result.in_flight:
        yield f"in flight: {loading.client} is loading from {loading.pinned_runs} runs"
    for host in result.host:
        used = f"; {host.in_use} in use stay with their users until these end" if host.in_use else ""
        yield f"host {host.namespace}: {verb} {host.blocks} blocks, {readable_size(host.bytes)}{used}"
    for stored in result.storage:
        blocks = (
            "all blocks"
            if stored.blocks is None
            else f"{stored.blocks} blocks, {readable_size(stored.bytes or 0)}"
        )
        yield f"storage {stored.namespace}: {verb} {blocks}"
    for device in result.device:
        state = "would be reset" if result.dry_run else "not reset yet" if device.client in late else "reset"
        yield f"device of {device.client}: {device.blocks} blocks, {state}"
    if not result.host and not result.storage and not result.device:
        yield "there was nothing to reset"
