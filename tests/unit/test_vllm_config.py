"""Layout, settings and keys from vLLM's configuration, as plain data: vLLM is not needed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fdcache.errors import ConfigurationError, UnsupportedLayoutError
from fdcache.groups import CacheGroup, Reach
from fdcache.integrations.vllm import config, keys, settings
from fdcache.layout import KVLayout
from fdcache.layout_planes import PlaneKind, PlaneSpec
from fdcache.manager import OffloadManager
from tests.vllm_configs import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    kv_config,
    placed,
    sharing,
    vllm_config,
)


@pytest.fixture(autouse=True)
def _version_of_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(config, "version", lambda name: "0.26.0")
    for name in ("FDCACHE_HOST_MEMORY", "FDCACHE_WRITE_POLICY", "FDCACHE_SERVER"):
        monkeypatch.delenv(name, raising=False)
    yield


def request(**changed: Any) -> Any:
    """A request like vLLM's."""
    given = {
        "request_id": "r",
        "all_token_ids": list(range(40)),
        "prompt_embeds": None,
        "resumable": False,
        "lora_request": None,
        "mm_features": [],
        "cache_salt": None,
        "skip_reading_prefix_cache": False,
    }
    return SimpleNamespace(**given | changed)


def hashes(source: Any) -> bytes:
    """The block keys of a request, in one string."""
    layout = config.layout_from_config(vllm_config(), kv_config(FullAttentionSpec))
    made = keys.request_of(source)
    assert made is not None
    given = settings.load_settings(vllm_config({"FDCACHE_HOST_MEMORY": "64MiB"}), layout.block_size)
    with OffloadManager.from_settings(layout, given) as manager:
        manager.prepare([made])
    return made.block_hashes.tobytes()


def pooler(sequence: str, token: str = "ALL") -> SimpleNamespace:
    """A pooler's configuration like vLLM's."""
    return SimpleNamespace(seq_pooling_type=sequence, tok_pooling_type=token)


def test_a_page_of_each_layer_is_one_plane_of_bytes() -> None:
    layout = config.layout_from_config(vllm_config(parallel_config__world_size=2), kv_config())
    assert [(plane.nbytes, plane.dtype) for plane in layout.planes] == [(65536, "uint8")] * 4
    assert (layout.block_size, layout.tp_size) == (16, 2)


@pytest.mark.parametrize(
    "changed",
    [
        {"model_config__revision": "b"},
        {"model_config__quantization": "fp8"},
        {"model_config__quantization_config": {"ignore": ["lm_head"]}},
        {"model_config__hf_config_path": "/other"},
        {"model_config__multimodal_config": SimpleNamespace(mm_processor_kwargs={"max_pixels": 1})},
        {"model_config__dtype": "float16"},
        {"model_config__hf_overrides": {"rope_theta": 1}},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__kv_cache_dtype_skip_layers": ["0"]},
        {"cache_config__kv_cache_layout": "LBHNC"},
        {"load_config__load_format": "dummy"},
        {"parallel_config__tensor_parallel_size": 2},
        {"attention_config__backend": "TRITON_ATTN"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_decides_the_bytes_of_a_page_is_part_of_the_revision(changed: dict[str, Any]) -> None:
    assert config.revision_of(vllm_config(**changed)) != config.revision_of(vllm_config())


def test_what_vllm_packs_pages_by_is_part_of_the_revision() -> None:
    """vLLM 0.26 does not tell the scheduler: its workers choose by the GPU unless its variable says."""
    found = {
        config.revision_of(vllm_config(), by) for by in (((9, 0), None), ((10, 0), None), ((9, 0), "HND"))
    }
    assert len(found) == 3


def test_the_longest_prompt_is_part_of_the_revision_where_it_decides_rotary_factors() -> None:
    revisions = {
        (kind, longest): config.revision_of(
            vllm_config(
                model_config__max_model_len=longest,
                model_config__hf_text_config=SimpleNamespace(
                    num_hidden_layers=4, rope_parameters={"rope_type": kind}
                ),
            )
        )
        for kind in ("yarn", "longrope")
        for longest in (4096, 8192)
    }
    assert revisions["yarn", 4096] == revisions["yarn", 8192]
    assert revisions["longrope", 4096] != revisions["longrope", 8192]


def test_a_copy_of_the_weights_in_another_place_is_the_same_model(tmp_path: Path) -> None:
    layouts: list[KVLayout] = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
        (tmp_path / folder / "model.safetensors").write_bytes(b"weights")
        os.utime(tmp_path / folder / "model.safetensors", (len(layouts), len(layouts)))
        given = vllm_config(model_config__model=str(tmp_path / folder))
        layouts.append(config.layout_from_config(given, kv_config()))
    assert layouts[0].fingerprint == layouts[1].fingerprint
    (tmp_path / "b" / "config.json").write_text("{ }")
    other = config.layout_from_config(vllm_config(model_config__model=str(tmp_path / "b")), kv_config())
    assert other.fingerprint != layouts[0].fingerprint


def test_weights_replaced_in_place_are_another_revision(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"old")
    before = config.revision_of(vllm_config(model_config__model=str(tmp_path)))
    for content in (b"new", b"newer"):
        weights.write_bytes(content)
        assert config.revision_of(vllm_config(model_config__model=str(tmp_path))) != before


def test_weights_that_a_loader_takes_from_elsewhere_are_told_apart(tmp_path: Path) -> None:
    """A folder may have the configuration alone, which other weights share."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
    places = [{"model_config__model": str(tmp_path / folder)} for folder in ("a", "b")]
    given: list[dict[str, Any]] = [
        *places,
        {**places[0], "model_config__model_weights": "s3://bucket/a"},
        {**places[0], "model_config__model_weights": "s3://bucket/b"},
        {**places[0], "load_config__model_loader_extra_config": {"tensorizer_uri": "s3://bucket/c"}},
    ]
    assert len({config.revision_of(vllm_config(**each)) for each in given}) == len(given)


def test_a_name_of_the_weights_stands_for_their_files_and_revision(tmp_path: Path) -> None:
    """Only what decides how they are computed and packed is left of the rest."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    local, remote = (
        vllm_config(model_config__model=str(tmp_path)),
        vllm_config(model_config__model="org/model", model_config__revision="main"),
    )
    named = [config.layout_from_config(each, kv_config(), weights="mine@1") for each in (local, remote)]
    assert named[0].fingerprint == named[1].fingerprint
    assert named[0].model == "mine@1"
    others = [
        config.layout_from_config(local, kv_config(), weights="mine@2"),
        config.layout_from_config(local, kv_config()),
        config.layout_from_config(
            vllm_config(model_config__model=str(tmp_path), model_config__dtype="float16"),
            kv_config(),
            weights="mine@1",
        ),
    ]
    assert len({each.fingerprint for each in (named[0], *others)}) == 4


@pytest.mark.parametrize(
    ("changed", "kinds", "named"),
    [
        (
            {"parallel_config__decode_context_parallel_size": 2},
            (FullAttentionSpec,),
            "decode_context_parallel_size=2",
        ),
        (
            {"parallel_config__prefill_context_parallel_size": 2},
            (FullAttentionSpec,),
            "prefill_context_parallel_size=2",
        ),
        (
            {"parallel_config__pipeline_parallel_size": 3},
            (FullAttentionSpec,),
            "4 layers do not divide into 3",
        ),
    ],
    ids=["dcp", "pcp", "pp"],
)
def test_what_cannot_be_right_is_refused_by_name(
    changed: dict[str, Any], kinds: tuple[type, ...], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        config.layout_from_config(vllm_config(**changed), kv_config(*kinds))


@pytest.mark.parametrize(
    ("kinds", "groups"),
    [
        ((FullAttentionSpec, SlidingWindowSpec), (CacheGroup(16), CacheGroup(16, Reach.LAST, 128))),
        ((SlidingWindowSpec,), (CacheGroup(16, Reach.LAST, 128),)),
        ((FullAttentionSpec,), ()),
    ],
    ids=["groups", "window", "full"],
)
def test_each_group_of_layers_needs_what_its_kind_reaches(
    kinds: tuple[type, ...], groups: tuple[CacheGroup, ...]
) -> None:
    layout = config.layout_from_config(vllm_config(), placed(kv_config(*kinds)))
    assert layout.groups == groups
    assert layout.num_layers == 4 // len(kinds)


def test_a_block_has_the_layers_of_the_largest_group() -> None:
    given = kv_config(FullAttentionSpec, SlidingWindowSpec)
    given.kv_cache_groups[1].layer_names.pop()
    assert config.layout_from_config(vllm_config(), placed(given)).num_layers == 2


def test_blocks_of_unequal_size_in_tokens_make_a_page_of_several() -> None:
    given = placed(kv_config(FullAttentionSpec, SlidingWindowSpec))
    given.kv_cache_groups[0].kv_cache_spec.block_size = 32
    layout = config.layout_from_config(vllm_config(), given)
    assert (layout.block_size, layout.page_groups) == (32, (0, 1, 1))


@pytest.mark.parametrize("spec", [{"mamba_cache_mode": "none"}, {"prefix_cacheable": False}], ids=str)
def test_a_cache_with_layers_of_a_kind_that_is_not_kept_is_refused_by_name(spec: dict[str, Any]) -> None:
    given = placed(kv_config(FullAttentionSpec, MambaSpec))
    vars(given.kv_cache_groups[1].kv_cache_spec).update({"mamba_cache_mode": "align"} | spec)
    named = "2 groups .*FullAttentionSpec: 2 layers.*MambaSpec: 2 layers.*serve this model without fdcache"
    with pytest.raises(UnsupportedLayoutError, match=named):
        config.layout_from_config(vllm_config(), given)


def test_states_at_the_ends_of_blocks_are_served() -> None:
    given = placed(kv_config(FullAttentionSpec, MambaSpec))
    given.kv_cache_groups[1].kv_cache_spec.mamba_cache_mode = "align"
    layout = config.layout_from_config(vllm_config(), given)
    assert layout.groups == (CacheGroup(16), CacheGroup(16, Reach.STATE))
    assert (layout.page_groups, layout.state_groups) == ((0,), (1,))


def test_layers_that_lie_over_each_other_are_one_plane_of_the_largest() -> None:
    """vLLM packs the layers of a block side by side: here two of 100 bytes, and a group with one of 150."""
    given = kv_config(FullAttentionSpec, SlidingWindowSpec)
    sides = SimpleNamespace(layers=["0.0", "0.1"], offset=0, layer_stride=100, block_stride=200)
    wide = SimpleNamespace(layers=["1.0"], offset=0, layer_stride=150, block_stride=200)
    given.kv_cache_tensors = [sides, wide]
    layout = config.layout_from_config(vllm_config(), given)
    assert [plane.nbytes for plane in layout.planes] == [200]
    sides.block_stride = 250
    with pytest.raises(ConfigurationError, match=r"250 and 200 bytes apart.*VLLM_KV_CACHE_LAYOUT"):
        config.layout_from_config(vllm_config(), given)


def test_layers_that_share_a_tensor_are_one_plane() -> None:
    """A group with one layer fewer leaves the last tensor to the others; a plane is a page all the same."""
    given = kv_config(FullAttentionSpec, MambaSpec)
    for group, count in zip(given.kv_cache_groups, (2, 3), strict=True):
        group.kv_cache_spec.mamba_cache_mode = "align"
        group.layer_names = [f"{group.layer_names[0][0]}.{number}" for number in range(count)]
    layout = config.layout_from_config(vllm_config(), sharing(given))
    assert layout.groups == (CacheGroup(16), CacheGroup(16, Reach.STATE))
    assert [plane.nbytes for plane in layout.planes] == [65536] * 3


def test_groups_whose_pages_differ_cannot_share_tensors() -> None:
    given = sharing(kv_config(FullAttentionSpec, SlidingWindowSpec))
    given.kv_cache_groups[1].kv_cache_spec.page_size_bytes = 32768
    named = r"pages of \[32768, 65536\] bytes; set --disable-hybrid-kv-cache-manager"
    with pytest.raises(ConfigurationError, match=named):
        config.layout_from_config(vllm_config(), given)


def test_pipeline_stages_of_several_groups_are_refused_by_name() -> None:
    made = vllm_config(parallel_config__pipeline_parallel_size=2)
    assert config.layout_from_config(made, kv_config()).groups == ()
    with pytest.raises(ConfigurationError, match=r"pipeline stages.*pipeline_parallel_size to 1"):
        config.layout_from_config(made, placed(kv_config(FullAttentionSpec, SlidingWindowSpec)))


def test_a_draft_model_may_share_the_cache_with_several_groups() -> None:
    made = vllm_config()
    made.speculative_config = SimpleNamespace(use_eagle=lambda: True, method="m", model="d")
    layout = config.layout_from_config(made, placed(kv_config(FullAttentionSpec, SlidingWindowSpec)))
    assert len(layout.groups) == 2


@pytest.mark.parametrize(
    "changed", [{"prompt_embeds": np.zeros(1)}, {"resumable": True}], ids=lambda c: next(iter(c))
)
def test_requests_whose_tokens_do_not_name_their_kv_are_never_cached(changed: dict[str, Any]) -> None:
    assert keys.request_of(request(**changed)) is None


def adapter(name: str, path: str, number: int = 1) -> SimpleNamespace:
    """An adapter like vLLM's."""
    return SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=number, load_inplace=False)


def test_an_adapter_that_is_trained_anew_into_its_folder_is_another(tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"old")
    before = hashes(request(lora_request=adapter("chat", str(tmp_path))))
    weights.write_bytes(b"newer")
    loaded, later = (
        hashes(request(lora_request=adapter("chat", str(tmp_path), number))) for number in (1, 2)
    )
    assert before == loaded != later
    printed = subprocess.run(
        [sys.executable, "-m", keys.__name__, "chat", tmp_path], capture_output=True, text=True, check=True
    )
    assert printed.stdout == f"{keys.adapter_id('chat', str(tmp_path))}\n"
    assert printed.stdout.startswith("4:chat@")


def test_a_copy_of_an_adapter_is_the_same(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "adapter_model.safetensors").write_bytes(b"weights")
        os.utime(tmp_path / folder / "adapter_model.safetensors", (1, ord(folder)))
    assert keys.adapter_id("chat", str(tmp_path / "a")) == keys.adapter_id("chat", str(tmp_path / "b"))
    assert keys.adapter_id("chat", str(tmp_path / "a")) != keys.adapter_id("other", str(tmp_path / "a"))


def test_an_adapter_is_known_by_name_and_path_and_a_salt_is_the_tenant() -> None:
    def image(offset: int, length: int, name: str) -> SimpleNamespace:
        return SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=length), identifier=name)

    different = [
        request(),
        request(cache_salt="a"),
        request(cache_salt="b"),
        request(lora_request=adapter("a", "bc")),
        request(lora_request=adapter("ab", "c")),
        request(lora_request=adapter("ab", "d")),
        request(mm_features=[image(2, 8, "x")]),
        request(mm_features=[image(2, 8, "y")]),
        request(mm_features=[image(3, 8, "x")]),
    ]
    assert len({hashes(each) for each in different}) == len(different)
    assert hashes(request()) == hashes(request(request_id="other"))


def test_a_request_with_prompt_logprobs_reads_nothing() -> None:
    made = keys.request_of(request(skip_reading_prefix_cache=True))
    assert made is not None
    assert made.device_only


@pytest.mark.parametrize(
    ("changed", "spec", "reason"),
    [
        ({}, {}, None),
        (
            {
                "model_config__pooler_config": pooler("LAST"),
                "model_config__is_prefix_caching_supported": True,
            },
            {},
            None,
        ),
        *(
            (
                {"model_config__pooler_config": given, "model_config__is_prefix_caching_supported": False},
                {},
                f"with {kind} pooling every token",
            )
            for kind, given in (
                ("MEAN", pooler("MEAN")),
                ("CLS", pooler("CLS")),
                ("STEP", pooler("LAST", "STEP")),
                ("this model's", pooler("LAST")),
            )
        ),
        ({}, {"non_causal": True}, "attends to later ones"),
        ({"cache_config__enable_prefix_caching": False}, {}, "enable_prefix_caching"),
    ],
    ids=["generation", "LAST", "MEAN", "CLS", "STEP", "encoder", "non-causal", "off"],
)
def test_blocks_are_cached_only_where_another_request_has_a_use_for_them(
    changed: dict[str, Any], spec: dict[str, Any], reason: str | None
) -> None:
    groups = kv_config()
    vars(groups.kv_cache_groups[0].kv_cache_spec).update(spec)
    found = config.why_not_cached(vllm_config(**changed), groups)
    assert found == reason if reason is None else reason in str(found)


def test_a_model_without_a_kv_cache_has_no_blocks() -> None:
    assert config.why_not_cached(vllm_config(), SimpleNamespace(kv_cache_groups=[])) is not None


# --- what ranks hold alike --------------------------------------------------------------------------------


def ranks(
    count: int,
    *,
    heads: object = 8,
    kind: type = FullAttentionSpec,
    beside: Sequence[type] = (),
    **changed: Any,
) -> KVLayout:
    """The layout of a model on ranks of one node, of layers that have one head a rank; ``beside``: of others, too."""
    given = vllm_config(
        parallel_config__world_size=count,
        parallel_config__tensor_parallel_size=count,
        parallel_config__distributed_executor_backend="mp",
    )
    given.model_config.hf_text_config = SimpleNamespace(
        num_hidden_layers=4, to_dict=lambda: {"num_key_value_heads": heads}
    )
    for name, value in changed.items():
        setattr(given.parallel_config, name, value)
    found = kv_config(kind, *beside)
    found = placed(found) if beside else found
    for group in found.kv_cache_groups:
        group.kv_cache_spec.num_kv_heads = 1
        group.kv_cache_spec.mamba_cache_mode = "align"
    return config.layout_from_config(given, found)


def test_latents_are_kept_once_at_every_parallelism() -> None:
    made = [ranks(count, kind=MLAAttentionSpec) for count in (1, 2, 4, 8)]
    assert [layout.replicas for layout in made] == [1, 2, 4, 8]
    assert len({layout.fingerprint for layout in made}) == 1


def test_states_beside_latents_are_those_of_each_rank() -> None:
    made = ranks(2, kind=MLAAttentionSpec, beside=[MambaSpec])
    state, whole = CacheGroup(16, Reach.STATE), CacheGroup(16)
    assert made.groups == (whole, replace(state, rank=0), replace(state, rank=1))
    assert (made.replicas, made.record_ranks, made.num_states) == (2, 1, 2)
    assert "once for 2 ranks but for states; host memory" in config.kept_by(made, 10)
    others = [ranks(count, kind=MLAAttentionSpec, beside=[MambaSpec]) for count in (1, 4)]
    assert len({layout.fingerprint for layout in (made, *others)}) == 3  # their states differ
    assert ranks(2, kind=FullAttentionSpec, beside=[MambaSpec]).replicas == 1


def test_ranks_that_share_a_head_keep_it_once() -> None:
    assert [ranks(count, heads=2).replicas for count in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert ranks(4, heads=2).fingerprint == ranks(2, heads=2).fingerprint != ranks(1, heads=2).fingerprint
    assert ranks(8, heads=3).replicas == 1
    assert ranks(8, heads=[2, 4]).replicas == 1  # layers with unequal numbers of heads


@pytest.mark.parametrize(
    ("changed", "replicas"),
    [
        ({"nnodes_within_dp": 2}, 4),
        ({"distributed_executor_backend": "ray"}, 1),
        ({"distributed_executor_backend": "external_launcher"}, 1),
    ],
)
def test_ranks_share_memory_only_with_those_of_their_node(changed: dict[str, Any], replicas: int) -> None:
    assert ranks(8, kind=MLAAttentionSpec, **changed).replicas == replicas


def test_the_start_tells_which_groups_are_kept_and_how_many_tokens_fit() -> None:
    plain = config.layout_from_config(vllm_config(), kv_config())
    assert config.kept_by(plain, 100) == (
        "kept: all in blocks of 16 tokens; host memory has room for 1,600 tokens"
    )
    assert config.kept_by(plain, 0) == "kept: all in blocks of 16 tokens, in the memory of a service"
    groups = (CacheGroup(16, Reach.LAST, 128), CacheGroup(16, Reach.LAST, 128), CacheGroup(32))
    mixed = KVLayout.build(
        [PlaneSpec(PlaneKind.KEY, "uint8", (64,))],
        model="m",
        revision="1",
        block_size=32,
        num_layers=1,
        groups=groups,
    )
    assert config.kept_by(mixed, 100) == (
        "kept: 2 x last 128 in blocks of 16 tokens, all in blocks of 32 tokens; host memory has room for 640 tokens"
    )
    assert "once for 2 ranks; host memory" in config.kept_by(ranks(2, kind=MLAAttentionSpec), 10)


def test_ranks_of_peers_that_cannot_be_served_are_refused_by_name() -> None:
    """Heads have to lie apart, and layers with states need equal ranks; with these nothing is asked."""
    common: dict[str, Any] = {"model": "m", "revision": "1", "block_size": 16, "num_layers": 2, "tp_size": 2}
    window, state = CacheGroup(16, Reach.LAST, 64), CacheGroup(16, Reach.STATE)
    mixed, apart = (
        PlaneSpec(PlaneKind.KEY, "uint8", (16, 8, 16)),
        PlaneSpec(PlaneKind.PAIR, "uint8", (8, 16, 32)),
    )
    given = kv_config(FullAttentionSpec)
    for planes, groups, words in (
        ([mixed], (), "VLLM_KV_CACHE_LAYOUT to HND"),
        ([apart], (CacheGroup(16), state), "layers that keep states"),
    ):
        layout = KVLayout.build(planes, groups=groups, **common)
        config.require_peer_ranks(layout, given, 2)
        with pytest.raises(ConfigurationError, match=f"FDCACHE_TRANSFER_PEER_RANKS=1.*{words}"):
            config.require_peer_ranks(layout, given, 1)
    beside = KVLayout.build([mixed], groups=(CacheGroup(16), state), **common)
    with pytest.raises(ConfigurationError, match=r"latents \(MLA\) beside them.*give all engines 2 ranks$"):
        config.require_peer_ranks(beside, kv_config(MLAAttentionSpec), 1, (8,))  # no layout of pages helps
    config.require_peer_ranks(beside, kv_config(MLAAttentionSpec), 2, (8,))  # the remedy
    for groups in ((), (CacheGroup(16), window)):
        config.require_peer_ranks(KVLayout.build([apart], groups=groups, **common), given, 1)
