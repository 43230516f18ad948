"""SGLang's engine with the core of its tree that is written in Rust, and both doors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang import passages
from tests.sglang.engine import Answer, linker_options, running_engine, storage_options
from tests.sglang.test_engine import from_storage
from tests.sglang.test_linker import from_host

_CORE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"


@pytest.mark.parametrize("door", ["linker", "storage"])
def test_answers_are_those_of_the_engine_without_it(
    model: Path,
    prompts: list[list[int]],
    computed: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    door: str,
) -> None:
    monkeypatch.setenv(_CORE, "rust")
    monkeypatch.setenv("TEST_SGLANG_LOG", "info")
    options = (linker_options if door == "linker" else storage_options)(FDCACHE_HOST_MEMORY="16MiB")
    found, source = (from_host, "host") if door == "linker" else (from_storage, "storage")
    with running_engine(model, **options) as engine:
        told = capfd.readouterr()
        if (reason := told.err.partition("Using the Python TreeCore: ")[2].partition("\n")[0]) != "":
            pytest.skip(reason)
        assert "Tree Core: RustUnifiedTreeCore" in told.out + told.err
        passages.pages_come_back(engine, prompts, computed, found)
        passages.rounds_evict(engine, prompts, computed, source)
