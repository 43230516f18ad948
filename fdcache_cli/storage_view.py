"""The storage tier of a running service in tables."""

from __future__ import annotations

from typing import Any

from fdcache.settings.kinds import readable_size
from fdcache_cli import output
from fdcache_cli.live import show_live
from fdcache_cli.service_view import Columns, Rows, connect, table

_LAYOUTS: Columns = (
    ("namespace", "namespace", str),
    ("model", "model", str),
    ("ranks", "ranks", str),
    ("state", "state", str),
    ("blocks", "blocks", lambda count: "" if count is None else f"{count:,}"),
    ("of", "capacity_blocks", lambda count: "" if count is None else f"{count:,}"),
    ("bytes", "bytes", lambda count: "" if count is None else readable_size(count)),
    ("queued", "queued_blocks", str),
    ("reading", "reading_blocks", str),
    ("writing", "writing_blocks", str),
    ("hits", "hit_blocks", str),
    ("read", "read_bytes", readable_size),
    ("written", "written_bytes", readable_size),
    ("dropped", "dropped_blocks", str),
    ("corrupt", "corrupt_blocks", str),
    ("bad slots", "quarantined", str),
    ("no room", "withheld", lambda count: f"{count:,}"),
    ("errors", "errors", str),
)


def show_storage(server: str | None, *, json: bool, watch: bool) -> None:
    """The storage of a service, layout by layout."""
    with connect(server) as client:
        show_live(lambda: _show(client.ask("storage"), json=json), watch)


def _show(found: Any, *, json: bool) -> None:
    if json:
        output.print_json(found)
        return
    if found is None:
        output.print_line("the service has no storage tier; FDCACHE_STORAGE or --storage gives it one")
        return
    loading = found["loading"]
    state = (
        f"loading, {loading['done']:,} of {loading['total']:,} slots" if loading["active"] else found["state"]
    )
    output.print_line(
        f"{found['connector']}: {state}, {found['blocks']:,} blocks, {readable_size(found['bytes'])}"
    )
    output.print_table(*table([{**each, **each.get("totals", {})} for each in found["layouts"]], _LAYOUTS))
    for each in found["layouts"]:
        if each["error"]:
            output.print_line(f"{each['namespace']}: {each['error']}")


def tier_rows(storage: Any) -> Rows:
    """Rows of the table of tiers."""
    if storage is None:
        return []
    free = storage["capacity_blocks"] - storage["blocks"] - storage["quarantined"] - storage["withheld"]
    return [
        {
            "tier": "storage",
            "of": f"{storage['connector']}, {storage['state']}, {readable_size(storage['bytes'])}",
            "blocks": storage["capacity_blocks"],
            "ready": storage["blocks"],
            "free": max(free, 0),
            "writing": storage["writing_blocks"],
            "evictions": storage["evictions"],
        }
    ]
