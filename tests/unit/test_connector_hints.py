"""Hints in the requests of engines, and what the client is answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fdcache.hints import HintKind, HintStatus
from fdcache.integrations.vllm.keys import extra_of
from tests.fastdeploy_help import BLOCK, fd_request, make, run
from tests.nodes_help import KEY, fetching, free_address

ENVELOPE = {
    "protocol_version": "0.1",
    "message_id": "m",
    "actions": [
        {
            "action_id": "keep",
            "action_type": "kv.retain",
            "action_version": "1.0",
            "payload": {"directives": [{"priority": 90, "duration": 60}]},
        }
    ],
}


class TestFastDeploy:
    def test_hints_of_the_metadata_are_taken_at_the_end_and_answered(self, monkeypatch: Any) -> None:
        monkeypatch.setenv("FDCACHE_EVICTION", "learned")
        manager = make()
        request = fd_request("a", 4 * BLOCK)
        request.metadata = {"kv_hints": ENVELOPE, "hints": [{"kind": "?", "id": "odd"}]}
        run(manager, request)
        manager.request_finish(request)
        refused, taken = request.hint_outcomes
        assert (refused.id, refused.status) == ("odd", HintStatus.REFUSED)
        assert (taken.id, taken.kind, taken.status) == ("keep", HintKind.RETAIN, HintStatus.TAKEN)
        assert taken.blocks == 4
        assert manager.core.get_stats().hints.outcomes == {"taken": 1}

    @pytest.mark.parametrize("is_known", [True, False])
    def test_a_named_node_is_asked_first_or_refused(self, is_known: bool, monkeypatch: Any) -> None:
        address = free_address()
        monkeypatch.setenv("FDCACHE_STORAGE", "nodes")
        monkeypatch.setenv("FDCACHE_NODES_KEY", KEY)
        monkeypatch.setenv("FDCACHE_NODES", address if is_known else free_address())
        manager = make()
        request = fd_request("a", 4 * BLOCK)
        request.metadata = {"kv_hints": fetching(address)}
        manager.match_prefix(request)
        manager.request_finish(request)
        (outcome,) = request.hint_outcomes
        assert (outcome.id, outcome.blocks) == ("f", 4)
        if is_known:
            assert (outcome.status, outcome.reason) == (HintStatus.TAKEN, "")
        else:
            assert outcome.status is HintStatus.REFUSED
            assert f"{address!r} is not the address of another node" in outcome.reason
        manager.core.close()

    def test_a_request_without_hints_gets_no_answer(self) -> None:
        manager = make()
        request = fd_request("a", 4 * BLOCK)
        run(manager, request)
        manager.request_finish(request)
        assert not hasattr(request, "hint_outcomes")


def vllm_request(**fields: Any) -> Any:
    tokens = list(range(4 * BLOCK + 1))
    return SimpleNamespace(
        **{
            "request_id": "r",
            "all_token_ids": tokens,
            "num_tokens": len(tokens),
            "num_computed_tokens": len(tokens) - 1,
            "prompt_embeds": None,
            "resumable": False,
            "lora_request": None,
            "mm_features": [],
            "cache_salt": None,
            "skip_reading_prefix_cache": False,
            "sampling_params": None,
            "kv_transfer_params": None,
            **fields,
        }
    )


class TestVllm:
    def test_hints_come_in_extra_arguments_transfer_parameters_or_the_envelope(self) -> None:
        control = {"type": "ephemeral"}
        sampling = SimpleNamespace(extra_args={"cache_control": control})
        assert extra_of(vllm_request(sampling_params=sampling)) == {"cache_control": control}
        assert extra_of(vllm_request(kv_transfer_params={"hints": []})) == {"hints": []}
        assert extra_of(vllm_request(kv_hints=ENVELOPE)) == {"kv_hints": ENVELOPE}
        assert extra_of(vllm_request(kv_hints=None)) == {}
