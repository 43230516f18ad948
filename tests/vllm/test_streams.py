"""Requests that are loaded while later blocks are read from storage, in vLLM's own engine with a disk that waits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from fdcache.storage import slab
from fdcache.tiers import storage_reads
from tests.storage_engine import SlowStore
from tests.vllm.engine import connector_config, running_engine
from tests.vllm.observed import Observed

Answers = list[list[int]]


class Slowed(Observed):
    """An engine whose disk reads two blocks at a time, and only when it is told to until ``open``."""

    @property
    def disk(self) -> SlowStore:
        controller = self.worker._controller
        assert controller is not None and controller._parts.storage is not None
        return cast(SlowStore, controller._parts.storage.storage)

    def half_loaded(self, prompt: list[int]) -> str:
        """Return a request some of whose blocks are loaded, while the others are read."""
        self.disk.gate.clear()
        name = self.add(prompt)
        before = self.counters
        self.disk.allow(1)
        self.steps_until(lambda: self.counters.blocks_loaded > before.blocks_loaded)
        assert self.status(name) == "WAITING_FOR_REMOTE_KVS"
        assert self.counters.blocks_loaded_ahead > before.blocks_loaded_ahead
        return name

    def open(self) -> None:
        """Let the disk read."""
        self.disk.gate.set()


@pytest.fixture(scope="module")
def stored(
    model: Path, prompts: Answers, computed: Answers, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with the blocks of every prompt."""
    folder = tmp_path_factory.mktemp("storage")
    with running_engine(model, storage_in(folder)) as llm:
        engine = Observed(llm)
        assert engine.answers(prompts) == computed
        engine.settle()
        assert engine.counters.blocks_stored > 0
    return folder


def storage_in(folder: Path) -> dict[str, Any]:
    return connector_config(
        FDCACHE_HOST_MEMORY="16MiB",
        FDCACHE_STORAGE="local",
        FDCACHE_STORAGE_DIR=str(folder),
        FDCACHE_STORAGE_SIZE="64MiB",
        FDCACHE_PREFETCH_POLICY="wait_complete",
        FDCACHE_LOAD_OR_RECOMPUTE="always",
    )


@pytest.fixture(scope="module")
def engine(model: Path, stored: Path) -> Iterator[Slowed]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slab, "SlabStore", SlowStore)
        with running_engine(model, storage_in(stored)) as llm:
            made = Slowed(llm)
            patch.setattr(storage_reads, "MOST_GROUP_BYTES", 2 * made.manager.layout.record_bytes)
            yield made
            made.open()


def test_a_prompt_is_loaded_while_it_is_read(engine: Slowed, prompts: Answers, computed: Answers) -> None:
    engine.half_loaded(prompts[0])
    other = engine.add(prompts[1])
    engine.open()
    assert sorted(engine.finish().values()) == sorted(computed[:2])
    assert engine.counters.loads_cut_short == engine.counters.loads_failed == 0
    assert engine.internal(other) is None
    engine.assert_nothing_is_held()


def test_what_cannot_be_read_is_computed(engine: Slowed, prompts: Answers, computed: Answers) -> None:
    engine.half_loaded(prompts[2])
    engine.disk.fails = True
    engine.open()
    assert list(engine.finish().values()) == [computed[2]]
    engine.disk.fails = False
    assert engine.counters.loads_cut_short == 1
    engine.assert_nothing_is_held()


def test_an_abort_while_later_blocks_are_read_leaves_nothing(
    engine: Slowed, prompts: Answers, computed: Answers
) -> None:
    name = engine.half_loaded(prompts[3])
    engine.abort(name)
    engine.add(prompts[4])
    engine.open()
    assert list(engine.finish().values()) == [computed[4]]
    engine.assert_nothing_is_held()
    assert engine.answers(prompts[3:4]) == computed[3:4]


def test_a_reset_while_later_blocks_are_read_changes_no_answer(
    engine: Slowed, prompts: Answers, computed: Answers
) -> None:
    engine.half_loaded(prompts[5])
    assert engine.connector.reset_cache()
    engine.open()
    assert list(engine.finish().values()) == [computed[5]]
    engine.assert_nothing_is_held()
