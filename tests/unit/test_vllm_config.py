"""Layout, settings and keys from vLLM's configuration, as plain data: vLLM is not needed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fdcache.errors import ConfigurationError, UnsupportedLayoutError
from fdcache.integrations.vllm import config, keys
from fdcache.manager import OffloadManager
from fdcache.settings import Source
from fdcache.settings.cache import WritePolicy


class FullAttentionSpec(SimpleNamespace):
    """A group of layers that attend to all tokens."""


class SlidingWindowSpec(SimpleNamespace):
    """A group of layers that attend to the last tokens."""


class MambaSpec(SimpleNamespace):
    """A group of layers with a state."""


@pytest.fixture(autouse=True)
def _version_of_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(config, "version", lambda name: "0.26.0")
    for name in ("FDCACHE_HOST_MEMORY", "FDCACHE_WRITE_POLICY", "FDCACHE_SERVER"):
        monkeypatch.delenv(name, raising=False)
    yield


def vllm_config(extra: dict[str, object] | None = None, **changed: Any) -> Any:
    """A configuration like vLLM's; ``changed`` replaces attributes by ``section__attribute``."""
    made = SimpleNamespace(
        model_config=SimpleNamespace(
            model="m",
            revision=None,
            hf_config=SimpleNamespace(),
            hf_text_config=SimpleNamespace(num_hidden_layers=4),
            max_model_len=4096,
            hf_overrides={},
            quantization=None,
            dtype="bfloat16",
            seed=0,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False, kv_cache_layout=None),
        parallel_config=SimpleNamespace(
            world_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_index=0,
        ),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
        attention_config=SimpleNamespace(backend=None),
        kv_transfer_config=SimpleNamespace(
            kv_role="kv_both", kv_load_failure_policy="fail", kv_connector_extra_config=extra or {}
        ),
    )
    for name, value in changed.items():
        section, attribute = name.split("__")
        setattr(getattr(made, section), attribute, value)
    return made


def kv_config(*kinds: type) -> Any:
    """KV cache groups of four layers in all, by default one."""
    kinds = kinds or (FullAttentionSpec,)
    groups = [
        SimpleNamespace(
            layer_names=[f"{i}.{j}" for j in range(4 // len(kinds))],
            kv_cache_spec=kind(page_size_bytes=65536, block_size=16, sliding_window=128),
        )
        for i, kind in enumerate(kinds)
    ]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=10)


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


def hashes(given: Any) -> bytes:
    """The block keys of a request, in one string."""
    layout = config.layout_from_config(vllm_config(), kv_config(FullAttentionSpec))
    made = keys.request_of(given)
    assert made is not None
    settings = config.load_settings(vllm_config({"FDCACHE_HOST_MEMORY": "64MiB"}), layout)
    with OffloadManager.from_settings(layout, settings) as manager:
        manager.prepare([made])
    return made.block_hashes.tobytes()


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


def test_weights_replaced_in_place_are_another_revision(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"old")
    before = config.revision_of(vllm_config(model_config__model=str(tmp_path)))
    weights.write_bytes(b"newer")
    assert config.revision_of(vllm_config(model_config__model=str(tmp_path))) != before


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
        ({"kv_transfer_config__kv_role": "kv_producer"}, (FullAttentionSpec,), "'kv_producer'"),
    ],
    ids=["dcp", "pcp", "pp", "role"],
)
def test_what_cannot_be_right_is_refused_by_name(
    changed: dict[str, Any], kinds: tuple[type, ...], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        config.layout_from_config(vllm_config(**changed), kv_config(*kinds))


@pytest.mark.parametrize(
    ("kinds", "windows"),
    [
        ((FullAttentionSpec, SlidingWindowSpec), (0, 128)),
        ((SlidingWindowSpec,), (128,)),
        ((FullAttentionSpec,), ()),
    ],
    ids=["groups", "window", "full"],
)
def test_groups_of_full_and_sliding_window_attention_have_one_block_each(
    kinds: tuple[type, ...], windows: tuple[int, ...]
) -> None:
    layout = config.layout_from_config(vllm_config(), kv_config(*kinds))
    assert layout.windows == windows
    assert layout.num_layers == 4 // len(kinds)


def test_a_block_has_the_layers_of_the_largest_group() -> None:
    given = kv_config(FullAttentionSpec, SlidingWindowSpec)
    given.kv_cache_groups[1].layer_names.pop()
    assert config.layout_from_config(vllm_config(), given).num_layers == 2


def test_a_cache_with_layers_of_another_kind_is_refused_by_name() -> None:
    named = "2 groups .*FullAttentionSpec: 2 layers.*MambaSpec: 2 layers.*--disable-hybrid-kv-cache-manager"
    with pytest.raises(UnsupportedLayoutError, match=named):
        config.layout_from_config(vllm_config(), kv_config(FullAttentionSpec, MambaSpec))


def test_pages_of_different_sizes_are_refused_by_name() -> None:
    given = kv_config(FullAttentionSpec, SlidingWindowSpec)
    given.kv_cache_groups[1].kv_cache_spec.page_size_bytes = 32768
    with pytest.raises(ConfigurationError, match=r"\[32768, 65536\] bytes; set --disable-hybrid"):
        config.layout_from_config(vllm_config(), given)


@pytest.mark.parametrize(
    ("stages", "drafts", "named"), [(2, False, "pipeline stages"), (1, True, "a draft model")]
)
def test_what_only_one_group_of_full_attention_can_have_is_refused_by_name(
    stages: int, drafts: bool, named: str
) -> None:
    made = vllm_config(parallel_config__pipeline_parallel_size=stages)
    made.speculative_config = SimpleNamespace(use_eagle=lambda: drafts, method="m", model="d")
    assert config.layout_from_config(made, kv_config()).windows == ()
    with pytest.raises(ConfigurationError, match=f"{named}.*--disable-hybrid-kv-cache-manager"):
        config.layout_from_config(made, kv_config(FullAttentionSpec, SlidingWindowSpec))


def loaded(extra: dict[str, object], **changed: Any) -> Any:
    made = vllm_config(extra, **changed)
    return config.load_settings(made, config.layout_from_config(made, kv_config()))


def test_the_extra_configuration_is_above_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDCACHE_HOST_MEMORY", "1GiB")
    monkeypatch.setenv("FDCACHE_WRITE_POLICY", "write_back")
    settings = loaded({"FDCACHE_HOST_MEMORY": "2GiB"})
    assert settings.render("FDCACHE_HOST_MEMORY") == "2GiB"
    assert settings.cache.write_policy is WritePolicy.WRITE_BACK
    assert settings.place("FDCACHE_HOST_MEMORY") != settings.place("FDCACHE_WRITE_POLICY")
    assert settings.source("FDCACHE_HOST_MEMORY") is not Source.DEFAULT


def test_blocks_are_written_through_unless_the_user_says_otherwise() -> None:
    assert loaded({"FDCACHE_HOST_MEMORY": "1GiB"}).cache.write_policy is WritePolicy.WRITE_THROUGH


def test_data_parallel_engines_have_folders_of_their_own() -> None:
    """The files of local storage have one owner; other stores are shared."""
    for storage, folders in (("local", ["/s", "/s/engine-1", "/s/engine-2"]), ("mooncake", ["/s"] * 3)):
        given: dict[str, object] = {
            "FDCACHE_HOST_MEMORY": "1GiB",
            "FDCACHE_STORAGE": storage,
            "FDCACHE_STORAGE_DIR": "/s",
            "MOONCAKE_MASTER_SERVER_ADDR": "master:50051",
        }
        found = []
        for index in range(3):
            engine = vllm_config(given, parallel_config__data_parallel_index=index)
            settings = config.load_settings(engine, config.layout_from_config(engine, kv_config()))
            found.append(str(settings.storage_tier.directory))
        assert found == folders


def test_the_settings_in_force_are_told_with_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDCACHE_HOST_MEMORY", "1GiB")
    monkeypatch.setenv("FDCACHE_EVICTION", "slru")
    layout = config.layout_from_config(vllm_config(), kv_config())
    settings = config.load_settings(vllm_config({"FDCACHE_HOST_MEMORY": "2GiB"}), layout)
    told = config.settings_in_force(settings).split(", ")
    assert {
        "FDCACHE_HOST_MEMORY=2GiB (kv_connector_extra_config)",
        "FDCACHE_EVICTION=slru (environment)",
        "FDCACHE_BLOCK_SIZE=16 (default)",
    } <= set(told)
    assert not any(each.startswith("FDCACHE_VERIFY=") for each in told)


def test_an_unknown_name_of_the_extra_configuration_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"FDCACHE_HOST_MEMROY .*FDCACHE_HOST_MEMORY"):
        loaded({"FDCACHE_HOST_MEMROY": "1GiB"})


def test_scales_made_at_run_time_are_not_shared() -> None:
    with pytest.raises(ConfigurationError, match=r"FDCACHE_SERVER .*calculate_kv_scales"):
        loaded({"FDCACHE_SERVER": "ipc:///run/fdcache.sock"}, cache_config__calculate_kv_scales=True)
    loaded({"FDCACHE_HOST_MEMORY": "1GiB"}, cache_config__calculate_kv_scales=True)


@pytest.mark.parametrize(
    ("given", "extra", "chosen"),
    [
        ("fail", None, "recompute"),
        ("recompute", None, "recompute"),
        ("fail", "fail", "fail"),
        ("recompute", "fail", "fail"),
    ],
)
def test_failed_loads_are_recomputed_unless_the_user_chose(
    given: str, extra: str | None, chosen: str
) -> None:
    """vLLM's own option has "fail" as its default and does not tell who gave it."""
    named: dict[str, object] = {} if extra is None else {"kv_load_failure_policy": extra}
    transfer = SimpleNamespace(kv_load_failure_policy=given, kv_connector_extra_config=named)
    config.choose_failure_policy(transfer)
    assert transfer.kv_load_failure_policy == chosen
    assert not config.extra_settings(named)


def test_a_failure_policy_that_vllm_does_not_have_is_refused() -> None:
    transfer = SimpleNamespace(
        kv_load_failure_policy="fail", kv_connector_extra_config={"kv_load_failure_policy": "retry"}
    )
    with pytest.raises(
        ConfigurationError, match="kv_load_failure_policy='retry'; set it to 'recompute' or 'fail'"
    ):
        config.choose_failure_policy(transfer)


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
    assert printed.stdout.startswith(f"4:chat{tmp_path}@")


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
