"""Tokens of SGLang's own events: a service tells routers of the pages that it has, and Dynamo's indexer knows them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from fdcache.hashing import sglang_keys
from fdcache.integrations.sglang import token_events
from fdcache.integrations.sglang.token_events import TokenEvents
from tests.router.environments import interpreter
from tests.router.indexer import Prompt, free_port, indexer
from tests.service_help import service_process, until
from tests.sglang.engine import PAGE, ask, flush, linker_options, running_engine, storage_options
from tests.sglang.passages import WHOLE

TOKENS = list(range(3, 3 + 6 * PAGE))


class Tree:
    """Nodes of SGLang's tree, whose events its own recorder makes."""

    def __init__(self) -> None:
        self.recorder = KVCacheEventRecorder(enabled=True, page_size=PAGE)
        self.root = SimpleNamespace(key=(), parent=None, hash_value=[], event_hash_value=None)

    def node(self, tokens: Sequence[int], parent: Any = None, **names: Any) -> Any:
        key = RadixKey(array("q", tokens), **{"extra_key": None, "cache_salt": None, **names})
        return SimpleNamespace(key=key, parent=parent or self.root, hash_value=None, event_hash_value=None)


class Told:
    """What is described: tokens and parent by key."""

    def __init__(self) -> None:
        self.pages: dict[bytes, tuple[list[int], bytes, str | None]] = {}
        self.calls = 0

    def describe(self, keys: Any, tokens: Any, parent: bytes, note: Any) -> None:
        self.calls += 1
        for row, part in zip(keys, np.split(tokens, len(keys)), strict=True):
            self.pages[row.tobytes()] = part.tolist(), parent, note.tenant
            parent = row.tobytes()


def described(tree: Tree, follower: TokenEvents, told: Told) -> list[bytes]:
    """Take the recorder's events as the cache does; return the keys that are described."""
    told.pages.clear()
    UnifiedRadixCache.take_events(SimpleNamespace(tree_core=SimpleNamespace(take_events=tree.recorder.take)))
    for _ in range(10):  # more than there are parts
        follower.describe(told)  # type: ignore[arg-type]
    return list(told.pages)


def keys_of(tokens: Sequence[int], salt: str | None = None) -> list[bytes]:
    return [row.tobytes() for row in sglang_keys(tokens, PAGE, salt=salt)]


@pytest.fixture
def follower() -> Any:
    made = TokenEvents(PAGE, lambda: None)
    yield made
    made.close()


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_pages_are_described_under_their_keys_below_those_of_the_device(
    follower: TokenEvents, salt: str | None
) -> None:
    tree, told = Tree(), Told()
    first = tree.node(TOKENS[: 4 * PAGE], cache_salt=salt)
    second = tree.node(TOKENS[4 * PAGE :], first, cache_salt=salt)
    tree.recorder.record_store(first)
    keys = keys_of(TOKENS, salt)
    assert described(tree, follower, told) == keys[:4]
    assert told.pages[keys[0]] == (TOKENS[:PAGE], b"", salt)
    assert told.pages[keys[3]] == (TOKENS[3 * PAGE : 4 * PAGE], keys[2], salt)
    tree.recorder.record_store(second)
    assert described(tree, follower, told) == keys[4:]
    assert told.pages[keys[4]] == (TOKENS[4 * PAGE : 5 * PAGE], keys[3], salt)
    tree.recorder.record_store(first, medium=StorageMedium.CPU)
    assert described(tree, follower, told) == []
    tree.recorder.record_remove(first)
    tree.recorder.record_store(second)
    assert described(tree, follower, told) == [], "its parent has left the device"
    tree.recorder.record_all_cleared()
    assert described(tree, follower, told) == []
    assert not follower._keys


def test_a_long_run_is_described_in_parts(follower: TokenEvents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_events, "MOST_PAGES", 2)
    tree, told = Tree(), Told()
    tree.recorder.record_store(tree.node(TOKENS))
    assert described(tree, follower, told) == keys_of(TOKENS)
    assert told.calls == 3


def test_what_events_do_not_tell_is_not_described(follower: TokenEvents) -> None:
    """Adapters have a part of the key that no event has, and pages of pairs are no tokens of a prompt."""
    tree, told = Tree(), Told()
    tree.recorder.record_store(tree.node(TOKENS, is_bigram=True))
    tree.recorder.lora_names._names["adapter"] = "name"
    tree.recorder.record_store(tree.node(TOKENS, extra_key="adapter"))
    assert described(tree, follower, told) == []


@pytest.mark.skipif(
    interpreter("dynamo") is None, reason="Dynamo's indexer is missing: run python -m tests.router.setup"
)
@pytest.mark.parametrize("options", [linker_options, storage_options], ids=["linker", "storage"])
def test_a_router_knows_after_a_flush_what_the_service_has(
    options: Callable[..., dict[str, Any]], model: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    own, events = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    variables = {"FDCACHE_KV_EVENTS": events, "FDCACHE_HOST_MEMORY": "64MiB"}
    plain, salted = Prompt(tuple(prompts[0])), Prompt(tuple(prompts[1]), "tenant")
    with (
        service_process(tmp_path / "service", **variables) as service,
        indexer(tmp_path, events, block_size=PAGE) as router,
    ):
        config = json.dumps({"publisher": "zmq", "endpoint": own})
        with running_engine(
            model, kv_events_config=config, **options(FDCACHE_SERVER=service.address)
        ) as engine:
            ask(engine, plain.tokens)
            ask(engine, salted.tokens, cache_salt=salted.tenant)
            both = [(0, WHOLE, WHOLE)] * 2
            until(
                lambda: [router.ask(each) for each in (plain, salted)] == both, "the router knows the pages"
            )
            assert router.ask(Prompt(salted.tokens))[1] == 0, "no tenant meets another"
            flush(engine)
            assert [router.ask(each) for each in (plain, salted)] == both
            service.ask("reset", tier="host")
            until(lambda: router.ask(plain)[1] == 0, "what has gone is told, too")
