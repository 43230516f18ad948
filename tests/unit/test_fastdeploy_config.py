"""Layouts and settings from FastDeploy's configuration."""

from __future__ import annotations

import pytest

from fdcache.errors import ConfigurationError
from fdcache.integrations.fastdeploy import CacheManager, layout_from_config, settings_from_config
from fdcache.planes import PlaneKind
from tests.fastdeploy_help import BLOCK, fd_config, fd_request, make, run


class TestConfiguration:
    def test_plain_caches_have_key_and_value_in_the_models_dtype(self) -> None:
        layout = layout_from_config(fd_config(ranks=2))
        assert [(plane.kind, plane.dtype, plane.shape) for plane in layout.layer_planes(0)] == [
            (PlaneKind.KEY, "bfloat16", (2, BLOCK, 8)),
            (PlaneKind.VALUE, "bfloat16", (2, BLOCK, 8)),
        ]
        assert (layout.num_layers, layout.tp_size, layout.num_draft_layers) == (3, 2, 0)

    def test_quantised_caches_are_bytes_with_scales_for_block_wise_fp8(self) -> None:
        plain = layout_from_config(fd_config(quantised="int8")).layer_planes(0)
        assert [plane.dtype for plane in plain] == ["uint8", "uint8"]
        scaled = layout_from_config(fd_config(quantised="block_wise_fp8")).layer_planes(0)
        assert [(plane.dtype, plane.shape) for plane in scaled[2:]] == [("float32", (4, BLOCK))] * 2

    def test_latent_attention_has_no_value(self) -> None:
        (plane,) = layout_from_config(fd_config(latent=16)).layer_planes(0)
        assert (plane.kind, plane.shape) == (PlaneKind.KEY, (1, BLOCK, 24))

    def test_draft_layers_come_after_the_main_ones(self) -> None:
        layout = layout_from_config(fd_config(method="mtp", ratio=1.5))
        assert (layout.num_draft_layers, layout.draft_blocks(10)) == (1, 15)
        manager = CacheManager(fd_config(method="mtp"))
        first = fd_request("a", 3 * BLOCK)
        run(manager, first)
        manager.request_finish(first)
        second = fd_request("b", prompt=[*first.prompt_token_ids, 5])
        manager.match_prefix(second)
        assert second._match_result.matched_device_nums == 2

    def test_models_and_dtypes_never_share_keys(self) -> None:
        prints = {
            layout_from_config(config).fingerprint
            for config in (
                fd_config(),
                fd_config(model="other"),
                fd_config(quantised="int8"),
                fd_config(ranks=2),
            )
        }
        assert len(prints) == 4

    def test_what_is_missing_or_unknown_is_named(self) -> None:
        with pytest.raises(ConfigurationError, match="has no dtype"):
            CacheManager(fd_config(dtype=None))
        with pytest.raises(ConfigurationError, match="write_policy"):
            make(write_policy="sometimes")


def test_deterministic_mode_cuts_reuse_to_the_split_kv_size(monkeypatch: pytest.MonkeyPatch) -> None:
    config = fd_config()
    assert settings_from_config(config, layout_from_config(config)).reuse_grid == 0
    monkeypatch.setenv("FD_DETERMINISTIC_MODE", "1")
    monkeypatch.setenv("FD_DETERMINISTIC_SPLIT_KV_SIZE", "32")
    assert settings_from_config(config, layout_from_config(config)).reuse_grid == 32
