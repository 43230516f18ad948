"""The part that compares tokens: which engines are asked what, and which answers must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from benchmarks.vllm.engines import BESIDE, NONE, OURS, Places
from benchmarks.vllm.faults import corrupt
from benchmarks.vllm.shapes import BLOCK, LOADS, Shape
from benchmarks.vllm.tokens import length_of

STORAGE = "fdcache-storage"
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

    def engine(
        self, shape: Shape, name: str, parts: Sequence[str] = ..., orders: Sequence[dict[str, Any]] = ...
    ) -> list[dict[str, Any]]: ...


def difference(one: Answer, other: Answer) -> float:
    """Return the greatest difference between the logprobs of two answers."""
    return max(abs(float(a) - float(b)) for a, b in zip(one["logprobs"], other["logprobs"], strict=True))


class Comparisons:
    """Asks engines and compares what they answer."""

    def __init__(self, run: Runs, shape: Shape) -> None:
        self._run = run
        self._shape = shape

    def ask(self, engine: str, orders: list[dict[str, Any]]) -> dict[str, Answer]:
        """Return an engine's answers by their labels; none if it does not run."""
        records = self._run.engine(self._shape, engine, orders=orders)
        return {
            answer["label"]: answer
            for record in records
            if record["part"] == "tokens"
            for answer in record["asked"]
        }

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
    for name in names:
        if name in BESIDE and name not in {NONE, OURS}:
            found = ask(name, FROM_HOST)
            expect(f"{name}: from the host as from the device", found.get("host"), found.get("device"))
    full = (length_of(LOADS[run.options.scale]) - 1) // BLOCK
    splits: dict[str, tuple[int, Answer]] = {}
    if OURS in names:
        first = ask(STORAGE, [*FROM_HOST, {"settle": True}, {"settle": True}])
        expect("fdcache: from the host as from the device", first.get("host"), first.get("device"))
        stored = ask(STORAGE, [{"ask": "storage"}]).get("storage") if first else None
        expect("fdcache: from storage after a restart as from the device", stored, first.get("device"))
        if stored and stored["cached"]:
            corrupt(run.places.storage(STORAGE))
            if refused := ask(STORAGE, [{"ask": "refused"}]).get("refused"):
                splits["one corrupted block in storage"] = (refused["cached"] // BLOCK, refused)
        if (failed := ask("fdcache-failing", FROM_HOST).get("host")) and failed["has_fault"]:
            splits["one failed load"] = (full // 2, failed)
        control = ask("fdcache-misplacing", FROM_HOST)
        expect(
            "control: a misplaced block is noticed", control.get("host"), control.get("device"), equal=False
        )
    if NONE not in names:
        return
    orders = list(COMPUTED)
    for what, (blocks, _) in splits.items():
        orders += [{"forget": True}, {"ask": f"head {what}", "same_blocks": blocks}, {"ask": what}]
    wanted = ask(NONE, orders)
    for what, (blocks, answer) in splits.items():
        text = f"fdcache: {what}: {blocks} of {full} blocks reused, the rest as computed"
        expect(text, answer, wanted.get(what), cached=what.endswith("storage"))
