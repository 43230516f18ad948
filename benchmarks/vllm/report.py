"""The results of a run as tables, the goals that can be judged from them, and a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.peers.report import Target, table, verdicts
from benchmarks.vllm.engines import LEAST, NONE, OURS, RESTARTED
from benchmarks.vllm.shapes import SHAPES
from benchmarks.vllm.timing import PHASES

Record = dict[str, Any]

Column = tuple[tuple[str, ...], int, float]
"""Where a figure is in a record, its decimals, and what it is divided by."""


class Results:
    """The records of a run, by part, shape and engine."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = list(records)

    @property
    def shapes(self) -> list[str]:
        """Return the shapes that were measured, in their order."""
        return list(dict.fromkeys(one["shape"] for one in self.records if "shape" in one))

    def engines(self, shape: str) -> list[str]:
        """Return the engines of a shape, in the order of their first run."""
        return list(dict.fromkeys(one["engine"] for one in self.of(shape)))

    def of(self, shape: str, part: str | None = None, engine: str | None = None) -> list[Record]:
        """Return the records of a shape, of one part and engine if they are given."""
        return [
            one
            for one in self.records
            if one.get("shape") == shape
            and "engine" in one
            and (part is None or one["part"] == part)
            and (engine is None or one["engine"] == engine)
        ]

    def value(self, shape: str, part: str, engine: str, *path: str) -> float | None:
        """Return a figure, the mean of an engine's runs; None if it was not measured."""
        found = []
        for one in self.of(shape, part, engine):
            value: Any = one
            for name in path:
                value = value.get(name) if isinstance(value, dict) else None
            if isinstance(value, list):
                value = median(value) if value else None
            if value is not None:
                found.append(float(value))
        return mean(found) if found else None

    def link_ms(self, shape: str, size: float) -> float | None:
        """Return how long so many bytes take over the link."""
        links = [one for one in self.records if one.get("part") == "link" and one.get("shape") == shape]
        return size * links[-1]["ms"] / links[-1]["bytes"] if links else None


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def _best(values: Iterable[float | None], highest: bool = False) -> float | None:
    known = [value for value in values if value is not None]
    return (max(known) if highest else min(known)) if known else None


def _sum(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _without(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def targets(results: Results, shape: str) -> Iterator[Target]:
    """Yield the goals of a shape."""
    value = results.value
    others = [
        name
        for name in results.engines(shape)
        if not name.startswith((OURS, NONE, LEAST)) and name != "tiering"
    ]
    best = f"{OURS} / best other"

    loaded, step = value(shape, "single", OURS, "loaded_ms"), value(shape, "single", OURS, "device_ms")
    size = value(shape, "single", OURS, "loaded_bytes")
    least = _sum(results.link_ms(shape, size) if size else None, step)
    yield Target(
        "first token from the host / (bytes over the link + a step)", _ratio(loaded, least), 1.0, False
    )
    other = value(shape, "single", "offloading", "loaded_ms")
    beyond = _ratio(
        _without(loaded, step), _without(other, value(shape, "single", "offloading", "device_ms"))
    )
    yield Target(
        f"first token from the host beyond a step: {OURS} / offloading",
        beyond,
        0.6 if SHAPES[shape].page_bytes <= 8192 else 1,
        False,
    )
    for percentile in ("p50", "p99"):
        path = ("chat", "ttft_ms", "later", percentile)
        theirs = _best(value(shape, path[0], name, *path[1:]) for name in others)
        ours = value(shape, path[0], OURS, *path[1:])
        yield Target(f"TTFT {percentile} of later turns: {best}", _ratio(ours, theirs), 1, False)
    hits = value(shape, "chat", OURS, "hit_tokens")
    theirs = _best((value(shape, "chat", name, "hit_tokens") for name in others), highest=True)
    yield Target(f"hit tokens of conversations: {best}", _ratio(hits, theirs), 1, True)
    step_us = _best(value(shape, "chat", name, "us_per_step") for name in others)
    ours = value(shape, "chat", OURS, "us_per_step")
    yield Target(f"engine CPU time of a step: {best}", _ratio(ours, step_us), 1, False)
    for percentile, most in (("p50", 1.03), ("p99", 1.15)):
        gap = ("itl_ms", "beside", percentile)
        ratio = _ratio(value(shape, "beside", OURS, *gap), value(shape, "beside", NONE, *gap))
        yield Target(f"time between tokens {percentile} beside loads: {OURS} / none", ratio, most, False)
    ratio = _ratio(value(shape, "unique", OURS, "seconds"), value(shape, "unique", NONE, "seconds"))
    yield Target(f"unique prompts: {OURS} / none", ratio, 1.01, False)
    ratio = _ratio(
        value(shape, "reread", "fdcache-storage", "ttft_ms", "p50"),
        value(shape, "reread", "tiering", "ttft_ms", "p50"),
    )
    yield Target("TTFT p50 after a restart: fdcache-storage / tiering", ratio, 1, False)


def _cell(value: float | None, digits: int = 1, scale: float = 1) -> str:
    return "-" if value is None else f"{value / scale:,.{digits}f}"


def _rows(results: Results, shape: str, part: str, columns: Sequence[Column]) -> list[list[str]]:
    return [
        [
            name,
            *(
                _cell(results.value(shape, part, name, *path), digits, scale)
                for path, digits, scale in columns
            ),
        ]
        for name in results.engines(shape)
        if results.of(shape, part, name)
    ]


def tables(results: Results, shape: str) -> Iterator[str]:
    """Yield the tables of a shape."""
    pages = f"{shape}, pages of {SHAPES[shape].page_bytes / 1024:g} KiB"
    gib = float(1 << 30)
    later = [f"turn {turn}" for turn in (1, 2, 3, 4)] + ["later"]
    shown: dict[str, tuple[list[str], list[Column]]] = {
        "single": (
            [
                f"one prompt at a time, ms to the first token ({pages})",
                "computed",
                "from the device",
                "from the host",
                "tokens found",
            ],
            [
                (("computed_ms",), 1, 1),
                (("device_ms",), 1, 1),
                (("loaded_ms",), 1, 1),
                (("loaded_cached",), 0, 1),
            ],
        ),
        "chat": (
            [
                f"conversations, ms ({pages})",
                *(f"TTFT {name} p50" for name in later),
                "later p99",
                "ITL later p50",
                "p99",
                "requests/s",
                "hit tokens",
            ],
            [
                *((("ttft_ms", name, "p50"), 1, 1) for name in later),
                (("ttft_ms", "later", "p99"), 1, 1),
                (("itl_ms", "later", "p50"), 2, 1),
                (("itl_ms", "later", "p99"), 2, 1),
                (("requests_per_s",), 2, 1),
                (("hit_tokens",), 0, 1),
            ],
        ),
        "unique": (
            [f"unique prompts ({pages})", "seconds", "TTFT p50", "p99", "us of a step", "engine CPU s"],
            [
                (("seconds",), 2, 1),
                (("ttft_ms", "p50"), 1, 1),
                (("ttft_ms", "p99"), 1, 1),
                (("us_per_step",), 0, 1),
                (("engine_cpu_s",), 1, 1),
            ],
        ),
        "beside": (
            [
                f"time between tokens beside loads, ms ({pages})",
                "p50",
                "p99",
                "quiet p50",
                "quiet p99",
                "TTFT p50",
                "tokens found",
            ],
            [
                (("itl_ms", "beside", "p50"), 2, 1),
                (("itl_ms", "beside", "p99"), 2, 1),
                (("itl_ms", "quiet", "p50"), 2, 1),
                (("itl_ms", "quiet", "p99"), 2, 1),
                (("ttft_ms", "p50"), 1, 1),
                (("cached_tokens",), 0, 1),
            ],
        ),
        "reread": (
            [f"after a restart, ms ({pages})", "TTFT p50", "p99", "seconds", "hit tokens"],
            [
                (("ttft_ms", "p50"), 1, 1),
                (("ttft_ms", "p99"), 1, 1),
                (("seconds",), 2, 1),
                (("hit_tokens",), 0, 1),
            ],
        ),
    }
    for part, (header, columns) in shown.items():
        if rows := _rows(results, shape, part, columns):
            yield table(header, rows)
    yield from _timeline(results, shape, pages)
    phases = list(PHASES)
    if rows := _rows(results, shape, "single", [(("phases_ms", phase), 2, 1) for phase in phases]):
        yield table([f"a prompt from the host, where its time goes, ms ({pages})", *phases], rows)
    costs = [
        [
            name,
            _cell(results.value(shape, "start", name, "engine_s")),
            _cell(results.value(shape, "start", name, "used_bytes"), 2, gib),
            *(
                _cell(results.value(shape, "chat", name, one), 0)
                for one in ("us_per_step", "schedule_us", "update_us", "hooks_us")
            ),
            _cell(results.value(shape, "chat", name, "engine_cpu_s")),
        ]
        for name in results.engines(shape)
        if results.of(shape, "start", name) and name not in RESTARTED
    ]
    if costs:
        header = [f"cost ({pages})", "start s", "host GiB when ready"]
        yield table([*header, "us of a step", "schedule", "update", "hooks", "engine CPU s"], costs)


def _timeline(results: Results, shape: str, pages: str) -> Iterator[str]:
    parts = ("interval", "idle", "work", "answer")
    rows = []
    for one in results.of(shape, "beside"):
        for kind, found in one.get("timeline", {}).get("kinds", {}).items():
            cells = [_cell(found[name].get(which), 2) for name in parts for which in ("p50", "p99")]
            rows.append([one["engine"], kind, str(found["interval"]["count"]), *cells])
    if rows:
        header = [f"from answer to answer beside loads, ms ({pages})", "", "steps"]
        yield table([*header, *(f"{name} {which}" for name in parts for which in ("p50", "p99"))], rows)


def agents(results: Results, shape: str) -> Iterator[str]:
    """Yield the table of agents and its goals."""
    measured = results.of(shape, "agents")
    if not measured:
        return
    header = [f"agents, ms ({shape})", "users", "host / working set", "TTFT later p50", "p99"]
    header += ["between tokens p50", "p99", "requests/s", "hit tokens", "of the ceiling"]
    rows = []
    for one in measured:
        later, gaps = one["ttft_ms"]["later"], one["itl_ms"]
        rows.append(
            [
                one["engine"],
                str(one["users"]),
                "-" if one["share"] is None else f"{one['share']:g}",
                *(_cell(later.get(name)) for name in ("p50", "p99")),
                *(_cell(gaps.get(name), 2) for name in ("p50", "p99")),
                _cell(one["requests_per_s"], 2),
                f"{one['cached_tokens']:,}",
                f"{one['cached_tokens'] / max(one['ceiling_tokens'], 1):.1%}",
            ]
        )
    yield table(header, rows)
    yield verdicts(f"ratio (agents, {shape})", list(agent_targets(measured)))


def agent_targets(measured: Sequence[Record]) -> Iterator[Target]:
    """Yield the goals of agents at each number of users and size of the host tier."""
    for users, share in dict.fromkeys((one["users"], one["share"]) for one in measured):
        if share is None:
            continue
        beside = [one for one in measured if one["users"] == users and one["share"] in (None, share)]
        ours = [one for one in beside if one["engine"] == OURS]
        others = [one for one in beside if not one["engine"].startswith((OURS, LEAST))]
        where = f"{users} users, host tier {share:g}: {OURS} / best other"

        def best(found: Sequence[Record], name: str, highest: bool) -> float | None:
            values = [
                one["requests_per_s"] if highest else one["ttft_ms"]["later"].get(name) for one in found
            ]
            return _best(values, highest)

        for name, highest in (("p50", False), ("p99", False), ("requests/s", True)):
            ratio = _ratio(best(ours, name, highest), best(others, name, highest))
            yield Target(f"{name if highest else f'TTFT {name}'}, {where}", ratio, 1, highest)


def compared(records: Iterable[Record]) -> str | None:
    """Return the table of comparisons of tokens."""
    rows = [
        [
            one["what"],
            str(one["cached"]),
            "equal" if one["tokens_equal"] else "differ",
            f"{one['logprob_difference']:.2g}",
            "right" if one["is_right"] else "wrong",
        ]
        for one in records
        if one.get("part") == "compared"
    ]
    return table(["right tokens", "cached", "tokens", "logprobs differ by", ""], rows) if rows else None


def faults(results: Results) -> Iterator[str]:
    """Yield what must not be: comparisons that failed, hits of other tokens, and hits that copied nothing."""
    for one in results.records:
        size, loaded = one.get("loaded_bytes"), one.get("loaded_ms")
        link = results.link_ms(one["shape"], size) if size else None
        if link and loaded and median(loaded) < link:
            yield (
                f"{one['shape']}: {one['engine']} had the first token after {median(loaded):.1f} ms, and its bytes "
                f"take {link:.1f} ms over the link: they were not loaded"
            )
        if one.get("part") == "compared" and not one["is_right"]:
            yield f"{one['shape']}: {one['what']}"
        if one.get("part") == "single" and one.get("wrong"):
            yield f"{one['shape']}: {one['engine']} gave other tokens {one['wrong']} times from the host"


def report(results: Results) -> Iterator[str]:
    """Yield everything that is printed at the end of a run."""
    for shape in results.shapes:
        yield from tables(results, shape)
        yield from agents(results, shape)
        if any(one["part"] in {"chat", "single"} for one in results.of(shape)):
            yield verdicts(f"ratio ({shape})", list(targets(results, shape)))
    if text := compared(results.records):
        yield text


def line(record: Record) -> str:
    """Return one line that says what a record found."""
    head = " ".join(str(record[name]) for name in ("shape", "engine") if name in record)
    write = _LINES.get(record["part"], _load_line)
    return f"{head} {write(record)}".lstrip()


def _single_line(record: Record) -> str:
    ways = ", ".join(
        f"{way} {median(record[name]):.1f}"
        for way, name in (("computed", "computed_ms"), ("device", "device_ms"), ("host", "loaded_ms"))
        if name in record
    )
    found = f", found {record['loaded_cached']}, wrong {record['wrong']}" if "wrong" in record else ""
    return f"first token, ms: {ways}{found}; tokens {record['tokens'][:2]}"


def _compared_line(record: Record) -> str:
    verdict = "right" if record["is_right"] else "WRONG"
    return f"{record['what']}: {verdict}, cached {record['cached']}"


def _tokens_line(record: Record) -> str:
    asked = ", ".join(f"{one['label']} {one['cached']}" for one in record["asked"])
    return f"tokens; cached of each request: {asked}"


def _load_line(record: Record) -> str:
    shown = ("seconds", "ttft_ms", "itl_ms", "hit_tokens", "us_per_step")
    return f"{record['part']}: " + ", ".join(f"{name} {record[name]}" for name in shown if name in record)


_LINES: dict[str, Callable[[Record], str]] = {
    "machine": lambda record: f"{record['machine']}, {record['date']}",
    "skipped": lambda record: f"is not measured: {record['why']}",
    "link": lambda record: f"link of {record['device']}: {record['bytes']:,} bytes in {record['ms']:.2f} ms",
    "start": lambda record: f"started in {record['import_s']} + {record['engine_s']} s",
    "single": _single_line,
    "tokens": _tokens_line,
    "compared": _compared_line,
}


def plot(results: Results, path: Path) -> None:
    """Plot the time to first token of later turns, p50 and p99, by engine and shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = [shape for shape in results.shapes if results.of(shape, "chat")]
    if not shapes:
        raise ValueError("no conversations were measured: there is nothing to plot")
    figure, panes = pyplot.subplots(
        1, len(shapes), figsize=(1 + 5 * len(shapes), 3.6), layout="constrained", squeeze=False
    )
    for axes, shape in zip(panes[0], shapes, strict=True):
        names = [name for name in results.engines(shape) if results.of(shape, "chat", name)]
        for index, name in enumerate(reversed(names)):
            colour = "#2d6a8e" if name.startswith(OURS) else "#b5b5b5"
            p50, p99 = (
                results.value(shape, "chat", name, "ttft_ms", "later", percentile) or 0
                for percentile in ("p50", "p99")
            )
            axes.barh(index, p99, color=colour, alpha=0.35)
            axes.barh(index, p50, color=colour)
        axes.set_yticks(range(len(names)), list(reversed(names)))
        axes.set(title=f"{shape}, later turns", xlabel="time to first token, p50 and p99 (ms)")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
