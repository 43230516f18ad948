"""``fdcache init``: the settings for a machine and its engine; prepares the machine and measures GPUs and storage."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fdcache_cli import errors, output
from fdcache_cli.doctor import compile_kernels, has_gpu, print_findings

if TYPE_CHECKING:
    from fdcache.machine.calibration import Calibration


def _engines(begun: str) -> list[str]:
    """Return the engines whose names begin so, for the completion of a shell."""
    from fdcache_cli.engines import ENGINES

    return [name for name in ENGINES if name.startswith(begun)]


def init(
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="UUID", help="Measure only this GPU; may be repeated. Default: all visible."),
    ] = None,
    *,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="ENGINE",
            help="vllm, sglang, fastdeploy, or own for one that embeds fdcache.",
            autocompletion=_engines,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="What the engine serves, a folder or a name; for an own engine its program."),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Host memory for blocks. Default: a quarter of what is left."),
    ] = None,
    storage: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep blocks in files of this folder, too.")
    ] = None,
    service: Annotated[
        bool | None,
        typer.Option("--service/--no-service", help="Share one host tier among the engines of this machine."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Take the defaults without asking.")] = False,
    clean_arenas: Annotated[
        bool, typer.Option("--clean-arenas", help="Remove the arenas of stopped services.")
    ] = False,
    env_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the settings with their meaning to this file. One that exists is kept, and nothing else is "
            "asked than what the engine serves. "
            "Default: FDCACHE_ENV_FILE, or fdcache/fdcache.env in the user's configuration directory.",
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
    """Write the settings for this machine and your engine, and print the line that starts it.

    It asks on a terminal; elsewhere give --yes. Then it creates missing directories, compiles the swap kernels for
    each GPU, measures its link and the folder of local storage, and saves the calibrations.

    Exit 1 if something would keep a service from starting; every problem names its remedy.

    A calibration of another driver, topology, file system or version is measured again. Without one, copies on a GPU
    use safe defaults. For the storage at most 256 MiB are written, for a few seconds.

    Example: `fdcache init --yes --engine vllm --model /models/llama --host-memory 64GiB`
    """
    from fdcache.devices.topology import find_gpu, visible_gpus
    from fdcache.service.server import machine_findings, machine_setup
    from fdcache.service.wire.address import load_settings
    from fdcache.settings import Source
    from fdcache_cli.answers import Answers

    if plot is not None:
        from fdcache_cli.link_plot import require_plotting

        require_plotting(plot)
    named = os.environ.get("FDCACHE_ENV_FILE")
    file = (env_file or (Path(named) if named else machine_setup.default_env_file())).absolute()
    if named and not os.path.lexists(named):
        del os.environ["FDCACHE_ENV_FILE"]  # nothing is read from a file that is about to be written
    answers = Answers(engine, model, host_memory, storage, service)
    if file.exists():
        answers.require_kept(file)
        answers = answers.with_engine(ask=not yes)
        settings = load_settings({}, {**os.environ, "FDCACHE_ENV_FILE": str(file)})
        has_server = settings.source("FDCACHE_SERVER") is not Source.DEFAULT
        service_line = machine_setup.service_line(file) if has_server else None
    else:
        load_settings(answers.memory)  # what is wrong in the environment is named before a question
        answers = answers.complete(ask=not yes)
        service_line = answers.service_line
        settings = load_settings({**answers.arguments, **answers.memory})
    # A GPU that is not here ends the command before a file is written.
    asked = [find_gpu(uuid) for uuid in device or ()] or (visible_gpus() if plot is not None else [])
    removed = machine_setup.clean_arenas(settings) if clean_arenas else []
    made = machine_setup.make_directories(settings)
    findings = machine_findings.examine(settings) + made
    kernels = compile_kernels(keep=True) if has_gpu(findings) else {}
    findings += kernels.values()
    findings += machine_findings.storage_speed(settings, measure=True, force=force)
    findings.append(machine_setup.write_env_file(file, findings, answers.settings, service_line))
    lines = [*filter(None, [service_line]), answers.start(file)] if file.exists() else []
    if not json:
        for text in removed:
            output.print_line(f"removed a dead arena: {text}")
        print_findings(findings)
    gpus = asked or (visible_gpus() if has_gpu(findings) else [])
    usable = [gpu.uuid for gpu in gpus if gpu.uuid in kernels and not kernels[gpu.uuid].problem]
    calibrations = [_calibrate(uuid, force=force, quiet=json) for uuid in usable]
    if json:
        import msgspec

        output.print_json(
            {
                "machine": [asdict(each) for each in findings],
                "removed_arenas": removed,
                "calibrations": [msgspec.to_builtins(each) for each in calibrations],
                "start": lines,
            }
        )
    else:
        _print_results(calibrations, lines, answers.title)
    if plot is not None and calibrations:
        from fdcache_cli.link_plot import write_plot

        write_plot(calibrations[0], plot)
    if any(each.problem for each in findings):
        raise typer.Exit(errors.FAILED)


def _print_results(calibrations: Sequence[Calibration], lines: Sequence[str], title: str) -> None:
    for calibration in calibrations:
        _print_calibration(calibration)
    if not lines:
        output.print_line(f"\nThe line that starts {title} needs the settings file, which was not written")
        return
    output.print_line(f"\nStart {title}:\n")
    for line in lines:
        output.print_line(f"  {line}")


def _calibrate(uuid: str, *, force: bool, quiet: bool) -> Calibration:
    from fdcache.devices.topology import find_gpu
    from fdcache.machine.calibration import load_calibration, save_calibration
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
