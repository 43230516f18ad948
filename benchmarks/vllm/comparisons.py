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
        self.places = replace(run.places, host_bytes=min(run.places.host_bytes, MOST_HOST_BYTES))

    @property
    def full(self) -> int:
        """Number of blocks of the prompt that can be reused."""
        return (length_of(LOADS[self._run.options.scale]) - 1) // BLOCK

    def started(self, names: Sequence[str]) -> AbstractContextManager[dict[str, Process]]:
        """Start engines of this part."""
        return self._run.started(self._shape, names, self.places, False)

    def from_host(self, ready: dict[str, Process]) -> dict[str, dict[str, Answer]]:
        """Compare what engines answer from the host with what they answer from the device; return all answers."""
        found = {}
        for name, process in ready.items():
            # What is to be read again has time to be written, and is written to its end.
            again = [{"settle": True}, {"settle": True}] if name == STORAGE else []
            answers = found[name] = self.ask(name, process, [*FROM_HOST, *again])
            host, device = answers.get("host"), answers.get("device")
            if name == SPOILING:
                self.expect("control: a cleared block is noticed", host, device, equal=False)
            elif name != FAILING:
                shown = OURS if name == STORAGE else name
                self.expect(f"{shown}: from the host as from the device", host, device)
            if name == STORAGE:
                process.leave(30)
            process.end()
        return found

    def restarted(self, label: str) -> Answer | None:
        """Return what an engine answers whose storage was filled by another process."""
        with self.started([STORAGE]) as ready:
            for process in ready.values():
                answer = self.ask(STORAGE, process, [{"ask": label}]).get(label)
                process.leave(30)
                return answer
        return None

    def splits_as_computed(self, process: Process, splits: dict[str, tuple[int, Answer]]) -> None:
        """Compare answers with those of an engine to prompts of which as many blocks come from the device."""
        orders = list(COMPUTED)
        for what, (blocks, _) in splits.items():
            orders += [{"forget": True}, {"ask": f"head {what}", "same_blocks": blocks}, {"ask": what}]
        wanted = self.ask(NONE, process, orders)
        for what, (blocks, answer) in splits.items():
            text = f"fdcache: {what}: {blocks} of {self.full} blocks reused, the rest as computed"
            self.expect(text, answer, wanted.get(what), cached=what.endswith("storage"))

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
    comparing = Comparisons(run, shape)
    chosen = [name for name in names if name in BESIDE and name not in {NONE, OURS}]
    if OURS in names:
        chosen += [STORAGE, FAILING, SPOILING]
    together = max(run.options.together)
    computing = [NONE] if NONE in names else []
    with comparing.started([*computing, *chosen[:together]]) as ready:
        without = ready.pop(NONE, None)
        found = comparing.from_host(ready)
        for some in batched(chosen[together:], together):
            with comparing.started(some) as others:
                found |= comparing.from_host(others)
        splits = restarted_splits(comparing, found)
        if without is not None:
            comparing.splits_as_computed(without, splits)


def restarted_splits(
    comparing: Comparisons, found: dict[str, dict[str, Answer]]
) -> dict[str, tuple[int, Answer]]:
    """Compare what comes from storage after restarts; return answers to broken loads with the blocks they reused."""
    splits: dict[str, tuple[int, Answer]] = {}
    failed = found.get(FAILING, {}).get("host")
    if failed and failed["has_fault"]:
        splits["one failed load"] = (comparing.full // 2, failed)
    first = found.get(STORAGE)
    if first:
        stored = comparing.restarted("storage")
        comparing.expect(
            "fdcache: from storage after a restart as from the device", stored, first.get("device")
        )
        if stored and stored["cached"]:
            corrupt(comparing.places.storage(STORAGE))
            if refused := comparing.restarted("refused"):
                splits["one corrupted block in storage"] = (refused["cached"] // BLOCK, refused)
    return splits
