"""What vLLM's engine is used with: adapters, drafts, pipelines, its schedulers, its events and metrics."""

from __future__ import annotations

import math
import multiprocessing
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from fdcache.errors import ConfigurationError
from tests.vllm.engine import connector_config, generate, make_adapter, make_model, running_engine
from tests.vllm.observed import Observed

Answers = list[list[int]]
_ON_SECOND_RUNNER = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
_TRANSFER = connector_config(FDCACHE_HOST_MEMORY="16MiB")


def test_adapters_are_known_by_name_and_path_and_share_no_block(
    model: Path, prompts: Answers, tmp_path: Path
) -> None:
    """Another adapter of the same name, loaded from another path, finds nothing of the first."""
    from vllm.lora.request import LoRARequest

    adapters = [
        LoRARequest("chat", 1, str(make_adapter(tmp_path / "a", 1))),
        LoRARequest("chat", 2, str(make_adapter(tmp_path / "b", 2))),
        LoRARequest("other", 3, str(tmp_path / "b")),
    ]
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    given = prompts[:2]
    with running_engine(model, enable_prefix_caching=False, **options) as llm:
        alone = [generate(llm, given, lora=adapter) for adapter in (None, *adapters)]
    assert alone[0] != alone[1] != alone[2] == alone[3]
    with running_engine(model, _TRANSFER, **options) as llm:
        engine = Observed(llm)
        for i, adapter in enumerate((None, *adapters)):
            before = engine.counters
            assert engine.answers(given, lora=adapter) == alone[i]
            assert engine.counters.host_hit_tokens == before.host_hit_tokens
            engine.forget_device()
        for i, adapter in enumerate((None, *adapters)):
            before = engine.counters
            assert engine.answers(given, lora=adapter) == alone[i]
            assert engine.counters.host_hit_tokens > before.host_hit_tokens
            engine.forget_device()
        engine.assert_nothing_is_held()


@pytest.mark.skipif(_ON_SECOND_RUNNER, reason="vLLM's second runner has no n-gram drafts")
def test_drafts_from_the_prompt_change_no_answer(model: Path, prompts: Answers) -> None:
    """Speculative decoding by n-grams: blocks of drafts that were not accepted are never stored.

    In a process of its own: vLLM 0.33 makes no engine in one that has imported numba.
    """
    child = multiprocessing.get_context("spawn").Process(target=_compare_drafts, args=(model, prompts))
    child.start()
    child.join()
    assert child.exitcode == 0


def _compare_drafts(model: Path, prompts: Answers) -> None:
    given = [prompt[:20] * 4 for prompt in prompts]
    with running_engine(model, enable_prefix_caching=False) as llm:
        alone = generate(llm, given, 40)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with running_engine(model, _TRANSFER, speculative_config=drafts, async_scheduling=False) as llm:
        engine = Observed(llm)
        accepted: list[int] = []
        make = engine.scheduler.make_spec_decoding_stats

        def counting(*given: Any, **named: Any) -> Any:
            accepted.append(named["num_accepted_tokens"])
            return make(*given, **named)

        engine.scheduler.make_spec_decoding_stats = counting
        for _ in range(2):
            assert engine.answers(given, 40) == alone
            engine.forget_device()
        assert any(accepted) and not all(accepted)
        assert engine.counters.host_hit_tokens > 0
        engine.assert_nothing_is_held()


def test_layers_that_all_have_a_window_are_refused_where_failed_loads_cannot_be_told(
    prompts: Answers, tmp_path: Path
) -> None:
    """vLLM 0.26 would go on with the blocks of a load that has failed; without the window it has a remedy."""
    layers = {"num_layers": 3, "layer_types": ["sliding_attention"] * 3, "sliding_window": 128}
    small = make_model(tmp_path, **layers)  # type: ignore[arg-type]
    given = [prompt[:90] for prompt in prompts]
    if version("vllm").startswith("0.26."):
        with (
            pytest.raises(ConfigurationError, match="set --disable-sliding-window"),
            running_engine(small, _TRANSFER),
        ):
            pass
    transfer = connector_config(FDCACHE_HOST_MEMORY="16MiB", FDCACHE_VERIFY="all")
    with running_engine(small, transfer, disable_sliding_window=True, max_model_len=128) as llm:
        engine = Observed(llm)
        first = engine.answers(given)
        engine.forget_device()
        engine.corrupt_host_records()
        assert engine.answers(given) == first
        assert engine.counters.loads_failed > 0
        engine.assert_nothing_is_held()


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_both_schedulers_answer_alike(
    model: Path, prompts: Answers, computed: Answers, is_async: bool
) -> None:
    with running_engine(model, _TRANSFER, async_scheduling=is_async) as llm:
        engine = Observed(llm)
        assert type(engine.scheduler).__name__ == ("AsyncScheduler" if is_async else "Scheduler")
        for _ in range(2):
            assert engine.answers(prompts) == computed
            engine.forget_device()
        assert engine.counters.host_hit_tokens > 0
        engine.assert_nothing_is_held()


@pytest.mark.skipif(_ON_SECOND_RUNNER, reason="vLLM's second runner needs CUDA streams for pipelines")
@pytest.mark.skipif(
    version("vllm").startswith("0.33."),
    reason="pipelines of vLLM 0.33 fail on a CPU, without a connector too",
)
def test_stages_of_a_pipeline_answer_alike(prompts: Answers, tmp_path: Path) -> None:
    model = make_model(tmp_path, num_layers=4)
    options: dict[str, Any] = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    with running_engine(model, enable_prefix_caching=False) as llm:
        alone = generate(llm, prompts)
    with running_engine(model, _TRANSFER, **options) as llm:
        manager = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler.manager
        for _ in range(2):
            assert generate(llm, prompts) == alone
        counters = manager.get_stats().counters
        assert counters.host_hit_tokens > 0
        assert counters.loads_failed == 0


def test_events_name_the_medium_and_the_hashes_of_the_device_and_metrics_have_names(
    model: Path, prompts: Answers, computed: Answers
) -> None:
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with running_engine(model, _TRANSFER, kv_events_config=events) as llm:
        engine = Observed(llm)
        published: list[Any] = []
        engine.connector._stats._next = math.inf  # LLM drops the metrics of steps without tokens
        publisher = engine.scheduler.kv_event_publisher
        publisher.publish = lambda batch, *_: published.extend(batch.events)
        for _ in range(2):
            assert engine.answers(prompts) == computed
            engine.forget_device()
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        engine.settle()
        engine.connector._stats._next = 0.0
        engine.answers([prompts[0][:20]])
        stored = [each for each in published if isinstance(each, BlockStored)]
        removed = [each for each in published if isinstance(each, BlockRemoved)]
        on_host = {key for each in stored if each.medium == "CPU" for key in each.block_hashes}
        on_device = {key for each in stored if each.medium == "GPU" for key in each.block_hashes}
        assert on_host and on_host <= on_device
        assert on_host & {key for each in removed if each.medium == "CPU" for key in each.block_hashes}
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        assert metrics["vllm:fdcache_host_hit_tokens"].value > 0
        assert metrics["vllm:fdcache_blocks_backed_up"].value > 0
        assert metrics["vllm:fdcache_host_blocks"].value > 0
        assert metrics["vllm:fdcache_inconsistencies"].value == 0
        assert "vllm:external_prefix_cache_hits" in metrics


def test_explain_tells_where_the_blocks_of_a_request_are(
    model: Path, prompts: Answers, tmp_path: Path
) -> None:
    from tests.service_help import run, service_process, until

    tmp_path.chmod(0o700)
    tokens = tmp_path / "prompt.json"
    tokens.write_text(repr(prompts[0]))
    with service_process(tmp_path):
        address = f"ipc://{tmp_path}/fdcache.sock"
        with running_engine(model, connector_config(FDCACHE_SERVER=address)) as llm:
            engine = Observed(llm)

            def explained(*options: str) -> str:
                given = ("inspect", "explain", "--tokens", tokens, "--server", address, *options)
                return str(run(*given).stdout)

            is_hit = f"a hit: all {len(prompts[0]) // 16} full blocks are there"
            assert "the run ends before block 0" in explained()
            engine.answers(prompts[:1])
            engine.settle()
            until(lambda: is_hit in explained(), "the service has been told")
            engine.add(prompts[0], cache_salt="acme")
            engine.finish()
            engine.settle()
            until(lambda: is_hit in explained("--tenant", "acme"), "the service has been told")
            engine.assert_nothing_is_held()
