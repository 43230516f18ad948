"""How the connector starts: what is told before the weights are loaded, and what needs no setting."""

from __future__ import annotations

import functools
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fdcache.errors import ConfigurationError
from fdcache.machine.memory import available_memory
from tests.vllm.engine import connector_config, generate, make_model, running_engine, scheduler_of
from tests.vllm.observed import Observed, settle, told

Answers = list[list[int]]
_TRANSFER = connector_config(FDCACHE_HOST_MEMORY="16MiB", FDCACHE_VERIFY="all")


@pytest.fixture(scope="module")
def weightless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights: an engine that comes as far as loading them ends there."""
    folder = make_model(tmp_path_factory.mktemp("weightless"))
    (folder / "model.safetensors").unlink()
    return folder


def in_multi(connector: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return ``kv_transfer_config`` for a connector inside of vLLM's own for several."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [connector]},
        **options,
    }


@pytest.mark.parametrize(
    ("transfer", "named"),
    [
        (connector_config(FDCACHE_HOST_MEMROY="1GiB"), "FDCACHE_HOST_MEMROY"),
        (connector_config(FDCACHE_HOST_MEMORY="much"), "FDCACHE_HOST_MEMORY"),
        (connector_config(FDCACHE_HOST_MEMORY="16MiB", FDCACHE_TRANSFER_LEASE=5), "FDCACHE_TRANSFER_LEASE"),
        (connector_config(FDCACHE_HOST_MEMORY="16MiB", FDCACHE_SERVER="ipc:///s"), "beside FDCACHE_SERVER"),
        (connector_config(FDCACHE_HOST_MEMORY="16MiB", FDCACHE_STORAGE="nosuch"), "FDCACHE_STORAGE=nosuch"),
        (_TRANSFER | {"kv_role": "kv_producer"}, "kv_role 'kv_producer'"),
        (in_multi(_TRANSFER), "under MultiConnector: kv_load_failure_policy is 'fail'"),
        (in_multi(connector_config(FDCACHE_HOST_MEMORY="much")), "FDCACHE_HOST_MEMORY"),
    ],
    ids=["name", "value", "no effect", "beside a service", "storage", "role", "policy", "inner value"],
)
def test_what_is_wrong_is_told_before_the_weights_are_loaded(
    weightless: Path, transfer: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named), running_engine(weightless, transfer):
        pass


def test_an_engine_without_weights_ends_when_it_loads_them(weightless: Path) -> None:
    """The control: settings that are right do not keep it from its weights."""
    with pytest.raises(RuntimeError, match="weights"), running_engine(weightless, _TRANSFER):
        pass


def configuration_of(model: Path, **options: Any) -> Any:
    """Return vLLM's configuration of an engine with the connector, which is not started."""
    from vllm.engine.arg_utils import EngineArgs

    options |= {"skip_tokenizer_init": True, "max_model_len": 512, "kv_transfer_config": _TRANSFER}
    return EngineArgs(model=str(model), **options).create_engine_config()


def test_a_configuration_that_vllm_derives_for_a_draft_model_is_not_checked_as_the_engines(
    model: Path, tmp_path: Path
) -> None:
    """Its layers and ranks are not those whose blocks are stored. With CUDA graphs vLLM asks for the class there."""
    from vllm.config import replace

    engine = configuration_of(model, pipeline_parallel_size=3)
    draft = configuration_of(make_model(tmp_path, num_layers=1)).model_config
    engine.scheduler_config.disable_hybrid_kv_cache_manager = None  # asks for the class without a GPU
    derived = replace(engine, model_config=draft)
    assert derived.scheduler_config.disable_hybrid_kv_cache_manager is not None
    assert derived.model_config.hf_text_config.num_hidden_layers == 1
    with pytest.raises(ConfigurationError, match="3 layers do not divide into 2"):
        configuration_of(model, pipeline_parallel_size=2)


def test_an_engine_whose_connector_is_asked_for_late_says_that_host_memory_has_to_be_set(model: Path) -> None:
    """Each of its processes makes a connector of its own then, and would choose by itself."""
    names = {"kv_connector": "FdcacheConnector", "kv_role": "kv_both"}
    late: dict[str, Any] = {"disable_hybrid_kv_cache_manager": True, "enforce_eager": True}
    with (
        pytest.raises(ConfigurationError, match="set FDCACHE_HOST_MEMORY"),
        running_engine(model, names, **late),
    ):
        pass


def test_the_class_is_there_where_vllm_makes_no_configuration() -> None:
    from fdcache.integrations import vllm
    from fdcache.integrations.vllm.callers import Configurations, configurations

    assert configurations() == Configurations([], None)
    assert vllm.FdcacheConnector.__name__ == "FdcacheConnector"


def in_a_process(function: Callable[..., None], *arguments: object) -> None:
    """Run a function in a process of its own, which has not asked for the connector."""
    child = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    child.start()
    child.join()
    assert child.exitcode == 0


def test_the_three_names_or_two_are_enough(
    model: Path, prompts: Answers, computed: Answers, tmp_path: Path
) -> None:
    """Without settings the connector takes a part of the memory that is available, here of a small machine."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1048576 kB\nMemAvailable: 262144 kB\n")
    names = {"kv_connector": "FdcacheConnector", "kv_role": "kv_both"}
    for path in ({}, {"kv_connector_module_path": "fdcache.integrations.vllm"}):
        in_a_process(_serve_names, model, prompts, computed, names | path, tmp_path)


def _serve_names(model: Path, prompts: Answers, computed: Answers, names: dict[str, Any], root: Path) -> None:
    from fdcache.integrations.vllm import settings

    os.environ["FDCACHE_LOAD_OR_RECOMPUTE"] = "always"
    vars(settings)["available_memory"] = functools.partial(available_memory, root)
    with running_engine(model, names) as llm:
        engine = Observed(llm)
        assert engine.manager.settings.host_memory == 64 << 20
        for _ in range(2):
            assert engine.answers(prompts) == computed
            engine.forget_device()
        assert engine.counters.host_hit_tokens > 0
        engine.assert_nothing_is_held()


def test_every_process_of_an_engine_has_the_memory_that_was_chosen(
    model: Path, prompts: Answers, tmp_path: Path
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1048576 kB\nMemAvailable: 262144 kB\n")
    in_a_process(_compare_processes, model, prompts, tmp_path)


def _compare_processes(model: Path, prompts: Answers, root: Path) -> None:
    from fdcache.integrations.vllm import settings

    os.environ |= {"FDCACHE_LOAD_OR_RECOMPUTE": "always", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    vars(settings)["available_memory"] = functools.partial(available_memory, root)
    names = {"kv_connector": "FdcacheConnector", "kv_role": "kv_both"}
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with running_engine(model, names, **ranks) as llm:
        manager = scheduler_of(llm).connector._scheduler.manager
        first = generate(llm, prompts)
        assert generate(llm, prompts) == first
        assert manager.get_stats().counters.host_hit_tokens > 0
        assert llm.collective_rpc(_memory_of_rank) == [manager.settings.host_memory] * 2 == [64 << 20] * 2


def _memory_of_rank(_: Any) -> int:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return int(get_kv_transfer_group()._worker._settings.cache.host_memory)


def test_the_plug_in_imports_nothing_of_the_connector_and_may_be_called_again() -> None:
    """vLLM calls it in every process of every engine, with or without the connector."""
    code = """
import json, sys
from vllm.plugins import load_general_plugins
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
before = set(sys.modules)
load_general_plugins()
from fdcache.integrations.vllm import register
register()
print(json.dumps(sorted(each for each in set(sys.modules) - before if "fdcache" in each)))
print(KVConnectorFactory.get_connector_class_by_name("FdcacheConnector").__name__)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported, name = found.stdout.splitlines()[-2:]
    assert name == "FdcacheConnector"
    of_ours = [each for each in json.loads(imported) if each.startswith("fdcache.") or each == "fdcache"]
    assert of_ours == ["fdcache", "fdcache.integrations", "fdcache.integrations.vllm"]


def test_a_model_copied_to_another_place_finds_what_was_stored(
    model: Path, prompts: Answers, computed: Answers, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copied", copy_function=shutil.copyfile))
    transfer = connector_config(
        FDCACHE_HOST_MEMORY="16MiB",
        FDCACHE_STORAGE="local",
        FDCACHE_STORAGE_DIR=str(tmp_path / "storage"),
        FDCACHE_STORAGE_SIZE="64MiB",
        FDCACHE_PREFETCH_POLICY="wait_complete",
    )
    for place, is_stored in ((model, False), (copy, True)):
        with running_engine(place, transfer) as llm:
            engine = Observed(llm)
            assert engine.answers(prompts) == computed
            assert bool(engine.counters.storage_hit_tokens) is is_stored
            engine.assert_nothing_is_held()
    other = make_model(tmp_path / "other", seed=1)
    with running_engine(other, transfer) as llm:
        engine = Observed(llm)
        assert engine.answers(prompts) != computed
        assert engine.counters.storage_hit_tokens == 0


def test_layers_that_attend_to_later_tokens_are_neither_stored_nor_loaded(
    model: Path,
    prompts: Answers,
    computed: Answers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM switches its own cache off for them once it knows the layers."""
    from vllm.model_executor.layers.attention.attention import Attention

    spec_of = Attention.get_kv_cache_spec
    monkeypatch.setattr(
        Attention, "get_kv_cache_spec", lambda *given: replace(spec_of(*given), non_causal=True)
    )
    options: dict[str, Any] = {"max_num_batched_tokens": 512}
    with caplog.at_level(logging.INFO, "fdcache"), running_engine(model, _TRANSFER, **options) as llm:
        for _ in range(2):
            assert generate(llm, prompts) == computed
            settle(llm)
        hits = {metric.name: metric.value for metric in llm.get_metrics() if "hits" in metric.name}
        assert not any(hits.values())
    (line,) = told(caplog.records, "neither stored nor loaded")
    assert "attends to later ones" in line


def test_inside_of_another_connector_what_cannot_be_loaded_is_computed(
    model: Path, prompts: Answers, computed: Answers
) -> None:
    transfer = in_multi(_TRANSFER, kv_load_failure_policy="recompute")
    # In one process vLLM 0.26 cannot count what connectors inside of another tell.
    with running_engine(model, transfer, disable_log_stats=True) as llm:
        engine = Observed(llm, index=0)
        for is_corrupt in (False, True):
            assert engine.answers(prompts) == computed
            engine.forget_device()
            if is_corrupt:
                engine.corrupt_host_records()
        before = engine.counters
        assert before.host_hit_tokens > 0
        assert engine.answers(prompts) == computed
        assert engine.counters.loads_failed > before.loads_failed
        engine.assert_nothing_is_held()
