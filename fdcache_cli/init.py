"""``fdcache init``: check a machine, prepare it, and measure the links of its GPUs and its storage."""

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
        typer.Option(metavar="UUID", help="Measure only this GPU; may be repeated. Default: all visible."),
    ] = None,
    *,
    check: Annotated[bool, typer.Option("--check", help="Only report: measure and change nothing.")] = False,
    clean_arenas: Annotated[
        bool, typer.Option("--clean-arenas", help="Remove the arenas of stopped services.")
    ] = False,
    env_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the settings with their meaning to this file, unless it exists. "
            "Default: fdcache/fdcache.env in the user's configuration directory.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Measure again even if a calibration is saved.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plot the first GPU's measurements (needs matplotlib)."),
    ] = None,
) -> None:
    """Check this machine and prepare it: create missing directories and a settings file, compile the swap kernels for
    each GPU, measure its link and the folder of local storage, and save the calibrations.

    Exit 1 if something would keep a service from starting; every problem names its remedy.

    A calibration of another driver, topology, file system or version is measured again. Without one, copies on a GPU
    use safe defaults. For the storage at most 256 MiB are written, for a few seconds.

    Example: `fdcache init --check` reports and changes nothing.
    """
    if check and (force or clean_arenas or plot is not None or env_file is not None):
        raise typer.BadParameter(
            "it changes nothing; leave out --force, --clean-arenas, --env-file and --plot",
            param_hint="--check",
        )
    from fdcache.devices.topology import find_gpu, visible_gpus
    from fdcache.service.server import machine_setup
    from fdcache.service.wire.address import load_settings

    if plot is not None:
        from fdcache_cli.link_plot import require_plotting

        require_plotting(plot)
    settings = load_settings({})
    removed = machine_setup.clean_arenas(settings) if clean_arenas else []
    made = [] if check else machine_setup.make_directories(settings)
    findings = machine_setup.examine(settings) + made
    kernels = _compile_kernels(keep=not check) if _has_gpu(findings) else {}
    findings += kernels.values()
    findings += machine_setup.storage_speed(settings, measure=not check, force=force)
    if check:
        findings += machine_setup.calibrations(settings) if _has_gpu(findings) else []
    else:
        findings.append(machine_setup.write_env_file(env_file or machine_setup.default_env_file(), findings))
    if not json:
        _print_machine(findings, removed)
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
            _print_calibration(calibration)
    if plot is not None and calibrations:
        from fdcache_cli.link_plot import write_plot

        write_plot(calibrations[0], plot)
    if any(each.problem for each in findings):
        raise typer.Exit(errors.FAILED)


def _has_gpu(findings: Sequence[Finding]) -> bool:
    return any(each.name == "GPU" and each.hint is None for each in findings)


def _compile_kernels(*, keep: bool) -> dict[str, Finding]:
    """Compile the swap kernels and return the result by GPU; without ``keep`` leave nothing on disk."""
    from fdcache.devices.topology import visible_gpus
    from fdcache.service.server import machine_setup

    if not keep:
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
    return machine_setup.kernels(visible_gpus())


def _print_machine(findings: Sequence[Finding], removed: Sequence[str]) -> None:
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
    from fdcache.devices.topology import find_gpu
    from fdcache.settings import Settings
    from fdcache_cli.link_probe import LinkProbe

    gpu = find_gpu(uuid)
    directory = Settings.load().transfer.calibration_dir
    saved = None if force else load_calibration(gpu, directory)
    if saved is not None:
        return saved

    def on_step(step: str) -> None:
        if not quiet and output.on_terminal():
            output.print_line(f"{gpu.name}: {step}")

    calibration = LinkProbe(gpu, on_step).measure()
    path = save_calibration(calibration, gpu, directory)
    if not quiet:
        output.print_line(f"{gpu.name}: measured, saved in {path}")
    return calibration


def _print_calibration(calibration: Calibration) -> None:
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
