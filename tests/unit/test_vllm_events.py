"""Events for routers that the vLLM connector tells, with the records and requests of vLLM's wheel.

Skipped without vLLM: ``python -m tests.vllm.setup`` makes environments with it, ``make test-vllm`` runs in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: python -m tests.vllm.setup")

import torch
from vllm import SamplingParams
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    get_request_block_hasher,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from fdcache.groups import record_keys
from fdcache.integrations.vllm.events import EventTranslator, GroupKind, group_kinds
from fdcache.metadata import CacheLevel
from fdcache.tiers import events
from tests.vllm_sides import (
    BLOCK,
    Engine,
    image,
    request,
)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


def full_attention() -> Any:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)


def plain(told: Sequence[Any]) -> list[dict[str, Any]]:
    """Events as a reader without vLLM decodes them, without the fields that say nothing."""
    batches = msgspec.msgpack.decode(msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=list(told))))
    return [{name: value for name, value in each.items() if value is not None} for each in batches[1]]


def test_events_carry_runs_of_blocks_with_the_fields_of_vllm(engine: Engine) -> None:
    source = request("a", list(range(12)), lora_request=LoRARequest("chat", 1, "/x"), cache_salt="acme")
    theirs = [maybe_convert_block_hash(each) for each in source.block_hashes]
    engine.compute(source, [3, 4, 5], fill=7)
    told = list(engine.side.take_events())
    assert all(isinstance(each, BlockStored) for each in told)
    (stored,) = plain(told)
    expected = {
        "type": "BlockStored",
        "block_hashes": theirs,
        "token_ids": list(range(12)),
        "block_size": BLOCK,
        "lora_id": 1,
        "lora_name": "chat",
        "medium": "CPU",
        "extra_keys": [["chat", "acme"], ["chat"], ["chat"]],
        "group_idx": 0,
        "locality": "LOCAL",
        "cache_salt": "acme",
    }
    assert stored == {name: value for name, value in expected.items() if value is not None}
    engine.side.reset()
    (removed,) = plain(list(engine.side.take_events()))
    assert sorted(removed.pop("block_hashes")) == sorted(theirs)
    assert removed == {"type": "BlockRemoved", "medium": "CPU", "group_idx": 0, "locality": "LOCAL"}
    assert list(engine.side.take_events()) == []


def test_groups_have_the_kinds_of_vllm() -> None:
    group = SimpleNamespace(kv_cache_spec=full_attention())
    (found,) = group_kinds(SimpleNamespace(kv_cache_groups=[group]))
    assert found == GroupKind("full_attention")


def test_an_event_has_a_run_that_continues_what_was_told_before() -> None:
    translator, source = EventTranslator(), request("a", list(range(16)))
    theirs = [maybe_convert_block_hash(each) for each in source.block_hashes]
    hashes = np.arange(128, dtype=np.uint8).reshape(4, 32)
    translator.learn(source, source.block_hashes, hashes, 0, BLOCK)
    stored = [events.BlockStored(CacheLevel.HOST, row.tobytes(), None, BLOCK) for row in hashes]
    (first,) = plain(list(translator.translate(stored[:2])))
    (second,) = plain(list(translator.translate(stored[2:])))
    assert (first["block_hashes"], second["block_hashes"]) == (theirs[:2], theirs[2:])
    assert "parent_block_hash" not in first
    assert second["parent_block_hash"] == theirs[1]
    apart = plain(list(translator.translate([stored[0], stored[2], stored[3]])))
    assert [each["block_hashes"] for each in apart] == [theirs[:1], theirs[2:]]


def test_the_extra_keys_of_an_image_are_those_of_its_blocks(engine: Engine) -> None:
    engine.compute(request("a", list(range(12)), mm_features=image("p", 5, 2)), [3, 4, 5], fill=7)
    (event,) = plain(list(engine.side.take_events()))
    keys, _ = generate_block_hash_extra_keys(
        request("b", list(range(12)), mm_features=image("p", 5, 2)), BLOCK, 2 * BLOCK, 0
    )
    assert event["extra_keys"][0] is event["extra_keys"][2] is None
    assert event["extra_keys"][1][0][0] == "p"
    assert len(event["extra_keys"][1]) == len(keys or ())


def test_a_block_that_was_not_known_is_told_once_a_request_has_its_tokens() -> None:
    """As after a restart: storage has blocks of which only the hashes are known."""
    translator = EventTranslator()
    source = request("a", list(range(12)))
    hashes = np.arange(96, dtype=np.uint8).reshape(3, 32)
    stored = [events.BlockStored(CacheLevel.STORAGE, row.tobytes(), None, BLOCK) for row in hashes]
    assert list(translator.translate(stored)) == []
    translator.learn(source, source.block_hashes, hashes, 0, BLOCK)
    late = plain(list(translator.translate([])))
    assert [each["block_hashes"] for each in late] == [
        [maybe_convert_block_hash(each)] for each in source.block_hashes
    ]
    assert {(each["medium"], each["locality"]) for each in late} == {("STORAGE", "LOCAL")}
    assert list(translator.translate([])) == []
    gone = [events.BlockRemoved(CacheLevel.STORAGE, row.tobytes()) for row in hashes[::-1]]
    (removed,) = plain(list(translator.translate(gone)))
    assert removed["medium"] == "STORAGE"
    assert len(removed["block_hashes"]) == 3


def test_a_block_that_left_before_its_tokens_were_known_is_never_told() -> None:
    translator = EventTranslator()
    source, key = request("a", list(range(4))), bytes(range(32))
    list(translator.translate([events.BlockStored(CacheLevel.HOST, key, None, BLOCK)]))
    list(translator.translate([events.BlockRemoved(CacheLevel.HOST, key)]))
    hashes = np.frombuffer(key, np.uint8)[np.newaxis]
    translator.learn(source, source.block_hashes, hashes, 0, BLOCK)
    assert list(translator.translate([])) == []


def test_events_of_a_model_with_two_groups_name_the_group() -> None:
    translator = EventTranslator(
        [GroupKind("full_attention"), GroupKind("sliding_window", 8)], marks=(1, 0), num_records=2
    )
    source = request("a", list(range(8)))
    hashes = np.arange(64, dtype=np.uint8).reshape(2, 32)
    translator.learn(source, source.block_hashes, hashes, 0, BLOCK)
    keys = record_keys(hashes, 2)
    stored = [events.BlockStored(CacheLevel.HOST, row.tobytes(), None, BLOCK) for row in keys]
    told = plain(list(translator.translate(stored)))
    theirs = [maybe_convert_block_hash(each) for each in source.block_hashes]
    assert [each["block_hashes"] for each in told] == [theirs, theirs]
    assert [each["group_idx"] for each in told] == [0, 1]
    if "kv_cache_spec_kind" in BlockStored.__struct_fields__:
        assert [each["kv_cache_spec_kind"] for each in told] == ["full_attention", "sliding_window"]


def test_events_carry_the_last_hash_of_each_block_where_vllm_has_several(engine: Engine) -> None:
    source = Request(
        "a",
        list(range(12)),
        SamplingParams(max_tokens=8),
        None,
        block_hasher=get_request_block_hasher(BLOCK // 2, sha256),
    )
    assert len(source.block_hashes) == 6
    theirs = [maybe_convert_block_hash(each) for each in source.block_hashes]
    engine.side.bind_pool(SimpleNamespace(hash_block_size=BLOCK // 2))
    engine.compute(source, [3, 4, 5], fill=7)
    (stored,) = plain(list(engine.side.take_events()))
    assert stored["block_hashes"] == theirs[1::2]
    assert "parent_block_hash" not in stored
    assert stored["token_ids"] == list(range(12))
