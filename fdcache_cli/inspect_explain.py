"""``fdcache inspect explain``: why a prompt was a hit or a miss, block by block."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fdcache.service.client.connection import Client
from fdcache_cli import output
from fdcache_cli.service_view import Json, ServerOption, connect, seconds


def explain(
    tokens: Annotated[
        Path, typer.Option(metavar="FILE", help="Token ids, a JSON list or numbers with spaces.", exists=True)
    ],
    server: ServerOption = None,
    *,
    namespace: Annotated[str, typer.Option(help="The beginning of the layout's name.")] = "",
    tenant: Annotated[str | None, typer.Option(help="The tenant of the prompt.")] = None,
    lookahead: Annotated[
        int | None,
        typer.Option(
            min=0, help="The engine's FDCACHE_LOOKAHEAD_TOKENS. Default: that variable here, else 0."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Tell of each block of a prompt where it is, or which one broke the run and when it was evicted."""
    from fdcache.service.wire.address import load_settings

    ahead = load_settings({"FDCACHE_LOOKAHEAD_TOKENS": lookahead}).cache.lookahead_tokens
    with connect(server) as client:
        answer = explain_tokens(client, namespace, _read_tokens(tokens), tenant, ahead)
    if json:
        output.print_json(answer)
        return
    rows = [
        [
            str(each["position"]),
            each["hash"][:16],
            each["tier"] or "nowhere",
            _ago(each["stored_at"]) if "stored_at" in each else "",
            seconds(each["idle_seconds"]) if "idle_seconds" in each else "",
            _gone(each),
        ]
        for each in answer["blocks"]
    ]
    output.print_table(["block", "hash", "tier", "since", "idle", "left"], rows)
    broken = answer["broken_at"]
    if not rows:
        output.print_line("these tokens fill no block, and only full blocks are kept")
    elif broken is None:
        output.print_line(f"a hit: all {len(rows)} full blocks are there")
    else:
        when = _gone(answer["blocks"][broken]) or "never stored, or not known any more"
        output.print_line(f"the run ends before block {broken}: {when}")


def explain_tokens(
    client: Client, namespace: str, tokens: Sequence[int], tenant: str | None, lookahead: int = 0
) -> Any:
    """Ask about the path of a prompt, hashed with the layout that the service has."""
    import msgspec

    from fdcache.hashing import TokenBlocks, root_hash
    from fdcache.layout import KVLayout

    layout = KVLayout.from_json(msgspec.json.encode(client.ask("layout", namespace=namespace)))
    blocks = TokenBlocks(layout.block_size, root_hash(layout.fingerprint, tenant), lookahead=lookahead)
    blocks.append(list(tokens))
    hashes = [row.tobytes().hex() for row in blocks.hashes]
    return client.ask("explain", namespace=layout.fingerprint.hex()[:16], hashes=hashes)


def _gone(block: dict[str, Any]) -> str:
    when = block.get("left_at")
    return f"{block['reason'].replace('_', ' ')} {_ago(when)}" if when else ""


def _ago(when: float) -> str:
    return f"{seconds(max(time.time() - when, 0.0))} ago"


def _read_tokens(path: Path) -> list[int]:
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read as text: {error}", param_hint="--tokens") from error
    words = text.strip("[]").replace(",", " ").split()
    wrong = next((word for word in words if not re.fullmatch(r"\d{1,10}", word, re.ASCII)), None)
    if wrong is not None:
        raise typer.BadParameter(f"{path}: {wrong[:40]!r} is no token id", param_hint="--tokens")
    return [int(word) for word in words]
