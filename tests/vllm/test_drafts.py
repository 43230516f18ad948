"""Draft layers of EAGLE and MTP in vLLM's own engine: their keys and values are cached with those of the model."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip(
    "vllm.v1.core.kv_cache_planning", reason="this vLLM keeps the layers of such models in one group"
)

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "vLLM's kernels for drafts are interpreted with its second model runner", allow_module_level=True
    )

from tests.vllm.drafts import make_eagle, make_mtp
from tests.vllm.engine import connector_config, generate, running_engine, scheduler_of
from tests.vllm.observed import Observed

Answers = list[list[int]]
Proposed = dict[int, set[tuple[int, ...]]]
"""What a draft layer proposes after each number of tokens of a request: of a near tie, which others decide, both."""

TOKENS = 16
pytestmark = pytest.mark.timeout(900)  # interpreted kernels
ROOM: dict[str, Any] = {
    "num_gpu_blocks_override": 40,
    "max_model_len": 256,
    "async_scheduling": False,  # the scheduler then sees what is proposed
}


class Drafting(NamedTuple):
    """A model with a draft layer, and without a connector what vLLM answers with it, and what the layer proposes."""

    model: Path
    drafts: dict[str, Any]
    answers: Answers
    proposals: list[Proposed]


class Proposals:
    """What the draft layer of an engine proposes behind each prompt."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._made: dict[str, Proposed] = {}
        scheduler = scheduler_of(llm)
        update = scheduler.update_draft_token_ids

        def noting(drafts: Any) -> None:
            for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
                request = scheduler.requests.get(name)
                if request is not None and request.num_output_tokens:
                    self._made.setdefault(name, {})[request.num_tokens] = {tuple(tokens)}
            update(drafts)

        scheduler.update_draft_token_ids = noting

    def of(self, prompts: Answers) -> tuple[Answers, list[Proposed]]:
        """Return what the engine answers these prompts with, and what is proposed for each of them."""
        self._made.clear()
        answers = generate(self._llm, prompts, TOKENS)
        names = sorted(self._made, key=lambda name: int(name.partition("-")[0]))
        assert len(names) == len(prompts)
        return answers, [self._made[name] for name in names]


def same_and_other(made: Sequence[Proposed], wanted: Sequence[Proposed]) -> tuple[int, int]:
    """Return how often the same was proposed after the same tokens, and how often something else.

    Steps end after different numbers of tokens where a full step leaves drafts out.
    """
    pairs = [
        each[tokens] <= given[tokens]
        for each, given in zip(made, wanted, strict=True)
        for tokens in each.keys() & given.keys()
    ]
    return sum(pairs), len(pairs) - sum(pairs)


@pytest.fixture(scope="module")
def asked(prompts: Answers) -> Answers:
    return [prompt[:150] for prompt in prompts]


@pytest.fixture(scope="module", params=[make_eagle, make_mtp], ids=["eagle", "mtp"])
def drafting(
    request: pytest.FixtureRequest, asked: Answers, tmp_path_factory: pytest.TempPathFactory
) -> Drafting:
    """The tokens are those of the model without drafts."""
    model, drafts = request.param(tmp_path_factory.mktemp("drafts"))
    with running_engine(model, enable_prefix_caching=False, **ROOM) as llm:
        answers = generate(llm, asked, TOKENS)
    with running_engine(model, enable_prefix_caching=False, speculative_config=drafts, **ROOM) as llm:
        noted = Proposals(llm)
        drafted, proposals = noted.of(asked)
        _, again = noted.of(asked[::-1])
    assert drafted == answers
    for each, more in zip(proposals, again[::-1], strict=True):
        for tokens in each.keys() & more.keys():
            each[tokens] |= more[tokens]
    return Drafting(model, drafts, answers, proposals)


@pytest.fixture(scope="module")
def cached(drafting: Drafting) -> Iterator[tuple[Observed, Proposals]]:
    transfer = connector_config(FDCACHE_HOST_MEMORY="16MiB", FDCACHE_VERIFY="all")
    with running_engine(drafting.model, transfer, speculative_config=drafting.drafts, **ROOM) as llm:
        yield Observed(llm), Proposals(llm)


def test_tokens_and_drafts_are_those_without_a_connector_while_blocks_are_evicted(
    cached: tuple[Observed, Proposals], drafting: Drafting, asked: Answers
) -> None:
    engine, proposals = cached
    assert engine.manager.settings.lookahead_tokens == 1
    order = list(range(len(asked)))
    for turn in range(2):
        random.Random(turn).shuffle(order)
        answers, proposed = proposals.of([asked[i] for i in order])
        assert answers == [drafting.answers[i] for i in order]
        same, other = same_and_other(proposed, [drafting.proposals[i] for i in order])
        assert same > 40 and not other
    assert engine.counters.host_hit_tokens > 300
    assert engine.counters.loads_failed == 0
    engine.assert_nothing_is_held()


def test_a_draft_layer_that_reads_other_bytes_proposes_other_tokens(
    cached: tuple[Observed, Proposals],
    drafting: Drafting,
    asked: Answers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control: the model's answers stay right."""
    engine, proposals = cached
    engine.answers(asked, TOKENS)
    engine.forget_device()
    poll = engine.worker.poll

    def changing() -> set[str]:
        loads = [[block for block in load.blocks if block > 0] for load in engine.worker._loads.values()]
        received = poll()
        for blocks in loads if received else ():
            engine.tensors[-1][blocks] = 0x3F
        return received

    monkeypatch.setattr(engine.worker, "poll", changing)
    answers, proposed = proposals.of(asked)
    assert answers == drafting.answers
    _, other = same_and_other(proposed, drafting.proposals)
    assert other
