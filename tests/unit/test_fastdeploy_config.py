"""Layouts and settings from FastDeploy's configuration."""

from __future__ import annotations

import logging

import pytest

from fdcache.errors import ConfigurationError
from fdcache.integrations.fastdeploy import CacheManager, layout_from_config, settings_from_config
from fdcache.layout_planes import PlaneKind
from fdcache.metadata import SLOT_HEADER_BYTES
from fdcache.settings import SettingsError
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.transfer.connector import agreed_fingerprint, share
from tests.fastdeploy_help import BLOCK, fd_config, fd_request, make, run


class TestConfiguration:
    def test_plain_caches_have_key_and_value_in_the_models_dtype(self) -> None:
        layout = layout_from_config(fd_config(ranks=2))
        assert [(plane.kind, plane.dtype, plane.shape) for plane in layout.layer_planes(0)] == [
            (PlaneKind.KEY, "bfloat16", (2, BLOCK, 8)),
            (PlaneKind.VALUE, "bfloat16", (2, BLOCK, 8)),
        ]
        assert (layout.num_layers, layout.tp_size, layout.num_draft_layers) == (3, 2, 0)

    def test_quantised_caches_have_byte_planes_and_block_wise_fp8_has_scales(self) -> None:
        plain = layout_from_config(fd_config(quantised="int8")).layer_planes(0)
        assert [plane.dtype for plane in plain] == ["uint8", "uint8"]
        scaled = layout_from_config(fd_config(quantised="block_wise_fp8")).layer_planes(0)
        assert [(plane.dtype, plane.shape) for plane in scaled[2:]] == [("bfloat16", (4, BLOCK))] * 2
        packed = layout_from_config(fd_config(quantised="int4_zp")).layer_planes(0)
        assert [(plane.dtype, plane.shape) for plane in packed] == [("uint8", (4, BLOCK, 4))] * 2

    @pytest.mark.parametrize("name", ["quantization_config", "quantization"])
    def test_the_engine_reads_the_quantisation_from_the_model(self, name: str) -> None:
        engine, worker = fd_config(), fd_config(quantised="block_wise_fp8")
        setattr(engine.model_config, name, {"kv_cache_quant_type": "block_wise_fp8"})
        assert layout_from_config(engine) == layout_from_config(worker)
        setattr(worker.model_config, name, {"kv_cache_quant_type": "int8"})
        with pytest.raises(ConfigurationError, match=r"'block_wise_fp8'.*'int8'"):
            layout_from_config(worker)

    def test_latent_attention_has_no_value(self) -> None:
        (plane,) = layout_from_config(fd_config(latent=16)).layer_planes(0)
        assert (plane.kind, plane.shape) == (PlaneKind.KEY, (1, BLOCK, 24))

    def test_latents_are_handed_over_between_unequal_ranks(self) -> None:
        """Each rank keeps them for itself on the host, which does not keep instances apart."""
        one, two = (layout_from_config(fd_config(latent=16, ranks=ranks)) for ranks in (1, 2))
        assert (one.replicas, two.replicas) == (1, 1)
        for own, peer in ((one, two), (two, one)):
            told = share(own, 0, peer.tp_size).layout
            assert agreed_fingerprint(told) == agreed_fingerprint(peer)

    def test_draft_layers_come_after_the_main_ones(self) -> None:
        layout = layout_from_config(fd_config(method="mtp", ratio=1.5))
        assert (layout.num_draft_layers, layout.draft_blocks(10)) == (1, 15)
        manager = CacheManager(fd_config(method="mtp"))
        first = fd_request("a", 3 * BLOCK)
        run(manager, first, outputs=2)  # the draft layer has seen the token after the prompt
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
                fd_config(quantised="float8_e4m3fn"),
                fd_config(dtype="float16", quantised="int8"),
                fd_config(ranks=2),
            )
        }
        assert len(prints) == 6

    def test_missing_and_unknown_attributes_are_reported(self) -> None:
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


def overruled(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log lines about attributes of the configuration that a variable overrides."""
    return [line for each in caplog.records if "is in force instead of" in (line := each.getMessage())]


class TestEnvironment:
    def test_variables_override_the_configuration_with_a_log_line(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        given = {
            "FDCACHE_WRITE_POLICY": "write_back",
            "FDCACHE_DEVICE_BLOCKS": "48",
            "FDCACHE_HOST_MEMORY": "64MiB",
            "FDCACHE_PREFIX_CACHING": "0",
            "FDCACHE_WRITE_THROUGH_THRESHOLD": "5",
            "FDCACHE_PLAN_TIMEOUT": "7s",
            "FDCACHE_EVENT_BUFFER": "100",
        }
        for name, text in given.items():
            monkeypatch.setenv(name, text)
        caplog.set_level(logging.INFO, "fdcache.integrations.fastdeploy.config")
        core = make().core
        assert core.num_device_blocks == 48
        assert core.num_host_blocks == (64 << 20) // (core.layout.record_bytes + SLOT_HEADER_BYTES)
        assert core.settings.write_policy is WritePolicy.WRITE_BACK
        assert not core.settings.enable_prefix_caching
        assert core.settings.write_through_threshold == 5
        assert (core.settings.plan_timeout, core.settings.event_buffer) == (7.0, 100)
        messages = "\n".join(overruled(caplog))
        assert (
            "FDCACHE_WRITE_POLICY=write_back (environment) is in force instead of cache_config.write_policy"
            in messages
        )
        replaced = {line.rpartition(" ")[2] for line in overruled(caplog)}
        attributes = (
            "total_block_num num_cpu_blocks enable_prefix_caching write_policy write_through_threshold"
        )
        assert replaced == {f"cache_config.{name}" for name in attributes.split()}

    def test_unset_variables_come_from_the_configuration_without_a_log_line(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("FDCACHE_PLAN_TIMEOUT", "7s")
        caplog.set_level(logging.INFO, "fdcache.integrations.fastdeploy.config")
        core = make(write_policy="write_back", total_block_num=9, num_cpu_blocks=3).core
        assert (core.settings.write_policy, core.num_device_blocks, core.num_host_blocks) == (
            "write_back",
            9,
            3,
        )
        assert core.settings.plan_timeout == 7.0
        assert not overruled(caplog)

    def test_arguments_override_environment_and_configuration(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FDCACHE_DEVICE_MEMORY", "1GiB")
        monkeypatch.setenv("FDCACHE_HOST_MEMORY", "64MiB")
        monkeypatch.setenv("FDCACHE_WRITE_POLICY", "write_back")
        own = CacheSettings(device_blocks=5, write_policy=WritePolicy.WRITE_THROUGH)
        assert CacheManager(fd_config(), settings=own).core.settings == own

    def test_device_memory_sets_the_number_of_blocks_whatever_profiling_finds(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = fd_config()
        block_bytes = sum(plane.device_stride for plane in layout_from_config(config).planes)
        monkeypatch.setenv("FDCACHE_DEVICE_MEMORY", str(20 * block_bytes))
        manager = CacheManager(config)
        manager.update_cache_config(config.cache_config)
        assert manager.num_gpu_blocks == 20

    def test_a_block_size_other_than_the_engines_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FDCACHE_BLOCK_SIZE", "64")
        with pytest.raises(SettingsError, match=r"FDCACHE_BLOCK_SIZE.* set FDCACHE_BLOCK_SIZE=4"):
            make()

    def test_draft_layers_require_a_lookahead_token(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FDCACHE_LOOKAHEAD_TOKENS", "0")
        make()
        with pytest.raises(SettingsError, match="FDCACHE_LOOKAHEAD_TOKENS"):
            CacheManager(fd_config(method="mtp"))
