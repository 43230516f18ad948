"""``fdcache init``: make a machine ready, and say what was found: memory, folders, disk, GPUs, their links."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fdcache_cli import errors, output

if TYPE_CHECKING:
    from fdcache.devices.calibration import Calibration
    from fdcache.service.server.machine_setup import Finding


def init(
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="UUID", help="Only this GPU; may be repeated. Default: all visible."),
    ] = None,
    *,
    check: Annotated[bool, typer.Option("--check", help="Only report; measure and change nothing.")] = False,
    clean_arenas: Annotated[
        bool, typer.Option("--clean-arenas", help="Remove what dead services left in the arena folder.")
    ] = False,
    env_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the annotated settings there, unless it is there already. "
            "Default: fdcache/fdcache.env in the user's configuration folder.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Measure again what was measured already.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the first GPU's measurements too (needs matplotlib)."),
    ] = None,
) -> None:
    """Look at the machine, make the folders that are missing and a file of settings, compile the swap kernels for
    each GPU, measure its link, and keep what was found.

    Exit 1 when something would make serving fail; each problem has its remedy.

    A calibration of another driver, topology or version is measured again. Copies on a GPU without one go by
    safe defaults.
    """
    if check and (force or clean_arenas or plot is not None or env_file is not None):
        raise typer.BadParameter(
            "it changes nothing; leave --force, --clean-arenas, --env-file and --plot out",
            param_hint="--check",
        )
    from fdcache.devices.topology import find_gpu, visible_gpus
    from fdcache.service.server import machine_setup
    from fdcache.service.wire.address import load_settings

    if plot is not None:
        from fdcache.devices.link_plot import require_plotting

        require_plotting(plot)
    settings = load_settings({})
    removed = machine_setup.clean_arenas(settings) if clean_arenas else []
    made = [] if check else machine_setup.make_folders(settings)
    findings = machine_setup.examine(settings) + made
    kernels = _kernels(keep=not check) if _has_gpu(findings) else {}
    findings += kernels.values()
    if check:
        findings += machine_setup.calibrations(settings) if _has_gpu(findings) else []
    else:
        findings.append(machine_setup.write_env_file(env_file or machine_setup.default_env_file(), findings))
    if not json:
        _show_machine(findings, removed)
    if device:
        gpus = [find_gpu(uuid) for uuid in device]
    else:
        gpus = visible_gpus() if plot is not None or _has_gpu(findings) else []
    usable = [gpu.uuid for gpu in gpus if gpu.uuid in kernels and not kernels[gpu.uuid].problem]
    calibrations = [] if check else [_calibrate(uuid, force=force, quiet=json) for uuid in usable]
    if json:
        import msgspec

        output.print_json(
            {
                "machine": [asdict(each) for each in findings],
                "removed_arenas": removed,
                "calibrations": [msgspec.to_builtins(each) for each in calibrations],
            }
        )
    else:
        for calibration in calibrations:
            _show(calibration)
    if plot is not None and calibrations:
        from fdcache.devices.link_plot import write_plot

        write_plot(calibrations[0], plot)
    if any(each.problem for each in findings):
        raise typer.Exit(errors.FAILED)


def _has_gpu(findings: Sequence[Finding]) -> bool:
    return any(each.name == "GPU" and each.hint is None for each in findings)


def _kernels(*, keep: bool) -> dict[str, Finding]:
    """Whether the swap kernels compile, by GPU; without ``keep`` nothing stays on disk of what is compiled."""
    from fdcache.devices.topology import visible_gpus
    from fdcache.service.server import machine_setup

    if not keep:
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
    return machine_setup.kernels(visible_gpus())


def _show_machine(findings: Sequence[Finding], removed: Sequence[str]) -> None:
    for text in removed:
        output.print_line(f"removed a dead arena: {text}")
    for each in findings:
        output.print_line(f"{each.name:<15} {each.found}")
        if each.hint:
            output.print_line(f"{'':<15} hint: {each.hint}")
        if each.problem:
            output.print_line(f"{'':<15} PROBLEM: {each.problem}")


def _calibrate(uuid: str, *, force: bool, quiet: bool) -> Calibration:
    from fdcache.devices.calibration import load_calibration, save_calibration
    from fdcache.devices.link_probe import LinkProbe
    from fdcache.devices.topology import find_gpu
    from fdcache.settings import Settings

    gpu = find_gpu(uuid)
    folder = Settings.load().transfer.calibration_dir
    kept = None if force else load_calibration(gpu, folder)
    if kept is not None:
        return kept

    def tell(step: str) -> None:
        if not quiet and output.on_terminal():
            output.print_line(f"{gpu.name}: {step}")

    calibration = LinkProbe(gpu, tell).measure()
    path = save_calibration(calibration, gpu, folder)
    if not quiet:
        output.print_line(f"{gpu.name}: measured, kept in {path}")
    return calibration


def _show(calibration: Calibration) -> None:
    links = {"host to device": calibration.link_to_device, "device to host": calibration.link_to_host}
    output.print_line(
        f"{calibration.gpu} ({calibration.topology}), measured {calibration.measured_at}: one large copy "
        f"{calibration.link_to_device:.1f} GB/s to the device, {calibration.link_to_host:.1f} to the host"
    )
    rows = [
        [
            each.direction,
            each.method,
            f"{each.piece_bytes // 1024} KiB",
            str(each.thread_blocks or "-"),
            f"{each.gb_per_s:.1f}",
            f"{each.gb_per_s / links[each.direction]:.3f}",
            "-" if each.slowdown is None else f"{100 * each.slowdown:+.1f}%",
        ]
        for each in calibration.measurements
    ]
    header = ("direction", "method", "pieces", "thread blocks", "GB/s", "of the link", "neighbour")
    output.print_table(header, rows)
    for way, limits in (("to the device", calibration.to_device), ("to the host", calibration.to_host)):
        output.print_line(
            f"{way}: planes from {_size(limits.direct_plane)} go straight, columns from "
            f"{_size(limits.staged_column)} through the ring, the rest by {calibration.kernel_ctas} thread blocks"
        )


def _size(nbytes: int) -> str:
    return f"{nbytes // 1024} KiB" if nbytes < 1 << 40 else "no size"
