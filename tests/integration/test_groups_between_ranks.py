"""Blocks of windows, chunks and states, handed over between engines of unequal numbers of ranks.

The bytes of a model are cut as vLLM does it: keys and values by head, of a state each part by itself. What lies behind
the parts of a state in its block belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fdcache.controller.cache_controller import CacheController
from fdcache.errors import TransferError, TransferNotFoundError
from fdcache.groups import CacheGroup, Reach, path_end
from fdcache.layout import KVLayout
from fdcache.layout_planes import PlaneKind, PlaneSpec
from fdcache.manager import LoadOutcome, OffloadManager, Request
from fdcache.manager.requests import PeerSource
from fdcache.manager.results import LoadStatus
from fdcache.metadata import NO_BLOCK, Int32Array
from fdcache.settings.cache import CacheSettings, CopySettings
from fdcache.settings.peers import PeerSettings
from fdcache.transfer.engine_handovers import EngineHandovers
from fdcache.transfer.handovers import PeerTerms
from fdcache.transfer.nixl import find_nixl
from tests.service_help import until

_PAGE, _HEADS, _LAYERS, _STATES, _BLOCKS = 16, 4, 3, 2, 100
_PARTS = (1024, 256, 256, 2048)
"""Bytes of the parts of a state over all ranks, less than those of a page: x, B and C of a convolution, and heads."""
_PAGE_BYTES = 4096


GROUPS = {
    "states": (*[CacheGroup(_PAGE, Reach.STATE)] * _STATES, CacheGroup(_PAGE)),
    "chunks": (*[CacheGroup(_PAGE, Reach.CHUNK, 4 * _PAGE)] * 3, CacheGroup(_PAGE)),
    "windows": (CacheGroup(_PAGE, Reach.LAST, 40), CacheGroup(_PAGE)),
    "all": (
        *[CacheGroup(_PAGE, Reach.STATE)] * _STATES,
        CacheGroup(_PAGE, Reach.CHUNK, 2 * _PAGE),
        CacheGroup(_PAGE, Reach.LAST, 24),
        CacheGroup(_PAGE),
    ),
}


def layout_of(ranks: int, groups: tuple[CacheGroup, ...]) -> KVLayout:
    whole = KVLayout.build(
        [PlaneSpec(PlaneKind.PAIR, "uint8", (_HEADS, _PAGE_BYTES // _HEADS))],
        model="m",
        revision="1",
        block_size=_PAGE,
        num_layers=_LAYERS,
        groups=groups,
    )
    return whole.with_tp_size(ranks)


class Model:
    """The bytes that the ranks of an engine have of a prompt with so many blocks of tokens."""

    def __init__(self, seed: int, blocks: int) -> None:
        chosen = np.random.default_rng(seed)
        self.tokens = chosen.integers(0, 256, (blocks, _LAYERS, _PAGE_BYTES), np.uint8)
        self.states = [chosen.integers(0, 256, (_STATES, _LAYERS, size), np.uint8) for size in _PARTS]

    def tokens_of(self, block: int, layer: int, rank: int, ranks: int) -> np.ndarray:
        """Return the heads of a rank."""
        found: np.ndarray = self.tokens[block, layer].reshape(ranks, -1)[rank]
        return found

    def state_of(self, number: int, layer: int, rank: int, ranks: int) -> np.ndarray:
        """Return the parts of a rank, one after the other."""
        return np.concatenate([part[number, layer].reshape(ranks, -1)[rank] for part in self.states])


class Engine:
    """An engine with ranks, above an ``OffloadManager``."""

    def __init__(
        self, role: str, folder: Path, connector: str, ranks: int, peers: int, kind: str = "states"
    ) -> None:
        settings = PeerSettings(
            role=role,
            connector=connector,
            directory=folder,
            address=f"ipc://{folder}/{role}",
            peer_ranks=peers,
            timeout=60.0,
            lease=60.0,
        )
        self.layout = layout = layout_of(ranks, GROUPS[kind])
        cache = CacheSettings(host_memory=32 * layout.record_bytes, write_policy="write_through")
        self.manager = OffloadManager(cache, layout)
        self.handovers = EngineHandovers(self.manager, PeerTerms(settings, 60.0), _BLOCKS)
        self.ranks = [
            CacheController(CopySettings(group_layers=1), layout, rank=rank) for rank in range(ranks)
        ]
        self.planes, self.addresses = [], []
        for each in self.ranks:
            tensors = each.initialize_kv_cache(_BLOCKS, shared=folder)
            self.planes.append([plane.reshape(_BLOCKS, -1).view(np.uint8) for plane in tensors])
            each.initialize_host_cache(self.manager.host_cache)
            parts = tuple(size // ranks for size in _PARTS)
            self.addresses.append(each.open_transfer(settings, state_parts=parts) or "")
        self.outcomes: list[LoadOutcome] = []
        self.results: list[str] = []

    def close(self) -> None:
        """Release everything."""
        for each in self.ranks:
            each.shutdown()
        self.manager.close()

    def step(self) -> None:
        """Submit what is planned and apply what was reported."""
        for plan in self.manager.take_plans():
            for each in self.ranks:
                each.submit_swap_tasks(plan).wait_all()
        for each in self.ranks:
            reports = each.poll()
            self.results += [report.handover.result for report in reports if report.handover is not None]
            self.outcomes += self.manager.apply(reports)

    def places(self, table: Int32Array, model: Model) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield what each rank has of a block in a layer, and what the model has: bytes that belong to nobody aside."""
        states, ranks = self.layout.num_states, len(self.ranks)
        blocks = len(table) - states
        for rank, planes in enumerate(self.planes):
            for layer, plane in enumerate(planes):
                for block in np.flatnonzero(table[:blocks] != NO_BLOCK):
                    yield plane[table[block]], model.tokens_of(int(block), layer, rank, ranks)
                for number in range(states):
                    wanted = model.state_of(number, layer, rank, ranks)
                    yield plane[table[blocks + number]][: len(wanted)], wanted

    def compute(self, table: Int32Array, model: Model) -> None:
        """Write the blocks of a prompt."""
        for planes in self.planes:
            for plane in planes:
                plane[table[table != NO_BLOCK]] = 99
        for has, wanted in self.places(table, model):
            has[:] = wanted

    def is_right(self, table: Int32Array, model: Model) -> bool:
        """Return True if every byte is the model's."""
        return all(np.array_equal(has, wanted) for has, wanted in self.places(table, model))


def step_until(condition: Callable[[], object], engines: Sequence[Engine]) -> None:
    def stepped() -> bool:
        for each in engines:
            each.step()
        return bool(condition())

    until(stepped, "engines with ranks")


@contextmanager
def engines(
    folder: Path, connector: str, ranks: tuple[int, int], kind: str = "states"
) -> Iterator[tuple[Engine, Engine]]:
    if connector == "rdma":
        try:
            find_nixl()
        except TransferNotFoundError:
            pytest.skip("NIXL is not installed")
    prefill = Engine("prefill", folder, connector, ranks[0], ranks[1], kind)
    decode = Engine("decode", folder, connector, ranks[1], ranks[0], kind)
    try:
        yield prefill, decode
    finally:
        prefill.close()
        decode.close()


def hand_over(prefill: Engine, decode: Engine, seed: int, num_tokens: int) -> tuple[Int32Array, Model]:
    """Compute all tokens but the last at prefill, and let decode fetch them; return its blocks and their bytes."""
    tokens = np.random.default_rng(seed).integers(3, 500, num_tokens + 1).astype(np.int32)
    theirs, mine = Request(f"p-{seed}", tokens[:-1]), Request(f"d-{seed}", tokens)
    pages, groups = -(-num_tokens // _PAGE), prefill.layout.groups
    needed = path_end(groups, np.zeros((pages, 32), np.uint8), num_tokens).needed
    model, count = Model(seed, len(needed) - prefill.layout.num_states), int(needed.sum())
    table = np.random.default_rng(seed).permutation(_BLOCKS).astype(np.int32)
    sent, into = np.full((2, len(needed)), NO_BLOCK, np.int32)
    sent[needed], into[needed] = table[:count], table[-count:]
    prefill.compute(sent, model)
    prefill.manager.prepare([theirs])
    assert prefill.handovers.send(theirs, f"of-{seed}", num_tokens, sent) == count
    prefill.manager.finish([theirs])
    decode.handovers.fetch(mine, PeerSource(f"of-{seed}", tuple(prefill.addresses)))
    assert decode.manager.match(mine, 0).num_tokens == num_tokens
    decode.manager.load(mine, into)
    before = len(decode.outcomes)
    step_until(lambda: len(decode.outcomes) > before, (prefill, decode))
    decode.manager.finish([mine])
    return into, model


@pytest.mark.parametrize(
    ("connector", "kind", "ranks"),
    [
        *((connector, "all", ranks) for connector in ("ipc", "rdma") for ranks in ((1, 2), (2, 1))),
        *(("ipc", kind, ranks) for kind in ("states", "chunks", "windows") for ranks in ((1, 2), (2, 1))),
        ("ipc", "all", (4, 2)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value[0]}:{value[1]}",
)
def test_each_rank_has_its_part_of_what_the_next_token_needs(
    connector: str, kind: str, ranks: tuple[int, int], tmp_path: Path
) -> None:
    with engines(tmp_path, connector, ranks, kind) as (prefill, decode):
        for seed, num_tokens in enumerate((3 * _PAGE, 5 * _PAGE + 7, 8 * _PAGE, _PAGE + 1)):
            into, model = hand_over(prefill, decode, seed, num_tokens)
            assert decode.outcomes[-1].status is LoadStatus.CONFIRMED
            assert decode.is_right(into, model)
        step_until(lambda: len(prefill.results) == 4 * len(prefill.ranks), (prefill, decode))
        assert {*prefill.results, *decode.results} == {"done"}


def test_a_byte_of_a_state_that_changes_on_the_way_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of the parts are compared as those of heads are."""
    with engines(tmp_path, "ipc", (1, 2)) as (prefill, decode):
        offset = _PARTS[0] + 5
        compute = Engine.compute

        def changed(engine: Engine, table: Int32Array, model: Model) -> None:
            compute(engine, table, model)
            transfer = prefill.ranks[0]._parts.transfer
            assert transfer is not None
            sums = transfer.endpoint._sends.side.sums

            def late(*arguments: object) -> None:
                sums(*arguments)  # type: ignore[arg-type]
                engine.planes[0][0][table[-1], offset] ^= 1

            monkeypatch.setattr(transfer.endpoint._sends.side, "sums", late)

        monkeypatch.setattr(Engine, "compute", changed)
        hand_over(prefill, decode, 1, 40)
        assert decode.outcomes[-1].status is LoadStatus.FAILED
        assert "corrupt" in decode.results


def test_states_without_parts_are_refused_by_name(tmp_path: Path) -> None:
    layout = layout_of(1, GROUPS["states"])
    settings = PeerSettings(
        role="prefill", connector="ipc", directory=tmp_path, address=f"ipc://{tmp_path}/x", peer_ranks=2
    )
    with CacheController(CopySettings(), layout) as controller:
        controller.initialize_kv_cache(4, shared=tmp_path)
        with pytest.raises(TransferError, match="FDCACHE_TRANSFER_PEER_RANKS=2: the layout has states"):
            controller.open_transfer(settings)
        with pytest.raises(TransferError, match="cannot be divided among 2 ranks in multiples of 8 bytes"):
            controller.open_transfer(settings, state_parts=(24, 16))
