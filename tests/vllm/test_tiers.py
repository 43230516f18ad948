"""What outlives an engine: local storage, the host tier of a service, and what happens when one of them dies."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.service_help import service_process
from tests.vllm.engine import connector_config, generate, running_engine
from tests.vllm.observed import Observed

Answers = list[list[int]]

MORTAL_ENGINE = """
import json, os, sys, tempfile
from pathlib import Path
from tests.vllm.engine import connector_config, install_plugin, running_engine
install_plugin(Path(tempfile.mkdtemp()))
def main():
    from tests.vllm.observed import Observed
    model, address, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    with running_engine(Path(model), connector_config(FDCACHE_SERVER=address)) as llm:
        engine = Observed(llm)
        engine.answers(prompts)
        engine.settle()
        engine.add(prompts[0], num_tokens=200)
        engine.core.step()
        os.kill(os.getpid(), 9)
if __name__ == "__main__":
    main()
"""


def test_a_restarted_engine_finds_its_blocks_in_storage(
    model: Path, prompts: Answers, computed: Answers, tmp_path: Path
) -> None:
    transfer = connector_config(
        FDCACHE_HOST_MEMORY="16MiB",
        FDCACHE_STORAGE="local",
        FDCACHE_STORAGE_DIR=str(tmp_path),
        FDCACHE_STORAGE_SIZE="64MiB",
    )
    with running_engine(model, transfer) as llm:
        engine = Observed(llm)
        assert engine.answers(prompts) == computed
        engine.assert_nothing_is_held()
        assert engine.counters.blocks_stored > 0
    with running_engine(model, transfer) as llm:
        engine = Observed(llm)
        assert engine.answers(prompts) == computed
        assert engine.counters.storage_hit_tokens > 0
        engine.assert_nothing_is_held()
        if not version("vllm").startswith("0.26."):  # its metrics do not tell
            by_source = {
                metric.labels["source"]: metric.value
                for metric in llm.get_metrics()
                if metric.name == "vllm:prompt_tokens_cached_by_source"
            }
            assert by_source["disk"] == engine.counters.storage_hit_tokens
            assert by_source["host"] == engine.counters.host_hit_tokens


def test_blocks_of_weights_updated_in_place_are_not_found_after_a_restart(
    model: Path, prompts: Answers, computed: Answers, tmp_path: Path
) -> None:
    """The engine that starts next has the weights of the files."""
    transfer = connector_config(
        FDCACHE_HOST_MEMORY="16MiB",
        FDCACHE_STORAGE="local",
        FDCACHE_STORAGE_DIR=str(tmp_path),
        FDCACHE_STORAGE_SIZE="64MiB",
    )
    with running_engine(model, transfer) as llm:
        engine = Observed(llm)
        assert engine.answers(prompts) == computed
        engine.settle()
        for weights in engine.model.parameters():
            weights.data.mul_(1.5)
        before = engine.counters
        assert llm.reset_prefix_cache(reset_connector=True)
        updated = engine.answers(prompts)
        assert updated != computed
        engine.forget_device()
        assert engine.answers(prompts) == updated
        assert engine.counters.host_hit_tokens > before.host_hit_tokens
        assert engine.counters.blocks_stored > before.blocks_stored
        engine.assert_nothing_is_held()
    with running_engine(model, transfer) as llm:
        assert generate(llm, prompts) == computed


def test_blocks_whose_step_went_without_its_plan_are_not_stored_with_the_next(
    model: Path, prompts: Answers, computed: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With write_back a block is copied out by the plan of the step that overwrites it."""
    transfer = connector_config(FDCACHE_HOST_MEMORY="16MiB", FDCACHE_WRITE_POLICY="write_back")
    with running_engine(model, transfer) as llm:
        engine = Observed(llm)
        take_plans = engine.manager.take_plans
        lost: list[int] = []

        def raise_before_evictions(**options: bool) -> object:
            evictions = engine.manager._plans.open.evictions
            if len(evictions) and len(lost) < 3:
                lost.append(len(evictions))
                raise RuntimeError("injected")
            return take_plans(**options)

        monkeypatch.setattr(engine.manager, "take_plans", raise_before_evictions)
        assert engine.answers(prompts) == computed
        assert lost
        for _ in range(2):
            engine.forget_device()
            assert engine.answers(prompts) == computed
        assert engine.counters.host_hit_tokens > 0


def test_a_failure_policy_of_the_user_is_honoured(
    model: Path, prompts: Answers, computed: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    """A request whose load fails ends with an error, as vLLM has it by default."""
    transfer = connector_config(
        FDCACHE_HOST_MEMORY="16MiB", FDCACHE_VERIFY="all", kv_load_failure_policy="fail"
    )
    with running_engine(model, transfer) as llm:
        engine = Observed(llm)
        assert engine.answers(prompts[:1]) == computed[:1]
        engine.forget_device()
        engine.corrupt_host_records()
        assert engine.answers(prompts[:1]) != computed[:1]
        assert engine.counters.loads_failed == 1
        engine.assert_nothing_is_held()
    assert "kv_load_failure_policy" not in caplog.text


def test_engines_share_a_service_and_outlive_it(
    model: Path, prompts: Answers, computed: Answers, tmp_path: Path
) -> None:
    """One engine is killed while it works, another finds its blocks, and goes on when the service is killed."""
    tmp_path.chmod(0o700)
    with service_process(tmp_path) as service:
        address = f"ipc://{tmp_path}/fdcache.sock"
        killed = subprocess.run(
            [sys.executable, "-c", MORTAL_ENGINE, str(model), address, repr(prompts)],
            env=os.environ,
            check=False,
        )
        assert killed.returncode == -9
        with running_engine(model, connector_config(FDCACHE_SERVER=address)) as llm:
            engine = Observed(llm)
            assert engine.answers(prompts) == computed
            assert engine.counters.host_hit_tokens > 0
            engine.assert_nothing_is_held()
            service.kill()
            assert engine.answers(prompts) == computed
            assert engine.side.inconsistencies == 0


def test_ranks_of_tensor_parallelism_answer_alike(model: Path, prompts: Answers) -> None:
    options: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with running_engine(model, enable_prefix_caching=False, **options) as llm:
        alone = generate(llm, prompts)
    with running_engine(model, connector_config(FDCACHE_HOST_MEMORY="32MiB"), **options) as llm:
        manager = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler.manager
        for _ in range(2):
            assert generate(llm, prompts) == alone
        counters = manager.get_stats().counters
        assert counters.host_hit_tokens > 0
        assert counters.loads_failed == 0
