"""The minimal list of the benchmark beside other engines does what it stands for: a model in Python agrees with it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.peers.adapters.base import OutOfBlocksError, Pool, Tokens
from benchmarks.peers.adapters.minimal import MinimalAdapter, MinimalRequest
from benchmarks.peers.environments import MissingError, build_minimal
from tests.seeds import budget

BLOCK = 4
BLOCKS = 12

Content = tuple[int, ...]
Action = tuple[str, list[int]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build_minimal(tmp_path_factory.mktemp("peers"))
    except MissingError as error:
        pytest.skip(str(error))


@dataclass(eq=False)
class ModelRequest:
    tokens: list[int]
    prompt_length: int
    native: MinimalRequest
    table: list[int] = field(default_factory=list)
    published: int = 0


class Model:
    """Free blocks in order of last use, the content of each, and one block for each cached content."""

    def __init__(self) -> None:
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(BLOCKS))
        self.content: dict[int, Content] = {}
        self.cached: dict[Content, int] = {}
        self.references = [0] * BLOCKS

    def match(self, request: ModelRequest) -> int:
        paths = full_paths(request.tokens)[: (request.prompt_length - 1) // BLOCK]
        for path in paths:
            if path not in self.cached:
                break
            request.table.append(self.cached[path])
        request.published = len(request.table)
        return request.published * BLOCK

    def allocate(self, request: ModelRequest) -> bool:
        missing = -(-len(request.tokens) // BLOCK) - len(request.table)
        if missing + sum(self.references[block] == 0 for block in request.table) > len(self.free):
            return False
        for block in request.table:
            self.references[block] += 1
            self.free.pop(block, None)
        self.take(request, missing)
        return True

    def take(self, request: ModelRequest, count: int) -> None:
        for _ in range(count):
            block, _ = self.free.popitem(last=False)
            if block in self.content:
                del self.cached[self.content.pop(block)]
            self.references[block] = 1
            request.table.append(block)

    def publish(self, request: ModelRequest) -> None:
        """Make the blocks filled since the last call matchable; equal content stays with the block that has it."""
        paths = full_paths(request.tokens)
        for path, block in zip(paths[request.published :], request.table[request.published :], strict=False):
            if path not in self.cached:
                self.cached[path] = block
                self.content[block] = path
        request.published = len(paths)

    def decode(self, request: ModelRequest, output: list[int]) -> bool:
        missing = -(-(len(request.tokens) + len(output)) // BLOCK) - len(request.table)
        if missing > len(self.free):
            return False
        request.tokens += output
        self.take(request, missing)
        self.publish(request)
        return True

    def release(self, request: ModelRequest) -> None:
        for block in reversed(request.table):
            self.references[block] -= 1
            if not self.references[block]:
                self.free[block] = None
                self.free.move_to_end(block, last=block in self.content)


def full_paths(tokens: list[int]) -> list[Content]:
    return [tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]


def array(tokens: list[int]) -> Tokens:
    return np.array(tokens, np.int32)


def of_blocks(symbols: list[int], tail: int) -> list[int]:
    """Return tokens of a few equal blocks, so that prompts share many, and a tail."""
    return [symbol for symbol in symbols for _ in range(BLOCK)] + [7] * tail


PROMPTS = st.builds(of_blocks, st.lists(st.integers(0, 1), min_size=1, max_size=5), st.integers(0, BLOCK - 1))
OUTPUTS = st.lists(st.integers(0, 1), min_size=1, max_size=2 * BLOCK)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), PROMPTS),
        st.tuples(st.just("free"), st.just([])),
        st.tuples(st.just("decode"), OUTPUTS),
        st.tuples(st.just("step"), st.just([1])),
    ),
    min_size=10,
    max_size=40,
)


@settings(max_examples=budget(500), deadline=None)
@given(actions=ACTIONS, picks=st.randoms(use_true_random=False))
def test_the_minimal_list_agrees_with_a_model(library: Path, actions: list[Action], picks: Random) -> None:
    adapter = MinimalAdapter(Pool(BLOCK, BLOCKS, 40, 400), library)
    model = Model()
    live: list[ModelRequest] = []
    for action, tokens in actions:
        if action == "admit":
            admit(adapter, model, live, tokens)
        elif action == "step":
            step(adapter, model, live)
        elif live:
            request = picks.choice(live)
            if action == "decode":
                decode(adapter, model, request, tokens)
            else:
                adapter.free(request.native)
                model.release(request)
                live.remove(request)
        assert adapter.free_blocks() == len(model.free)


def admit(adapter: MinimalAdapter, model: Model, live: list[ModelRequest], tokens: list[int]) -> None:
    request = ModelRequest(list(tokens), len(tokens), adapter.make_request(0, array(tokens)))
    adapter.hash(request.native)
    assert adapter.match(request.native) == model.match(request)
    if not model.allocate(request):
        with pytest.raises(OutOfBlocksError):
            adapter.allocate(request.native)
        return
    adapter.allocate(request.native)
    assert request.native.table[: len(request.table)].tolist() == request.table
    adapter.commit(request.native)
    model.publish(request)
    live.append(request)


def decode(adapter: MinimalAdapter, model: Model, request: ModelRequest, tokens: list[int]) -> None:
    before = len(request.table)
    if not model.decode(request, tokens):
        with pytest.raises(OutOfBlocksError):
            adapter.decode(request.native, adapter.make_output(array(tokens)))
        return
    adapter.decode(request.native, adapter.make_output(array(tokens)))
    added = request.table[before:]
    assert request.native.table[: len(added)].tolist() == added


def step(adapter: MinimalAdapter, model: Model, live: list[ModelRequest]) -> None:
    """Add a token to every request, if there are blocks for all."""
    if sum(len(request.tokens) % BLOCK == 0 for request in live) > len(model.free):
        return
    for request in live:
        assert model.decode(request, [1])
    requests = [request.native for request in live]
    adapter.decode_step(requests, [[1] for _ in live])
