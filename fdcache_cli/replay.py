"""``fdcache replay``: its options, and how a run ends."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from fdcache.errors import ReplayOptionError
from fdcache.integrations.fastdeploy.model_variables import AttentionSettings
from fdcache.integrations.fastdeploy.serving_variables import SchedulingSettings
from fdcache.replay.capacities import Axis, Capacities
from fdcache.replay.config import (
    LAPTOP_DEFAULTS,
    MOST_LAYERS,
    WHOLE_DEFAULTS,
    LayoutName,
    ReplayConfig,
    Shape,
    VerifyBytes,
    layout_of,
    load_settings,
)
from fdcache.replay.devices import DeviceName, device_bytes
from fdcache.replay.engine import replay as run_replay
from fdcache.replay.nodes.routing import Route
from fdcache.replay.page import write_page
from fdcache.replay.replay_hints import with_hints
from fdcache.replay.report import Report, require_plotting, write_plot
from fdcache.replay.sweep import SweepConfig
from fdcache.replay.trace import TRACE_BLOCK_TOKENS, read_trace
from fdcache.replay.workloads import WorkItem, WorkloadName, generate
from fdcache.settings import VARIABLES, Settings, SettingsError
from fdcache.settings.cache import EvictionPolicy, WritePolicy
from fdcache.settings.kinds import parse_size
from fdcache.settings.problems import error as problem_of
from fdcache.settings.sources import Source, Sourced
from fdcache_cli import errors
from fdcache_cli.errors import print_problems
from fdcache_cli.output import progress_bars
from fdcache_cli.replay_nodes import refuse_with_nodes, run_nodes
from fdcache_cli.replay_pd import refuse_with_pd, require_pd, run_and_print
from fdcache_cli.replay_report import print_report, progress_bar
from fdcache_cli.replay_sweep import parse_policies, refuse_options, sweep_and_print
from fdcache_cli.running_service import is_served

GENERATED_REQUESTS = 1000


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a size; write 512MiB, 4G or a number of bytes") from None


Trace = Annotated[
    Path | None,
    typer.Argument(metavar="TRACE", help="Trace in Mooncake's JSONL format. Default: generate a workload."),
]
Requests = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"Stop after this many requests. Default: the whole trace, or {GENERATED_REQUESTS} generated.",
    ),
]


def replay(
    context: typer.Context,
    trace: Trace = None,
    *,
    workload: Annotated[
        WorkloadName, typer.Option(help="Workload to generate without a TRACE.")
    ] = WorkloadName.CHAT,
    requests: Requests = None,
    trace_block: Annotated[
        int, typer.Option(min=1, metavar="TOKENS", help="Tokens that an id of the TRACE stands for.")
    ] = TRACE_BLOCK_TOKENS,
    device_blocks: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Blocks of the device tier. Default: {LAPTOP_DEFAULTS['FDCACHE_DEVICE_BLOCKS']}."
        ),
    ] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens in a block. Default: 64.")] = None,
    host_memory: Annotated[
        int | None,
        typer.Option(
            parser=_size,
            metavar="SIZE",
            help="Host memory of all ranks together, such as 1GiB; 0 for no host tier. "
            f"Default: {LAPTOP_DEFAULTS['FDCACHE_HOST_MEMORY']}.",
        ),
    ] = None,
    storage: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory of local storage; a run starts with the blocks of earlier runs."
        ),
    ] = None,
    storage_size: Annotated[
        int | None,
        typer.Option(
            parser=_size,
            metavar="SIZE",
            help=f"Size of the local storage of each rank. Default: {LAPTOP_DEFAULTS['FDCACHE_STORAGE_SIZE']}.",
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Use the host tier of this service instead of an own one."),
    ] = None,
    layout: Annotated[
        LayoutName | None,
        typer.Option(
            help="Kind of KV layout. Default: mla with FD_ATTENTION_BACKEND=MLA_ATTN, else uniform."
        ),
    ] = None,
    layers: Annotated[int, typer.Option(min=1, max=MOST_LAYERS, help="Main layers.")] = 2,
    groups: Annotated[
        str | None,
        typer.Option(
            metavar="GROUP[,...]",
            help="Groups of layers with block tables of their own, in an engine with a device cache of its own: all, "
            "last:TOKENS (a window), chunk:TOKENS or state, each with /TOKENS for blocks smaller than --block-size. "
            "Default: one group that attends to all tokens.",
        ),
    ] = None,
    draft_layers: Annotated[
        int, typer.Option(min=0, max=MOST_LAYERS, help="Draft (MTP) layers after the main ones.")
    ] = 0,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads of one rank.")] = 1,
    head_dim: Annotated[int, typer.Option(min=1, help="Elements in a head.")] = 16,
    dtype: Annotated[
        str, typer.Option(help="bf16, fp16, fp32, fp8 or int8; fp8 layouts choose their own.")
    ] = "bf16",
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tensor-parallel ranks; more than one run as processes, at most 64. Default: 1."
        ),
    ] = None,
    write_policy: Annotated[
        WritePolicy | None,
        typer.Option(help="When blocks are copied to the host. Default: write_through_selective."),
    ] = None,
    write_through_threshold: Annotated[
        int | None,
        typer.Option(min=1, help="Hits after which write_through_selective copies a block. Default: 2."),
    ] = None,
    eviction: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(EvictionPolicy) + "[,...]",
            help="Order in which blocks leave a full tier; for --sweep several, with commas. Default: learned.",
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 16,
    chunk_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens computed in a step by all requests.")
    ] = 4096,
    speed: Annotated[
        float | None,
        typer.Option(
            metavar="FACTOR",
            help="Follow the timestamps, this many times faster. Default: as fast as possible.",
        ),
    ] = None,
    verify: Annotated[
        VerifyBytes | None,
        typer.Option(help="Reused blocks to compare byte by byte. Default: all; off in a --sweep."),
    ] = None,
    device: Annotated[
        DeviceName, typer.Option(help="Device: memory of this machine (cpu), or its GPUs.")
    ] = DeviceName.CPU,
    load_failures: Annotated[
        float, typer.Option(min=0, max=1, help="Fraction of the loads from the host that fail.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the workload, its tokens and the failures.")] = 0,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Plot hit rate and tier occupancy over time; with --sweep, hit rate against memory.",
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a page of the run for a browser: hit rate beside that of an endless cache, tiers, bandwidth, "
            "evictions and the hottest prefixes.",
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=VALUES",
            help="Find the hit rate at several capacities, without computing or copying: device-blocks=VALUES or "
            "host-memory=VALUES, such as device-blocks=1000,2000,5000. A..B/N is N values from A to B; A..B/xF is "
            "A, A*F and so on up to B, such as host-memory=1GiB..64GiB/x2.",
        ),
    ] = None,
    optimum: Annotated[
        bool, typer.Option("--optimum", help="Add the hit rate of the best possible eviction to a --sweep.")
    ] = False,
    hints: Annotated[
        float | None,
        typer.Option(
            metavar="WRONG",
            min=0,
            max=1,
            help="Give each request the hints about reuse that fit the workload, wrong ones to this share of them; "
            "with --eviction learned.",
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes of a --sweep. Default: one for each CPU.")
    ] = None,
    pd: Annotated[
        bool,
        typer.Option(
            "--pd", help="Compute prompts in a prefill process and hand their blocks to a decode process."
        ),
    ] = False,
    transfer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Transfer connector of a --pd. Default: ipc.")
    ] = None,
    pd_ranks: Annotated[
        str | None,
        typer.Option(
            metavar="PREFILL:DECODE",
            help="Tensor-parallel ranks of a --pd, such as 2:1. Default: as many on both sides.",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Nodes, each with a service and an engine, that share as FDCACHE_STORAGE says: nodes (default), "
            "object or shared. Memory, device blocks and concurrency are those of each node.",
        ),
    ] = None,
    route: Annotated[
        Route | None,
        typer.Option(
            help="Node of each request of --nodes: any one, or the one that has most of its prompt, by the events of "
            "the services. Default: random."
        ),
    ] = None,
    faults: Annotated[
        str | None,
        typer.Option(
            metavar="FAULTS",
            help="Faults of a --pd or of --nodes: a number of them between random requests, or kinds such as "
            "kill=5,flip=3: of a --pd kill, stop, abort, reset and flip (a byte), of --nodes kill (a service), engine, "
            "stop, cut and slow (the network), and full (the bucket).",
        ),
    ] = None,
) -> None:
    """Replay a workload through the real cache, compare every reused byte, and report what was saved.

    Exit 1 if a block was corrupt, anything leaked, or no request fits the device tier; 130 after Ctrl-C, which stops
    the run and prints the report so far.

    Example: `fdcache replay --workload agent --requests 2000 --host-memory 1GiB`

    Example: `fdcache replay trace.jsonl --sweep device-blocks=1000..64000/x2 --optimum --plot sizes.svg`
    """
    require_pd(pd, {"--transfer": transfer, "--pd-ranks": pd_ranks, "--faults": None if nodes else faults})
    if pd:
        refuse_with_pd(context)
    if nodes is not None:
        refuse_with_nodes(context)
    elif route is not None:
        raise typer.BadParameter("only a replay of --nodes has it", param_hint="--route")
    refuse_options(context, sweep)
    policies = parse_policies(eviction)
    if sweep is None and len(policies) > 1:
        raise typer.BadParameter("only a --sweep takes several policies", param_hint="--eviction")
    options = {
        "--device-blocks": device_blocks,
        "--block-size": block_size,
        "--host-memory": host_memory,
        "--ranks": ranks,
        "--write-policy": write_policy,
        "--write-through-threshold": write_through_threshold,
        "--eviction": policies[0] if policies else None,
        "--storage": storage,
        "--storage-size": storage_size,
        "--server": server,
        "--transfer": transfer if transfer is not None or not pd else "ipc",
    }
    settings = _settings(options, LAPTOP_DEFAULTS if groups is None and nodes is None else WHOLE_DEFAULTS)
    print_problems(settings.misspelt, sys.stderr)
    shape = Shape(
        layout or layout_of(settings.group(AttentionSettings)),
        layers,
        draft_layers,
        kv_heads,
        head_dim,
        dtype,
        groups,
    )
    try:
        ranks = settings.deployment.ranks
        kv_layout = shape.build(settings.deployment.block_size, ranks)
        config = ReplayConfig(
            layout=kv_layout,
            cache=settings.cache_for(kv_layout, partial(device_bytes, device, ranks)),
            transfer=settings.transfer,
            storage=settings.storage_tier,
            storage_options=settings.connector_options,
            scheduling=settings.group(SchedulingSettings),
            concurrency=concurrency,
            chunk_tokens=chunk_tokens if sweep is None else max(chunk_tokens, concurrency),
            speed=speed,
            verify=verify or (VerifyBytes.ALL if sweep is None else VerifyBytes.OFF),
            seed=seed,
            load_failures=load_failures,
            device=device,
        )
        total = requests if trace else requests or GENERATED_REQUESTS
        count = total or GENERATED_REQUESTS
        items = read_trace(trace, total, trace_block) if trace else generate(workload, count, seed)
        if pd or nodes is not None:
            run = (
                partial(run_nodes, items, config, settings, nodes, faults, route or Route.RANDOM)
                if nodes is not None
                else partial(run_and_print, items, config, settings.peers, faults, pd_ranks)
            )
            with _interrupts() as stop:
                sys.exit(run(json_output=json_output, should_stop=lambda: bool(stop)))
        _require_places(plot, page)
        if hints is not None:
            items = iter(with_hints(list(items), hints, seed))
        if sweep is not None:
            planned = _sweep_config(config, Capacities.parse(sweep), policies, settings, optimum, jobs)
            with _interrupts() as stop:
                sys.exit(
                    sweep_and_print(
                        items, planned, json_output=json_output, plot=plot, should_stop=lambda: bool(stop)
                    )
                )
        if config.cache.server is not None and not is_served(config.cache.server):
            sys.stderr.write(
                f"note: no service at {config.cache.server}: the host tier misses until there is one; "
                "start `fdcache serve`, or leave --server out to use an own host tier\n"
            )
        report = _run(items, config, total)
    except ReplayOptionError as error:
        name = None if options.get(error.option) is not None else _variable_of(error.option, settings)
        if name is None:
            raise typer.BadParameter(error.reason, param_hint=error.option) from error
        wrong, _, right = error.reason.rpartition("; ")
        raise SettingsError([problem_of(name, settings.place(name), wrong, right)]) from error
    if json_output:
        sys.stdout.write(json.dumps(report.to_dict()) + "\n")
    else:
        print_report(report)
    _draw(report, config, settings, plot, page)
    sys.exit(_status(report, config, _variable_of("--device-blocks", settings)))


def _sweep_config(
    config: ReplayConfig,
    capacities: Capacities,
    policies: tuple[EvictionPolicy, ...],
    settings: Settings,
    optimum: bool,
    jobs: int | None,
) -> SweepConfig:
    """Return a sweep; of device blocks alone unless a host tier was asked for."""
    if capacities.axis is Axis.DEVICE_BLOCKS and settings.source("FDCACHE_HOST_MEMORY") is Source.DEFAULT:
        config = replace(config, cache=config.cache.model_copy(update={"host_memory": 0}))
    return SweepConfig(
        config,
        capacities,
        policies or (config.cache.eviction,),
        optimum=optimum,
        jobs=jobs or len(os.sched_getaffinity(0)),
    )


def _settings(options: Mapping[str, object], defaults: Mapping[str, int | str]) -> Settings:
    """Load the settings with these options; errors about an option name the option, not its variable."""
    if options["--server"] is not None and options["--host-memory"] is not None:
        raise typer.BadParameter(
            "the host tier is the service's: give it to `fdcache serve`, or leave --server out",
            param_hint="--host-memory",
        )
    names = {f"FDCACHE_{option[2:].replace('-', '_').upper()}": option for option in options}
    names["FDCACHE_STORAGE_DIR"] = "--storage"
    values = {name: options[option] for name, option in names.items()}
    # The option takes a directory, which means local storage; the variable takes any connector.
    values["FDCACHE_STORAGE"] = "local" if options["--storage"] else None
    try:
        return load_settings(
            {name: Sourced("command line", value) for name, value in values.items()}, defaults
        )
    except SettingsError as error:
        concerned = {name for problem in error.problems for name in problem.variables}
        wrong = [
            option for name, option in names.items() if name in concerned and options[option] is not None
        ]
        if not wrong:
            raise
        text = str(error)
        for name, option in sorted(names.items(), reverse=True):
            text = text.replace(name, option)
        raise typer.BadParameter(text, param_hint=wrong[0]) from error


def _require_places(plot: Path | None, page: Path | None) -> None:
    """Raise ``ReplayOptionError`` if a plot or a page cannot be written."""
    if plot is not None:
        require_plotting(plot)
    if page is not None and not page.absolute().parent.is_dir():
        raise ReplayOptionError("--page", f"{page}: the directory {page.parent} does not exist")


def _draw(
    report: Report, config: ReplayConfig, settings: Settings, plot: Path | None, page: Path | None
) -> None:
    if plot is not None:
        write_plot(report, plot)
    if page is not None:
        write_page(report, config.layout, settings, page)


def _variable_of(option: str, settings: Settings) -> str | None:
    """Return the variable that was set in place of an option, or None."""
    names = [f"FDCACHE_{option[2:].replace('-', '_').upper()}"]
    if option == "--device-blocks":
        names.append("FDCACHE_DEVICE_MEMORY")
    given = [name for name in names if name in VARIABLES and settings.source(name) is not Source.DEFAULT]
    return min(given, key=lambda name: list(Source).index(settings.source(name)), default=None)


def _run(items: Iterator[WorkItem], config: ReplayConfig, total: int | None) -> Report:
    with _interrupts() as stop, progress_bars() as start, progress_bar(total) as advance:
        return run_replay(items, config, on_progress=advance, on_start=start, should_stop=lambda: bool(stop))


def _status(report: Report, config: ReplayConfig, device_variable: str | None) -> int:
    if report.tally.rejected and not report.tally.finished:
        blocks, tokens = config.cache.device_blocks, config.layout.block_size
        remedy = "--device-blocks (FDCACHE_DEVICE_BLOCKS)"
        if device_variable == "FDCACHE_DEVICE_MEMORY":
            remedy = device_variable
        sys.stderr.write(
            f"error: each of the {report.tally.rejected} requests is larger than the device tier, {blocks} blocks of "
            f"{tokens} tokens; raise {remedy}\n"
        )
        return errors.FAILED
    if not report.clean:
        return errors.FAILED
    return errors.INTERRUPTED if report.interrupted else 0


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Yield a list to which the first Ctrl-C is added; a second one interrupts as usual."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, former)

    former = signal.signal(signal.SIGINT, note)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, former)
