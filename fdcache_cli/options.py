"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")]
ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="ADDRESS",
        help="Address of the service, such as ipc:///run/fdcache/fdcache.sock. Default: FDCACHE_SERVER, else the "
        "default socket.",
    ),
]
WatchOption = Annotated[bool, typer.Option("--watch", help="Refresh every second until Ctrl-C.")]
PlotOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw a picture, such as tiers.png or .svg (needs fdcache[plot])."),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option(help="Beginning of a namespace's name, as `fdcache inspect namespaces` lists it."),
]
