"""``fdcache doctor``: check a machine, and name the remedy of every problem."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from fdcache_cli import errors, output
from fdcache_cli.options import Json

if TYPE_CHECKING:
    from fdcache.service.server.machine_findings import Finding
    from fdcache.settings import Problem, Settings


def doctor(json: Json = False) -> None:
    """Check this machine and the settings, and name the remedy of every problem; nothing is changed.

    It looks at GPUs, driver, CuPy and swap kernels, memory and the limit of pinned memory, NUMA nodes, huge pages,
    /dev/shm, folders and their permissions, addresses and ports, storage, calibrations and the engines installed.
    Exit 1 if something would keep a service or an engine from starting; hints only improve it.

    Example: `fdcache doctor --json` is for programs.
    """
    from fdcache.service.server.machine_findings import calibrations, examine, storage_speed
    from fdcache.settings import read_settings
    from fdcache_cli.engines import examine_engines

    read = read_settings()
    settings = read.settings
    findings = [*_settings(read.problems), *examine(settings)]
    if has_gpu(findings):
        findings += [*compile_kernels(keep=False).values(), *calibrations(settings)]
    findings += [*storage_speed(settings), *_transfer(settings), *examine_engines()]
    if json:
        output.print_json(
            {"ok": not any(each.problem for each in findings), "machine": list(map(asdict, findings))}
        )
    else:
        print_findings(findings)
        problems = sum(bool(each.problem) for each in findings)
        output.print_line(f"\n{problems or 'no'} problem{'' if problems == 1 else 's'}")
    if any(each.problem for each in findings):
        raise typer.Exit(errors.FAILED)


def print_findings(findings: Iterable[Finding]) -> None:
    """Print each finding on a line, its hint and its problem below it."""
    for each in findings:
        output.print_line(f"{each.name:<15} {each.found}")
        if each.hint:
            output.print_line(f"{'':<15} hint: {each.hint}")
        if each.problem:
            output.print_line(f"{'':<15} PROBLEM: {each.problem}")


def has_gpu(findings: Sequence[Finding]) -> bool:
    """Return True if a GPU is among the findings that this process can use."""
    return any(each.name == "GPU" and each.hint is None for each in findings)


def compile_kernels(*, keep: bool) -> dict[str, Finding]:
    """Compile the swap kernels and return the result by GPU; without ``keep`` leave nothing on disk."""
    from fdcache.devices.topology import visible_gpus
    from fdcache.service.server import machine_findings

    if not keep:
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
    return machine_findings.kernels(visible_gpus())


def _settings(problems: Iterable[Problem]) -> Iterator[Finding]:
    """Yield what is wrong with the settings. Errors are problems, the rest are hints."""
    from fdcache.service.server.machine_findings import Finding
    from fdcache.settings import Severity

    for problem in problems:
        is_error = problem.severity is Severity.ERROR
        names = ", ".join(problem.variables)
        text = str(problem)
        yield Finding("setting", names, text if is_error else None, None if is_error else text)


def _transfer(settings: Settings) -> Iterator[Finding]:
    """Yield the address at which this instance answers peers, if one is set."""
    from fdcache.errors import ConfigurationError
    from fdcache.service.server.machine_findings import Finding
    from fdcache.transfer.access import rank_address, require_key

    address, key = settings.peers.address, settings.peers.key
    if address is None:
        return
    wrong = []
    for check in (
        lambda: require_key(address, None if key is None else key.get_secret_value()),
        lambda: rank_address(address, 0),
    ):
        try:
            check()
        except ConfigurationError as error:
            wrong.append(str(error))
    text = "; ".join(wrong) or None
    is_used = settings.peers.is_on  # an engine refuses it then
    yield Finding("transfer", address, text if is_used else None, None if is_used else text)
