"""The request parameters of vLLM's protocol between prefill and decode, on plain data: vLLM is not needed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fdcache.groups import CacheGroup, Reach
from fdcache.integrations.vllm.handover import ADDRESSES, EngineIdentity, PeerSide
from fdcache.integrations.vllm.tables import PlainTable, TableShape
from fdcache.layout import KVLayout
from fdcache.layout_planes import PlaneKind, PlaneSpec
from fdcache.manager import OffloadManager, Request
from fdcache.metadata import Int32Array, SwapPurpose
from fdcache.settings.cache import CacheSettings
from fdcache.settings.peers import PeerSettings
from fdcache.transfer.engine_handovers import EngineHandovers
from fdcache.transfer.handovers import PeerTerms
from tests.transfer_help import BLOCK, LAYOUT

_TABLE = [3, 1, 4, 2, 9]


@dataclass
class Notes:
    """What the ranks are told with the next step."""

    computed: list[tuple[int, int, Int32Array]] = field(default_factory=list)
    sends: dict[int, str] = field(default_factory=dict)
    sends_over: Sequence[int] = ()


class Side:
    """What an engine of one role tells its clients, and the hand-overs that it plans."""

    def __init__(self, role: str, layout: KVLayout = LAYOUT) -> None:
        cache = CacheSettings(host_memory=8 * layout.record_bytes, write_policy="write_through")
        self.manager = OffloadManager(cache, layout)
        handovers = EngineHandovers(self.manager, PeerTerms(PeerSettings(connector="ipc", role=role)), 64)
        self.peers = PeerSide(handovers, EngineIdentity("engine-7", 2, 1))
        self.peers.learn_addresses({1: "tcp://node-1:7001", 0: "tcp://node-1:7000"})
        self.notes = Notes()

    def finished(
        self,
        num_tokens: int,
        status: str = "FINISHED_LENGTH_CAPPED",
        computed: int | None = None,
        **params: Any,
    ) -> dict[str, Any] | None:
        """End a request with these parameters; return what its client is told."""
        tokens = list(range(num_tokens))
        source = SimpleNamespace(
            request_id="r-1",
            kv_transfer_params=params,
            num_prompt_tokens=num_tokens,
            num_computed_tokens=num_tokens if computed is None else computed,
            status=SimpleNamespace(name=status),
        )
        table = PlainTable([_TABLE], BLOCK)
        told, is_kept = self.peers.finished(source, Request("r-1", [*tokens, 5]), table, self.notes)
        assert is_kept == (told is not None)
        return told

    def arrived(self, params: object) -> int:
        """Begin a request with these parameters; return how many of its tokens a peer has."""
        request = Request("d-1", list(range(3 * BLOCK + 1)))
        self.manager.begin([request])
        self.peers.arrived(SimpleNamespace(request_id="d-1", kv_transfer_params=params), request)
        return self.manager.match(request, 0).from_peer

    def planned(self) -> list[tuple[SwapPurpose, str, list[int]]]:
        """Return the hand-overs of the next plans."""
        tasks = [task for plan in self.manager.take_plans() for task in plan.peers]
        for task in tasks:
            self.peers.planned(task, self.notes)
        return [(task.swap.purpose, task.transfer, task.swap.src_block_ids.tolist()) for task in tasks]


def test_a_prompt_that_is_computed_is_handed_over_with_its_last_block() -> None:
    side = Side("prefill")
    told = side.finished(3 * BLOCK + 1, do_remote_decode=True, remote_block_ids=None)
    assert told == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [_TABLE[:4]],
        "remote_engine_id": "engine-7",
        "remote_request_id": "r-1",
        "remote_host": "node-1",
        "remote_port": 7000,
        "remote_num_tokens": 3 * BLOCK + 1,
        "tp_size": 2,
        "pp_size": 1,
        "dcp_size": 1,
        "transfer_mode": "pull",
        ADDRESSES: ["tcp://node-1:7000", "tcp://node-1:7001"],
    }
    assert side.planned() == [(SwapPurpose.SEND, "r-1", _TABLE[:4])]


@pytest.mark.parametrize(
    ("role", "tokens", "fields"),
    [
        ("prefill", 3 * BLOCK, {}),
        ("prefill", 3 * BLOCK, {"do_remote_decode": False}),
        ("prefill", 3 * BLOCK, {"do_remote_decode": True, "status": "FINISHED_ABORTED"}),
        ("prefill", 3 * BLOCK, {"do_remote_decode": True, "computed": 2 * BLOCK}),
        ("prefill", BLOCK, {"do_remote_decode": True}),
        ("decode", 3 * BLOCK, {"do_remote_decode": True}),
    ],
    ids=["not asked", "asked for nothing", "aborted", "computed in part", "one block", "decode"],
)
def test_nothing_is_handed_over_that_nobody_wants_or_that_is_not_whole(
    role: str, tokens: int, fields: dict[str, Any]
) -> None:
    side = Side(role)
    assert side.finished(tokens, **fields) is None
    assert side.planned() == []


def test_a_prompt_that_prefill_has_computed_is_promised_whole() -> None:
    told = Side("prefill").finished(3 * BLOCK + 1, do_remote_decode=True)
    assert Side("decode").arrived(told) == 3 * BLOCK + 1
    assert Side("mixed").arrived(told) == 3 * BLOCK + 1
    assert Side("prefill").arrived(told) == 0


def test_a_router_may_name_a_hand_over_and_ask_both_at_once() -> None:
    named = {"do_remote_prefill": True, "transfer_id": "x-1", ADDRESSES: ["ipc:///x"]}
    assert Side("decode").arrived(named) == 3 * BLOCK + 1
    side = Side("prefill")
    told = side.finished(3 * BLOCK + 1, do_remote_decode=True, transfer_id="x-1")
    assert told is not None
    assert told["remote_request_id"] == "x-1"
    assert side.finished(3 * BLOCK + 1, do_remote_decode=True, transfer_id="x-1") is None
    assert [each[1] for each in side.planned()] == ["x-1"]
    assert list(side.notes.sends.values()) == ["r-1"]


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        "do_remote_prefill",
        {"do_remote_prefill": False, ADDRESSES: ["a"], "remote_request_id": "x"},
        {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_request_id": "x"},
        {"do_remote_prefill": True, ADDRESSES: [1], "remote_request_id": "x"},
        {"do_remote_prefill": True, ADDRESSES: [], "remote_request_id": "x"},
        {"do_remote_prefill": True, ADDRESSES: ["ipc:///x"], "remote_request_id": 5},
    ],
)
def test_parameters_of_others_are_no_hand_over(params: object, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert Side("decode").arrived(params) == 0
    asked = isinstance(params, dict) and bool(params.get("do_remote_prefill"))
    assert len([each for each in caplog.records if "name no engine" in each.message]) == asked


def test_a_prompt_is_shortened_once_where_no_layer_can_go_back_by_a_token() -> None:
    """Of the window of 2 blocks the last is handed over, of full attention every block, of states the last one."""
    groups = (
        CacheGroup(BLOCK),
        CacheGroup(BLOCK, Reach.LAST, 2 * BLOCK),
        CacheGroup(2 * BLOCK, Reach.STATE),
    )
    layout = KVLayout.build(
        [PlaneSpec(PlaneKind.KEY, "uint8", (64,))],
        model="m",
        revision="1",
        block_size=2 * BLOCK,
        num_layers=2,
        groups=groups,
    )
    side = Side("prefill", layout)
    tokens = list(range(4 * BLOCK + 2))
    source = SimpleNamespace(
        request_id="r-1",
        kv_transfer_params={"do_remote_decode": True},
        prompt_token_ids=list(tokens),
        _all_token_ids=list(tokens),
        num_prompt_tokens=len(tokens),
        skip_reading_prefix_cache=False,
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
    )
    for _ in range(2):
        side.peers.shorten(source)
    assert (
        source.num_prompt_tokens
        == len(source.prompt_token_ids)
        == len(source._all_token_ids)
        == len(tokens) - 1
    )
    source.num_computed_tokens = source.num_prompt_tokens
    table = TableShape(layout).table([[1, 2, 3, 4, 5], [0, 0, 6, 7, 8], [0, 0, 9]])
    told, _ = side.peers.finished(source, Request("r-1", tokens), table, side.notes)
    assert told is not None
    assert told["remote_block_ids"] == [[1, 2, 3, 4, 5], [6, 7, 8], [9]]
    assert side.planned() == [(SwapPurpose.SEND, "r-1", [1, 2, 3, 4, 6, 7, 5, 8, 9])]
    source.num_computed_tokens += 1  # the state has gone on
    assert side.peers.finished(source, Request("r-2", tokens), table, side.notes) == (None, False)


def test_the_table_of_a_send_is_that_of_its_prompt() -> None:
    side = Side("prefill")
    side.finished(4 * BLOCK, do_remote_decode=True)
    ((_, _, blocks),) = side.planned()
    assert np.array_equal(blocks, _TABLE[:4])
