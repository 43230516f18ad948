"""Hints in vLLM's requests: taken when the request ends, and answered with its output."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from fdcache.hints import HintStatus
from fdcache.integrations.vllm.connector import FdcacheConnector
from fdcache.integrations.vllm.scheduler import SchedulerSide
from fdcache.integrations.vllm.tables import PlainTable
from fdcache.layout import KVLayout
from fdcache.manager import OffloadManager, Request
from fdcache.metadata import TransferPlan, TransferReport
from fdcache.settings.cache import CacheSettings, EvictionPolicy, StorageTierSettings, WritePolicy
from tests.fastdeploy_help import BLOCK, report_of
from tests.nodes_help import fetching, free_address, open_node
from tests.unit.test_connector_hints import ENVELOPE

LAYOUT = KVLayout.uniform(
    model="m", revision="1", num_layers=1, block_size=BLOCK, kv_heads=1, head_dim=8, dtype="bfloat16"
)
SETTINGS = CacheSettings(
    host_memory=16 * LAYOUT.record_bytes,
    eviction=EvictionPolicy.LEARNED,
    write_policy=WritePolicy.WRITE_THROUGH,
)


def executed(plan: TransferPlan) -> TransferReport:
    """Return the report of a plan whose copies need no bytes."""
    results = [
        msgspec.structs.replace(result, checksums=np.zeros(len(swap) if swap.to_host else 0, np.uint64))
        for swap, result in zip(plan.swaps(), report_of(plan).results, strict=True)
    ]
    return TransferReport(plan_id=plan.plan_id, rank=0, results=tuple(results))


def ended(manager: OffloadManager | None = None, **fields: Any) -> tuple[bool, dict[str, Any] | None]:
    """What the connector returns for a request of four blocks that are on the host when it ends."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request as Source

    source = Source("r", list(range(17)), fields.pop("sampling", SamplingParams()), None, **fields)
    source.num_computed_tokens = 16
    connector = FdcacheConnector.__new__(FdcacheConnector)
    connector._scheduler = side = SchedulerSide(manager or OffloadManager(SETTINGS, LAYOUT))
    connector.on_new_request(source)
    known = side._running["r"]
    known.has_table(PlainTable([range(5)], BLOCK))
    side.manager.offer(known.request, 16, np.arange(4, dtype=np.int32))
    while plans := [each for each in side.manager.take_plans() if isinstance(each, TransferPlan)]:
        # backups come a share of the pool at a time
        side.manager.apply([executed(plan) for plan in plans])
    return connector.request_finished(source, list(range(5)))


def test_the_envelope_of_a_request_is_answered() -> None:
    protocol = pytest.importorskip("vllm.v1.kv_hints.protocol")
    envelope = msgspec.convert(ENVELOPE, protocol.KvHintsEnvelope)
    _, answer = ended(kv_hints=envelope)
    assert answer is not None
    (outcome,) = answer["hint_outcomes"]
    assert (outcome["id"], outcome["status"], outcome["blocks"]) == ("keep", HintStatus.TAKEN, 4)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_node_that_the_envelope_names_is_asked_first_or_refused(is_known: bool) -> None:
    protocol = pytest.importorskip("vllm.v1.kv_hints.protocol")
    named, other = free_address(), free_address()
    lookup = open_node(LAYOUT, None, listed=(named if is_known else other,))
    storage = StorageTierSettings(connector="nodes")
    manager = OffloadManager(SETTINGS, LAYOUT, storage=storage, lookup=lookup)
    envelope = msgspec.convert(fetching(named), protocol.KvHintsEnvelope)
    _, answer = ended(manager, kv_hints=envelope)
    assert answer is not None
    (outcome,) = answer["hint_outcomes"]
    assert (outcome["id"], outcome["blocks"]) == ("f", 4)
    if is_known:
        assert outcome["status"] == HintStatus.TAKEN
        hashes = Request("r", list(range(17)))
        manager.prepare([hashes])
        keys = [row.tobytes() for row in hashes.block_hashes]
        assert lookup._node.whereabouts.sources(keys) == {named: [0, 1, 2, 3]}
    else:
        assert outcome["status"] == HintStatus.REFUSED
        assert f"{named!r} is not the address of another node" in outcome["reason"]
    manager.close()


def test_extra_arguments_may_have_hints() -> None:
    from vllm.sampling_params import SamplingParams

    _, answer = ended(sampling=SamplingParams(extra_args={"hints": [{"kind": "once", "id": "x"}, 3]}))
    assert answer is not None
    assert [each["status"] for each in answer["hint_outcomes"]] == [HintStatus.REFUSED, HintStatus.TAKEN]


def test_a_request_without_hints_is_not_answered() -> None:
    assert ended() == (False, None)
