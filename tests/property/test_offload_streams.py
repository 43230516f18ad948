"""OffloadManager under random interleavings, with loads whose later blocks are still being read from storage."""

from __future__ import annotations

import shutil
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache.settings.cache import WritePolicy
from fdcache.tiers import storage_reads
from tests.offload_engine import BLOCK, OffloadEngine, prompt
from tests.property.offload_model import Engine
from tests.property.offload_play import play
from tests.seeds import budget
from tests.storage_engine import SlowStore
from tests.storage_help import storage_layout

LAYOUT = storage_layout(block_size=BLOCK, num_layers=2)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every path that the engine may ask for."""
    folder = tmp_path_factory.mktemp("stored")
    engine = OffloadEngine(layout=LAYOUT, folder=folder, host_blocks=80)
    for number, families in enumerate(product((1, 2), repeat=5)):
        engine.stored(f"path {number}", prompt(*families), range(5))
    assert engine.manager.get_stats().counters.blocks_stored == 62
    engine.close()
    return folder


class Streaming(Engine):
    """The same engine with storage, of which each read brings one block or two. Its disk answers now and then."""

    def __init__(self, seed: int, policy: WritePolicy, stored: Path, **options: Any) -> None:
        self.folder = Path(tempfile.mkdtemp())
        shutil.copytree(stored, self.folder, dirs_exist_ok=True)
        super().__init__(
            seed, policy, head_dim=16, folder=self.folder, store=SlowStore, streams=True, **options
        )
        self.disk = cast(SlowStore, self.offload.stores[0])
        self.disk.gate.clear()

    def step(self) -> None:
        self.disk.fails = self.random.random() < self.failures / 3
        if self.random.random() < 0.4:
            self.disk.allow(1)
        super().step()

    def drain(self) -> None:
        self.disk.gate.set()
        super().drain()
        self.loaded_ahead = self.manager.get_stats().counters.blocks_loaded_ahead

    def close(self) -> int:
        wrong = super().close()
        shutil.rmtree(self.folder)
        return wrong


@pytest.fixture(params=[1, 2], autouse=True)
def blocks_of_a_read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_reads, "MOST_GROUP_BYTES", request.param * LAYOUT.record_bytes)


@settings(max_examples=budget(40), deadline=None)
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(WritePolicy), host=st.sampled_from([9, 14, 30]))
def test_no_block_has_wrong_bytes_and_every_load_ends_once(
    stored: Path, seed: int, policy: WritePolicy, host: int
) -> None:
    engine = Streaming(seed, policy, stored, host_blocks=host)
    play(engine, 150)
    assert engine.close() == 0


def test_blocks_are_loaded_ahead_in_these_runs(stored: Path) -> None:
    ahead = 0
    for seed in range(4):
        engine = Streaming(seed, WritePolicy.WRITE_THROUGH, stored, host_blocks=14)
        play(engine, 150, accidents=False)
        assert engine.close() == 0
        ahead += engine.loaded_ahead
    assert ahead
