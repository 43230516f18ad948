"""Which layers of a step may be handed over, in whatever order vLLM tells them."""

from __future__ import annotations

import pytest

from fdcache.integrations.vllm.layers import StepLayers, layers_of_planes
from tests.vllm_configs import FullAttentionSpec, MambaSpec, kv_config, placed, sharing, vllm_config

_NAMES = [f"layer.{number}" for number in range(6)]
_PLANES = {name: number for number, name in enumerate(_NAMES)}
_ENDS = (0, 3, 5)


def test_a_group_is_told_with_its_last_layer() -> None:
    layers = StepLayers(_PLANES, _ENDS)
    assert [layers.saved(name) for name in _NAMES] == [[0], [], [], [3], [], [5]]


def test_each_step_begins_anew() -> None:
    layers = StepLayers(_PLANES, _ENDS)
    for _ in range(2):
        layers.begin()
        assert [end for name in _NAMES[:4] for end in layers.saved(name)] == [0, 3]


def test_layers_that_come_early_wait_for_those_before_them() -> None:
    layers = StepLayers(_PLANES, _ENDS)
    assert [layers.saved(name) for name in reversed(_NAMES)] == [[], [], [], [], [], [0, 3, 5]]


def test_a_layer_that_is_told_twice_counts_once() -> None:
    layers = StepLayers({"a": 0, "b": 0, "c": 1}, (1,))
    assert [layers.saved(name) for name in "aacb"] == [[], [], [], [1]]


def test_a_layer_that_is_never_told_holds_up_those_behind_it() -> None:
    layers = StepLayers({**_PLANES, "index": 2}, _ENDS)
    assert [end for name in _NAMES for end in layers.saved(name)] == [0]


def test_nothing_is_told_of_unknown_layers_or_without_planes() -> None:
    assert StepLayers(_PLANES, _ENDS).saved("draft.0") == []
    assert StepLayers({}, _ENDS).saved("layer.0") == []


def test_each_layer_has_the_plane_that_it_writes() -> None:
    config = vllm_config(parallel_config__use_ubatching=False)
    for given in (kv_config(), placed(kv_config())):
        assert layers_of_planes(config, given) == {f"0.{at}": at for at in range(4)}


def test_layers_that_share_a_tensor_have_one_plane() -> None:
    config = vllm_config(parallel_config__use_ubatching=False)
    given = sharing(kv_config(FullAttentionSpec, MambaSpec))
    assert layers_of_planes(config, given) == {"0.0": 0, "1.0": 0, "0.1": 1, "1.1": 1}


@pytest.mark.parametrize(
    "changed", [{"use_ubatching": True}, {"speculative_config": "eagle"}], ids=["parts", "drafts"]
)
def test_layers_that_a_step_may_write_again_are_not_followed(changed: dict[str, object]) -> None:
    config = vllm_config(parallel_config__use_ubatching="use_ubatching" in changed)
    config.speculative_config = changed.get("speculative_config")
    assert layers_of_planes(config, placed(kv_config())) == {}
