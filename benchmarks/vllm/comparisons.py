"""The part that compares tokens: which engines are asked what, and which answers must be equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

from benchmarks.vllm.engines import BESIDE, FAULTY, NONE, OURS, Places
from benchmarks.vllm.faults import corrupt
from benchmarks.vllm.processes import Process
from benchmarks.vllm.shapes import BLOCK, LOADS, Shape
from benchmarks.vllm.tokens import length_of

STORAGE = "fdcache-storage"
FAILING, SPOILING = FAULTY
MOST_HOST_BYTES = 2 << 30
LIMIT = 0.0
"""Equal blocks in equal steps give equal bits: any difference between logprobs is one of KV."""

Answer = dict[str, Any]

COMPUTED: list[dict[str, Any]] = [{"ask": "computed"}, {"settle": True}, {"ask": "device"}]
FROM_HOST: list[dict[str, Any]] = [*COMPUTED, {"forget": True}, {"ask": "host"}]


class Runs(Protocol):
    """What this part uses of a run."""

    options: Any
    places: Places

    def add(self, record: dict[str, Any]) -> None: ...

    def started(
        self, shape: Shape, names: Sequence[str], places: Places | None = ..., warm_up: bool = ...
    ) -> AbstractContextManager[dict[str, Process]]: ...

    def order(
        self, shape: Shape, name: str, process: Process, order: dict[str, Any]
    ) -> list[dict[str, Any]]: ...


def batched(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """Yield the names, so many at a time."""
    for begin in range(0, len(names), size):
        yield names[begin : begin + size]


def difference(one: Answer, other: Answer) -> float:
    """Return the greatest difference between the logprobs of two answers."""
    return max(abs(float(a) - float(b)) for a, b in zip(one["logprobs"], other["logprobs"], strict=True))


class Comparisons:
    """Asks engines and compares what they answer."""

    def __init__(self, run: Runs, shape: Shape) -> None:
        self._run = run
        self._shape = shape

    def ask(self, engine: str, process: Process, asked: list[dict[str, Any]]) -> dict[str, Answer]:
        """Return an engine's answers by their labels; none if it has failed."""
        records = self._run.order(self._shape, engine, process, {"ask": asked})
        return {answer["label"]: answer for record in records for answer in record["asked"]}

    def expect(
        self, what: str, got: Answer | None, wanted: Answer | None, *, cached: bool = True, equal: bool = True
    ) -> None:
        """Record that an answer equals another one, and was made of as many cached tokens; with ``equal`` unset,
        that it does not."""
        if got is None or wanted is None:
            return
        tokens_equal = got["tokens"] == wanted["tokens"]
        distance = difference(got, wanted)
        is_same = tokens_equal and distance <= LIMIT
        is_right = is_same == equal and (not cached or got["cached"] == wanted["cached"] > 0)
        self._run.add(
            {
                "shape": self._shape.name,
                "part": "compared",
                "what": what,
                "tokens_equal": tokens_equal,
                "logprob_difference": distance,
                "cached": got["cached"],
                "is_right": is_right,
            }
        )


def compare_tokens(run: Runs, shape: Shape, names: Sequence[str]) -> None:
    """Compare hits from every tier with hits from the device, and broken loads with the same split computed."""
    ask, expect = (comparisons := Comparisons(run, shape)).ask, comparisons.expect
    places = replace(run.places, host_bytes=min(run.places.host_bytes, MOST_HOST_BYTES))
    chosen = [name for name in names if name in BESIDE and name not in {NONE, OURS}]
    if OURS in names:
        chosen += [STORAGE, FAILING, SPOILING]
    full = (length_of(LOADS[run.options.scale]) - 1) // BLOCK
    splits: dict[str, tuple[int, Answer]] = {}
    first: dict[str, Answer] = {}
    for some in batched(chosen, max(run.options.together)):
        with run.started(shape, some, places, False) as ready:
            for name, process in ready.items():
                again = [{"settle": True}, {"settle": True}] if name == STORAGE else []
                found = ask(name, process, [*FROM_HOST, *again])
                host, device = found.get("host"), found.get("device")
                if name == FAILING:
                    if host and host["has_fault"]:
                        splits["one failed load"] = (full // 2, host)
                elif name == SPOILING:
                    expect("control: a cleared block is noticed", host, device, equal=False)
                else:
                    shown = OURS if name == STORAGE else name
                    expect(f"{shown}: from the host as from the device", host, device)
                if name == STORAGE:
                    first = found
                    process.leave(30)
                process.end()

    def restarted(label: str) -> Answer | None:
        with run.started(shape, [STORAGE], places, False) as ready:
            for process in ready.values():
                answer = ask(STORAGE, process, [{"ask": label}]).get(label)
                process.leave(30)
                return answer
        return None

    stored = restarted("storage") if first else None
    expect("fdcache: from storage after a restart as from the device", stored, first.get("device"))
    if stored and stored["cached"]:
        corrupt(places.storage(STORAGE))
        if refused := restarted("refused"):
            splits["one corrupted block in storage"] = (refused["cached"] // BLOCK, refused)
    if NONE not in names:
        return
    orders = list(COMPUTED)
    for what, (blocks, _) in splits.items():
        orders += [{"forget": True}, {"ask": f"head {what}", "same_blocks": blocks}, {"ask": what}]
    with run.started(shape, [NONE], places, False) as ready:
        for process in ready.values():
            wanted = ask(NONE, process, orders)
            for what, (blocks, answer) in splits.items():
                text = f"fdcache: {what}: {blocks} of {full} blocks reused, the rest as computed"
                expect(text, answer, wanted.get(what), cached=what.endswith("storage"))
