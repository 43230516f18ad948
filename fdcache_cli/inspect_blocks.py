"""``fdcache inspect tree``, ``block`` and ``explain``: where blocks are, and why others are not there."""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from fdcache.service.wire.client_views import ClientFigures, ClientView
from fdcache.service.wire.views import BlockView, ExplainedBlock, ExplainView
from fdcache.tiers.pool import TreeNode
from fdcache.tiers.statistics import LoadDecision
from fdcache_cli import inspect_plot, output
from fdcache_cli.control_service import prefix_of
from fdcache_cli.service_view import ask, connect, seconds, show_live, table


def show_tree(
    server: str | None, namespace: str | None, limit: int, *, json: bool, watch: bool, plot: Path | None
) -> None:
    """Draw the hottest blocks and their ancestors, as text or as a picture."""
    if plot is not None:
        inspect_plot.check_plot(plot, json, watch)
    with connect(server) as client:

        def blocks() -> tuple[list[TreeNode], Any]:
            return ask(client, list[TreeNode], "tree", limit=limit, namespace=namespace)

        def show() -> None:
            nodes, answer = blocks()
            if json:
                output.print_json(answer)
            else:
                for line in draw_trees(nodes):
                    output.print_line(line)

        if plot is not None:
            inspect_plot.plot_tree(blocks()[0], plot)
        else:
            show_live(show, watch)


def draw_trees(nodes: Sequence[TreeNode]) -> list[str]:
    """Return the lines of a tree for each namespace, below its name if there are several."""
    names = list({node.namespace: None for node in nodes})
    if not names:
        return ["there are no blocks"]
    lines = []
    for name in names:
        lines += [f"namespace {name}"] if len(names) > 1 else []
        lines += draw_tree([node for node in nodes if node.namespace == name])
    return lines


def draw_tree(nodes: Sequence[TreeNode]) -> list[str]:
    """Return the lines of an indented tree; a run of blocks without branches is one line."""
    children: dict[str | None, list[TreeNode]] = {}
    for node in nodes:
        children.setdefault(node.parent, []).append(node)
    lines: list[str] = []

    def draw(node: TreeNode, indent: str) -> None:
        length = 1
        last = node
        while len(below := children.get(last.hash, [])) == 1 and below[0].hits == node.hits:
            last = below[0]
            length += 1
        blocks = "block" if length == 1 else "blocks"
        lines.append(
            f"{indent}{node.hash[:12]}  {length} {blocks}, {node.hits} hits, idle {seconds(last.idle_seconds)}"
        )
        for child in sorted(children.get(last.hash, []), key=lambda each: -each.hits):
            draw(child, indent + "  ")

    for root in sorted(children.get(None, []), key=lambda each: -each.hits):
        draw(root, "")
    return lines


def show_block(server: str | None, prefix: str, *, json: bool) -> None:
    """Show the blocks whose hash begins with ``prefix``."""
    with connect(server) as client:
        blocks, answer = ask(client, list[BlockView], "block", hash=prefix)
    if json:
        output.print_json(answer)
    elif blocks:
        output.print_table(*table(blocks, BlockView))
    else:
        output.print_line(f"no block that begins with {prefix} is there, and none is known to have left")


def show_explanation(
    server: str | None,
    tokens: Path,
    namespace: str | None,
    tenant: str | None,
    adapter: str | None,
    lookahead: int | None,
    *,
    json: bool,
) -> None:
    """Show for each block of a prompt where it is, or why it is missing."""
    prefix = prefix_of(tokens, None, namespace, tenant, adapter, lookahead)
    with connect(server) as client:
        explained, answer = ask(client, ExplainView, "explain", **prefix.arguments(client.ask))
        clients, _ = ask(client, list[ClientView], "clients")
    decisions = decisions_on(clients, {each.hash for each in explained.blocks})
    if json:
        told = [{"client": name} | msgspec.to_builtins(found) for name, found in decisions]
        output.print_json(answer | {"decisions": told})
        return
    rows = [
        [
            str(each.position),
            each.hash[:16],
            _place(each),
            _ago(each.stored_at) if isinstance(each.stored_at, float) else "",
            seconds(each.idle_seconds) if isinstance(each.idle_seconds, float) else "",
            _left(each),
        ]
        for each in explained.blocks
    ]
    output.print_table(["block", "hash", "tier", "since", "idle", "left"], rows)
    if not rows:
        output.print_line("these tokens fill no block, and only full blocks are kept")
    elif explained.broken_at is None:
        output.print_line(f"a hit: all {len(rows)} full blocks are there")
    else:
        left = (
            _left(explained.blocks[explained.broken_at]) or "never stored, or forgotten by the eviction log"
        )
        output.print_line(f"the run ends before block {explained.broken_at}: {left}")
        if more := _more_on_devices(explained):
            output.print_line(f"an engine that has them on its device reuses {more} more")
    if explained.ended_by is not None:
        output.print_line(f"of use are {explained.usable}: group {explained.ended_by}, has no more")
    for name, decision in decisions:
        output.print_line(f"{name}, {decision.request_id}: {_decided(decision)}")


def decisions_on(clients: Sequence[ClientView], hashes: Set[str]) -> list[tuple[str, LoadDecision]]:
    """Return the recent decisions of load or recompute whose prefix ends in one of these blocks, with their client."""
    return [
        (client.name, found)
        for client in clients
        for found in ClientFigures.of(client.figures).load_decisions()
        if found.last_block in hashes
    ]


def _decided(found: LoadDecision) -> str:
    cached = found.device_blocks + found.host_blocks + found.storage_blocks
    reused = f"reused {found.reused_blocks} of {cached} cached blocks ({found.choice})"
    expected = (
        f"expected {1e3 * found.expected_seconds:.0f} ms (all {1e3 * found.expected_seconds_whole:.0f} ms, "
        f"no load {1e3 * found.expected_seconds_nothing:.0f} ms)"
    )
    late = ", went on without a late read" if found.hedged else ""
    true = f"took {1e3 * found.true_seconds:.0f} ms" if found.true_seconds else "not computed yet"
    return f"{reused}{late}; {expected}, {true}"


def _place(block: ExplainedBlock) -> str:
    if isinstance(block.node, str):
        return f"on {block.node}'s host"
    return block.tier or ("device" if _on_devices(block) else "nowhere")


def _on_devices(block: ExplainedBlock) -> bool:
    return isinstance(block.devices, int) and block.devices > 0


def _more_on_devices(explained: ExplainView) -> int:
    """Return how many blocks more than all engines those can reuse that have these on their device."""
    rest = explained.blocks[explained.broken_at or 0 :]
    return sum(1 for _ in takewhile(lambda each: each.tier is not None or _on_devices(each), rest))


def _left(block: ExplainedBlock) -> str:
    if not isinstance(block.left_at, float) or not isinstance(block.reason, str):
        return ""
    return f"{block.reason.replace('_', ' ')} {_ago(block.left_at)}"


def _ago(when: float) -> str:
    return f"{seconds(max(time.time() - when, 0.0))} ago"
